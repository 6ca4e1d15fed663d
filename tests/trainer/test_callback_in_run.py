"""Suspects from the training steps themselves."""

import json
from dataclasses import asdict

import pytest
import torch
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

from lightning_gradsim import visit_statistics
from lightning_gradsim.mislabel import MislabelStatistics, judge
from lightning_gradsim.neighbours import neighbour_votes
from lightning_gradsim.true_labels import TrueLabels
from tests.trainer.support import (
    NUM_CLASSES,
    NUM_TRAIN,
    Classifier,
    Recorder,
    Untouched,
    collect_warnings,
    fit,
    loader,
    make_data,
    make_trainer,
    read,
    strict,
    train_data,
    val_data,
)

ROUNDS = (2, 4, 5)
"""Epochs after which neighbours are looked for in a run of five."""


def watching(**options):
    return strict(**{"mislabel_score": "margin_knn", **options})


class Numbered(Dataset):
    """The training data, each with its own index."""

    def __init__(self, data=None):
        self.data = train_data() if data is None else data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return (*self.data[index], index)


class Truth(Callback):
    """What a reader with the ids at hand gathers by running the module beside each step."""

    def __init__(self):
        self.statistics = MislabelStatistics(NUM_TRAIN, NUM_CLASSES, columns=("margin", "prediction"))
        self.features, self.last_round = torch.zeros(NUM_TRAIN, 12), 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        x, y, ids = batch
        with torch.no_grad():
            features = pl_module.body(x)
            self.statistics.update(ids, pl_module.head(features), y)
        self.features[ids] = features

    def on_validation_start(self, trainer, pl_module):
        epoch = trainer.current_epoch + 1
        if not trainer.sanity_checking and epoch in ROUNDS:
            visited = self.statistics.visits.nonzero().flatten()
            votes = neighbour_votes(self.features[visited].half(), self.statistics.labels[visited])
            self.statistics.add_neighbours(visited, votes, weight=epoch - self.last_round)
            self.last_round = epoch


