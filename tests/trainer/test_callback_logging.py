from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import TensorDataset

from lightning_gradsim import GradSimCallback
from tests.trainer.support import Classifier, collect_warnings, fit, loader, read, strict, train_data, val_data

FILES = {"suspects.csv", "influences.csv", "report.json", "report.html", "mistakes.png", "class_pairs.png"}
IMAGES = ["gradsim/mistakes", "gradsim/class_pairs"]


def tensorboard(root, version):
    return TensorBoardLogger(root, name="run", version=version)


def events(directory):
    accumulator = EventAccumulator(str(directory), size_guidance={"images": 0, "tensors": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


def rows(path):
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


class Pictures(Classifier):
    """On pictures of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU())


def pictures(num_samples, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(num_samples, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(4, (num_samples,), generator=generator))


@pytest.mark.usefixtures("real_panel")
def test_files_hold_the_report(tmp_path):
    gradsim, _, _ = fit(tmp_path, strict(name="why"))
    directory, report = tmp_path / "run" / "version_0" / "why", read(gradsim)
    assert {path.name for path in directory.iterdir()} == FILES
    suspects = rows(directory / "suspects.csv")
    assert [int(row["sample_id"]) for row in suspects] == report.suspects.sample_ids.tolist()
    assert [float(row["score"]) for row in suspects] == report.suspects.scores.tolist()
    influences = rows(directory / "influences.csv")
    assert len(influences) == len(report.to_rows()) > 0
    harmful = [row for row in influences if row["query"] == "0" and row["list"] == "harmful"]
    assert [int(row["sample_id"]) for row in harmful] == [each.sample_id for each in report.queries[0].harmful]
    stored = json.loads((directory / "report.json").read_text())
    assert (stored["epoch"], stored["step"], stored["layers"]) == (0, 6, ["head"])
    assert [query["sample_id"] for query in stored["queries"]] == [query.sample_id for query in report.queries]
    assert (stored["seconds"], stored["time_share"]) == (report.seconds, report.time_share)
    with Image.open(directory / "mistakes.png") as panel:
        assert panel.size[0] == 700


@pytest.mark.usefixtures("real_panel")
def test_panel_shows_the_pictures_of_both_datasets(tmp_path):
    train, val = pictures(30, 1), pictures(20, 2)
    train.tensors[0][:] = 0.25  # a grey that nothing else on the panel has, in both directions of the range
    train.tensors[0][:, :, 0, 0], train.tensors[0][:, :, 7, 7] = 0, 1
    gradsim, _, _ = fit(tmp_path, module=Pictures(), train=loader(train), val=loader(val))
    with Image.open(tmp_path / "run" / "version_0" / "gradsim" / "mistakes.png") as panel:
        pixels = np.asarray(panel.convert("RGB")).reshape(-1, 3)
    assert read(gradsim).queries
    assert (pixels == round(0.25 * 255)).all(1).sum() > 8 * 100 * 100
    first = val.tensors[0][read(gradsim).queries[0].sample_id]
    for value in (first[0, 2, 2], first[0, 5, 6]):
        assert (np.abs(pixels.astype(int) - float(255 * value)) <= 1).all(1).sum() > 300


@pytest.mark.usefixtures("real_panel")
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled:UserWarning")
def test_panel_shows_the_query_where_its_place_is_not_known(tmp_path, shuffle):
    val = pictures(20, 2)
    val.tensors[0][:] = 0.25
    val.tensors[0][:, :, 0, 0], val.tensors[0][:, :, 7, 7] = 0, 1
    fit(tmp_path, module=Pictures(), train=loader(pictures(30, 1)), val=loader(val, shuffle=shuffle))
    with Image.open(tmp_path / "run" / "version_0" / "gradsim" / "mistakes.png") as panel:
        pixels = np.asarray(panel.convert("RGB")).reshape(-1, 3)
    assert (pixels == round(0.25 * 255)).all(1).sum() > 100 * 100


@pytest.mark.usefixtures("real_panel")
def test_show_teachers_adds_rows(tmp_path):
    heights = []
    for shown in (False, True):
        fit(tmp_path, strict(show_teachers=shown))
        with Image.open(tmp_path / "run" / "version_0" / "gradsim" / "mistakes.png") as panel:
            heights.append(panel.size[1])
    assert heights[1] > heights[0] + 6 * 100


class TestTensorBoard:
    def test_tags_steps_and_values(self, tmp_path):
        _, _, recorder = fit(tmp_path, max_epochs=2)
        read_back = events(tmp_path / "run" / "version_0")
        assert read_back.Tags()["images"] == IMAGES
        texts = [f"gradsim/{name}/text_summary" for name in ("mistakes", "suspects", "class_pairs")]
        assert read_back.Tags()["tensors"] == texts
        assert read_back.Tags()["histograms"] == ["gradsim/self_influence_log10"]
        ours = {tag for tag in read_back.Tags()["scalars"] if tag.startswith("gradsim/")}
        names = {
            "errors",
            "suspects_flagged",
            "suspects_overlap",
            "harmful_with_prediction",
            "overhead_seconds",
            "overhead_share",
        }
        assert ours == {f"gradsim/{name}" for name in names}
        for tag in (*ours, "gradsim/suspects/text_summary", "gradsim/mistakes"):
            kind = {"mistakes": read_back.Images, "text_summary": read_back.Tensors}.get(
                tag.rpartition("/")[2], read_back.Scalars
            )
            assert [event.step for event in kind(tag)] == [6, 12][tag == "gradsim/suspects_overlap" :]
        expected = {
            "errors": lambda report: report.num_errors,
            "suspects_flagged": lambda report: report.suspects.num_flagged,
            "overhead_seconds": lambda report: report.seconds,
            "overhead_share": lambda report: report.time_share,
            "harmful_with_prediction": lambda report: report.trends[-1].harmful_with_prediction,
        }
        assert [len(report.trends) for report in recorder.reports] == [1, 2]
        for name, value in expected.items():
            logged = [event.value for event in read_back.Scalars(f"gradsim/{name}")]
            assert logged == pytest.approx([value(report) for report in recorder.reports], rel=1e-6)

    @pytest.mark.usefixtures("real_panel")
    def test_image_is_the_panel(self, tmp_path):
        fit(tmp_path, module=Pictures(), train=loader(pictures(30, 1)), val=loader(pictures(20, 2)))
        (event,) = events(tmp_path / "run" / "version_0").Images("gradsim/mistakes")
        with (
            Image.open(io.BytesIO(event.encoded_image_string)) as logged,
            Image.open(tmp_path / "run" / "version_0" / "gradsim" / "mistakes.png") as saved,
        ):
            assert (logged.size, logged.mode) == (saved.size, "RGB")
            assert np.array_equal(np.asarray(logged), np.asarray(saved))
            assert (event.width, event.height) == saved.size

    def test_text_is_the_table_of_suspects(self, tmp_path):
        train = train_data()
        train.classes = ["<b>", "a|b", "c", "d"]
        gradsim, _, _ = fit(tmp_path, train=loader(train))
        (event,) = events(tmp_path / "run" / "version_0").Tensors("gradsim/suspects/text_summary")
        table = event.tensor_proto.string_val[0].decode().split("\n")
        ids = [line.split(" | ")[1] for line in table if line.startswith("| 1 |") or line.startswith("| 2 |")]
        assert ids == [str(suspect.sample_id) for suspect in read(gradsim).suspects[:2]]
        assert not any("<b>" in line or "a|b" in line for line in table)

    def test_two_loggers_are_both_written(self, tmp_path):
        gradsim, _, _ = fit(tmp_path, logger=[tensorboard(tmp_path, 0), tensorboard(tmp_path, 1)])
        for version in (0, 1):
            read_back = events(tmp_path / "run" / f"version_{version}")
            assert read_back.Tags()["images"] == IMAGES
            (errors,) = read_back.Scalars("gradsim/errors")
            assert errors.value == read(gradsim).num_errors
        assert (tmp_path / "run" / "version_0" / "gradsim" / "report.json").exists()
        assert not (tmp_path / "run" / "version_1" / "gradsim").exists()

    def test_beside_another_logger(self, tmp_path):
        fit(tmp_path, logger=[CSVLogger(tmp_path, "csv", 0), tensorboard(tmp_path, 0)])
        assert events(tmp_path / "run" / "version_0").Tags()["images"] == IMAGES
        assert (tmp_path / "csv" / "version_0" / "gradsim" / "report.json").exists()

    def test_two_callbacks_have_tags_of_their_own(self, tmp_path):
        fit(tmp_path, strict(), callbacks=[strict(name="other")])
        assert events(tmp_path / "run" / "version_0").Tags()["images"] == [
            *IMAGES,
            "other/mistakes",
            "other/class_pairs",
        ]

    def test_without_mistakes(self, tmp_path):
        easy = TensorDataset(torch.eye(8)[:4].repeat(10, 1), torch.arange(4).repeat(10))
        fit(tmp_path, train=loader(easy), val=loader(easy), max_epochs=40, check_val_every_n_epoch=40)
        read_back = events(tmp_path / "run" / "version_0")
        assert [event.value for event in read_back.Scalars("gradsim/errors")] == [0]
        assert len(read_back.Images("gradsim/mistakes")) == 1


class TestOtherLoggers:
    @pytest.mark.parametrize("kind", ["none", "csv"])
    def test_files_are_written_with_one_warning(self, tmp_path, kind):
        logger = False if kind == "none" else CSVLogger(tmp_path, "run", 0)
        with collect_warnings() as texts:
            _, _, recorder = fit(tmp_path, GradSimCallback(time_budget=None), logger=logger, max_epochs=3)
        directory = (tmp_path if kind == "none" else tmp_path / "run" / "version_0") / "gradsim"
        (text,) = texts
        assert "no logger takes pictures" in text
        assert f"`{directory}`" in text
        assert "`callback.report`" in text
        assert {path.name for path in directory.iterdir()} == FILES
        assert len(recorder.reports) == 3


class TestTerminal:
    def test_quiet_without_a_progress_bar(self, tmp_path, capsys):
        fit(tmp_path)
        printed = "".join(capsys.readouterr())
        assert "gradsim" not in printed.lower()
        assert "gradient" not in printed

    @pytest.mark.parametrize("enabled", [True, False])
    def test_progress_bar(self, tmp_path, capsys, monkeypatch, enabled):
        monkeypatch.setattr("lightning_gradsim.lightning_bridge.tqdm", always_shown)
        bar = TQDMProgressBar()
        if not enabled:
            bar.disable()
        fit(tmp_path, callbacks=[bar], enable_progress_bar=True)
        assert ("gradient similarity" in capsys.readouterr().err) == enabled


def always_shown(items, **options):
    from tqdm import tqdm

    return tqdm(items, **{**options, "delay": 0, "mininterval": 0})


def test_val_accuracy_of_the_module_is_still_logged(tmp_path):
    fit(tmp_path, val=loader(val_data()))
    assert "val_loss" in events(tmp_path / "run" / "version_0").Tags()["scalars"]
