"""From the queries of a validation to its report, its notes and its pictures."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.engine import EngineSettings
from lightning_gradsim.explanation import make_report
from lightning_gradsim.queries import QuerySelection
from lightning_gradsim.reading import Reading, RunContext, score_part
from lightning_gradsim.reference import make_reference
from lightning_gradsim.reference_choice import Choice
from lightning_gradsim.train_pass import make_reader

CLASSES, NUM_TRAIN, NUM_VALIDATION = 3, 60, 40


class Flat(nn.Module):
    def __init__(self, outputs=CLASSES):
        super().__init__()
        self.head = nn.Linear(4, outputs)

    def forward(self, x):
        return self.head(x.flatten(1))


class Images(Dataset):
    """Images of one value each, read in a worker; their classes have names."""

    classes = ("cat", "dog", "ape")

    def __init__(self, number=NUM_TRAIN, noise=0.0):
        self.number, self.noise = number, noise

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return torch.full((1, 2, 2), float(index)) + self.noise * torch.rand(()), index % CLASSES


class Three(Dataset):
    """Samples of three parts, which only ``gradsim_step`` can read."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.zeros(4), torch.zeros(1), index % CLASSES


def image_data(number):
    return TensorDataset(torch.randn(number, 1, 2, 2), torch.arange(number) % CLASSES)


def context(shown=None, move=lambda batch: batch):
    def show(items, total, description):
        if shown is not None:
            shown.append((total, description))
        return items

    return RunContext(move, lambda batch: batch, nullcontext, show)


def validate(module, adapter, data, *, num_queries=20, with_ids=True, batch_size=8):
    adapter.bind(module, adapter.criterion if hasattr(adapter, "criterion") else None)
    selection = QuerySelection(num_queries)
    for ids, batch in make_reader(data, batch_size=batch_size).batches():
        with torch.no_grad():
            step = adapter.step(module, batch)
        selection.update(adapter, batch, step, ids if with_ids else None, 0)
    return selection


@pytest.fixture
def setting():
    """A module, its adapter, training and validation data."""
    return Flat(), Adapter(), image_data(NUM_TRAIN), image_data(NUM_VALIDATION)


def report_of(module, adapter, train, selection, run=None, **settings):
    reference = make_reference(train, adapter, Choice())
    parts = [score_part(module, adapter, selection, reference, EngineSettings(**settings), run or context())]
    return make_report(parts, selection, reference, EngineSettings(**settings))[0]


def test_report(setting):
    module, adapter, train, validation = setting
    selection = validate(module, adapter, validation)
    report = report_of(module, adapter, train, selection, similarity="cosine", top_k=3)
    by_class, errors, total = selection.error_counts()
    assert report.layers == ("head",)
    assert report.similarity == "cosine"
    assert report.reference == "all 60 training samples"
    assert report.num_train_samples == len(report.suspects) == NUM_TRAIN
    assert (report.errors_per_class, report.num_errors, report.num_validation_samples) == (by_class, errors, total)
    assert report.task == "classification"
    assert report.num_dropped_queries == 0
    assert report.notes == ()
    assert [query.sample_id for query in report.queries] == [query.sample_id for query in selection.queries]
    for query in report.queries:
        assert query.label == int(validation.tensors[1][query.sample_id])
        assert len(query.harmful) <= 3
        assert all(sample.label == int(train.tensors[1][sample.sample_id]) for sample in query.harmful)


def test_queries_that_are_right_by_now_are_dropped_and_counted(setting):
    module, adapter, train, validation = setting
    selection = validate(module, adapter, validation)
    before = [query.sample_id for query in selection.queries]
    with torch.no_grad():
        module.head.bias.copy_(torch.tensor([100.0, 0.0, 0.0]))
    report = report_of(module, adapter, train, selection)
    dropped = [sample_id for sample_id in before if int(validation.tensors[1][sample_id]) == 0]
    assert dropped
    assert report.num_dropped_queries == len(dropped)
    assert [query.sample_id for query in report.queries] == [i for i in before if i not in dropped]
    assert all(query.prediction == 0 for query in report.queries)


def test_no_mistakes(setting):
    module, adapter, train, _ = setting
    report = report_of(module, adapter, train, QuerySelection(5))
    assert report.queries == ()
    assert report.num_errors == 0
    assert len(report.suspects) == NUM_TRAIN
    assert "teachers" not in " ".join(report.notes)