class Triples(Classifier):
    """A Classifier of batches of three, of which the third are ids that nobody reads but the test."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch[:2], batch_idx)


class FirstTwo:
    """Reads such batches."""

    def split(self, batch):
        return batch[0], batch[1]


def pairs():
    from lightning_gradsim import Adapter

    return type("Pairs", (FirstTwo, Adapter), {})()


LOADERS = {
    "plain": lambda data: DataLoader(data, 10),
    "shuffle": lambda data: DataLoader(data, 10, shuffle=True),
    "odd": lambda data: DataLoader(data, 7, shuffle=True, drop_last=True),
    "workers": lambda data: DataLoader(data, 10, shuffle=True, num_workers=2, persistent_workers=True),
    "weighted": lambda data: DataLoader(data, 10, sampler=WeightedRandomSampler(torch.ones(len(data)), len(data))),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_suspects_are_those_of_all_training_steps(tmp_path, make):
    truth = Truth()
    gradsim, _, _ = fit(
        tmp_path, watching(adapter=pairs()), Triples(), make(Numbered()), callbacks=[truth], max_epochs=5
    )
    expected, suspects = judge(truth.statistics.compute(), parts=("log_margin", "knn")), read(gradsim).suspects
    assert suspects.score_name == "margin_knn"
    torch.testing.assert_close(suspects.scores.sort().values, expected.scores.sort().values, rtol=1e-3, atol=1e-3)
    by_id = suspects.sample_ids.argsort()
    order = expected.sample_ids.argsort()
    assert torch.equal(suspects.sample_ids[by_id], expected.sample_ids[order])
    assert torch.equal(suspects.visits[by_id], expected.visits[order])
    assert torch.equal(suspects.labels[by_id].long(), expected.labels[order])
    torch.testing.assert_close(
        suspects.parts["log_margin"][by_id], expected.parts["log_margin"][order], rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(suspects.probabilities[by_id], expected.probabilities[order], rtol=1e-4, atol=1e-5)
    assert torch.equal(suspects.flagged[by_id], expected.flagged[order])


def test_a_suspect_in_words_and_rows(tmp_path):
    gradsim, _, _ = fit(tmp_path, watching(), max_epochs=5)
    suspect = read(gradsim).suspects[0]
    assert suspect.visits == 5
    assert set(suspect.parts) == {"log_margin", "knn"}
    row = read(gradsim).suspects.to_rows(1)[0]
    assert (row["visits"], row["knn"]) == (5, suspect.parts["knn"])
    [path] = tmp_path.glob("**/suspects.csv")
    assert path.read_text().splitlines()[0].endswith(",visits,reports_flagged,reports_judged")


def test_harmful_samples_that_are_suspects_are_marked(tmp_path):
    gradsim, _, _ = fit(tmp_path, watching(), max_epochs=3)
    suspects = read(gradsim).suspects
    flagged = set(suspects.sample_ids[suspects.flagged].tolist())
    harmful = [sample for query in read(gradsim).queries for sample in query.harmful]
    assert {sample.is_suspect for sample in harmful} == {True, False}
    assert all(sample.is_suspect == (sample.sample_id in flagged) for sample in harmful)


def test_flipped_labels_are_found_before_others(tmp_path):
    data = make_data(400, seed=5)
    x, y = data.tensors
    clean = Classifier()  # labels that a linear rule gives, so that only the flipped ones are wrong
    with torch.no_grad():
        y = clean(3 * x).argmax(1)
    flipped = torch.randperm(400, generator=torch.Generator().manual_seed(0))[:40]
    y[flipped] = (y[flipped] + 1) % NUM_CLASSES
    gradsim, _, _ = fit(tmp_path, watching(), train=loader(TensorDataset(x, y), shuffle=True), max_epochs=8)
    found = read(gradsim).suspects.sample_ids[:40]
    assert torch.isin(found, flipped).float().mean() > 0.7  # by chance .1


@pytest.mark.parametrize("score", ["log_margin", "knn", "aum", "loss", "el2n", "self_influence"])
def test_other_scores(tmp_path, score):
    gradsim, _, _ = fit(tmp_path, watching(mislabel_score=score), max_epochs=2)
    suspects = read(gradsim).suspects
    assert suspects.score_name == score
    assert len(suspects) == NUM_TRAIN
    assert suspects.scores.diff().le(0).all()


def assert_same_suspects(found, expected):
    """But for rounding, by which the sums of two runs may differ: it moves neither a flag nor a neighbour here."""
    ours, theirs = found.sample_ids.argsort(), expected.sample_ids.argsort()
    for name in ("sample_ids", "labels", "suggested_labels", "flagged", "visits"):
        assert torch.equal(getattr(found, name)[ours], getattr(expected, name)[theirs]), name
    assert found.parts.keys() == expected.parts.keys()
    values = {"score": (found.scores, expected.scores), "probability": (found.probabilities, expected.probabilities)}
    values |= {name: (found.parts[name], expected.parts[name]) for name in found.parts}
    for name, (own, other) in values.items():
        torch.testing.assert_close(own[ours], other[theirs], rtol=1e-4, atol=1e-5, msg=name)


def test_resumed_at_any_epoch_equals_uninterrupted(tmp_path):
    def run(callbacks, **options):
        trainer = make_trainer(tmp_path, callbacks, max_epochs=5)
        trainer.fit(Classifier(), loader(train_data()), loader(val_data()), **options)

    class Saves(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    whole = Recorder(watching())
    run([whole.gradsim, whole, Saves()])
    for epoch in range(4):
        resumed = Recorder(watching())
        run([resumed.gradsim, resumed], ckpt_path=tmp_path / f"{epoch}.ckpt")
        expected = [report for report in whole.reports if report.epoch > epoch]
        assert len(resumed.reports) == len(expected)
        for ours, theirs in zip(resumed.reports, expected, strict=True):
            assert_same_suspects(ours.suspects, theirs.suspects)


def test_the_state_is_plain(tmp_path):
    gradsim = watching()
    trainer = make_trainer(tmp_path, [gradsim], max_epochs=2)
    trainer.fit(Classifier(), loader(train_data()), loader(val_data()))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    state = torch.load(tmp_path / "saved.ckpt", weights_only=True)["callbacks"][gradsim.state_key]["in_run"]
    assert state["version"] == 1
    assert state["samples"]["features"].dtype == torch.float16


def test_a_second_fit_begins_anew(tmp_path):
    gradsim, _, _ = fit(tmp_path, watching(), max_epochs=2)
    fit(tmp_path, gradsim)
    assert set(read(gradsim).suspects.visits.tolist()) == {1}


def test_validate_after_fit_keeps_them(tmp_path):
    gradsim, module, _ = fit(tmp_path, watching(), max_epochs=2)
    before = read(gradsim).suspects.to_rows()
    make_trainer(tmp_path, [gradsim]).validate(module, loader(val_data()), verbose=False)
    assert read(gradsim).suspects.to_rows() == before


class OwnBatches(torch.utils.data.BatchSampler):
    """A batch sampler of the user's own."""


@pytest.mark.parametrize("steps_tell", [True, False])
@pytest.mark.parametrize(("time_budget", "is_exact"), [(None, True), (1e6, False)])
def test_without_a_budget_neighbours_are_those_among_all_samples(
    tmp_path, monkeypatch, steps_tell, time_budget, is_exact
):
    monkeypatch.setattr(visit_statistics, "FLOPS_PER_SECOND", 1e-3)  # of a machine that is very slow
    module = Classifier()
    if not steps_tell:
        module.compile(backend="eager")
    gradsim, _, _ = fit(tmp_path, watching(time_budget=time_budget), module, max_epochs=2)
    assert "log_margin" in read(gradsim).suspects.parts
    assert "knn" in read(gradsim).suspects.parts
    assert is_exact != any(note.startswith("neighbours were looked for among 26") for note in read(gradsim).notes)


