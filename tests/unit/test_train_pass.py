"""Reading training samples by id: any nesting, any loader of the user's, nothing of it touched."""

import multiprocessing
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
)
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_gradsim.datasets import Relabelled, sample_ids
from lightning_gradsim.errors import TrainingDataError
from lightning_gradsim.train_pass import (
    differs_on_second_read,
    ids_in_order,
    is_in_order,
    known_labels,
    make_reader,
    stratified_indices,
)


def tensors(number=10, start=0):
    """The input of a sample is its id."""
    values = torch.arange(start, start + number)
    return TensorDataset(values[:, None].float(), values % 3)


class Counting(Dataset):
    """Holds state: how often it was read in this process."""

    def __init__(self, number=6, augmented=False, source="torch"):
        self.number, self.augmented, self.source, self.reads = number, augmented, source, 0
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        self.reads += 1
        draws = {
            "torch": lambda: float(torch.rand(())),
            "numpy": lambda: float(np.random.rand()),
            "own": lambda: float(torch.rand((), generator=self.generator)),
        }
        return torch.tensor([index + (draws[self.source]() if self.augmented else 0.0)]), index % 3


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Sampled(Dataset):
    """A map-style dataset without a length."""

    def __getitem__(self, index):
        return index


def doubled(items):
    """A ``collate_fn`` of the user's own."""
    inputs, targets = zip(*items, strict=True)
    return {"x": 2 * torch.stack(inputs), "y": torch.as_tensor(targets)}


def read(reader):
    """Ids and inputs of everything that is read."""
    ids, inputs = zip(*((ids, batch[0]) for ids, batch in reader.batches()), strict=True)
    return torch.cat(ids).tolist(), torch.cat(inputs).flatten().tolist()


BASE = tensors(10)
NESTED = {
    "plain": (BASE, range(10)),
    "subset": (Subset(BASE, [7, 2, 5]), [7, 2, 5]),
    "subset of a subset": (Subset(Subset(BASE, [9, 7, 5, 3, 1]), [4, 0, 2]), [1, 9, 5]),
    "concatenation": (ConcatDataset([BASE, tensors(4, 10)]), range(14)),
    "parts": (ConcatDataset([Subset(BASE, [3, 1]), Subset(tensors(4, 10), [2])]), [3, 1, 12]),
    "subset of a concatenation": (Subset(ConcatDataset([BASE, tensors(4, 10)]), [13, 0, 10]), [13, 0, 10]),
    "concatenation of concatenations": (
        ConcatDataset([ConcatDataset([tensors(2), tensors(2, 2)]), Subset(tensors(3, 4), [1])]),
        [0, 1, 2, 3, 5],
    ),
}


@pytest.mark.parametrize(("dataset", "ids"), NESTED.values(), ids=NESTED.keys())
def test_ids_reach_through_nesting(dataset, ids):
    """Every tensor here holds its sample's id, so what is read must equal the ids."""
    assert sample_ids(dataset).tolist() == list(ids)
    assert read(make_reader(dataset, batch_size=3)) == (list(ids), [float(sample_id) for sample_id in ids])


def test_a_sample_named_twice_is_read_once():
    reader = make_reader(Subset(BASE, [4, 1, 4, 4, 9, 1]))
    assert len(reader) == 3
    assert read(reader) == ([4, 1, 9], [4.0, 1.0, 9.0])


def test_indices_may_be_tensors_or_arrays():
    for indices in (torch.tensor([3, 1]), np.array([3, 1]), (3, 1)):
        assert sample_ids(Subset(BASE, indices)).tolist() == [3, 1]


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(BASE, 4, shuffle=True),
        DataLoader(BASE, 4, drop_last=True),
        DataLoader(BASE, 4, sampler=WeightedRandomSampler([1.0] * 10, 20)),
        DataLoader(BASE, 4, sampler=RandomSampler(BASE, replacement=True, num_samples=30)),
        DataLoader(BASE, batch_sampler=BatchSampler(RandomSampler(BASE), 4, drop_last=True)),
    ],
    ids=["shuffled", "drop last", "weighted", "with replacement", "own batches"],
)
def test_every_sample_once_and_in_order_whatever_the_loader(loader):
    reader = make_reader(loader)
    assert read(reader) == (list(range(10)), [float(i) for i in range(10)])
    assert read(reader) == read(reader)


def test_batch_size_is_the_loaders():
    assert [len(ids) for ids, _ in make_reader(DataLoader(BASE, 4)).batches()] == [4, 4, 2]
    assert make_reader(BASE).batch_size == 64
    assert make_reader(DataLoader(BASE, 4), batch_size=5).batch_size == 5