def test_batches_go_through_the_users_ways(setting):
    module, adapter, train, validation = setting
    shown, moved = [], []

    def move(batch):
        moved.append(len(batch[1]))
        return [2 * batch[0], batch[1]]

    selection = validate(module, adapter, validation)
    plain = report_of(module, adapter, train, selection)
    report = report_of(module, adapter, DataLoader(train, 25), selection, context(shown, move))
    assert shown == [(3, "gradient similarity")]
    assert moved == [25, 25, 10]
    assert not torch.equal(report.suspects.scores, plain.suspects.scores)


def test_samples_of_different_shape(setting):
    """Validation images of two sizes come back as two batches; every query keeps its place."""

    class Pooled(Flat):
        def forward(self, x):
            return self.head(nn.functional.adaptive_avg_pool2d(x, 2).flatten(1))

    module, adapter, train, _ = Pooled(), *setting[1:]
    adapter.bind(module)
    selection = QuerySelection(20)
    for start, size in ((0, 2), (8, 4), (16, 2)):
        batch = torch.randn(8, 1, size, size), torch.arange(8) % CLASSES
        with torch.no_grad():
            step = adapter.step(module, batch)
        selection.update(adapter, batch, step, torch.arange(start, start + 8), 0)
    report = report_of(module, adapter, train, selection)
    assert [query.sample_id for query in report.queries] == [query.sample_id for query in selection.queries]
    for query, kept in zip(report.queries, selection.queries, strict=True):
        assert query.label == kept.label
        assert query.loss == pytest.approx(kept.loss, rel=1e-4)


def test_note_on_ids_that_are_not_known(setting):
    module, adapter, train, validation = setting
    report = report_of(module, adapter, train, validate(module, adapter, validation, with_ids=False))
    assert any("its samples have no id" in note for note in report.notes)
    assert all(query.sample_id is None for query in report.queries)


def test_notes_of_a_regression(setting):
    module, adapter = Flat(1), Adapter()
    adapter.criterion = nn.MSELoss()
    data = TensorDataset(torch.randn(20, 4), torch.randn(20))
    report = report_of(module, adapter, data, validate(module, adapter, data))
    assert report.task == "regression"
    assert any("highest loss" in note for note in report.notes)
    assert any("no teachers" in note for note in report.notes)


def test_note_on_a_noisy_validation_set(setting):
    """Both sets come from two clouds; the validation labels are those of the other cloud."""
    module, adapter = Flat(), Adapter()
    with torch.no_grad():
        module.head.weight.copy_(torch.eye(CLASSES, 4))
        module.head.bias.zero_()
    clouds = torch.tensor([[6.0, 0.0, 0.0, 1.0], [0.0, 6.0, 0.0, 1.0]])
    labels = torch.arange(40) % 2
    inputs = clouds[labels] + 0.01 * torch.randn(40, 4)
    selection = validate(module, adapter, TensorDataset(inputs, 1 - labels))
    report = report_of(module, adapter, TensorDataset(inputs, labels), selection)
    assert len(report.suspect_queries) == len(report.queries) == 20
    assert any("20 of 20 queries may be wrongly labelled" in note for note in report.notes)


def test_reference_to_all_samples():
    reference = make_reference(image_data(1500), Adapter(), Choice())
    assert reference.words == "all 1,500 training samples"
    assert len(reference.reader) == 1500
    assert not reference.augmented
    assert reference.class_names is None
    assert reference.notes == ()


@pytest.mark.parametrize("limit", [60, 1000])
def test_a_limit_that_does_not_limit(limit):
    assert make_reference(image_data(NUM_TRAIN), Adapter(), Choice(limit, seed=0)).words == "all 60 training samples"


@pytest.mark.parametrize("data", [image_data(NUM_TRAIN), Images()], ids=["labels at hand", "labels read"])
def test_a_limit_keeps_the_shares_of_the_classes(data):
    reference = make_reference(data, Adapter(), Choice(15, seed=3))
    assert reference.words == "15 of 60 training samples, chosen by class"
    assert torch.bincount(reference.reader.ids % CLASSES).tolist() == [5, 5, 5]
    assert torch.equal(reference.reader.ids, make_reference(data, Adapter(), Choice(15, seed=3)).reader.ids)
    assert not torch.equal(reference.reader.ids, make_reference(data, Adapter(), Choice(15, seed=4)).reader.ids)


def test_a_limit_without_classes():
    data = TensorDataset(torch.randn(30, 4), torch.randn(30))
    assert make_reference(data, Adapter(), Choice(10, seed=0)).words == "10 of 30 training samples, chosen at random"


