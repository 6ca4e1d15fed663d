"""The in-run mode: what training steps have shown chooses which samples are read, and those are scored exactly."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset

from lightning_gradsim import reading, rereading, shortlist
from tests.trainer.processes import ddp, run_processes
from tests.trainer.support import (
    Classifier,
    Recorder,
    Still,
    Truth,
    assert_exact,
    fit,
    loader,
    make_data,
    make_trainer,
    read,
    similarities,
    strict,
    val_data,
)

NUMBER = 400
CHOSEN = "chosen by what training steps have shown"
FIRST = "what was read is not chosen by training steps: until the second epoch training steps tell too little"


@pytest.fixture(scope="module")
def data():
    return make_data(NUMBER, seed=5)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Shares that are made for thousands of samples."""
    monkeypatch.setattr(reading, "MIN_FIRST", 40)
    monkeypatch.setattr(rereading, "MIN_PROBE", 20)


def in_run(**options):
    return strict(**{"mode": "in_run", "mislabel_score": "margin_knn", "top_k": 4, **options})


class Exact(Callback):
    """What a pass over all samples finds, by autograd, beside every report."""

    def __init__(self, data, gradsim, similarity="dot"):
        self.data, self.gradsim, self.similarity, self.recalls = data, gradsim, similarity, []

    def on_validation_end(self, trainer, pl_module):
        if trainer.sanity_checking:
            return
        truth, report = Truth(pl_module), read(self.gradsim)
        samples = [self.data[i] for i in range(len(self.data))]
        with torch.enable_grad():
            gradients = torch.stack([truth.gradient(sample, sample[1]) for sample in samples])
        found = {"harmful": [], "look_alikes": [], "teachers": []}
        for query in report.queries:
            sample = val_data()[query.sample_id]
            with torch.enable_grad():
                own, other = (truth.gradient(sample, torch.tensor(label)) for label in (query.label, query.prediction))
            harmful = -similarities(self.similarity, own, gradients)
            look_alikes = similarities("cosine", own, gradients)
            teachers = similarities(self.similarity, other, gradients)
            for name, expected in (("harmful", harmful), ("look_alikes", look_alikes), ("teachers", teachers)):
                best = set(expected.topk(4).indices.tolist())
                found[name].append(len(best & {each.sample_id for each in getattr(query, name)}) / 4)
        self.recalls.append({name: sum(values) / len(values) for name, values in found.items()})


@pytest.mark.parametrize("similarity", ["dot", "cosine", "asymmetric"])
def test_scores_are_exact_and_most_of_the_best_are_found(tmp_path, data, similarity, monkeypatch):
    keep_suspects_of_the_pass(monkeypatch)
    gradsim = in_run(similarity=similarity)
    exact = Exact(data, gradsim, similarity)
    _, module, recorder = fit(tmp_path, gradsim, train=loader(data, shuffle=True), callbacks=[exact], max_epochs=4)
    for report, recall in list(zip(recorder.reports, exact.recalls, strict=True))[1:]:
        assert CHOSEN in report.reference
        assert 0.05 < report.share_read < 0.8
        assert report.num_train_samples == round(report.share_read * NUMBER) == len(report.suspects)
        assert sum(recall.values()) / 3 > 0.85
        assert set(report.recall) == set(recall)
        for name, share in report.recall.items():
            assert share == pytest.approx(recall[name], abs=0.15), name
    ids = sorted(recorder.reports[-1].suspects.sample_ids.tolist())
    assert_exact(recorder.reports[-1], Truth(module), Subset(data, ids), val_data(), ids=ids, top_k=4)


def keep_suspects_of_the_pass(monkeypatch):
    """Those tell which samples were read."""
    monkeypatch.setattr("lightning_gradsim.training_watch.TrainingWatch.suspects", lambda *_: (None, ()))


def test_everything_is_found_where_everything_is_read(tmp_path, data, monkeypatch):
    keep_suspects_of_the_pass(monkeypatch)
    monkeypatch.setattr(shortlist, "TARGET_RECALL", 2.0)
    gradsim, module, _ = fit(tmp_path, in_run(), train=loader(data, shuffle=True), max_epochs=2)
    report = read(gradsim)
    assert report.share_read == 1.0
    assert report.recall == {"harmful": 1.0, "look_alikes": 1.0, "teachers": 1.0}
    assert_exact(report, Truth(module), data, val_data(), top_k=4)


def test_the_first_epoch_reads_a_part(tmp_path, data):
    gradsim, _, _ = fit(tmp_path, in_run(), train=loader(data, shuffle=True))
    report = read(gradsim)
    assert report.reference == "50 of 400 training samples, drawn at random"
    assert report.share_read == 0.125
    assert report.recall is None
    assert report.notes[0].startswith(FIRST)
    assert len(report.suspects) == NUMBER


