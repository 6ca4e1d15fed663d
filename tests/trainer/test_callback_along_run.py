"""Similarities summed over the reports of a run."""

from __future__ import annotations

import copy
import os
import pickle
import re

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import TensorDataset

from lightning_gradsim import Adapter, GradSimCallback
from tests.trainer.processes import ddp, run_processes
from tests.trainer.support import (
    NUM_TRAIN,
    Classifier,
    Recorder,
    Still,
    assert_equal_states,
    collect_warnings,
    fit,
    loader,
    make_trainer,
    read,
    strict,
    train_data,
    val_data,
)
from tests.trainer.support import Truth as OneByOne

# The resumed runs do without the callback that has written their checkpoints.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used:UserWarning")
SMALL = 1e-4
"""MiB in which no sums have room."""


def in_double(data):
    return TensorDataset(data.tensors[0].double(), data.tensors[1])


def everything(**options):
    """A callback whose lists hold all training samples, so that every sum can be read off."""
    return strict(top_k=NUM_TRAIN, **options)


def sums_of(query):
    """Sum by training sample."""
    return {each.sample_id: each.score for each in (*query.harmful, *query.proponents)}


def by_id(report):
    return {query.sample_id: query for query in report.along_run}


class Truth(Callback):
    """Scores of all validation samples at every validation, by plain autograd on one sample at a time."""

    def __init__(self, similarity, train, val):
        self.similarity, self.train, self.val = similarity, train, val
        self.scores, self.wrong = {}, {}

    def on_validation_end(self, trainer, pl_module):
        if trainer.sanity_checking:
            return
        with torch.enable_grad():
            one_by_one = OneByOne(pl_module)
            of_train = torch.stack([one_by_one.gradient(s, s[1]) for s in self.train])
            of_val = torch.stack([one_by_one.gradient(s, s[1]) for s in self.val])
        scores = of_val @ of_train.T
        if self.similarity == "cosine":
            scores = scores / (of_val.norm(dim=1)[:, None] * of_train.norm(dim=1))
        elif self.similarity == "asymmetric":
            scores = scores / of_train.square().sum(1)
        self.scores[trainer.current_epoch] = scores
        self.wrong[trainer.current_epoch] = set(one_by_one.mistakes(self.val))


def assert_sums(query, scores, similarity):
    """The sums are those of the given scores ``[reports, N]``, to the precision of float32."""
    expected = scores.mean(0) if similarity == "cosine" else scores.sum(0)
    found = torch.tensor([sums_of(query).get(i, 0.0) for i in range(NUM_TRAIN)], dtype=torch.float64)
    assert (found - expected).abs().max() <= 1e-6 * scores.abs().max() * len(scores)
    assert [each.score for each in query.harmful] == sorted(each.score for each in query.harmful)
    assert max(each.score for each in query.harmful) < 0 < min(each.score for each in query.proponents)


