"""Whether the loss compared is the loss trained with."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as nn_module

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.loss_check import NUM_STEPS, LossCheck


class Model(nn.Module):
    def __init__(self, criterion=None):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.criterion = criterion
        self.metric = nn.Identity()

    def forward(self, x):
        return self.head(self.body(x).tanh())


def steps(module, training_step, check=None, number=1):
    adapter, check = Adapter(), check or LossCheck()
    adapter.bind(module)
    for _ in range(number):
        batch = torch.randn(5, 3), torch.randint(3, (5,))
        check.begin_step(module)
        assert check.is_watching
        loss = training_step(module, *batch)
        check.end_step(adapter, batch, loss)
        assert not check.is_watching
    return check


def hooks(module):
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


def global_hooks():
    return len(nn_module._global_forward_hooks)


@pytest.mark.parametrize("criterion", [None, nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.1]), label_smoothing=0.2)])
def test_agreement(criterion):
    module = Model(criterion)
    loss = criterion or F.cross_entropy
    check = steps(module, lambda module, x, y: loss(module(x), y), number=NUM_STEPS)
    assert check.difference is None
    assert check.gap is None
    assert not check.is_open


def test_a_difference_names_both_values_and_the_way_out():
    values = []

    def weighted(module, x, y):
        loss = 2 * F.cross_entropy(module(x), y)
        values.append(float(loss.detach()))
        return loss

    check = steps(Model(), weighted)
    assert f"{values[0]:.4g}" in check.difference
    assert f"{values[0] / 2:.4g}" in check.difference
    assert "`loss_fn=`" in check.difference
    assert "`gradsim_step(batch)`" in check.difference
    assert not check.is_open


@pytest.mark.parametrize(("factor", "agrees"), [(1.005, True), (0.995, True), (1.02, False), (0.98, False)])
def test_one_percent(factor, agrees):
    check = steps(Model(), lambda module, x, y: factor * F.cross_entropy(module(x), y))
    assert (check.difference is None) == agrees


def test_a_difference_of_a_later_step_is_found():
    check = steps(Model(), lambda module, x, y: F.cross_entropy(module(x), y), number=NUM_STEPS - 1)
    assert check.is_open
    steps(Model(), lambda module, x, y: F.cross_entropy(module(x), y) + 5, check)
    assert check.difference is not None


def test_children_where_the_step_does_not_call_the_module():
    check = steps(Model(), lambda module, x, y: F.cross_entropy(module.head(module.body(x).tanh()), y))
    assert (check.difference, check.gap) == (None, None)


def test_criteria_and_metrics_are_not_taken_for_the_model():
    module = Model(nn.CrossEntropyLoss())

    def step(module, x, y):
        logits = module.head(module.body(x).tanh())
        loss = module.criterion(logits, y)
        module.metric(logits.argmax(1))
        return loss

    check = steps(module, step)
    assert (check.difference, check.gap) == (None, None)


@pytest.mark.parametrize(
    "training_step",
    [
        lambda module, x, y: None,  # manual optimisation
        lambda module, x, y: F.cross_entropy(x @ module.head.weight[:, :3].T, y),  # nothing was called
        lambda module, x, y: F.cross_entropy(module(x[:2]), y[:2]),  # other rows than the batch's
    ],
)
def test_what_cannot_be_compared_is_said(training_step):
    check = steps(Model(), training_step)
    assert check.difference is None
    assert "could not be checked" in check.gap


def test_a_step_that_can_be_compared_closes_the_gap():
    check = steps(Model(), lambda module, x, y: None)
    assert check.gap is not None
    steps(Model(), lambda module, x, y: F.cross_entropy(module(x), y), check)
    assert check.gap is None


class Wrapped(Model):
    """Its step is a call of itself, as ``DistributedDataParallel`` and Lightning make it."""

    def step(self, x, y, *, step=None):
        self.forward = lambda x, y: self.redirected(x, y, step)
        return self(x, y)

    def redirected(self, x, y, step):
        del self.forward
        return step(self, x, y)


@pytest.mark.parametrize(
    ("step", "agrees"),
    [
        (lambda module, x, y: F.cross_entropy(module(x), y), True),
        (lambda module, x, y: 2 * F.cross_entropy(module(x), y), False),
        (lambda module, x, y: F.cross_entropy(module.head(module.body(x).tanh()), y), True),
        (lambda module, x, y: (module(x + 1), F.cross_entropy(module(x), y))[1], True),
    ],
    ids=["agrees", "differs", "calls the head", "calls twice"],
)
def test_a_step_that_is_a_call_of_the_module(step, agrees):
    module, check, adapter = Wrapped(), LossCheck(), Adapter()
    adapter.bind(module)
    x, y = torch.randn(5, 3), torch.randint(3, (5,))
    check.begin_step(module, is_wrapped=True)
    check.end_step(adapter, (x, y), module.step(x, y, step=step))
    assert check.gap is None
    assert (check.difference is None) == agrees


def test_a_batch_that_cannot_be_read_is_a_gap_and_not_an_error():
    module, check, adapter = Model(), LossCheck(), Adapter()
    adapter.bind(module)
    check.begin_step(module)
    loss = module(torch.randn(2, 3)).sum()
    check.end_step(adapter, torch.randn(2, 3), loss)
    assert "BatchFormatError" in check.gap


def test_the_hook_lives_for_one_step_and_on_no_module():
    module, check, before = Model(), LossCheck(), global_hooks()
    check.begin_step(module)
    assert (hooks(module), global_hooks()) == (0, before + 1)
    check.begin_step(module)  # a step that never ended
    check.end_step(Adapter(), (torch.randn(2, 3), torch.zeros(2).long()), None)
    assert global_hooks() == before
    check.begin_step(module)
    check.remove()
    check.remove()
    assert global_hooks() == before


def test_a_step_may_copy_its_module():
    copies = []

    def step(module, x, y):
        logits = module(x)
        copies.append(copy.deepcopy(module))
        copies[-1](x + 1)
        return F.cross_entropy(logits, y)

    check = steps(Model(), step)
    assert (check.difference, check.gap) == (None, None)
    assert hooks(copies[0]) == 0


@pytest.mark.parametrize("calls_module", [True, False])
def test_outputs_that_own_hooks_may_change_are_not_compared(calls_module):
    module = Model()
    (module if calls_module else module.head).register_forward_hook(lambda module, args, output: 9 * output)
    check = steps(
        module,
        lambda module, x, y: F.cross_entropy(module(x) if calls_module else module.head(x @ torch.ones(3, 4)), y),
    )
    assert check.difference is None
    assert "forward hooks" in check.gap


def test_own_hooks_of_a_child_do_not_matter_where_the_module_is_called():
    module = Model()
    module.body.register_forward_hook(lambda module, args, output: 9 * output)
    check = steps(module, lambda module, x, y: F.cross_entropy(module(x), y))
    assert (check.difference, check.gap) == (None, None)


def test_the_outputs_are_not_kept():
    module, check = Model(), LossCheck()
    check.begin_step(module)
    module(torch.randn(2, 3))
    check.remove()
    assert not any(isinstance(value, torch.Tensor) for value in vars(check).values())
