"""After every fault: training goes on as if nothing was there, files are whole, and the user knows what to do."""

from __future__ import annotations

import copy
import functools
import json
import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_gradsim import GradSimCallback
from lightning_gradsim.explanation import RAN_SHORT
from tests.noninterference.cases import NUM_TRAIN, make_samples
from tests.noninterference.harness import Observer, RunRecord, differences, record_baseline, record_run
from tests.trainer import faults
from tests.trainer.faults import CASE, FAULTS, Fault, Trap
from tests.trainer.support import collect_warnings

EVERY = pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
OPTIONS = {"num_queries": 8, "top_k": 3, "time_budget": None, "memory_budget": 2**28, "mislabel_score": None}
"""Nothing that depends on the clock, on how much memory is free, or on whether earlier steps were watched."""
FILES = {"suspects.csv", "influences.csv", "report.json", "report.html", "mistakes.png", "class_pairs.png"}


class Look(Callback):
    """What the callback has left behind the last validation of each epoch: files, the report, no process."""

    def __init__(self, gradsim: GradSimCallback) -> None:
        self.gradsim = gradsim
        self.files: list[Any] = [None, None, None]
        self.reports: list[Any] = [None, None, None]

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        assert multiprocessing.active_children() == []
        self.files[trainer.current_epoch] = read_files(Path(trainer.log_dir) / "gradsim")
        self.reports[trainer.current_epoch] = self.gradsim.report

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.files[trainer.current_epoch] = read_files(Path(trainer.log_dir) / "gradsim")


class Surroundings(Callback):
    """The state of the run: the last before the callback's own hooks, and where an exception arrives."""

    def __init__(self) -> None:
        self.before, self.after = RunRecord(), RunRecord()

    def record(self, record: RunRecord, trainer: Any, module: Any) -> None:
        record.points.clear()
        Observer(record, ())._record_state("the exception", trainer, module)
        # Lightning has left its own `no_grad` by then, and notes which hook it is in.
        for fact in (("globals", "gradient mode"), ("values", "module _current_fx_name")):
            del record.points["the exception"][fact]

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.record(self.before, trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[-1].train()  # a mode of its own
        self.record(self.before, trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.record(self.after, trainer, pl_module)
        self.exception = exception


def read_files(folder: Path) -> dict[str, Any]:
    """Content by name, less what depends on the clock, on how the fault was planted, and on earlier reports."""
    if not folder.is_dir():
        return {}
    found: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "errors.log"}
    if "report.json" in found:
        report = json.loads(found["report.json"])
        changing = {"seconds", "time_share", "settings", "trends", "followed"}
        found["report.json"] = {key: value for key, value in report.items() if key not in changing}
        for suspect in found["report.json"]["suspects"]:
            del suspect["reports_flagged"], suspect["reports_judged"]
    if "suspects.csv" in found:  # the same two columns come last
        found["suspects.csv"] = [line.rsplit(b",", 2)[0] for line in found["suspects.csv"].splitlines()]
    if "report.html" in found:
        found["report.html"] = found["report.html"].rstrip().endswith(b"</html>")
        assert found["report.html"]
    return found


@pytest.fixture
def trap(monkeypatch):
    trap = Trap()
    monkeypatch.setattr(faults, "TRAP", trap)
    return trap


def run(trap, options, on_error="warn", *others):
    gradsim = GradSimCallback(**OPTIONS, on_error=on_error, **options)
    look = Look(gradsim)
    record = record_run(CASE, [trap, *others, gradsim, look])
    return record, gradsim, look


@functools.cache
def healthy_run(layers):
    """The same run with nothing broken; data, loss and adapter of a fault are the usual ones otherwise."""
    return run(Trap(), {"layers": layers})


def assert_old_or_new(files, old, new):
    assert set(files) <= FILES
    for name, content in files.items():
        assert content in (old[name], new[name]), name


def test_gradients_are_pending_when_things_break():
    facts = record_baseline(CASE).points["validation 6 end"]
    assert facts["grad", "net.4.weight"] is not None


@EVERY
def test_training_goes_on_as_if_nothing_was_there(trap, monkeypatch, fault: Fault):
    options = fault.plant(monkeypatch, trap)
    with collect_warnings() as texts:
        record, _, look = run(trap, options)
    assert differences(record, record_baseline(CASE)) == []
    (text,) = texts
    for words in fault.says:
        assert words in text
    assert ".." not in text
    assert text.endswith("Training goes on without it.")
    assert [report.epoch for report in look.reports] == [0, 1 if fault.has_report else 0, 2]
    old, new, last = healthy_run(options.get("layers", "last"))[2].files
    assert look.files[0] == old
    assert_old_or_new(look.files[1], old, new)
    assert look.files[2] == last
    assert set(last) == FILES


@EVERY
def test_the_exception_arrives_and_the_run_is_as_it_was(trap, monkeypatch, fault: Fault):
    options, around = fault.plant(monkeypatch, trap), Surroundings()
    with pytest.raises(fault.arrives) as caught:
        run(trap, options, "raise", around)
    if fault.is_original:
        assert trap.error in (caught.value, caught.value.__cause__)
    assert type(caught.value) is fault.arrives
    assert around.exception is caught.value
    assert differences(around.after, around.before) == []


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("name", ["adapter", "adapter_in_pass", "drawing", "full_disk"])
def test_an_interrupt_stops_the_run_and_leaves_it_as_it_was(trap, monkeypatch, name, on_error):
    options, around = next(each for each in FAULTS if each.name == name).plant(monkeypatch, trap), Surroundings()
    trap.error = KeyboardInterrupt()
    gradsim = GradSimCallback(**OPTIONS, on_error=on_error, **options)
    look, handler = Look(gradsim), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):  # Lightning's answer to an interrupt
            record_run(CASE, [trap, around, gradsim, look])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert around.exception is trap.error
    assert differences(around.after, around.before) == []
    assert look.files[2] is None
    assert_old_or_new(look.files[1], *healthy_run("last")[2].files[:2])


