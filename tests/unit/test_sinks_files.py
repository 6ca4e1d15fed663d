"""Files: complete, readable by others, and never half written."""

import csv
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_gradsim.report import (
    INFLUENCE_COLUMNS,
    SUSPECT_COLUMNS,
    InfluentialSample,
    QueryReport,
    Report,
    SuspectTable,
)
from lightning_gradsim.sinks import files
from lightning_gradsim.sinks.files import save_png_atomically, write_report_files, write_text_atomically


def make_report(num_suspects=3, loss=1.5):
    ids = torch.arange(num_suspects)
    suspects = SuspectTable(ids, -ids.float(), ids.int() % 2, (ids.int() + 1) % 2, ids * 0 + 0.5, ids < 1)
    query = QueryReport(4, 0, 1, 0, 0.75, loss, harmful=(InfluentialSample(2, 0, -0.5, True),))
    return Report(
        epoch=0,
        step=7,
        layers=("head",),
        similarity="dot",
        reference="3 training samples",
        num_train_samples=3,
        num_validation_samples=5,
        num_errors=1,
        errors_per_class={1: 1},
        queries=(query,),
        suspects=suspects,
        class_names=("日本", "b,\n|\udc80"),
    )


def read_csv(path):
    return list(csv.reader(io.StringIO(path.read_text(encoding="utf-8"))))


def refuse_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_the_three_files(tmp_path):
    report = make_report()
    paths = write_report_files(report, tmp_path / "new" / "gradsim")
    assert [path.name for path in paths] == ["suspects.csv", "influences.csv", "report.json"]
    assert sorted(paths) == sorted((tmp_path / "new" / "gradsim").iterdir())
    suspects, influences = read_csv(paths[0]), read_csv(paths[1])
    assert tuple(suspects[0]) == SUSPECT_COLUMNS
    assert len(suspects) == 1 + 3
    assert tuple(influences[0]) == INFLUENCE_COLUMNS
    assert len(influences) == 1 + 1
    values = json.loads(paths[2].read_text(encoding="utf-8"))
    assert values["queries"][0]["harmful"] == [{"sample_id": 2, "label": 0, "score": -0.5, "label_is_prediction": True}]
    assert values["class_names"] == list(report.class_names)
    assert values["errors_per_class"] == {"1": 1}


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_numbers_are_null_in_json(tmp_path, loss):
    path = write_report_files(make_report(loss=loss), tmp_path)[2]
    values = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    assert values["queries"][0]["loss"] is None


def test_suspects_are_capped(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_CSV_SUSPECTS", 5)
    assert len(read_csv(write_report_files(make_report(num_suspects=9), tmp_path)[0])) == 1 + 5


def test_an_empty_report_gives_headers(tmp_path):
    report = replace(make_report(), queries=(), suspects=SuspectTable.empty())
    paths = write_report_files(report, tmp_path)
    assert [len(read_csv(path)) for path in paths[:2]] == [1, 1]


@pytest.mark.parametrize("owner", [os, Path])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch, owner, error):
    path = write_text_atomically("old", tmp_path / "suspects.csv")

    def fail(*_):
        raise error

    monkeypatch.setattr(owner, "fsync" if owner is os else "replace", fail)
    with pytest.raises(type(error)):
        write_text_atomically("new", path)
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_sees_the_old_text_until_the_new_one_is_complete(tmp_path, monkeypatch):
    path = write_text_atomically("old", tmp_path / "report.json")
    seen = []
    replace_file = Path.replace

    def look_first(self, target):
        seen.extend([self.parent, self.read_text(encoding="utf-8"), path.read_text(encoding="utf-8")])
        return replace_file(self, target)

    monkeypatch.setattr(Path, "replace", look_first)
    write_text_atomically("new", path)
    assert seen == [tmp_path, "new", "old"]
    assert path.read_text(encoding="utf-8") == "new"


def test_text_is_written_as_it_is(tmp_path):
    text = "é\r\n日\n"
    assert write_text_atomically(text, tmp_path / "a.txt").read_bytes() == text.encode()


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_files_have_the_usual_permissions(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    assert write_text_atomically("x", tmp_path / "ours").stat().st_mode == plain.stat().st_mode


def test_png(tmp_path):
    pixels = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
    path = save_png_atomically(pixels, tmp_path / "new" / "panel.png")
    with Image.open(path) as image:
        np.testing.assert_array_equal(np.asarray(image), pixels)
