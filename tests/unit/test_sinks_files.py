"""Files: complete, readable by others, and never half written."""

import csv
import errno
import io
import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_gradsim.records import INFLUENCE_COLUMNS, InfluentialSample, QueryReport
from lightning_gradsim.report import Report
from lightning_gradsim.sinks import files
from lightning_gradsim.sinks.files import write_bytes_atomically, write_report_files, write_text_atomically
from lightning_gradsim.suspects import SUSPECT_COLUMNS, SuspectTable

needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="processes are spawned")


def in_child(work, *arguments):
    """Exit code of a forked process that does this, minus the number of the signal that ended it."""
    child = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    child.start()
    child.join()
    return child.exitcode


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
    [sample] = values["queries"][0]["harmful"]
    assert sample == {"sample_id": 2, "label": 0, "score": -0.5, "label_is_prediction": True, "is_suspect": False}
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


def test_bytes(tmp_path):
    path = write_bytes_atomically(b"\x89\n\r\n", tmp_path / "new" / "panel.png")
    assert path.read_bytes() == b"\x89\n\r\n"


@needs_fork
@pytest.mark.parametrize("moment", ["before the flush", "before the rename", "behind the rename"])
def test_killed_while_writing(tmp_path, monkeypatch, moment):
    """SIGKILL leaves the old file or the new one, and at most a hidden file beside it that nothing reads."""
    path = write_text_atomically("old", tmp_path / "report.json")
    owner, name = (os, "fsync") if moment == "before the flush" else (Path, "replace")
    original = getattr(owner, name)

    def kill(*arguments):
        if moment == "behind the rename":
            original(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(owner, name, kill)
    assert in_child(write_text_atomically, "new", path) == -signal.SIGKILL
    monkeypatch.undo()
    assert path.read_text(encoding="utf-8") == ("new" if moment == "behind the rename" else "old")
    left = [each.name for each in tmp_path.iterdir() if each != path]
    assert len(left) == (moment != "behind the rename")
    assert all(name.startswith(".report.json.") and name.endswith(".tmp") for name in left)
    write_text_atomically("newer", path)
    assert path.read_text(encoding="utf-8") == "newer"


@needs_fork
def test_a_disk_that_takes_a_part_only(tmp_path):
    """The kernel itself refuses the rest of the file."""
    path = write_text_atomically("old", tmp_path / "report.json")

    resource = pytest.importorskip("resource")

    def write():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            write_text_atomically("new" * 1000, path)
        except OSError as error:
            os._exit(error.errno)

    assert in_child(write) == errno.EFBIG
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_device(tmp_path, monkeypatch):
    path = write_text_atomically("old", tmp_path / "report.json")
    open_path = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode: open_path(Path("/dev/full"), mode.replace("x", "w")))
    with pytest.raises(OSError, match="No space left on device"):
        write_text_atomically("new", path)
    monkeypatch.undo()
    assert path.read_text(encoding="utf-8") == "old"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="permissions of POSIX, which do not bind root")
def test_a_folder_without_write_permission(tmp_path):
    path = write_text_atomically("old", tmp_path / "gradsim" / "report.json")
    path.parent.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            write_text_atomically("new", path)
    finally:
        path.parent.chmod(0o700)
    assert path.read_text(encoding="utf-8") == "old"


def test_a_folder_whose_place_is_taken(tmp_path):
    (tmp_path / "gradsim").write_text("a file")
    with pytest.raises(FileExistsError):
        write_text_atomically("new", tmp_path / "gradsim" / "report.json")
    assert (tmp_path / "gradsim").read_text() == "a file"