def test_memory_that_suffices_for_few_samples_only(trap):
    def check(x):
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    trap.in_pass = check
    record, _, look = run(trap, {}, "raise")
    assert differences(record, record_baseline(CASE)) == []
    halved, whole = look.reports[1], healthy_run("last")[2].reports[1]
    assert RAN_SHORT in halved.notes
    assert [query.sample_id for query in halved.queries] == [query.sample_id for query in whole.queries]
    for ours, theirs in zip(halved.queries, whole.queries, strict=True):
        for kind in ("harmful", "look_alikes", "teachers"):
            ours_ids, theirs_ids = ([each.sample_id for each in getattr(query, kind)] for query in (ours, theirs))
            assert ours_ids == theirs_ids
    torch.testing.assert_close(halved.suspects.scores, whole.suspects.scores)


class Resized(Callback):
    """Changes the number of training samples in the second epoch."""

    def __init__(self, data, size):
        self.data, self.size = data, size

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            self.data.tensors = make_samples(self.size, seed=1).tensors


@pytest.mark.parametrize("size", [NUM_TRAIN - 20, NUM_TRAIN + 20])
@pytest.mark.parametrize("max_train_samples", [None, 30])
def test_data_of_another_length_are_read_anew(trap, size, max_train_samples):
    data = copy.copy(make_samples(NUM_TRAIN, seed=1))
    options = {"train_data": data, "max_train_samples": max_train_samples}
    record, _, look = run(trap, options, "raise", Resized(data, size))
    assert differences(record, record_baseline(CASE)) == []
    note = f"the training data have {size} samples now, and had {NUM_TRAIN} at the last report"
    assert [note in report.notes for report in look.reports] == [False, True, False]
    assert [f"{size} " in report.reference for report in look.reports] == [False, True, True]
    assert [report.num_train_samples for report in look.reports] == (
        [NUM_TRAIN, size, size] if max_train_samples is None else [30, 30, 30]
    )
