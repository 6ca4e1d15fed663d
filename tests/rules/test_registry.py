"""Registering rules, and finding the one for a layer."""

import pytest
import torch
from torch import nn

from lightning_gradsim.errors import UnsupportedLayerError
from lightning_gradsim.factors import OuterFactors
from lightning_gradsim.rules import find_rule, linear, register_rule, registered_types, registry
from lightning_gradsim.wrapper import PerSampleGradients


class Scale(nn.Module):
    """A layer of the user's own: one factor a feature."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return x * self.weight


def scale_factors(layer, activations, output_grads):
    """Features are groups of one input and one output each."""
    return OuterFactors(activations[:, None, :, None], output_grads[:, None, :, None], bias=False)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


def test_linear_has_its_rule():
    assert find_rule("fc", nn.Linear(2, 2)) is linear.linear_factors
    assert nn.Linear in registered_types()


def test_a_rule_of_ones_own():
    assert register_rule(Scale)(scale_factors) is scale_factors
    assert find_rule("scale", Scale()) is scale_factors
    assert Scale in registered_types()
    module, x = nn.Sequential(Scale(), nn.Linear(3, 2)), torch.randn(4, 3)
    with PerSampleGradients(module, "0") as gradients:
        with gradients.recording():
            losses = module(x).square().sum(1)
        [factors] = gradients.factors(losses).values()
    expected = [torch.autograd.grad(module(x[i : i + 1]).square().sum(), module[0].weight)[0] for i in range(4)]
    torch.testing.assert_close(factors.gradients.flatten(1), torch.stack(expected))


def test_a_second_rule_is_refused():
    register_rule(Scale)(scale_factors)
    with pytest.raises(ValueError, match=r"`Scale` already has a gradient rule\. Pass `overwrite=True`"):
        register_rule(Scale)(lambda *_: None)
    assert find_rule("scale", Scale()) is scale_factors


def test_nothing_is_registered_where_one_of_several_types_is_taken():
    with pytest.raises(ValueError, match="`Linear` already has a gradient rule"):
        register_rule(Scale, nn.Linear)(scale_factors)
    assert Scale not in registered_types()


def test_overwriting():
    register_rule(Scale)(lambda *_: None)
    register_rule(Scale, overwrite=True)(scale_factors)
    assert find_rule("scale", Scale()) is scale_factors


def test_a_subclass_with_a_rule_of_its_own():
    class Wide(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    with pytest.raises(UnsupportedLayerError, match=r"`fc` \(`Wide`\): it overrides `Linear.forward`"):
        find_rule("fc", Wide(2, 2))
    register_rule(Wide)(scale_factors)
    assert find_rule("fc", Wide(2, 2)) is scale_factors
    assert find_rule("fc", nn.Linear(2, 2)) is linear.linear_factors


def test_parameters_that_a_rule_covers():
    class Shifted(Scale):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3))

    register_rule(Scale)(scale_factors)
    with pytest.raises(
        UnsupportedLayerError, match=r"`s` \(`Shifted`\): it trains `shift` instead of `weight` and `bias`"
    ):
        find_rule("s", Shifted())
    register_rule(Shifted, parameters=("weight", "shift"))(scale_factors)
    assert find_rule("s", Shifted()) is scale_factors


def test_types_that_have_a_rule_are_named():
    register_rule(Scale)(scale_factors)
    with pytest.raises(
        UnsupportedLayerError, match=r"Types with a rule: .*Linear, .*Scale\. Use `PerSampleGradients.compute`"
    ) as caught:
        find_rule("mix", nn.GRU(2, 2))
    assert "`register_rule(GRU)`" in str(caught.value)
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("shape", [(5, 4), (5, 2, 4), (5, 2, 3, 4), (5, 0, 4)])
def test_positions_of_a_linear_are_shared(shape):
    layer, x = nn.Linear(4, 3), torch.randn(shape)
    factors = linear.linear_factors(layer, x, layer(x))
    positions = x.shape[1:-1].numel()
    assert factors.activations.shape == (5, positions, 1, 4)
    assert factors.output_grads.shape == (5, positions, 1, 3)
    assert factors.num_parameters == 15


@pytest.mark.parametrize(("weight", "bias", "number"), [(True, True, 15), (True, False, 12), (False, True, 3)])
def test_frozen_parameters_of_a_linear_drop_out(weight, bias, number):
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    layer.weight.requires_grad_(weight)
    layer.bias.requires_grad_(bias)
    assert linear.linear_factors(layer, x, layer(x)).num_parameters == number
