"""Budgets, portions that halve, and what a graph keeps."""

import gc
import weakref

import pytest
import torch
from torch import nn

from lightning_gradsim import memory
from lightning_gradsim.guard import is_out_of_memory
from lightning_gradsim.memory import GraphMeter, Portions, default_budget, free_memory

CPU = torch.device("cpu")
OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 40 bytes."),
    MemoryError(),
)


def limited(capacity, error=None):
    """Work that fails beyond so many samples."""

    def work(rows):
        if rows.stop - rows.start > capacity:
            raise error or torch.OutOfMemoryError("too many")
        return list(range(rows.start, rows.stop))

    return work


@pytest.mark.parametrize("size", [1, 3, 8, 20, 100])
@pytest.mark.parametrize("capacity", [1, 2, 7, 20])
def test_portions_cover_everything_once_in_order(size, capacity):
    portions = Portions(size)
    parts = list(portions.split(20, limited(capacity)))
    assert [row for part in parts for row in part] == list(range(20))
    assert portions.was_halved == (min(size, 20) > capacity)
    assert portions.size == size or portions.size <= capacity


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_what_counts_as_out_of_memory(error):
    assert is_out_of_memory(error)
    assert len(list(Portions(8).split(8, limited(2, error)))) == 4


@pytest.mark.parametrize("error", [RuntimeError("a shape"), ValueError("not enough memory"), KeyError()])
def test_other_errors_are_let_through(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)):
        list(Portions(8).split(8, limited(2, error)))


def test_one_sample_that_does_not_fit():
    with pytest.raises(torch.OutOfMemoryError):
        list(Portions(8).split(8, limited(0)))


def test_the_failed_attempt_is_let_go_before_the_next():
    kept = []

    def work(rows):
        tensor = torch.empty(1)
        kept.append(tensor.untyped_storage()._weak_ref())
        if rows.stop - rows.start > 1:
            raise torch.OutOfMemoryError("too many")

    list(Portions(2).split(2, work))
    assert torch.UntypedStorage._new_with_weak_ptr(kept[0]) is None


def test_a_size_may_be_changed_on_the_way():
    portions = Portions(2)
    sizes = []
    for part in portions.split(20, limited(20)):
        sizes.append(len(part))
        portions.size = 9
    assert sizes == [2, 9, 9]


def test_the_budget_is_a_share_of_what_is_free(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    assert default_budget(CPU) == 250
    assert default_budget(CPU, 2) == 125
    monkeypatch.undo()
    assert 2**20 < default_budget(CPU) < free_memory(CPU)


@pytest.mark.parametrize(
    ("limit", "current", "expected"),
    [("max", "5", None), ("2048", "48", 2000), ("100", "200", 0), ("2048", None, None)],
)
def test_the_limit_of_a_container(tmp_path, monkeypatch, limit, current, expected):
    (tmp_path / "memory.max").write_text(limit + "\n")
    if current is not None:
        (tmp_path / "memory.current").write_text(current + "\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    found = free_memory(CPU)
    assert found == expected if expected is not None else found > 2**20


def test_bytes_that_a_graph_keeps():
    module = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    x, meter = torch.randn(8, 10), GraphMeter()
    with meter.watching(*module.parameters()):
        module(x)
    # The input, and the output of the ReLU once for the ReLU and the layer above.
    assert meter.num_bytes == 4 * 8 * (10 + 20)
    assert meter.largest == 4 * 8 * 20


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.Sigmoid(), nn.Softmax(1), nn.Tanh()])
def test_a_graph_that_was_measured_is_released(layer):
    x, meter = torch.randn(4, 3, requires_grad=True), GraphMeter()
    with meter.watching():
        output = layer(x * 2)
    (gradient,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(layer(x * 2).sum(), x)[0])
    held = weakref.ref(meter)
    del output, gradient, meter
    gc.collect()
    assert held() is None


def test_nothing_is_kept_without_a_graph():
    meter = GraphMeter()
    with torch.no_grad(), meter.watching():
        nn.Linear(3, 3)(torch.randn(2, 3))
    assert meter.num_bytes == 0


def test_sparse_tensors_are_left_out():
    adjacency = torch.eye(4).to_sparse()
    layer, meter = nn.Linear(3, 3), GraphMeter()
    with meter.watching(*layer.parameters(), adjacency):
        torch.sparse.mm(adjacency, layer(torch.randn(4, 3))).sum()
    assert meter.num_bytes == 4 * 4 * 3


def test_casts_of_parameters_are_no_memory_of_samples():
    layer, x, meter = nn.Linear(16, 32), torch.randn(2, 16), GraphMeter()
    with meter.watching(*layer.parameters(), x), torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x)
    assert meter.num_bytes == 2 * 2 * 16