class MixesOnce(Classifier):
    """Mixes the labels of one step, after the first ones, whose loss is looked at."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x, y.roll(1)) if batch_idx == 4 else batch, batch_idx)


def test_visits_that_are_left_out_are_counted_in_a_sentence(tmp_path):
    gradsim, _, _ = fit(tmp_path, watching(), MixesOnce())
    assert (
        "suspects leave out visits of training samples: 10, as the step trained on something else than the batch's own "
        "labels (mixed inputs or labels, another loss?)"
    ) in read(gradsim).notes


class TestWhereStepsTellNothing:
    """Passes do: see ``test_callback_passes.py``."""

    def reason(self, gradsim):
        assert read(gradsim).suspects.score_name == "margin_knn"
        assert set(read(gradsim).suspects.visits.tolist()) == {1}
        [note] = [note for note in read(gradsim).notes if note.startswith("suspects rest on passes over the training")]
        return note

    def test_a_batch_sampler_of_ones_own(self, tmp_path):
        batches = OwnBatches(torch.utils.data.SequentialSampler(train_data()), 10, drop_last=False)
        gradsim, _, _ = fit(tmp_path, watching(), train=DataLoader(train_data(), batch_sampler=batches))
        assert "batch sampler of its own (`OwnBatches`)" in self.reason(gradsim)
        assert "`id_key=`" in self.reason(gradsim)

    def test_batches_that_carry_ids(self, tmp_path):
        batches = OwnBatches(torch.utils.data.RandomSampler(train_data()), 10, drop_last=False)
        train = DataLoader(Numbered(), batch_sampler=batches)
        gradsim, _, _ = fit(tmp_path, watching(adapter=pairs(), id_key=2), Triples(), train, max_epochs=2)
        assert sorted(read(gradsim).suspects.sample_ids.tolist()) == list(range(NUM_TRAIN))

    def test_batches_that_do_not_carry_them_as_said(self, tmp_path):
        with pytest.raises(TypeError, match="`id_key='index'`"):
            fit(tmp_path, watching(id_key="index"))

    def test_a_compiled_module(self, tmp_path):
        module = Classifier()
        module.compile(backend="eager")
        gradsim, _, _ = fit(tmp_path, watching(), module)
        assert "the module is compiled" in self.reason(gradsim)

    def test_other_labels_in_the_data_compared_with(self, tmp_path):
        x, y = train_data().tensors
        other = TensorDataset(x, (y + 1) % NUM_CLASSES)
        gradsim, _, _ = fit(tmp_path, watching(train_data=other))
        assert read(gradsim).suspects.score_name == "self_influence"
        words = "for 60 sample ids, training saw other labels than `train_data=` holds"
        assert f"suspects are those of largest gradient in this pass: {words}" in read(gradsim).notes

    def test_a_tap_that_breaks(self, tmp_path, monkeypatch):
        def fail(*_):
            raise RuntimeError("boom")

        monkeypatch.setattr("lightning_gradsim.tap.Tap.end_step", fail)
        with collect_warnings() as texts:
            gradsim, _, _ = fit(tmp_path, watching(on_error="warn"))
        assert texts == ["`GradSimCallback`: the watch of training steps was given up. RuntimeError: boom."]
        assert "RuntimeError: boom" in self.reason(gradsim)

    def test_a_sampler_that_draws_beyond_the_data_known(self, tmp_path):
        """Samples that come in while training goes on, as in active learning."""

        class Growing(TensorDataset):
            size = 40

            def __len__(self):
                return self.size

        class Grows(Callback):
            def on_train_epoch_end(self, trainer, pl_module):
                data.size = NUM_TRAIN

        data = Growing(*train_data().tensors)
        with collect_warnings():
            _, module, _ = fit(
                tmp_path, watching(on_error="warn"), train=loader(data), callbacks=[Grows()], max_epochs=3,
                reload_dataloaders_every_n_epochs=1,
            )  # fmt: skip
        assert module.trainer.current_epoch == 3


class WithToken(Classifier):
    """A module with a parameter of its own, as vision transformers have."""

    def __init__(self):
        super().__init__()
        self.token = torch.nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return super().forward(x + self.token)


def test_a_module_with_a_parameter_of_its_own(tmp_path):
    gradsim, _, _ = fit(tmp_path, watching(), WithToken())
    assert read(gradsim).suspects.score_name == "margin_knn"


class Counting(torch.nn.CrossEntropyLoss):
    """Weighs its losses by what it has seen before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, outputs, targets):
        self.seen += 1
        return super().forward(outputs, targets) * (1 + 0.01 * self.seen)


