"""The module is in eval mode inside, and as found outside."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_gradsim.guard import evaluating, preserving


class Surprising(nn.Module):
    """A module whose ``train`` does more than set a flag."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def train(self, mode=True):
        self.calls += 1
        return super().train(mode)


def make():
    module = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3), Surprising()).train()
    module[1].eval()  # a frozen BatchNorm
    return module, [part.training for part in module.modules()]


def test_every_part_is_restored():
    module, modes = make()
    with evaluating(module):
        assert not any(part.training for part in module.modules())
    assert [part.training for part in module.modules()] == modes


def test_restored_after_an_exception():
    module, modes = make()

    def fail():
        with evaluating(module):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [part.training for part in module.modules()] == modes
    assert torch.is_grad_enabled()


def test_the_users_train_is_not_called():
    module, _ = make()
    before = module[2].calls
    with evaluating(module):
        pass
    assert module[2].calls == before


@pytest.mark.parametrize("outside", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_leaves_inference_mode_and_restores_it(outside):
    module, _ = make()
    with outside():
        before = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        with evaluating(module):
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_grad_enabled()
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == before


def test_buffers_stay():
    module, _ = make()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with evaluating(module):
        module[1](torch.randn(4, 3))
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def test_preserving_leaves_the_modes_and_restores_what_a_forward_changes():
    module, modes = make()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with preserving(module):
        assert [part.training for part in module.modules()] == modes
        module[1].training = True
        module[1](torch.randn(4, 3))
        assert not torch.equal(module[1].running_mean, before["1.running_mean"])
    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


class LearnsInEval(nn.Module):
    """Normalises by the batch in every mode, and averages its statistics."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))
        self.register_buffer("same", torch.ones(1).expand(4))  # cannot be written to

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, training=True)


def test_running_statistics_that_a_forward_changes_in_eval_mode():
    module = LearnsInEval()
    versions = [buffer._version for buffer in module.buffers()]
    with evaluating(module):
        module(torch.randn(4, 3) + 5)
        assert module.mean.min() > 0.1
    assert torch.equal(module.mean, torch.zeros(3))
    assert torch.equal(module.var, torch.ones(3))
    assert [buffer._version for buffer in module.buffers()] == versions
