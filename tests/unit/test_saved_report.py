import dataclasses
import json
import math
import os

import pytest
import torch

from lightning_gradsim import Report, load_report
from lightning_gradsim.errors import SavedReportError
from lightning_gradsim.records import InfluentialSample, QueryReport
from lightning_gradsim.sinks import write_report_files
from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.true_labels import SuspectQuality
from tests.unit.test_golden_files import make_report


def small(task, labels, suggested=None, probabilities=None, class_names=None, query=None):
    number = len(labels)
    table = SuspectTable(
        torch.arange(number).flip(0),
        torch.linspace(2, -1, number),
        labels,
        suggested,
        probabilities,
        torch.arange(number) < 2,
    )
    return Report(0, 7, ("head",), "dot", "all", number, 9, 1, {}, 0, query or (), table, class_names, task=task)


MULTILABEL = QueryReport(3, 0, (0, 2), (1,), 0.5, math.nan, (InfluentialSample(1, (), -0.5, False),))
REPORTS = {
    "every field": make_report(),
    "a quality": dataclasses.replace(
        make_report(), suspect_quality=SuspectQuality(1, 0.5, None, 1.0, 1.0, 1.0, 1.0, 0.5)
    ),
    "a recall": dataclasses.replace(make_report(), recall={"harmful": 0.75}),
    "regression": small("regression", torch.tensor([0.5, -2.25, 8.0])),
    "multilabel": small(
        "multilabel",
        torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]], dtype=torch.int8),
        None,
        None,
        ("a", "b", "c"),
        (MULTILABEL,),
    ),
    "nothing": small("classification", torch.empty(0).int()),
}


def same(first, second):
    """Equal, tensors and NaN included."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, SuspectTable):
        return all(same(value, vars(second)[name]) for name, value in vars(first).items())
    if dataclasses.is_dataclass(first):
        return type(first) is type(second) and same(vars(first), vars(second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    if isinstance(first, tuple):
        return isinstance(second, tuple) and len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, float) and math.isnan(first):
        return math.isnan(second)
    return first == second and type(first) is type(second)


@pytest.mark.parametrize("name", REPORTS)
def test_what_was_written_comes_back(name, tmp_path):
    report = REPORTS[name]
    write_report_files(report, tmp_path)
    assert same(report, load_report(tmp_path))


def test_the_newest_of_several(tmp_path):
    for number, folder in enumerate(["version_0/gradsim", "version_1/gradsim"]):
        write_report_files(dataclasses.replace(make_report(), epoch=number), tmp_path / folder)
        os.utime(tmp_path / folder / "report.json", (1000 * (2 - number),) * 2)
    assert load_report(tmp_path).epoch == 0
    assert load_report(str(tmp_path / "version_1")).epoch == 1


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no `report.json` in .* Expected the log folder of a run"):
        load_report(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "3"])
def test_no_report(text, tmp_path):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(SavedReportError, match=r"report.json` holds no report"):
        load_report(tmp_path)


def test_another_version(tmp_path):
    write_report_files(make_report(), tmp_path)
    values = json.loads((tmp_path / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps({**values, "version": 2}))
    with pytest.raises(SavedReportError, match="is of version 2, this release reads version 1"):
        load_report(tmp_path)


@pytest.mark.parametrize(
    "spoil", [lambda text: text.replace("score", "points"), lambda text: text.replace("6.5", "six")]
)
def test_files_that_do_not_fit(spoil, tmp_path):
    write_report_files(make_report(), tmp_path)
    path = tmp_path / "suspects.csv"
    path.write_text(spoil(path.read_text()))
    with pytest.raises(SavedReportError, match="do not fit each other, with ValueError"):
        load_report(tmp_path)
