"""Where reports go in a run: sinks of users, loggers that fail, texts and named numbers."""

from __future__ import annotations

import json

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, Dataset

from lightning_gradsim import GradSimCallback
from lightning_gradsim.sinks import Sink, TensorBoardSink
from tests.trainer.support import Classifier, collect_warnings, fit, make_data, read, strict
from tests.unit.test_sinks_protocol import Memory


class Broken(Memory):
    def write_texts(self, texts, step):
        raise ConnectionError("no route to host")


def tags(directory):
    return EventAccumulator(str(directory), size_guidance={"tensors": 0}).Reload()


def test_a_sink_of_the_user_gets_every_report(tmp_path):
    sink = Memory()
    assert isinstance(sink, Sink)
    _, _, recorder = fit(tmp_path, strict(sinks=[sink], name="why"), max_epochs=2)
    scalars = [(values["why/errors"], step) for kind, values, step in sink.got if kind == "scalars"]
    assert scalars == [(report.num_errors, report.step) for report in recorder.reports]
    images = [set(values) for kind, values, _ in sink.got if kind == "images"]
    assert images == [{"why/mistakes", "why/class_pairs"}] * 2


def test_with_a_sink_there_is_no_warning_of_missing_loggers(tmp_path):
    with collect_warnings() as texts:
        fit(tmp_path, GradSimCallback(time_budget=None, sinks=[Memory()]), logger=False)
    assert texts == []


def test_a_failing_sink_stops_no_other_place_and_is_told_of(tmp_path):
    sink = Memory()
    with collect_warnings() as texts:
        gradsim, _, _ = fit(tmp_path, GradSimCallback(time_budget=None, sinks=[Broken(), sink]))
    (text,) = texts
    assert "no route to host" in text
    assert "Training goes on without it." in text
    assert len(sink.got) == 3
    assert read(gradsim).queries
    directory = tmp_path / "run" / "version_0"
    assert "gradsim/errors" in tags(directory).Tags()["scalars"]
    assert {"report.html", "report.json", "errors.log"} <= {path.name for path in (directory / "gradsim").iterdir()}


def test_a_failing_logger_stops_no_other_one(tmp_path, monkeypatch):
    loggers = [TensorBoardLogger(tmp_path, "run", version) for version in (0, 1)]
    write, broken = TensorBoardSink.write_texts, loggers[0].experiment

    def fail_first(self, texts, step):
        if self._writer is broken:
            raise OSError("disk full")
        write(self, texts, step)

    monkeypatch.setattr(TensorBoardSink, "write_texts", fail_first)
    with collect_warnings() as texts:
        fit(tmp_path, GradSimCallback(time_budget=None), logger=loggers)
    (text,) = texts
    assert "disk full" in text
    assert "gradsim/errors" in tags(tmp_path / "run" / "version_1").Tags()["scalars"]


def test_a_failing_sink_raises_where_failures_are_to_arrive(tmp_path):
    with pytest.raises(ConnectionError, match="no route"):
        fit(tmp_path, strict(sinks=[Broken()]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sinks": [object()]}, r"`sinks=<object.*is an object\. Expected a list of objects with the methods"),
        ({"sinks": Memory()}, "Expected a list of objects"),
        ({"describe": 3}, r"`describe=3` is an int\. Expected a function of a sample, or a tokenizer"),
        ({"feature_names": "abc"}, "Expected a list of strings"),
    ],
)
def test_wrong_arguments(options, words):
    with pytest.raises(TypeError, match=words):
        GradSimCallback(**options)


class Texts(Dataset):
    """Samples with a text of their own; batches hold numbers."""

    classes = ("a|b", "<b>", "c", "日本")

    def __init__(self, number, seed):
        self.x, self.y = make_data(number, seed).tensors

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return {"text": f"<script>{index}</script> a | b\n日本 🚀", "x": self.x[index], "label": int(self.y[index])}


def collate(samples):
    return torch.stack([sample["x"] for sample in samples]), torch.tensor([sample["label"] for sample in samples])


def texts_loader(number, seed):
    return DataLoader(Texts(number, seed), batch_size=10, collate_fn=collate)


@pytest.mark.usefixtures("real_panel")
def test_texts_become_tables(tmp_path):
    gradsim, _, _ = fit(tmp_path, train=texts_loader(60, 1), val=texts_loader(40, 2))
    directory = tmp_path / "run" / "version_0"
    read_back = tags(directory)
    assert read_back.Tags()["images"] == ["gradsim/class_pairs"], "no panel without pictures"
    query = read(gradsim).queries[0]
    markdown = read_back.Tensors("gradsim/mistakes/text_summary")[0].tensor_proto.string_val[0].decode()
    text = f"&lt;script&gt;{query.harmful[0].sample_id}&lt;/script&gt; a &#124; b 日本 🚀"
    shown = text.replace("&lt;", "&#60;").replace("&gt;", "&#62;")
    assert f"{shown} |" in markdown.replace("<br>", " ")
    page = (directory / "gradsim" / "report.html").read_text(encoding="utf-8")
    assert text.replace("&#124;", "|").replace("b 日", "b\n日") in page
    assert not (directory / "gradsim" / "mistakes.png").exists()


def test_named_numbers_become_tables(tmp_path):
    names = [f"feature {i}" for i in range(8)]
    fit(tmp_path, strict(feature_names=names))
    directory = tmp_path / "run" / "version_0"
    markdown = tags(directory).Tensors("gradsim/mistakes/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "differs in" in markdown
    assert "feature 0" in markdown
    assert "feature 7" in (directory / "gradsim" / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("real_panel")
def test_numbers_without_names_are_shown_too(tmp_path):
    gradsim, _, _ = fit(tmp_path)
    page = (tmp_path / "run" / "version_0" / "gradsim" / "report.html").read_text(encoding="utf-8")
    assert "<tr><td>7</td>" in page
    assert read(gradsim).notes == ()


def test_names_that_do_not_fit_are_told_of(tmp_path):
    gradsim, _, _ = fit(tmp_path, strict(feature_names=["a", "b"]))
    (note,) = read(gradsim).notes
    assert note.startswith("`feature_names=` has 2 names, but an input has 8 numbers")


def test_a_describe_that_fails_is_told_of_once(tmp_path):
    def describe(sample):
        raise LookupError("no title")

    with collect_warnings() as texts:
        gradsim, _, _ = fit(tmp_path, GradSimCallback(time_budget=None, describe=describe), max_epochs=2)
    (text,) = texts
    assert "`describe=` failed on a sample, which is shown without its text. LookupError: no title." in text
    assert read(gradsim).queries


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_wandb_logger_is_served(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    from lightning.pytorch.loggers import WandbLogger

    for name in ("WANDB_SILENT", "WANDB_MODE"):  # Lightning sets the second one, and leaves it set
        monkeypatch.setenv(name, "true" if name == "WANDB_SILENT" else "offline")
    logger = WandbLogger(project="gradsim", save_dir=tmp_path, offline=True, settings={"console": "off"})
    gradsim, _, _ = fit(tmp_path, logger=logger, module=Classifier())
    summary = dict(logger.experiment.summary)
    wandb.finish()
    wandb.teardown()
    assert summary["gradsim/errors"] == read(gradsim).num_errors
    assert list(tmp_path.rglob("gradsim/mistakes*.png"))
    (table,) = tmp_path.rglob("gradsim/suspects_table*.json")
    columns = json.loads(table.read_text())["columns"]
    assert columns[:4] == ["rank", "sample", "label", "suggested label"]
