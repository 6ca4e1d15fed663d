"""Suspects from passes over the training data, where training steps tell nothing."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from lightning_gradsim.budget import TimeBudget
from lightning_gradsim.mislabel import MislabelStatistics, judge
from lightning_gradsim.neighbours import neighbour_votes
from tests.trainer.processes import ddp, run_processes
from tests.trainer.support import (
    NUM_CLASSES,
    NUM_TRAIN,
    Classifier,
    Recorder,
    Still,
    collect_warnings,
    fit,
    loader,
    make_trainer,
    read,
    strict,
    train_data,
    val_data,
)
from tests.trainer.test_callback_in_run import assert_same_suspects

NOTE = "suspects rest on passes over the training data, one visit each, as steps tell nothing: "
GRADIENTS = "suspects are those of largest gradient in this pass: "


def watching(**options):
    return strict(**{"mislabel_score": "margin_knn", **options})


class Doubled(Classifier):
    """Its logits are not the output of a layer."""

    def forward(self, x):
        return 2 * super().forward(x)


class StillDoubled(Doubled, Still):
    """Training leaves it as it is."""


class OwnBatches(BatchSampler):
    """A batch sampler of the user's own."""


def own_batches():
    return DataLoader(train_data(), batch_sampler=OwnBatches(RandomSampler(train_data()), 10, drop_last=False))


def compiled():
    module = Classifier()
    module.compile(backend="eager")
    return module


class Stream(IterableDataset):
    def __iter__(self):
        return iter(list(train_data()))


class Truth(Callback):
    """Runs the module over the training data before every report."""

    def __init__(self):
        self.statistics = MislabelStatistics(NUM_TRAIN, NUM_CLASSES, columns=("margin", "prediction"))

    def on_validation_start(self, trainer, pl_module):
        if trainer.sanity_checking:
            return
        x, y = train_data().tensors
        features = pl_module.body(x)
        scale = 2 if isinstance(pl_module, Doubled) else 1
        self.statistics.update(torch.arange(NUM_TRAIN), scale * pl_module.head(features), y)
        self.statistics.add_neighbours(torch.arange(NUM_TRAIN), neighbour_votes(features.half(), y))


RUNS = {
    "compiled": (compiled, None, {}, "the module is compiled"),
    "batch sampler": (Classifier, own_batches, {}, "batch sampler of its own"),
    "logits of no layer": (Doubled, None, {}, "the logits are not the output of one layer"),
    "stream": (Classifier, lambda: loader(Stream()), {"train_data": train_data()}, "an iterable dataset (`Stream`)"),
    "all layers": (Doubled, None, {"layers": "all"}, "the logits are not the output of one layer"),
}


@pytest.mark.parametrize(("module", "train", "options", "reason"), RUNS.values(), ids=RUNS)
def test_each_pass_is_a_visit_of_every_sample(tmp_path, module, train, options, reason):
    truth = Truth()
    train = None if train is None else train()
    gradsim, _, _ = fit(tmp_path, watching(**options), module(), train, callbacks=[truth], max_epochs=3)
    expected, suspects = judge(truth.statistics.compute(), parts=("log_margin", "knn")), read(gradsim).suspects
    [note] = [note for note in read(gradsim).notes if note.startswith(NOTE)]
    assert reason in note
    assert suspects.score_name == "margin_knn"
    by_id, order = suspects.sample_ids.argsort(), expected.sample_ids.argsort()
    assert torch.equal(suspects.sample_ids[by_id], torch.arange(NUM_TRAIN))
    assert set(suspects.visits.tolist()) == {3}
    assert torch.equal(suspects.labels[by_id].long(), train_data().tensors[1])
    for ours, theirs in (
        (suspects.scores, expected.scores),
        (suspects.probabilities, expected.probabilities),
        (suspects.parts["log_margin"], expected.parts["log_margin"]),
        (suspects.parts["knn"], expected.parts["knn"]),
    ):
        torch.testing.assert_close(ours[by_id], theirs[order], rtol=1e-3, atol=1e-4)
    assert torch.equal(suspects.flagged[by_id], expected.flagged[order])


def test_of_a_part_only_what_was_read_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(TimeBudget, "allows_report", lambda _: True)
    monkeypatch.setattr(TimeBudget, "reading_seconds", lambda *_, **__: 0.0)
    _, _, recorder = fit(tmp_path, watching(time_budget=0.1), Doubled(), max_epochs=7)
    assert [len(report.suspects) for report in recorder.reports] == [10, 20, 30, 40, 50, 60, 60]
    assert [int(report.suspects.visits.sum()) for report in recorder.reports] == [10, 20, 30, 40, 50, 60, 70]