def test_the_users_collate_fn_is_used():
    [(_, batch)] = make_reader(DataLoader(BASE, 16, collate_fn=doubled)).batches()
    assert batch["x"].flatten().tolist() == [2.0 * i for i in range(10)]


def test_the_users_worker_init_fn_is_taken_over():
    def seed(worker):
        torch.manual_seed(99)

    assert make_reader(DataLoader(BASE, worker_init_fn=seed)).options["worker_init_fn"] is seed


def test_tensors_are_read_in_this_process():
    for dataset in (BASE, Subset(BASE, [1]), ConcatDataset([BASE, Subset(BASE, [2])])):
        reader = make_reader(dataset)
        assert reader.options["num_workers"] == 0
        assert not reader.reads_in_process  # nothing that could hold state


@pytest.mark.parametrize(
    "source",
    [
        Counting(),
        Subset(Counting(), [0]),
        ConcatDataset([BASE, Counting()]),
        DataLoader(Counting()),
        DataLoader(BASE, collate_fn=doubled),  # a function may hold state, too
    ],
)
def test_what_may_hold_state_is_read_by_a_worker(source):
    reader = make_reader(source)
    assert reader.options["num_workers"] == 1
    assert not reader.reads_in_process


@pytest.mark.parametrize(("theirs", "ours"), [(0, 1), (1, 1), (8, 2)])
def test_few_workers(theirs, ours):
    loader = DataLoader(Counting())
    loader.num_workers = theirs  # asking for eight at once warns on a small machine
    assert make_reader(loader).options["num_workers"] == ours


def test_spawned_workers_only_where_the_user_has_some():
    loader = DataLoader(Counting(), num_workers=0)
    spawning = DataLoader(Counting(), num_workers=1, multiprocessing_context="spawn")
    assert make_reader(spawning).options["num_workers"] == 1
    spawning.num_workers = 0
    reader = make_reader(spawning)
    assert reader.options["num_workers"] == 0
    assert reader.reads_in_process
    assert not make_reader(loader).reads_in_process


def test_state_of_the_dataset_and_global_generators_stay():
    dataset = Counting(augmented=True, source="own")
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), dataset.generator.get_state()
    list(make_reader(dataset, batch_size=3).batches())
    assert dataset.reads == 0
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(dataset.generator.get_state(), states[2])


def test_the_users_loader_is_never_iterated():
    class Untouchable(DataLoader):
        def __iter__(self):
            raise AssertionError("the live loader was iterated")

    assert read(make_reader(Untouchable(BASE, 4, shuffle=True)))[0] == list(range(10))


@pytest.mark.parametrize("source", ["torch", "numpy", "own"])
def test_augmentation_is_noticed(source):
    assert differs_on_second_read(make_reader(Counting(augmented=True, source=source)))


@pytest.mark.parametrize("dataset", [Counting(), BASE, Counting(1), Subset(BASE, [3])])
def test_no_augmentation(dataset):
    assert not differs_on_second_read(make_reader(dataset))


def test_missing_values_are_no_augmentation():
    assert not differs_on_second_read(make_reader(TensorDataset(torch.full((4, 2), torch.nan), torch.zeros(4))))


def test_lookup_reads_single_samples_in_the_given_order():
    reader = make_reader(Subset(BASE, [7, 2, 5]))
    assert read(reader.lookup([5, 7])) == ([5, 7], [5.0, 7.0])
    assert all(len(ids) == 1 for ids, _ in reader.lookup([5, 7]).batches())


def test_choice_of_samples_keeps_ids():
    reader = make_reader(Subset(BASE, [7, 2, 5, 9]), batch_size=2).choose(torch.tensor([3, 0]))
    assert read(reader) == ([9, 7], [9.0, 7.0])
    assert len(reader) == 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("number", [1, 2, 3, 10, 64, 100, 1000])
@pytest.mark.parametrize("batch_size", [1, 16, 1000])
def test_every_sample_is_in_one_share(world_size, number, batch_size):
    reader = make_reader(TensorDataset(torch.arange(number)), batch_size=batch_size)
    shares = [reader.share(rank, world_size) for rank in range(world_size)]
    found = [torch.cat([ids for ids, _ in share.batches()] or [torch.empty(0).long()]) for share in shares]
    assert [len(share) for share in shares] == [len(ids) for ids in found]
    assert torch.cat(found).sort().values.tolist() == list(range(number))
    assert all(torch.equal(ids, ids.sort().values) for ids in found)
    # Even but for one run of neighbours, or what is left after equal runs.
    assert max(map(len, found)) - min(map(len, found)) <= max(batch_size, 4 * world_size - 1) if number > 1 else 1


