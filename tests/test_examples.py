import csv
import importlib.util
import json
import re
from pathlib import Path

import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALLEST = {"mislabel_digits": ["--smoke"], "mnist_convnet": ["--smoke"]}


def run_example(name, log_dir):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([*SMALLEST[name], "--log-dir", str(log_dir)])


@pytest.fixture(scope="module", params=sorted(SMALLEST))
def example(request, tmp_path_factory):
    """Name, report, folder of logs and printed lines of an example that ran once."""
    pytest.importorskip("sklearn" if request.param == "mislabel_digits" else "mlxtend", reason="an extra: `examples`")
    log_dir = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *values, **_: lines.extend(" ".join(map(str, values)).splitlines()))
        report = run_example(request.param, log_dir)
    return request.param, report, log_dir, lines


def test_every_example_is_run():
    elsewhere = ["digits_cli"]  # tests/test_lightning_cli.py
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted([*SMALLEST, *elsewhere])


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