@pytest.mark.filterwarnings("ignore:.*`training_step` returned a loss:lightning_gradsim.GradSimWarning")
@pytest.mark.parametrize("score", [None, "margin_knn"])
def test_a_criterion_with_a_state_is_left_alone(tmp_path, score):
    weights = []
    for callbacks in ([watching(mislabel_score=score)], []):
        module = Classifier(Counting())
        trainer = make_trainer(tmp_path, callbacks)
        trainer.fit(module, loader(train_data()), loader(val_data()))
        weights.append(module.state_dict())
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_a_validation_from_a_checkpoint_leaves_the_next_fit_alone(tmp_path):
    gradsim = watching()
    trainer = make_trainer(tmp_path, [gradsim], max_epochs=2)
    module = Classifier()
    trainer.fit(module, loader(train_data()), loader(val_data()))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    make_trainer(tmp_path, [gradsim]).validate(
        module, loader(val_data()), ckpt_path=tmp_path / "saved.ckpt", verbose=False
    )
    fit(tmp_path, gradsim)
    assert set(read(gradsim).suspects.visits.tolist()) == {1}


def test_a_resume_with_a_score_that_needs_more_begins_anew(tmp_path):
    trainer = make_trainer(tmp_path, [watching()], max_epochs=1)
    trainer.fit(Classifier(), loader(train_data()), loader(val_data()))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    gradsim = watching(mislabel_score="el2n")
    trainer = make_trainer(tmp_path, [gradsim], max_epochs=2)
    trainer.fit(Classifier(), loader(train_data()), loader(val_data()), ckpt_path=tmp_path / "saved.ckpt")
    assert set(read(gradsim).suspects.visits.tolist()) == {1}


def test_every_score_comes_with_suggested_labels(tmp_path):
    gradsim, _, _ = fit(tmp_path, watching(mislabel_score="aum"))
    report = read(gradsim)
    assert report.suspects.suggested_labels is not None
    assert not any("max_state_mb" in note for note in report.notes)
    assert len(report.relabel(train_data())) == NUM_TRAIN


class TestTrueLabels:
    def test_say_how_well_suspects_find_wrong_labels(self, tmp_path):
        true = torch.where(torch.arange(NUM_TRAIN) % 6 == 0, 0, train_data().tensors[1])
        number = int((true != train_data().tensors[1]).sum())
        gradsim, _, recorder = fit(tmp_path, watching(true_labels=true), max_epochs=2)
        quality = read(gradsim).suspect_quality
        assert quality == TrueLabels(true).judge(read(gradsim).suspects)
        assert quality.num_wrong == number > 3
        assert [report.suspect_quality.num_wrong for report in recorder.reports] == [number, number]
        [path] = tmp_path.glob("**/report.json")
        assert json.loads(path.read_text())["suspect_quality"] == asdict(quality)
        assert f"by the true labels {number} are wrong: auroc 0." in read(gradsim).summary()
        events = EventAccumulator(str(tmp_path / "run" / "version_0"))
        events.Reload()
        for name, share in quality.shares():
            scalars = events.Scalars(f"gradsim/suspects_{name}")
            assert [scalar.step for scalar in scalars] == [6, 12]
            assert scalars[-1].value == pytest.approx(share)

    def test_of_a_subset_are_those_of_the_dataset_beneath(self, tmp_path):
        part = Subset(train_data(), list(range(40, 20, -1)))
        gradsim, _, _ = fit(tmp_path, watching(true_labels=train_data().tensors[1].numpy()), train=loader(part))
        assert read(gradsim).suspect_quality.num_wrong == 0

    def test_without_a_watch_judge_those_of_the_pass(self, tmp_path):
        gradsim, _, _ = fit(tmp_path, strict(true_labels=[0] * NUM_TRAIN))
        assert read(gradsim).suspect_quality.num_wrong == int((train_data().tensors[1] != 0).sum())

    @pytest.mark.parametrize("number", [NUM_TRAIN - 1, NUM_TRAIN + 1])
    def test_of_another_number_are_refused_before_training(self, tmp_path, number):
        with pytest.raises(ValueError, match=f"^`true_labels` holds {number} labels for 60 training samples"):
            fit(tmp_path, watching(true_labels=[0] * number, on_error="warn"), callbacks=[Untouched()])

    @pytest.mark.parametrize(("value", "words"), [(4, "the label 4"), (0.5, "floating-point numbers")])
    def test_out_of_range_are_refused_in_the_first_step(self, tmp_path, value, words):
        module = Classifier()
        with pytest.raises(ValueError, match=f"^`true_labels` holds {words}, and the task is classification. Expected"):
            fit(tmp_path, watching(true_labels=[value] * NUM_TRAIN, on_error="warn"), module)
        assert module.trainer.global_step == 1