def test_large_shares_read_whole_batches():
    reader = make_reader(TensorDataset(torch.arange(100)), batch_size=5)
    batches = [ids.tolist() for ids, _ in reader.share(1, 2).batches()]
    assert batches == [list(range(start, start + 5)) for start in range(5, 100, 10)]


def test_a_share_of_chosen_samples():
    reader = make_reader(Subset(BASE, [7, 2, 5, 9])).choose(torch.tensor([3, 0, 1]))
    assert [read(reader.share(rank, 3))[0] for rank in range(3)] == [[9], [7], [2]]


def test_an_empty_share_reads_nothing():
    dataset = Counting(number=2)
    reader = make_reader(dataset).share(2, 3)
    assert (len(reader), list(reader.batches()), dataset.reads) == (0, [], 0)


@pytest.mark.parametrize("size", [1, 3, 10, 50, 99, 100])
@pytest.mark.parametrize("shares", [[50, 30, 20], [97, 2, 1], [100], [34, 33, 33]])
def test_stratified_choice_keeps_the_shares(size, shares):
    labels = torch.repeat_interleave(torch.arange(len(shares)), torch.tensor(shares))[torch.randperm(100)]
    chosen = stratified_indices(labels, 100, size, seed=0)
    assert len(chosen) == len(set(chosen.tolist())) == size
    assert chosen.tolist() == sorted(chosen.tolist())
    counts = Counter(labels[chosen].tolist())
    for label, share in enumerate(shares):
        assert abs(counts[label] - share * size / 100) <= 1


def test_stratified_choice_is_seeded_and_touches_no_global_generator():
    labels, state = torch.arange(200) % 4, torch.get_rng_state()
    first, again, other = (stratified_indices(labels, 200, 20, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(stratified_indices(None, 200, 20, 0)) == 20


def test_stratified_choice_is_random_within_a_class():
    hits = Counter()
    for seed in range(60):
        hits.update(stratified_indices(torch.zeros(10).long(), 10, 5, seed).tolist())
    assert all(15 <= hits[i] <= 45 for i in range(10))


class WithTargets(Counting):
    def __init__(self):
        super().__init__(6)
        self.targets = [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("dataset", "labels"),
    [
        (BASE, [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]),
        (Subset(BASE, [7, 2]), [1, 2]),
        (Subset(BASE, [7, 2, 7]), [1, 2]),
        (WithTargets(), [5, 4, 3, 2, 1, 0]),
        (Subset(Subset(WithTargets(), [4, 2, 0]), [2, 0]), [5, 1]),
        (Counting(), None),
        (ConcatDataset([BASE, BASE]), None),
        (TensorDataset(torch.zeros(3, 2), torch.rand(3)), None),  # no classes
        (TensorDataset(torch.zeros(3, 2), torch.zeros(3, 2).long()), None),
    ],
)
def test_labels_that_the_dataset_holds(dataset, labels):
    known = known_labels(make_reader(dataset))
    assert (known if known is None else known.tolist()) == labels


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(BASE, 4), True),
        (DataLoader(BASE, 4, drop_last=True), True),
        (DataLoader(BASE, 4, shuffle=True), False),
        (DataLoader(BASE, 4, sampler=[1, 0]), False),
        (DataLoader(BASE, batch_sampler=[[1, 0]]), False),
        (DataLoader(BASE, batch_size=None), False),
        (DataLoader(Numbers()), False),
        ([1, 2], False),
    ],
)
def test_loaders_in_the_order_of_the_dataset(loader, expected):
    assert is_in_order(loader) == expected
    found = ids_in_order(loader)
    assert found.tolist() == list(range(10)) if expected else found is None


SAMPLERS = {
    "torch": lambda data, **options: DistributedSampler(data, shuffle=False, **options),
    "dropping": lambda data, **options: DistributedSampler(data, shuffle=False, drop_last=True, **options),
    "unrepeated": lambda data, **options: UnrepeatedDistributedSampler(data, shuffle=False, **options),
    "wrapped": lambda data, **options: DistributedSamplerWrapper(SequentialSampler(data), shuffle=False, **options),
    "unrepeated, wrapped": lambda data, **options: UnrepeatedDistributedSamplerWrapper(
        SequentialSampler(data), shuffle=False, **options
    ),
}