def test_it_is_said_what_limits_a_report(tmp_path, data):
    gradsim, _, _ = fit(tmp_path, in_run(), train=loader(data, shuffle=True), max_epochs=2)
    report = read(gradsim)
    words = ", ".join(f"{name.replace('_', '-')} {share:.0%}" for name, share in report.recall.items())
    assert report.notes[0].startswith("scores are exact, of the samples read;")
    assert report.notes[0].endswith(words)
    assert report.to_dict()["recall"] == report.recall
    assert len(report.suspects) == NUMBER


class TestAPass:
    """Where training steps do not tell what to read, with the reason."""

    def assert_pass(self, report, reason, number=NUMBER):
        assert report.num_train_samples == number
        assert report.recall is None
        [note] = [note for note in report.notes if note.startswith("what was read is not chosen by training steps: ")]
        assert reason in note

    def test_of_other_layers(self, tmp_path, data):
        gradsim, _, _ = fit(tmp_path, in_run(layers="all"), train=loader(data), max_epochs=2)
        self.assert_pass(read(gradsim), "training steps tell of the head alone (`head`), not of `body.0`, `head`")

    def test_of_another_layer(self, tmp_path, data):
        gradsim, _, _ = fit(tmp_path, in_run(layers="body.0"), train=loader(data), max_epochs=2)
        self.assert_pass(read(gradsim), "training steps tell of the head alone (`head`), not of `body.0`")

    def test_of_a_head_whose_weight_is_frozen(self, tmp_path, data):
        module = Classifier()
        module.head.weight.requires_grad_(False)
        gradsim, _, _ = fit(tmp_path, in_run(), module, train=loader(data), max_epochs=2)
        self.assert_pass(read(gradsim), "the weight of the head `head` is frozen")

    def test_of_a_bias(self, tmp_path, data):
        gradsim, _, _ = fit(tmp_path, in_run(layers="head.bias"), train=loader(data), max_epochs=2)
        self.assert_pass(read(gradsim), "of the head (`head`) only the bias is compared")

    def test_without_sample_ids(self, tmp_path, data):
        class OwnBatches(BatchSampler):
            pass

        train = DataLoader(data, batch_sampler=OwnBatches(SequentialSampler(data), 10, drop_last=False))
        gradsim, _, _ = fit(tmp_path, in_run(), train=train, max_epochs=2)
        self.assert_pass(read(gradsim), "batch sampler of its own (`OwnBatches`)")

    def test_where_steps_are_not_watched(self, tmp_path, data):
        gradsim, _, recorder = fit(tmp_path, in_run(mode="auto", mislabel_score=None), train=loader(data), max_epochs=2)
        self.assert_pass(recorder.reports[0], "training steps are not watched (`mislabel_score=None`)")
        assert read(gradsim).notes == ()

    def test_where_most_samples_have_not_been_drawn(self, tmp_path, data):
        gradsim, _, _ = fit(tmp_path, in_run(), train=loader(data), max_epochs=2, limit_train_batches=10)
        self.assert_pass(read(gradsim), "training steps have shown only 25% of the training samples")


def test_samples_that_were_not_drawn_are_read_at_random(tmp_path, data):
    gradsim, _, _ = fit(tmp_path, in_run(), train=loader(data), max_epochs=2, limit_train_batches=32)
    report = read(gradsim)
    assert CHOSEN in report.reference
    assert any(note.startswith("no training step has shown 80 of 400 training samples") for note in report.notes)
    assert max(report.recall.values()) <= 0.8 + 10 / 400


def test_a_part_of_the_training_data_is_chosen_from(tmp_path, data, monkeypatch):
    keep_suspects_of_the_pass(monkeypatch)
    gradsim, _, recorder = fit(tmp_path, in_run(mode="auto", max_train_samples=200), train=loader(data), max_epochs=3)
    _, chosen, last = recorder.reports
    assert "of 200 training samples, " + CHOSEN in chosen.reference
    assert set(chosen.suspects.sample_ids.tolist()) < set(last.suspects.sample_ids.tolist())
    assert read(gradsim).num_train_samples == 200


def test_samples_are_known_by_id_in_any_order(tmp_path, data, monkeypatch):
    keep_suspects_of_the_pass(monkeypatch)
    order = torch.randperm(NUMBER, generator=torch.Generator().manual_seed(0)).tolist()
    reads = []
    for number, train in enumerate((data, Subset(data, order))):
        gradsim, _, _ = fit(tmp_path / str(number), in_run(), Still(), train=loader(train), max_epochs=2)
        reads.append(set(read(gradsim).suspects.sample_ids.tolist()))
    assert len(reads[0] & reads[1]) > 0.95 * len(reads[0] | reads[1])  # but for rounding