def test_resumed_at_any_epoch_equals_uninterrupted(tmp_path):
    def run(callbacks, **options):
        trainer = make_trainer(tmp_path, callbacks, max_epochs=4)
        trainer.fit(Doubled(), loader(train_data()), loader(val_data()), **options)

    class Saves(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    whole = Recorder(watching())
    run([whole.gradsim, whole, Saves()])
    for epoch in range(3):
        resumed = Recorder(watching())
        run([resumed.gradsim, resumed], ckpt_path=tmp_path / f"{epoch}.ckpt")
        expected = [report for report in whole.reports if report.epoch > epoch]
        assert len(resumed.reports) == len(expected)
        for ours, theirs in zip(resumed.reports, expected, strict=True):
            assert_same_suspects(ours.suspects, theirs.suspects)
    state = torch.load(tmp_path / "2.ckpt", weights_only=True)["callbacks"][whole.gradsim.state_key]["in_run"]
    assert set(state["passes"]) == {"statistics"}  # features are those of the last pass, and of no use in the next
    assert "statistics" not in state


@pytest.mark.filterwarnings(
    "ignore:It is recommended to use .self.log:UserWarning:lightning",
    "ignore:Using `DistributedSampler` with the dataloaders:UserWarning:lightning",
)
def test_two_processes_find_what_one_finds(tmp_path):
    def job():
        return read(fit(tmp_path / "two", watching(), StillDoubled(), max_epochs=3, **ddp())[0])

    expected = read(fit(tmp_path / "one", watching(), StillDoubled(), max_epochs=3)[0])
    assert set(expected.suspects.visits.tolist()) == {3}
    assert expected.suspects.parts["knn"].unique().numel() > 3
    for report in run_processes(job, tmp_path):
        assert_same_suspects(report.suspects, expected.suspects)
        assert any(note.startswith(NOTE) for note in report.notes)


def test_a_run_forgets_the_one_before(tmp_path):
    gradsim, _, _ = fit(tmp_path, watching(), Doubled(), max_epochs=2)
    fit(tmp_path, gradsim, Doubled())
    assert set(read(gradsim).suspects.visits.tolist()) == {1}


class TestValidate:
    def validate(self, tmp_path, gradsim, module):
        make_trainer(tmp_path, [gradsim]).validate(module, loader(val_data()), verbose=False)
        return read(gradsim).suspects

    def test_alone_is_one_visit(self, tmp_path):
        gradsim = watching(train_data=train_data())
        for _ in range(2):  # which may be of other weights
            suspects = self.validate(tmp_path, gradsim, Classifier())
            assert suspects.score_name == "margin_knn"
            assert set(suspects.visits.tolist()) == {1}
            assert "knn" in suspects.parts
        assert f"{NOTE}no training step was watched" in read(gradsim).notes

    def test_after_fit_keeps_what_fit_has_found(self, tmp_path):
        gradsim, module, _ = fit(tmp_path, watching(), Doubled(), max_epochs=2)
        before = read(gradsim).suspects.to_rows()
        assert self.validate(tmp_path, gradsim, module).to_rows() == before

    def test_leaves_the_next_fit_alone(self, tmp_path):
        gradsim = watching(train_data=train_data())
        self.validate(tmp_path, gradsim, Doubled())
        fit(tmp_path, gradsim, Doubled())
        assert set(read(gradsim).suspects.visits.tolist()) == {1}


class Probabilities(Classifier):
    """Gives probabilities of two classes that are not exclusive."""

    def __init__(self):
        super().__init__(nn.BCELoss(), num_outputs=2)

    def forward(self, x):
        return super().forward(x).sigmoid()


def test_probabilities_become_logits(tmp_path):
    def two_labels(data):
        x, y = data.tensors
        return TensorDataset(x, torch.stack([y % 2, y // 2], dim=1).float())

    train = two_labels(train_data())
    gradsim, module, _ = fit(tmp_path, watching(), Probabilities(), loader(train), loader(two_labels(val_data())))
    suspects = read(gradsim).suspects
    with torch.no_grad():
        logits = torch.logit(module(train.tensors[0]))
    expected = torch.where(train.tensors[1] == 1, -logits, logits).amax(1)
    torch.testing.assert_close(suspects.parts["log_margin"], expected[suspects.sample_ids], rtol=1e-4, atol=1e-4)


class TestWherePassesTellNothingEither:
    def assert_by_gradients(self, gradsim, reason):
        assert read(gradsim).suspects.score_name == "self_influence"
        assert [note for note in read(gradsim).notes if note.startswith("suspects")] == [f"{GRADIENTS}{reason}"]

    def test_self_influence_is_that_of_the_pass(self, tmp_path):
        gradsim, _, _ = fit(tmp_path, watching(mislabel_score="self_influence"), Doubled(), max_epochs=2)
        reason = "the logits are not the output of one layer (the last one called is `head`)"
        self.assert_by_gradients(gradsim, reason)

    def test_outputs_of_several_values(self, tmp_path):
        class Vectors(Doubled):
            def __init__(self):
                super().__init__(nn.MSELoss())

        def vectors(data):
            return TensorDataset(data.tensors[0], data.tensors[0][:, :NUM_CLASSES])

        gradsim, _, _ = fit(tmp_path, watching(), Vectors(), loader(vectors(train_data())), loader(vectors(val_data())))
        self.assert_by_gradients(gradsim, "outputs of shape (8, 4) have no single label a sample")

    def test_what_breaks(self, tmp_path, monkeypatch):
        def fail(*_):
            raise RuntimeError("boom")

        monkeypatch.setattr("lightning_gradsim.pass_visits.PassVisits._features", fail)
        with collect_warnings() as texts:
            gradsim, _, _ = fit(tmp_path, watching(on_error="warn"), Doubled(), max_epochs=2)
        assert texts == ["`GradSimCallback`: the watch of what passes read was given up. RuntimeError: boom."]
        self.assert_by_gradients(gradsim, "RuntimeError: boom")
        with pytest.raises(RuntimeError, match="boom"):
            fit(tmp_path, watching(), Doubled())


def test_a_pass_that_fails_does_not_count(tmp_path, monkeypatch):
    from lightning_gradsim import reporter

    make_report, left = reporter.make_report, [2]

    def failing(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise OSError("boom")
        return make_report(*arguments)

    monkeypatch.setattr(reporter, "make_report", failing)
    with collect_warnings() as texts:
        gradsim, _, _ = fit(tmp_path, watching(on_error="warn"), Doubled(), max_epochs=3)
    assert len(texts) == 1
    assert set(read(gradsim).suspects.visits.tolist()) == {2}


class Convolved(Classifier):
    """Its last layer sees no vector a sample."""

    def __init__(self):
        super().__init__()
        self.head = nn.Conv1d(1, NUM_CLASSES, 3)

    def forward(self, x):
        return self.head(self.body(x)[:, None]).mean(2)


def test_without_features_there_are_no_neighbours(tmp_path):
    gradsim, _, _ = fit(tmp_path, watching(), Convolved(), max_epochs=2)
    assert "knn" not in read(gradsim).suspects.parts
    assert "No round of neighbours yet: samples are ranked by their margin alone." in read(gradsim).notes
    assert "there are no neighbours, as none of the chosen layers sees one vector a sample" in read(gradsim).notes


def by_label(samples):
    return torch.utils.data.default_collate(sorted(samples, key=lambda sample: int(sample[1])))


def test_a_collate_function_that_reorders_samples(tmp_path):
    """Ids by places in a batch would be wrong, in training steps and in passes."""
    truth = Truth()
    train = loader(train_data(), collate_fn=by_label, shuffle=True)
    gradsim, _, _ = fit(tmp_path, watching(), train=train, callbacks=[truth], max_epochs=2)
    suspects = read(gradsim).suspects
    assert torch.equal(suspects.labels.long(), train_data().tensors[1][suspects.sample_ids])
    expected = judge(truth.statistics.compute())
    torch.testing.assert_close(suspects.scores.sort().values, expected.scores.sort().values, rtol=1e-3, atol=1e-4)
    assert any("`collate_fn` (`by_label`) gives samples in another order" in note for note in read(gradsim).notes)
    assert any("they were read one at a time" in note for note in read(gradsim).notes)
    assert_right_labels(read(gradsim))


def assert_right_labels(report):
    assert report.queries
    for query in report.queries:
        for sample in (*query.harmful, *query.look_alikes):
            assert sample.label == int(train_data().tensors[1][sample.sample_id])


def test_batches_that_carry_ids_may_be_in_any_order(tmp_path):
    from tests.trainer.test_callback_in_run import Numbered, Triples, pairs

    train = loader(Numbered(), collate_fn=by_label, shuffle=True)
    gradsim, _, _ = fit(tmp_path, watching(adapter=pairs(), id_key=2), Triples(), train, max_epochs=2)
    suspects = read(gradsim).suspects
    assert torch.equal(suspects.labels.long(), train_data().tensors[1][suspects.sample_ids])
    assert not any(note.startswith(NOTE) for note in read(gradsim).notes)
