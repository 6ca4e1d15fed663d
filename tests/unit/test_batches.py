"""Samples cut out of nested batches, and put together again."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from lightning_gradsim.batches import copy_batch, join_batches, join_samples, map_tensors, take_sample, tensors_of
from lightning_gradsim.errors import BatchFormatError

Pair = namedtuple("Pair", ["x", "y"])
Source = namedtuple("Source", ["split", "version"])

BATCHES = {
    "tensor": torch.randn(3, 2),
    "pair": [torch.randn(3, 2), torch.tensor([0, 1, 2])],
    "tuple": (torch.randn(3, 2), torch.tensor([0, 1, 2])),
    "named tuple": Pair(torch.randn(3, 2), torch.tensor([0, 1, 2])),
    "mapping": {"image": torch.randn(3, 1, 4, 4), "label": torch.tensor([2, 1, 0])},
    "ordered mapping": OrderedDict(image=torch.randn(3, 2), label=torch.tensor([2, 1, 0])),
    "nested": ({"a": (torch.randn(3, 2), torch.randn(3, 1))}, torch.tensor([0, 1, 2])),
    "names": (torch.randn(3, 2), ["a.png", "b.png", "c.png"]),
    "tuple of names": (torch.randn(3, 2), ("a.png", "b.png", "c.png")),
    "columns of names": {"x": torch.randn(3, 2), "path": [("a", "b", "c"), ("d", "e", "f")]},
    "common values": {"x": torch.randn(3, 2), "scale": 2.5, "split": "train", "step": torch.tensor(7), "none": None},
    "common record": (torch.randn(3, 2), Source("train", 3)),
}
every_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())


def assert_same(left, right):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert type(left) is type(right)
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@every_batch
def test_taking_all_samples_and_joining_them_gives_the_batch(batch):
    samples = [take_sample(batch, i, 3) for i in range(3)]
    [(positions, joined)] = join_samples(samples)
    assert positions == [0, 1, 2]
    assert_same(joined, batch)


@every_batch
def test_any_order_and_choice(batch):
    [(positions, joined)] = join_samples([take_sample(batch, i, 3) for i in (2, 0)])
    assert positions == [0, 1]
    for mine, theirs in zip(tensors_of(joined), tensors_of(batch), strict=True):
        assert torch.equal(mine, theirs[[2, 0]] if theirs.ndim else theirs)


@every_batch
def test_a_sample_shares_no_memory_with_its_batch(batch):
    sample, copied = take_sample(batch, 1, 3), copy_batch(batch)
    theirs = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(batch)}
    for tensor in [*tensors_of(sample), *tensors_of(copied)]:
        assert tensor.untyped_storage().data_ptr() not in theirs
        assert not tensor.requires_grad
    assert_same(copied, batch)


def test_samples_of_different_shape_and_dtype_stay_apart():
    samples = [
        (torch.zeros(1, 3), torch.tensor([0])),
        (torch.zeros(1, 5), torch.tensor([1])),
        (torch.ones(1, 3), torch.tensor([2])),
        (torch.ones(1, 5), torch.tensor([3])),
        (torch.ones(1, 3, dtype=torch.float64), torch.tensor([4])),
    ]
    groups = join_samples(samples)
    assert [positions for positions, _ in groups] == [[0, 2], [1, 3], [4]]
    for positions, (inputs, targets) in groups:
        assert targets.tolist() == positions
        assert len(inputs) == len(positions)


def test_samples_of_different_common_values_stay_apart():
    samples = [{"x": torch.zeros(1, 2), "task": task, "scale": torch.tensor(1)} for task in ("a", "b", "a")]
    assert [positions for positions, _ in join_samples(samples)] == [[0, 2], [1]]


def test_nothing_to_join():
    assert join_samples([]) == []


def test_copies_of_inference_tensors_can_be_differentiated():
    with torch.inference_mode():
        batch = {"x": torch.ones(2, 3)}
    with torch.inference_mode(False):
        copied = copy_batch(batch)["x"].requires_grad_()
    copied.sum().backward()
    assert copied.grad is not None


def test_gradients_are_left_behind():
    x = torch.ones(2, 3, requires_grad=True) * 2
    assert not take_sample(x, 0, 2).requires_grad


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.zeros(4, 2), torch.zeros(3)), "a tensor of length 3"),
        ((torch.zeros(4), ["a", "b"]), "a list of length 2"),
    ],
)
def test_lengths_that_do_not_fit_are_named(batch, words):
    with pytest.raises(BatchFormatError, match=rf"A batch of 4 samples holds {words}.*override `Adapter.take_sample`"):
        take_sample(batch, 0, 4)


class Graph:
    pass


def test_unknown_types_are_named():
    with pytest.raises(BatchFormatError, match=r"holds a `Graph`.*Expected tensors.*`collate_fn`"):
        take_sample((torch.zeros(4, 2), Graph()), 0, 4)


def test_a_batch_of_the_users_own_kind_is_left_to_the_adapter():
    batch = Graph()
    assert copy_batch(batch) is batch


def test_tensors_of_goes_in_order():
    first, second, third = torch.zeros(1), torch.ones(2), torch.ones(3)
    assert [len(tensor) for tensor in tensors_of({"a": first, "b": ["text", (second, 3)], "c": third})] == [1, 2, 3]


def test_tensors_are_exchanged_in_any_nesting():
    batch = {"x": [torch.ones(2), "word"], "y": (torch.zeros(()), None, 3)}
    changed = map_tensors(batch, lambda tensor: tensor + 1)
    assert_same(changed, {"x": [torch.full((2,), 2.0), "word"], "y": (torch.ones(()), None, 3)})
    own = object()
    assert map_tensors(own, torch.neg) is own


def nested(start, size, **changes):
    rows = torch.arange(start, start + size)
    return {"x": rows[:, None].float(), "deep": [(rows, None)], "word": "common", "number": 3, **changes}


def test_batches_are_joined():
    joined = join_batches([nested(0, 3), nested(3, 2), nested(5, 1)], [3, 2, 1])
    expected = nested(0, 6)
    assert torch.equal(joined["x"], expected["x"])
    assert torch.equal(joined["deep"][0][0], expected["deep"][0][0])
    assert (joined["deep"][0][1], joined["word"], joined["number"]) == (None, "common", 3)


@pytest.mark.parametrize(
    "other",
    [
        nested(3, 2, word="another"),
        nested(3, 2, number=4),
        nested(3, 2, x=torch.zeros(2, 2)),
        nested(3, 2, x=torch.zeros(2, 1).double()),
        nested(3, 2, x=torch.zeros(3, 1)),
        nested(3, 2, x=None),
        nested(3, 2, more=1),
        nested(3, 2, deep=[]),
        [torch.zeros(2, 1)],
    ],
    ids=["word", "number", "shape", "dtype", "length", "kind", "key", "items", "nesting"],
)
def test_batches_that_are_not_alike(other):
    assert join_batches([nested(0, 3), other], [3, 2]) is None


@pytest.mark.parametrize("entry", [["a", "b"], torch.tensor(1.0), object()], ids=["words", "scalar", "object"])
def test_what_cannot_be_joined(entry):
    assert join_batches([(torch.zeros(2), entry), (torch.zeros(2), entry)], [2, 2]) is None


def test_named_tuples_are_joined():
    Pair = namedtuple("Pair", "x y")
    joined = join_batches([Pair(torch.zeros(2), torch.ones(2)), Pair(torch.zeros(1), torch.ones(1))], [2, 1])
    assert isinstance(joined, Pair)
    assert (len(joined.x), len(joined.y)) == (3, 3)