class TestSums:
    @pytest.mark.parametrize("similarity", ["dot", "cosine", "asymmetric"])
    def test_of_given_samples_are_those_of_the_separate_validations(self, tmp_path, similarity):
        train, val = in_double(train_data()), in_double(val_data())
        truth = Truth(similarity, train, val)
        gradsim, _, recorder = fit(
            tmp_path,
            everything(along_run=[3, 0, 17, 39], similarity=similarity),
            Classifier().double(),
            loader(train, shuffle=True),
            loader(val),
            [truth],
            max_epochs=3,
        )
        for epoch, report in enumerate(recorder.reports):
            assert [query.sample_id for query in report.along_run] == [0, 3, 17, 39]
            for query in report.along_run:
                assert (query.since_epoch, query.num_reports) == (0, epoch + 1)
                scores = torch.stack([truth.scores[each][query.sample_id] for each in range(epoch + 1)])
                assert_sums(query, scores, similarity)
        assert any(query.sample_id not in truth.wrong[2] for query in read(gradsim).along_run), "right ones, too"

    def test_begin_with_the_first_report_that_has_the_query(self, tmp_path):
        train, val = in_double(train_data()), in_double(val_data())
        truth = Truth("dot", train, val)
        _, _, recorder = fit(
            tmp_path,
            everything(along_run=30, num_queries=30),
            Classifier().double(),
            loader(train, shuffle=True),
            loader(val),
            [truth],
            max_epochs=4,
        )
        first = {}
        for epoch, report in enumerate(recorder.reports):
            for query in report.queries:
                first.setdefault(query.sample_id, epoch)
            assert {query.sample_id: query.since_epoch for query in report.along_run} == first
            for query in report.along_run:
                since = first[query.sample_id]
                assert query.num_reports == epoch + 1 - since
                rows = [truth.scores[each][query.sample_id] for each in range(since, epoch + 1)]
                assert_sums(query, torch.stack(rows), "dot")
        assert len(set(first.values())) > 1, "some are wrong later only"

    def test_a_number_takes_the_first_queries_and_no_more(self, tmp_path):
        _, _, recorder = fit(tmp_path, strict(along_run=3), max_epochs=3)
        wanted = {query.sample_id for query in recorder.reports[0].queries[:3]}
        assert [{query.sample_id for query in report.along_run} for report in recorder.reports] == [wanted] * 3

    def test_change_nothing_else_in_the_report(self, tmp_path):
        without = read(fit(tmp_path / "a", max_epochs=2, train=loader(train_data()))[0])
        given = read(fit(tmp_path / "b", strict(along_run=[0, 1, 2]), max_epochs=2, train=loader(train_data()))[0])
        for name in ("harmful", "look_alikes", "teachers"):
            lists = [[getattr(query, name) for query in report.queries] for report in (given, without)]
            ids = [[[each.sample_id for each in samples] for samples in of_report] for of_report in lists]
            assert ids[0] == ids[1]
        assert [query.sample_id for query in given.queries] == [query.sample_id for query in without.queries]
        assert given.num_dropped_queries == without.num_dropped_queries == 0
        assert torch.equal(given.suspects.sample_ids, without.suspects.sample_ids)
        assert not without.along_run

    def test_labels_and_marks(self, tmp_path):
        report = read(fit(tmp_path, strict(along_run=[0], num_queries=1))[0])
        labels, flagged = train_data().tensors[1], report.flagged_among(range(NUM_TRAIN))
        (query,) = report.along_run
        for each in (*query.harmful, *query.proponents):
            assert each.label == labels[each.sample_id]
            assert each.label_is_prediction == (each.label == query.prediction)
            assert each.is_suspect == (each.sample_id in flagged)
        assert query.label == val_data().tensors[1][0]

    def test_a_last_validation_that_is_reported_twice_counts_once(self, tmp_path):
        stopper = EarlyStopping("val_loss", patience=1, min_delta=10.0)
        gradsim, _, _ = fit(tmp_path, strict(along_run=2, final_pass=True), callbacks=[stopper], max_epochs=9)
        assert stopper.stopped_epoch == 1
        assert [query.num_reports for query in read(gradsim).along_run] == [2, 2]

    def test_in_regression_the_samples_of_highest_loss(self, tmp_path):
        def values(data):
            return TensorDataset(data.tensors[0], data.tensors[1].float()[:, None])

        module = Classifier(torch.nn.MSELoss(), num_outputs=1)
        report = read(
            fit(tmp_path, strict(along_run=2), module, loader(values(train_data())), loader(values(val_data())))[0]
        )
        assert [query.num_reports for query in report.along_run] == [1, 1]

    def test_outside_of_fit_there_are_none(self, tmp_path):
        gradsim, module, _ = fit(tmp_path, strict(along_run=2), max_epochs=2)
        before = gradsim.state_dict()["along_run"]
        make_trainer(tmp_path, [gradsim]).validate(module, loader(val_data()), verbose=False)
        assert read(gradsim).along_run == ()
        assert_equal_states(gradsim.state_dict()["along_run"], before)

    def test_a_second_fit_begins_anew(self, tmp_path):
        gradsim, _, _ = fit(tmp_path, strict(along_run=2), max_epochs=2)
        fit(tmp_path, gradsim)
        assert [query.num_reports for query in read(gradsim).along_run] == [1, 1]

    def test_a_report_that_fails_is_left_out(self, tmp_path):
        class FailsOnce(Adapter):
            failed = False

            def predicted_targets(self, step):
                if not self.failed:
                    self.failed = True
                    raise RuntimeError("not today")
                return super().predicted_targets(step)

        options = {"along_run": 2, "adapter": FailsOnce(), "on_error": "warn"}
        with collect_warnings() as texts:
            gradsim, _, recorder = fit(tmp_path, strict(**options), max_epochs=3)
        expected = len(recorder.reports)
        assert expected == 2
        assert len(texts) == 3 - expected
        assert [query.num_reports for query in read(gradsim).along_run] == [expected] * 2

    def test_with_a_budget_all_samples_are_read(self, tmp_path):
        gradsim, _, recorder = fit(tmp_path, strict(along_run=2, time_budget=1e-9), max_epochs=4)
        assert [report.share_read for report in recorder.reports] == [1.0] * len(recorder.reports)
        assert recorder.moments[0][0] == 0
        assert recorder.moments[-1][0] == 3
        assert len(recorder.reports) < 4
        assert [query.num_reports for query in read(gradsim).along_run] == [len(recorder.reports)] * 2

    @pytest.mark.parametrize("copier", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
    def test_copies_go_their_own_way(self, tmp_path, copier):
        gradsim, _, _ = fit(tmp_path, strict(along_run=2, max_state_mb=SMALL))
        state = gradsim.state_dict()
        fit(tmp_path, copier(gradsim))
        assert_equal_states(gradsim.state_dict(), state)


def resume(root, checkpoint, callbacks, max_epochs=4, **options):
    trainer = make_trainer(root, callbacks, max_epochs=max_epochs, **options)
    trainer.fit(Classifier(), loader(train_data()), loader(val_data()), ckpt_path=checkpoint)


class TestResume:
    @pytest.mark.parametrize("max_state_mb", [256.0, SMALL], ids=["in the state", "in a file"])
    @pytest.mark.parametrize("along_run", [5, [0, 1, 2]], ids=str)
    def test_at_any_epoch_equals_uninterrupted(self, tmp_path, along_run, max_state_mb):
        settings = {"along_run": along_run, "max_state_mb": max_state_mb}
        whole = Recorder(strict(**settings))
        saves = ModelCheckpoint(tmp_path / "saved", "{epoch}", save_top_k=-1)
        resume(tmp_path, None, [whole.gradsim, whole, saves], enable_checkpointing=True)
        files = list((tmp_path / "saved").glob("gradsim-along-run-step*.pt"))
        assert len(files) == (4 if max_state_mb == SMALL else 0)
        for epoch in range(3):
            resumed = Recorder(strict(**settings))
            resume(tmp_path, tmp_path / "saved" / f"epoch={epoch}.ckpt", [resumed.gradsim, resumed])
            assert [report.along_run for report in resumed.reports] == [
                report.along_run for report in whole.reports[epoch + 1 :]
            ]

    def saved(self, root, **options):
        """A checkpoint after two epochs, and the file with its sums."""
        checkpoint = ModelCheckpoint(root, "{epoch}")
        settings = {"along_run": 2, "max_state_mb": SMALL, **options}
        fit(root, strict(**settings), callbacks=[checkpoint], max_epochs=2, enable_checkpointing=True)
        (file,) = root.glob("*-step12-*.pt")
        return root / "epoch=1.ckpt", file

    def goes_on(self, root, checkpoint, **options):
        settings = {"along_run": 2, "max_state_mb": SMALL, **options}
        gradsim = strict(**settings)
        with collect_warnings() as texts:
            resume(root, checkpoint, [gradsim], max_epochs=3)
        return read(gradsim), texts

    def test_elsewhere_with_the_file_beside_the_checkpoint(self, tmp_path):
        checkpoint, file = self.saved(tmp_path / "here")
        there = tmp_path / "there"
        there.mkdir()
        for each in (checkpoint, file):
            each.rename(there / each.name)
        report, texts = self.goes_on(tmp_path, there / checkpoint.name)
        assert texts == []
        assert [query.num_reports for query in report.along_run] == [3, 3]

    def missing(file):
        file.unlink()

    def truncated(file):
        os.truncate(file, file.stat().st_size // 2)

    def changed(file):
        held = torch.load(file, weights_only=True)
        held["sums"][0, 0] += 1
        torch.save(held, file)

    def another(file):
        torch.save({"weights": torch.ones(3)}, file)

    @pytest.mark.parametrize(
        ("harm", "words"),
        [
            (missing, r"is not in `.*`; copy it beside the checkpoint to go on with its sums"),
            (truncated, r"cannot be read, with RuntimeError"),
            (changed, r"is not as it was written"),
            (another, r"cannot be read, with KeyError"),
        ],
    )
    def test_a_file_that_is_not_as_it_was_is_told_and_sums_begin_anew(self, tmp_path, harm, words):
        checkpoint, file = self.saved(tmp_path)
        harm(file)
        report, (text,) = self.goes_on(tmp_path, checkpoint)
        begin = "influences along the run begin anew after the resume: "
        assert re.fullmatch(rf"`GradSimCallback`: {begin}`.*{re.escape(file.name)}` {words}\.", text)
        (note,) = [note for note in report.notes if note.startswith(begin)]
        assert text == f"`GradSimCallback`: {note}."
        assert [(query.since_epoch, query.num_reports) for query in report.along_run] == [(2, 1), (2, 1)]

    def test_with_another_similarity_they_begin_anew(self, tmp_path):
        checkpoint, _ = self.saved(tmp_path)
        report, texts = self.goes_on(tmp_path, checkpoint, similarity="cosine")
        assert texts == []
        assert (
            "influences along the run begin anew at epoch 2: there are other layers or similarity now" in report.notes
        )
        assert [query.num_reports for query in report.along_run] == [1, 1]

    def test_with_other_training_samples_they_begin_anew(self, tmp_path):
        checkpoint, _ = self.saved(tmp_path)
        report, _ = self.goes_on(tmp_path, checkpoint, max_train_samples=30)
        assert "influences along the run begin anew at epoch 2: there are other training samples now" in report.notes

    def test_without_sums_as_before(self, tmp_path):
        checkpoint, _ = self.saved(tmp_path)
        report, texts = self.goes_on(tmp_path, checkpoint, along_run=None)
        assert texts == []
        assert report.along_run == ()

    def test_a_disk_that_is_full_is_told_and_training_goes_on(self, tmp_path, monkeypatch):
        def fail(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("lightning_gradsim.along_run.write_sums", fail)
        gradsim = strict(along_run=2, max_state_mb=SMALL, on_error="warn")
        with collect_warnings() as texts:
            fit(tmp_path, gradsim, callbacks=[ModelCheckpoint(tmp_path)], enable_checkpointing=True)
        assert [text.partition(": ")[2] for text in texts] == [
            "writing the sums along the run was given up. OSError: [Errno 28] No space left on device."
        ]
        assert (tmp_path / "epoch=0-step=6.ckpt").exists()


class TestBeyondTheBudget:
    def test_sums_are_the_same(self, tmp_path):
        in_memory = read(fit(tmp_path / "a", strict(along_run=4), train=loader(train_data()), max_epochs=2)[0])
        gradsim = strict(along_run=4, max_state_mb=SMALL)
        in_file = read(fit(tmp_path / "b", gradsim, train=loader(train_data()), max_epochs=2)[0])
        assert in_file.along_run == in_memory.along_run
        state = gradsim.state_dict()["along_run"]
        assert "sums" not in state
        assert len(state["hash"]) == 64
        assert not list((tmp_path / "b").rglob("tmp*")), "the mapped files have no name"


@pytest.mark.filterwarnings(
    "ignore:It is recommended to use .self.log:UserWarning:lightning",
    "ignore:Using `DistributedSampler` with the dataloaders:UserWarning:lightning",
)
@pytest.mark.parametrize("max_state_mb", [256.0, SMALL], ids=["in the state", "in a file"])
def test_two_processes_sum_what_one_sums(tmp_path, max_state_mb):
    settings = {"along_run": 4, "max_state_mb": max_state_mb, "top_k": NUM_TRAIN}

    def job():
        saves = ModelCheckpoint(tmp_path / "saved", "{epoch}", save_top_k=-1)
        gradsim = strict(**settings)
        fit(tmp_path / "two", gradsim, Still(), callbacks=[saves], max_epochs=2, enable_checkpointing=True, **ddp())
        resumed = strict(**settings)
        trainer = make_trainer(tmp_path / "again", [resumed], max_epochs=3, **ddp())
        checkpoint = tmp_path / "saved" / "epoch=1.ckpt"
        trainer.fit(Still(), loader(train_data()), loader(val_data()), ckpt_path=checkpoint)
        return read(gradsim), read(resumed)

    expected = [read(fit(tmp_path / f"one{n}", strict(**settings), Still(), max_epochs=n)[0]) for n in (2, 3)]
    for reports in run_processes(job, tmp_path):
        for report, one in zip(reports, expected, strict=True):
            assert [query.num_reports for query in report.along_run] == [one.epoch + 1] * 4
            assert by_id(report).keys() == by_id(one).keys()
            for sample_id, query in by_id(report).items():
                found, wanted = sums_of(query), sums_of(by_id(one)[sample_id])
                assert found.keys() == wanted.keys()
                assert all(abs(found[i] - wanted[i]) <= 1e-5 * max(map(abs, wanted.values())) for i in wanted)


class TestBadInput:
    def test_ids_that_the_validation_data_do_not_have(self, tmp_path):
        words = (
            "`along_run` names validation samples [40, 99], which the first validation dataset does not have. Expected "
            "ids from 0 to 39."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
            fit(tmp_path, GradSimCallback(along_run=[3, 40, 99]))

    def test_samples_that_are_not_shown_are_noted(self, tmp_path):
        report = read(fit(tmp_path, strict(along_run=[3, 35]), limit_val_batches=2)[0])
        assert [query.sample_id for query in report.along_run] == [3]
        assert "`along_run=` names validation samples [35], which no validation has shown" in report.notes

    @pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled:UserWarning")
    @pytest.mark.parametrize("along_run", [3, [1]], ids=str)
    def test_samples_without_ids_are_told(self, tmp_path, along_run):
        with collect_warnings() as texts:
            gradsim, _, _ = fit(tmp_path, strict(along_run=along_run), val=loader(val_data(), shuffle=True))
        assert read(gradsim).along_run == ()
        (text,) = texts
        assert "its samples have no id here, and nothing is summed" in text