def test_a_limit_where_only_gradsim_step_reads_batches():
    assert make_reference(Three(), Adapter(), Choice(5, seed=0)).words == "5 of 12 training samples, chosen at random"


def test_a_trial_run_reads_its_first_batches():
    reference = make_reference(DataLoader(image_data(NUM_TRAIN), 8, shuffle=True), Adapter(), Choice(), num_batches=2)
    assert reference.reader.ids.tolist() == list(range(16))
    assert reference.words == "the first 16 of 60 training samples"


def test_augmentation_is_noted():
    reference = make_reference(Images(noise=1.0), Adapter(), Choice())
    assert reference.augmented
    assert any("augmented at random" in note and "`train_data=`" in note for note in reference.notes)


def test_reading_in_process_is_noted():
    loader = DataLoader(Images(), num_workers=1, multiprocessing_context="spawn")
    loader.num_workers = 0
    assert any("read in the training process" in note for note in make_reference(loader, Adapter(), Choice()).notes)


def test_class_names_of_the_dataset():
    assert make_reference(Subset(Images(), range(6)), Adapter(), Choice()).class_names == ("cat", "dog", "ape")


@pytest.mark.parametrize("seconds", [None, 1e6])
@pytest.mark.parametrize("world_size", [1, 2, 3, 70])
def test_several_processes_read_a_share_each(setting, monkeypatch, world_size, seconds):
    module, adapter, train, validation = setting
    monkeypatch.setattr("lightning_gradsim.reading.default_budget", lambda _, number: 10**9 // number)
    selection, reference = validate(module, adapter, validation), make_reference(train, adapter, Choice())
    parts = [
        score_part(
            module, adapter, selection, reference, EngineSettings(), context(), Reading(seconds, 7, rank, world_size)
        )
        for rank in range(world_size)
    ]
    shares = [part.shard.suspects.sample_ids.tolist() for part in parts]
    assert sorted(sample_id for share in shares for sample_id in share) == list(range(NUM_TRAIN))
    assert max(map(len, shares)) < NUM_TRAIN / world_size + 8
    assert {part.reached for part in parts} == {NUM_TRAIN}
    assert {part.shard.plan.memory_budget for part in parts if part.shard.plan} == {10**9 // world_size}
    report, kept = make_report(parts, selection, reference, EngineSettings())
    alone = report_of(module, adapter, train, selection)
    assert [query.sample_id for query in report.queries] == [query.sample_id for query in alone.queries]
    for ours, theirs in zip(report.queries, alone.queries, strict=True):
        assert [sample.sample_id for sample in ours.harmful] == [sample.sample_id for sample in theirs.harmful]
    assert report.suspects.sample_ids.tolist() == alone.suspects.sample_ids.tolist()
    assert (report.reference, report.share_read) == ("all 60 training samples", 1.0)
    assert len(kept) == len(report.queries)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_reached_is_the_first_place_left_unread(setting, world_size):
    """In batches of 5: one for each process, of runs that take turns."""
    module, adapter, train, validation = setting
    loader = DataLoader(train, 5)
    selection, reference = validate(module, adapter, validation), make_reference(loader, adapter, Choice())
    parts = [
        score_part(
            module, adapter, selection, reference, EngineSettings(), context(), Reading(0.0, 58, rank, world_size)
        )
        for rank in range(world_size)
    ]
    order = reference.in_turn(58).ids.tolist()
    read = {sample_id for part in parts for sample_id in part.shard.suspects.sample_ids.tolist()}
    assert min(part.reached for part in parts) == 5 * world_size
    assert read == set(order[: 5 * world_size])
    report, _ = make_report(parts, selection, reference, EngineSettings())
    assert report.reference == f"{5 * world_size} of 60 training samples, as many as the time budget allows"


def test_the_choice_behind_the_curvature_is_seeded_and_named(setting, monkeypatch):
    module, adapter, train, validation = setting
    monkeypatch.setattr("lightning_gradsim.reference.CURVATURE_SAMPLES", 25)
    chosen = [make_reference(train, adapter, Choice(seed=seed)).for_curvature().ids.tolist() for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(set(chosen[0])) == 25
    selection = validate(module, adapter, validation)
    note = "influence takes its curvature from 25 training samples, chosen at random"
    assert note in report_of(module, adapter, train, selection, similarity="influence").notes
    assert note not in report_of(module, adapter, train, selection).notes
    monkeypatch.setattr("lightning_gradsim.reference.CURVATURE_SAMPLES", NUM_TRAIN)
    assert not report_of(module, adapter, train, selection, similarity="influence").notes
