"""Several processes: they find what one finds, fail and decide alike, and change nothing."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import math
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import nn
from torch.utils.data import Subset, TensorDataset

import lightning_gradsim.presentation
import lightning_gradsim.reporter
import lightning_gradsim.tap
from lightning_gradsim import GradSimCallback, GradSimWarning, lightning_bridge
from lightning_gradsim.budget import TimeBudget
from lightning_gradsim.queries import QuerySelection
from tests.noninterference import harness
from tests.noninterference.cases import CASES, rows
from tests.trainer.processes import Raised, ddp, run_processes
from tests.trainer.support import (
    NUM_FEATURES,
    WIDTH,
    Classifier,
    Still,
    Truth,
    assert_equal_states,
    assert_exact,
    fit,
    loader,
    make_trainer,
    read,
    strict,
    train_data,
    val_data,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:It is recommended to use .self.log:UserWarning:lightning",
    "ignore:Using `DistributedSampler` with the dataloaders:UserWarning:lightning",
    "ignore:.*sampler has shuffling enabled:UserWarning:lightning",
    "ignore:The number of training batches:UserWarning:lightning",
    "ignore:.broadcast_buffers. is deprecated:FutureWarning",
    "ignore:.*augmented at random",
    "ignore:.*`training_step` returned a loss",  # one that holds more than the criterion
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # the compiler looks at it
    "ignore:You're resuming from a checkpoint that ended before:UserWarning:lightning",
)
REPOSITORY = Path(__file__).parents[2]


class Normalised(Classifier):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.9), nn.ReLU())


def validate(root, gradsim, val, module=None, **options):
    trainer = make_trainer(root, [gradsim], **options)
    trainer.validate(Classifier() if module is None else module, val, verbose=False)
    return read(gradsim)


def assert_same_report(found, expected):
    """But for the last digits of scores, and for what it cost."""
    same = {name: getattr(expected, name) for name in ("epoch", "step", "queries", "suspects", "seconds", "time_share")}
    plans = {"plan": None, "self_influence": None}
    histograms = [report.self_influence for report in (found, expected)]
    assert [sum(histogram.counts) + histogram.num_zero for histogram in histograms] == [expected.num_train_samples] * 2
    assert histograms[0].edges == pytest.approx(histograms[1].edges, rel=1e-4, abs=1e-4)
    assert asdict(replace(found, **same, **plans)) == asdict(replace(expected, **plans))
    assert_same_rows(found.to_rows(), expected.to_rows())
    assert_same_rows(found.suspects.to_rows(), expected.suspects.to_rows())


def asdict(report):
    return {name: value for name, value in vars(report).items() if name not in {"queries", "suspects"}}


def assert_same_rows(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            if isinstance(value, float):
                assert value == pytest.approx(theirs[name], rel=1e-3 if name == "probability" else 1e-4, abs=1e-6), name
            else:
                assert value == theirs[name], name


def half_right(number):
    """Validation samples of which every other one is classified correctly."""
    x, labels = val_data(number).tensors
    with torch.no_grad():
        predictions = Classifier()(x).argmax(1)
    return TensorDataset(x, torch.where(torch.arange(number) % 2 == 0, labels, predictions))


ONE_LIKE_SEVERAL = {
    "even": (2, train_data(), [val_data()], {}),
    "uneven": (2, train_data(61), [val_data(41)], {}),
    "three processes": (3, train_data(61), [val_data(40)], {}),
    "random queries": (2, train_data(61), [val_data(41)], {"query_policy": "random"}),
    "all mistakes": (2, train_data(), [val_data(41)], {"num_queries": 1000, "top_k": 100}),
    "asymmetric, all layers": (2, train_data(), [val_data(41)], {"layers": "all", "similarity": "asymmetric"}),
    "cosine": (2, train_data(61), [val_data()], {"similarity": "cosine"}),
    "influence, all layers": (2, train_data(61), [val_data()], {"layers": "all", "similarity": "influence"}),
    "an empty share": (3, train_data(2), [val_data()], {}),
    "fewer validation samples than processes": (3, train_data(), [val_data(2)], {}),
    "no mistakes on one": (2, train_data(), [half_right(40)], {}),
    "several loaders": (2, train_data(), [val_data(41), Subset(val_data(60), list(range(59, 40, -1)))], {}),
    "a part": (2, train_data(), [val_data()], {"max_train_samples": 31}),
}


@pytest.mark.parametrize(("world_size", "train", "val", "options"), ONE_LIKE_SEVERAL.values(), ids=ONE_LIKE_SEVERAL)
def test_several_processes_find_what_one_finds(tmp_path, world_size, train, val, options):
    loaders = [loader(part) for part in val]

    def job():
        gradsim = strict(train_data=loader(train), **options)
        return validate(tmp_path / "several", gradsim, loaders, **{**ddp(), "devices": world_size})

    reports = run_processes(job, tmp_path, world_size)
    expected = validate(tmp_path / "one", strict(train_data=loader(train), **options), loaders)
    assert expected.queries
    for report in reports:
        assert_same_report(report, expected)
    written = sorted(path.name for path in (tmp_path / "several" / "run" / "version_0" / "gradsim").iterdir())
    assert written == sorted(path.name for path in (tmp_path / "one" / "run" / "version_0" / "gradsim").iterdir())


def test_shuffled_validation_samples_have_no_id_but_count(tmp_path):
    """What the sampler repeats cannot be told apart then."""

    def job():
        gradsim = strict(train_data=train_data(), num_queries=1000)
        return validate(tmp_path, gradsim, loader(val_data(), shuffle=True), **ddp())

    expected = validate(tmp_path, strict(train_data=train_data(), num_queries=1000), loader(val_data()))
    for report in run_processes(job, tmp_path):
        assert {query.sample_id for query in report.queries} == {None}
        assert (report.num_errors, report.errors_per_class) == (expected.num_errors, expected.errors_per_class)
        assert sorted(query.loss for query in report.queries) == pytest.approx(
            sorted(query.loss for query in expected.queries), rel=1e-4
        )


@pytest.mark.parametrize(
    ("module", "options"), [(Classifier, {}), (Normalised, {}), (Normalised, {"broadcast_buffers": False})]
)
def test_training(tmp_path, module, options):
    """Training differs with the number of processes; what is said of its weights is exact."""

    def job():
        gradsim, trained, recorder = fit(tmp_path, strict(num_queries=1000), module(), max_epochs=2, **ddp(**options))
        return recorder.reports, trained.state_dict(), gradsim.state_dict()

    first, second = run_processes(job, tmp_path)
    assert [report.epoch for report in first[0]] == [report.epoch for report in second[0]] == [0, 1]
    for ours, theirs in zip(first[0], second[0], strict=True):
        assert_same_report(ours, theirs)
    assert_equal_states({**first[2], "seconds": 0}, {**second[2], "seconds": 0})
    # Running statistics may be those of a process's own batches: what counts are those of the first, which are saved.
    assert torch.equal(first[1]["head.weight"], second[1]["head.weight"])
    alike = all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    assert alike == (not options)
    trained = module().eval()
    trained.load_state_dict(first[1])
    assert_exact(first[0][-1], Truth(trained), train_data(), val_data())


FAULTS = {
    "the choice of queries": (QuerySelection, "update", (0, 1)),
    "scoring": (lightning_gradsim.reporter, "score_part", (0, 1)),
    "merging": (lightning_gradsim.reporter, "make_report", (0, 1)),
    "drawing": (lightning_gradsim.presentation, "mistake_panel", (0,)),
    "writing": (lightning_gradsim.presentation, "write_report_files", (0,)),
}


@pytest.fixture
def fail_on(monkeypatch):
    """Makes a function fail on one rank, in its first calls."""

    def fail_on(owner, name, rank, calls=1):
        function, left = getattr(owner, name), [calls]

        def failing(*args, **kwargs):
            if left[0] and torch.distributed.get_rank() == rank:
                left[0] -= 1
                raise OSError(f"boom on {rank}")
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, failing)

    return fail_on


@contextlib.contextmanager
def collected_warnings(texts):
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=GradSimWarning)
        yield
    texts += [str(each.message) for each in caught]


@pytest.mark.parametrize(("what", "rank"), [(what, rank) for what, (_, _, ranks) in FAULTS.items() for rank in ranks])
def test_what_fails_on_one_process_fails_on_all(tmp_path, fail_on, what, rank):
    """Whatever fails where, all learn of it and none waits for the others; one of them tells."""
    owner, name, _ = FAULTS[what]
    fail_on(owner, name, rank, calls=2)

    def job():
        with contextlib.suppress(Exception):
            validate(tmp_path, strict(train_data=train_data()), loader(val_data()), **ddp())
            return "nothing was raised"
        texts, gradsim = [], GradSimCallback(num_queries=8, time_budget=None)
        with collected_warnings(texts):
            _, _, recorder = fit(tmp_path, gradsim, max_epochs=2, **ddp())
        return texts, recorder.moments, gradsim.state_dict()["failures"]

    results = run_processes(job, tmp_path)
    for _, moments, failures in results:
        assert moments[-1] == (1, 6)  # 3 batches of 10 for each process
        assert failures == 0
    [text], others = results[0][0], results[1][0]
    stage = "choice of queries" if what == "the choice of queries" else "report"
    cause = f"OSError: boom on {rank}"
    assert text.startswith(f"`GradSimCallback` failed in the {stage} of epoch 0: ")
    assert cause in text if rank == 0 else text.count("ProcessError: Process 1 of 2 failed") == 1 and cause in text
    assert others == []
    assert cause in (tmp_path / "run" / "version_0" / "gradsim" / "errors.log").read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_raises_where_failures_shall(tmp_path, fail_on, rank):
    fail_on(lightning_gradsim.reporter, "score_part", rank)
    results = run_processes(lambda: fit(tmp_path, strict(), **ddp()), tmp_path)
    assert results[rank] == Raised("OSError", f"boom on {rank}")
    assert results[1 - rank].kind == "ProcessError"
    assert results[1 - rank].message.startswith(f"Process {rank} of 2 failed: Traceback")
    assert results[1 - rank].message.endswith(f"OSError: boom on {rank}")


def test_all_processes_stop_after_three_failures_in_a_row(tmp_path, fail_on):
    fail_on(lightning_gradsim.reporter, "score_part", 1, calls=5)

    def job():
        texts, gradsim = [], GradSimCallback(time_budget=None)
        with collected_warnings(texts):
            fit(tmp_path, gradsim, max_epochs=5, **ddp())
        return texts, gradsim.state_dict()["failures"], gradsim.report

    first, second = run_processes(job, tmp_path)
    assert first[1:] == second[1:] == (3, None)
    assert ["the callback stops" in text for text in first[0]] == [False, False, True]
    assert second[0] == []


def test_samples_that_are_not_finite_are_named_on_every_process(tmp_path):
    x, labels = train_data().tensors
    x = x.index_fill(0, torch.tensor([3, 58]), math.nan)

    def job():
        return validate(tmp_path, strict(train_data=TensorDataset(x, labels)), loader(val_data()), **ddp())

    for result in run_processes(job, tmp_path):
        assert result.kind == "NonFiniteError"
        assert "sample ids [3, 58]" in result.message


def test_decisions_by_the_clock_are_those_of_the_first_process(tmp_path, monkeypatch):
    monkeypatch.setattr(TimeBudget, "allows_report", lambda _: torch.distributed.get_rank() == next(later))
    later = iter([0, 1, 0, 1])

    def job():
        _, _, recorder = fit(tmp_path, strict(time_budget=0.1), max_epochs=5, **ddp())
        return recorder.moments

    assert run_processes(job, tmp_path) == [[(0, 3), (2, 9), (4, 15)]] * 2


def test_passes_over_a_part_take_turns(tmp_path, monkeypatch):
    """Each process reads as much as it can, and all samples get their turn."""
    monkeypatch.setattr(TimeBudget, "allows_report", lambda _: True)
    monkeypatch.setattr(TimeBudget, "reading_seconds", lambda *_, **__: 0.0)

    def job():
        _, _, recorder = fit(tmp_path, strict(time_budget=0.1), max_epochs=4, **ddp())
        return [(report.suspects.sample_ids.tolist(), report.share_read) for report in recorder.reports]

    first, second = run_processes(job, tmp_path)
    assert first == second
    assert [share for _, share in first] == [pytest.approx(20 / 60)] * 4
    assert all(len(set(ids)) == 20 for ids, _ in first)
    assert {sample_id for ids, _ in first for sample_id in ids} == set(range(60))


def test_one_process_speaks(tmp_path, monkeypatch, real_panel):
    monkeypatch.setattr(lightning_bridge, "BAR_DELAY", 0.0)

    def job():
        records, errors = [], io.StringIO()
        handler, ours = logging.Handler(), logging.getLogger("lightning_gradsim")
        handler.emit = records.append
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        with contextlib.redirect_stderr(errors):
            fit(tmp_path, strict(), callbacks=[TQDMProgressBar()], enable_progress_bar=True, **ddp())
        return len(records), "gradient similarity" in errors.getvalue()

    assert run_processes(job, tmp_path) == [(1, True), (0, False)]


HARMLESS = ("plain", "shuffle", "accumulate", "batchnorm", "dropout")
LEFT_OUT = ("custom_batch_sampler", "batch_size_finder_first", "batch_size_finder_last", "resume")
"""What Lightning does not allow with several processes; and one whose second trainer has one."""
OTHERS = tuple(case.name for case in CASES if case.name not in {*HARMLESS, *LEFT_OUT})


def _slow(parameters):
    return [pytest.param(*each.values, id=each.id, marks=pytest.mark.slow) for each in parameters]


def _changes(case, gradsim, directory):
    """What differs on this process between a run with the callback and one without."""
    records = []
    for callbacks in ([gradsim], []):
        root = str(directory / f"run{len(callbacks)}")  # one for all processes, as they look for checkpoints there
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(harness.tempfile, "TemporaryDirectory", lambda root=root: contextlib.nullcontext(root))
            records.append(harness.record_run(replace(case, trainer={**case.trainer, **ddp()}), callbacks))
    return harness.differences(*records)


@pytest.mark.parametrize("case", [*rows(HARMLESS), *_slow(rows(OTHERS))])
def test_it_changes_nothing(tmp_path, case):
    def job():
        gradsim = GradSimCallback(num_queries=8, top_k=3, on_error="raise", every_n_epochs=1, **case.options())
        return _changes(case, gradsim, tmp_path), len(read(gradsim).queries)

    for found, num_queries in run_processes(job, tmp_path, seconds=600):  # compilers take their time
        assert found == []
        assert num_queries


def test_what_changes_on_one_process_is_found(tmp_path):
    class Offender(GradSimCallback):
        def on_validation_end(self, trainer, pl_module):
            super().on_validation_end(trainer, pl_module)
            if trainer.global_rank == 1:
                torch.rand(1)

    [case] = rows(("plain",))

    def job():
        return _changes(*case.values, Offender(), tmp_path)

    first, second = run_processes(job, tmp_path)
    assert first == []
    assert any("rng" in each for each in second)


@pytest.mark.parametrize("case", rows(("batchnorm",)))
def test_failing_on_one_process_changes_nothing(tmp_path, case, fail_on):
    fail_on(lightning_gradsim.reporter, "score_part", 1, calls=9)

    def job():
        texts = []
        with collected_warnings(texts):
            return _changes(case, GradSimCallback(num_queries=8, top_k=3), tmp_path)

    assert run_processes(job, tmp_path) == [[], []]


def files_of(root):
    folder = root / "run" / "version_0" / "gradsim"
    tables = [
        list(csv.DictReader((folder / name).read_text().splitlines())) for name in ("influences.csv", "suspects.csv")
    ]
    report = json.loads((folder / "report.json").read_text())
    return [[{name: _number(value) for name, value in row.items()} for row in table] for table in tables], report


def _number(text):
    try:
        return float(text) if "." in text or "e" in text else text
    except ValueError:
        return text


def assert_same_files(found, expected):
    for ours, theirs in zip(files_of(found)[0], files_of(expected)[0], strict=True):
        assert ours
        assert_same_rows(ours, theirs)
    ours, theirs = (files_of(root)[1] for root in (found, expected))
    for name in ("errors_per_class", "num_validation_samples", "num_train_samples", "notes", "reference"):
        assert ours[name] == theirs[name]


@pytest.fixture
def own_port(monkeypatch):
    """Lightning leaves behind the port of the first launch."""
    for name in ("MASTER_PORT", "MASTER_ADDR", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("own_port")
@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_processes_that_lightning_forks_and_spawns(tmp_path, strategy):
    data = {"train": loader(train_data(61), shuffle=True), "val": loader(val_data(41))}
    fit(tmp_path / "several", strict(num_queries=20), Still(), **data, strategy=strategy, devices=2)
    fit(tmp_path / "one", strict(num_queries=20), Still(), **data)
    assert_same_files(tmp_path / "several", tmp_path / "one")


SCRIPT = """
import sys
import torch
from tests.trainer.support import Still, fit, loader, strict, train_data, val_data