@pytest.mark.parametrize("make_sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("number", [2, 3, 9, 10])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ids_under_a_distributed_sampler(make_sampler, number, world_size):
    """They are those of the samples that the loader gives, repeated ones included."""
    dataset = Subset(BASE, list(range(10))[::-1][:number])
    for rank in range(min(world_size, number)):
        loader = DataLoader(dataset, 2, sampler=make_sampler(dataset, num_replicas=world_size, rank=rank))
        given = torch.cat([x for x, _ in loader] or [torch.empty(0)]).flatten()
        assert ids_in_order(loader).tolist() == given.tolist()


class Backwards(DistributedSampler):
    def __iter__(self):
        return reversed(list(super().__iter__()))


@pytest.mark.parametrize(
    "sampler",
    [
        DistributedSampler(BASE, 2, 0),
        Backwards(BASE, 2, 0, shuffle=False),
        DistributedSamplerWrapper(RandomSampler(BASE), num_replicas=2, rank=0, shuffle=False),
    ],
    ids=["shuffled", "their own", "wrapped random"],
)
def test_order_of_other_distributed_samplers_is_not_known(sampler):
    assert ids_in_order(DataLoader(BASE, 2, sampler=sampler)) is None


def test_ids_under_a_distributed_batch_sampler_of_their_own():
    class Own(BatchSampler):
        pass

    sampler = DistributedSampler(BASE, 2, 0, shuffle=False)
    assert ids_in_order(DataLoader(BASE, batch_sampler=Own(sampler, 2, False))) is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Numbers(), r"is an iterable dataset \(`Numbers`\)"),
        (DataLoader(Numbers()), r"is an iterable dataset \(`Numbers`\)"),
        ([DataLoader(BASE), DataLoader(BASE)], r"is a `list`\. Expected one `DataLoader`"),
        ({"a": DataLoader(BASE)}, r"is a `dict`"),
        (iter([1]), r"is a `list_iterator`"),
        (7, r"is an `int`"),
        ("train.csv", r"is a `str`"),
        (DataLoader(BASE, batch_size=None), r"is a `DataLoader` with `batch_size=None`"),
        (Subset(BASE, []), r"has no samples"),
        (Sampled(), r"is a `Sampled`"),
    ],
)
def test_sources_that_cannot_be_read_by_index(source, words):
    with pytest.raises(TrainingDataError, match=r"^The training data " + words) as caught:
        make_reader(source)
    assert "as `train_data=` to `GradSimCallback`" in str(caught.value)


def test_the_name_of_the_source_is_used():
    with pytest.raises(TrainingDataError, match=r"^`train_data` has no samples"):
        make_reader([], "`train_data`")


def test_plain_lists_are_datasets():
    reader = make_reader([(torch.tensor([1.0]), 0), (torch.tensor([2.0]), 1)])
    assert len(reader) == 2


class Broken(Counting):
    """Fails for some samples, in a worker or here."""

    def __init__(self, *broken, number=40, longer=None):
        super().__init__(number)
        self.broken, self.longer = broken, longer

    def __getitem__(self, index):
        if index in self.broken:
            raise FileNotFoundError(2, "No such file or directory", f"{index}.png")
        return torch.zeros(2 if index == self.longer else 1), 0


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("broken", [(17,), (0,), (39, 38), (7, 5)])
def test_a_sample_that_cannot_be_read_is_named(num_workers, broken):
    reader = make_reader(Subset(Broken(*(i + 1 for i in broken), number=42), range(1, 41)), batch_size=4)
    reader = replace(reader, options={**reader.options, "num_workers": num_workers})
    name = min(broken) + 1
    words = (
        f"^Sample {name} of `Subset` cannot be read: FileNotFoundError: .* No such file or directory: '{name}.png'. "
    )
    with pytest.raises(TrainingDataError, match=words + "Repair it, or pass other.*`train_data=`") as caught:
        list(reader.batches())
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert multiprocessing.active_children() == []


def test_samples_of_different_shapes_are_no_batch():
    reader = make_reader(Broken(32, longer=30), batch_size=8)
    words = (  # the worker is at sample 32 by then, which fails too
        r"^Samples \[24, 25, 26, 27, 28, 29, 30, 31\] of `Broken` can be read one by one, but not as a batch: Runtime"
    )
    with pytest.raises(TrainingDataError, match=words):
        list(reader.batches())


def test_a_reader_that_is_left_early_leaves_no_worker():
    batches = make_reader(Broken(), batch_size=2).batches()
    next(batches)
    assert multiprocessing.active_children()
    batches.close()
    assert multiprocessing.active_children() == []


def test_a_relabelled_view_keeps_ids_and_stays_pure():
    view = Relabelled(Subset(TensorDataset(torch.zeros(4, 2), torch.arange(4)), [3, 1]), {0: 9})
    reader = make_reader(view)
    assert reader.ids.tolist() == [3, 1]
    assert reader.options["num_workers"] == 0
    [(_, (_, labels))] = reader.batches()
    assert labels.tolist() == [9, 1]
