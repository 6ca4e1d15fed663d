"""Samples run again, each on its own: the same gradients as autograd's, or a named error."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_gradsim.errors import BatchFormatError, SampleMixingError
from lightning_gradsim.whole_module import Recompute, WholeModule

BATCH, FEATURES, CLASSES = 5, 4, 3


class Net(nn.Module):
    def __init__(self, change=lambda x: x):
        super().__init__()
        self.fc = nn.Linear(FEATURES, CLASSES)
        self.change = change

    def forward(self, x):
        return self.change(self.fc(x))


def losses_of(module):
    return lambda batch: F.cross_entropy(module(batch[0]), batch[1], reduction="none")


def data(number=BATCH):
    return torch.randn(number, FEATURES), torch.randint(CLASSES, (number,))


def whole(module):
    return WholeModule(module, dict(module.named_parameters()))


def expected(module, batch, losses=None):
    losses = losses or losses_of(module)
    number = len(batch[0])
    rows = [
        torch.autograd.grad(losses((batch[0][i : i + 1], batch[1][i : i + 1])).sum(), list(module.parameters()))
        for i in range(number)
    ]
    return {n: torch.stack(c) for (n, _), c in zip(module.named_parameters(), zip(*rows, strict=True), strict=True)}


def assert_equal(found, reference):
    assert list(found) == list(reference)
    for name, value in reference.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def per_sample_branch(x):
    return torch.stack([row * 2 if row.sum() > 0 else row for row in x])


@pytest.mark.parametrize(
    ("change", "step"), [(torch.tanh, "vmap"), (per_sample_branch, "one at a time")], ids=["vmap", "one-at-a-time"]
)
def test_gradients_of_single_samples(change, step):
    module, batch = Net(change), data()
    watcher = whole(module)
    for each in (batch, data(), data(1), data(2)):
        assert_equal(watcher.gradients(Recompute(losses_of(module), each), len(each[0])), expected(module, each))
    assert watcher.step == step
    assert bool(watcher.reason) == (step != "vmap")


@pytest.mark.parametrize("change", [torch.tanh, per_sample_branch], ids=["vmap", "one-at-a-time"])
@pytest.mark.parametrize("outside", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_leaves_no_trace(change, outside):
    module, batch = Net(change), data()
    F.cross_entropy(torch.tanh(module.fc(batch[0])), batch[1]).backward()
    before = copy.deepcopy(module.state_dict())
    parameters = {name: (id(p), p._version, p.grad.clone()) for name, p in module.named_parameters()}
    with outside():
        whole(module).gradients(Recompute(losses_of(module), batch), BATCH)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    for name, parameter in module.named_parameters():
        identity, version, gradient = parameters[name]
        assert (id(parameter), parameter._version) == (identity, version)
        assert torch.equal(parameter.grad, gradient)


def test_parameters_are_put_back_after_a_failure():
    def fail(x):
        raise KeyError("broken")

    module, batch = Net(fail), data()
    before = [id(parameter) for parameter in module.parameters()]
    with pytest.raises(KeyError, match="broken"):
        whole(module).gradients(Recompute(losses_of(module), batch), BATCH)
    assert [id(parameter) for parameter in module.parameters()] == before


def test_an_empty_batch():
    module = Net()
    found = whole(module).gradients(Recompute(losses_of(module), data(0)), 0)
    assert {name: tuple(value.shape) for name, value in found.items()} == {"fc.weight": (0, 3, 4), "fc.bias": (0, 3)}


MIXERS = {
    "centred outputs": (lambda x: x - x.mean(0), None),
    "centred losses": (lambda x: x, lambda values: values - values.mean().detach()),
    "contrastive": (lambda x: x, lambda values: values * values.mean()),
    "random": (lambda x: x + torch.randn_like(x), None),
}


@pytest.mark.parametrize(("change", "after"), MIXERS.values(), ids=MIXERS.keys())
def test_mixing_is_found(change, after):
    module = Net(change)
    losses = losses_of(module)
    mixed = losses if after is None else lambda batch: after(losses(batch))
    with pytest.raises(SampleMixingError, match=r"Samples taken alone do not have the losses and gradients"):
        whole(module).gradients(Recompute(mixed, data()), BATCH)


def test_mixing_is_found_in_the_first_batch_of_more_than_one():
    module = Net(lambda x: x - x.mean(0))
    watcher = whole(module)
    watcher.gradients(Recompute(losses_of(module), data(1)), 1)
    with pytest.raises(SampleMixingError):
        watcher.gradients(Recompute(losses_of(module), data()), BATCH)


def test_batches_of_any_nesting():
    module, (x, y) = Net(), data()
    reference = expected(module, (x, y))
    nested = {"deep": [{"x": x}, (torch.tensor(2.0), None)], "y": y, "word": "common"}

    def losses(batch):
        assert batch["word"] == "common"
        scale = batch["deep"][1][0]
        return F.cross_entropy(module(batch["deep"][0]["x"] * scale / 2), batch["y"], reduction="none")

    watcher = whole(module)
    assert_equal(watcher.gradients(Recompute(losses, nested), BATCH), reference)
    assert watcher.step == "vmap"


def test_a_list_of_strings_goes_one_at_a_time():
    module, (x, y) = Net(), data()
    words = [str(number) for number in range(BATCH)]
    seen = []

    def losses(batch):
        seen.append(batch[2])
        return F.cross_entropy(module(batch[0]), batch[1], reduction="none")

    watcher = whole(module)
    assert_equal(watcher.gradients(Recompute(losses, (x, y, words)), BATCH), expected(module, (x, y)))
    assert watcher.step == "one at a time"
    assert seen[-BATCH - 1 : -1] == [[word] for word in words]


def test_batches_that_cannot_be_cut():
    module, (x, y) = Net(), data()
    with pytest.raises(BatchFormatError, match="of length 2 along the first dimension"):
        whole(module).gradients(Recompute(losses_of(module), (x, y, torch.zeros(2))), BATCH)


def test_no_warning_of_what_vmap_has_no_kernel_for():
    module, batch = Net(lambda x: torch.cummax(x, 1).values + x), data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(whole(module).gradients(Recompute(losses_of(module), batch), BATCH), expected(module, batch))


def test_out_of_memory_is_no_reason_to_slow_down():
    calls = []

    def fail_once(x):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x

    module, batch = Net(fail_once), data()
    watcher = whole(module)
    with pytest.raises(torch.OutOfMemoryError):
        watcher.gradients(Recompute(losses_of(module), batch), BATCH)
    assert watcher.step == "vmap"
    assert_equal(watcher.gradients(Recompute(losses_of(module), batch), BATCH), expected(module, batch))


@pytest.mark.parametrize("change", [torch.tanh, per_sample_branch], ids=["vmap", "one-at-a-time"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_float32(change, dtype):
    module, (x, y) = Net(change), data()
    reference = expected(module, (x, y))
    module.to(dtype)
    found = whole(module).gradients(
        Recompute(lambda b: F.cross_entropy(module(b[0]).float(), b[1], reduction="none"), (x.to(dtype), y)), BATCH
    )
    for name, value in reference.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], value, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("change", [torch.tanh, per_sample_branch], ids=["vmap", "one-at-a-time"])
@pytest.mark.parametrize("scale", [1e-9, 1e6], ids=["tiny", "huge"])
def test_float16_gradients_of_any_size(change, scale):
    module, (x, y) = Net(change).half().float(), data()
    x = x.half().float()

    def losses(batch):
        return scale * F.cross_entropy(module(batch[0]).float(), batch[1], reduction="none")

    reference = expected(module, (x, y), losses)
    module.half()
    found = whole(module).gradients(Recompute(losses, (x.half(), y)), BATCH)
    for name, value in reference.items():
        torch.testing.assert_close(found[name] / scale, value / scale, rtol=0.03, atol=0.01)