def test_nothing_to_explain_reads_the_probe(tmp_path, data):
    x, _ = val_data().tensors
    right = torch.utils.data.TensorDataset(x, Still()(x).argmax(1))
    gradsim, _, _ = fit(tmp_path, in_run(), Still(), train=loader(data), val=loader(right), max_epochs=2)
    report = read(gradsim)
    assert (report.queries, report.recall) == ((), None)
    assert report.num_train_samples == 20
    assert report.layers == ("head",)


def test_the_budget_ends_the_rounds(tmp_path, data, monkeypatch):
    monkeypatch.setattr("lightning_gradsim.budget.TimeBudget.reading_seconds", lambda self, *, is_last: 1e-9)
    monkeypatch.setattr("lightning_gradsim.budget.TimeBudget.allows_report", lambda self: True)
    _, _, recorder = fit(tmp_path, in_run(), train=loader(data), max_epochs=2)
    first, second = recorder.reports
    assert "as many as the time budget allows" in first.reference
    assert second.num_train_samples == 10  # a batch of the probe
    assert second.recall["harmful"] < 0.7


class TestAuto:
    def test_the_last_report_is_of_all_samples(self, tmp_path, data):
        _, module, recorder = fit(tmp_path, in_run(mode="auto"), train=loader(data), max_epochs=3)
        assert [report.recall is not None for report in recorder.reports] == [False, True, False]
        assert recorder.reports[-1].share_read == 1.0
        assert recorder.reports[-1].notes == ()
        del module

    def test_also_where_training_stops_early(self, tmp_path, data):
        gradsim, _, recorder = fit(
            tmp_path, in_run(mode="auto"), Still(), train=loader(data),
            callbacks=[EarlyStopping("val_loss", patience=1)], max_epochs=9,
        )  # fmt: skip
        assert recorder.reports[-1].recall is not None
        assert (read(gradsim).share_read, read(gradsim).recall) == (1.0, None)


def test_the_seed_chooses_the_probe(tmp_path, data):
    reads = []
    for number, seed in enumerate((0, 0, 1)):
        gradsim, _, _ = fit(tmp_path / str(number), in_run(seed=seed), Still(), train=loader(data), max_epochs=2)
        reads.append((read(gradsim).num_train_samples, read(gradsim).recall))
    assert reads[0] == reads[1] != reads[2]


def test_resumed_equals_uninterrupted(tmp_path, data):
    def run(callbacks, **options):
        trainer = make_trainer(tmp_path, callbacks, max_epochs=4)
        trainer.fit(Classifier(), loader(data), loader(val_data()), **options)

    class Saves(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    whole = Recorder(in_run())
    run([whole.gradsim, whole, Saves()])
    for epoch in range(3):
        resumed = Recorder(in_run())
        run([resumed.gradsim, resumed], ckpt_path=tmp_path / f"{epoch}.ckpt")
        expected = [report for report in whole.reports if report.epoch > epoch]
        assert [report.recall is not None for report in resumed.reports] == [True] * len(expected)
        for ours, theirs in zip(resumed.reports, expected, strict=True):
            assert (ours.num_train_samples, ours.notes) == (theirs.num_train_samples, theirs.notes)
            assert ours.to_rows() == theirs.to_rows()
            assert ours.recall == theirs.recall


@pytest.mark.filterwarnings(
    "ignore:It is recommended to use .self.log:UserWarning:lightning",
    "ignore:Using `DistributedSampler` with the dataloaders:UserWarning:lightning",
)
def test_two_processes_find_what_one_finds(tmp_path, data):
    def run(root, **options):
        gradsim, _, _ = fit(root, in_run(), Still(), train=loader(data), max_epochs=2, **options)
        return read(gradsim)

    reports = run_processes(lambda: run(tmp_path / "two", **ddp()), tmp_path)
    expected = run(tmp_path / "one")
    for report in reports:
        assert report.num_train_samples == expected.num_train_samples
        assert report.recall == pytest.approx(expected.recall)
        assert report.reference == expected.reference
        for ours, theirs in zip(report.to_rows(), expected.to_rows(), strict=True):
            assert {**ours, "score": 0, "query_probability": 0, "query_loss": 0} == {
                **theirs, "score": 0, "query_probability": 0, "query_loss": 0,
            }  # fmt: skip
            assert ours["score"] == pytest.approx(theirs["score"], rel=1e-4, abs=1e-6)