torch.set_num_threads(1)
data = {{"train": loader(train_data(61), shuffle=True), "val": loader(val_data(41))}}
gradsim, _, _ = fit({root!r}, strict(num_queries=20), Still(), **data, strategy="ddp", devices=2)
print("queries:", len(gradsim.report.queries))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("own_port")
def test_processes_that_lightning_starts_anew(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(tmp_path / "several")))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    finished = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("queries: 20") == 2
    data = {"train": loader(train_data(61), shuffle=True), "val": loader(val_data(41))}
    fit(tmp_path / "one", strict(num_queries=20), Still(), **data)
    assert_same_files(tmp_path / "several", tmp_path / "one")


@pytest.mark.parametrize("number", [60, 61], ids=["even", "uneven"])
def test_several_processes_gather_what_one_gathers(tmp_path, number):
    """From weights that stand still, so that every visit of a sample shows the same."""

    def run(root, **options):
        gradsim = strict(mislabel_score="margin_knn")
        fit(root, gradsim, Still(), train=loader(train_data(number)), max_epochs=3, **options)
        return read(gradsim)

    found = run_processes(lambda: run(tmp_path / "several", **ddp()), tmp_path)
    expected = run(tmp_path / "one")
    assert expected.suspects.score_name == "margin_knn"
    assert expected.suspects.parts.keys() == {"log_margin", "knn"}
    padded = number % 2
    for report in found:
        ours, theirs = report.suspects.sample_ids.argsort(), expected.suspects.sample_ids.argsort()
        assert torch.equal(report.suspects.sample_ids[ours], expected.suspects.sample_ids[theirs])
        visits = report.suspects.visits[ours]
        # What the sampler repeats to give all processes as much was trained on, too.
        assert int(visits.sum()) == 3 * (number + padded)
        assert visits.min() == 3
        for name in ("log_margin", "knn"):
            parts = report.suspects.parts[name][ours], expected.suspects.parts[name][theirs]
            torch.testing.assert_close(*parts, rtol=1e-4, atol=1e-5)
        assert report.suspects.to_rows() == found[0].suspects.to_rows()


def test_what_was_gathered_counts_once_after_a_resume(tmp_path):
    def job():
        for epochs in (1, 2):
            gradsim = strict(mislabel_score="margin_knn")
            trainer = make_trainer(tmp_path / "run", [gradsim], max_epochs=epochs, **ddp())
            saved = None if epochs == 1 else tmp_path / "saved.ckpt"
            trainer.fit(Still(), loader(train_data()), loader(val_data()), ckpt_path=saved)
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
        return read(gradsim)

    for report in run_processes(job, tmp_path):
        assert set(report.suspects.visits.tolist()) == {2}


def test_a_watch_that_breaks_on_one_process_ends_on_all(tmp_path):
    def job():
        gradsim = strict(mislabel_score="margin_knn", on_error="warn")
        if int(os.environ["RANK"]) == 1:
            lightning_gradsim.tap.Tap.end_step = _fail
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GradSimWarning)
            fit(tmp_path / "run", gradsim, max_epochs=2, **ddp())
        return read(gradsim)

    for report in run_processes(job, tmp_path):
        assert set(report.suspects.visits.tolist()) == {2}  # those of the two passes
        assert sum("RuntimeError: boom" in note for note in report.notes) == 1


def _fail(*_):
    raise RuntimeError("boom")
