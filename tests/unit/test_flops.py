"""Operations as counted by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_gradsim.flops import count_flops


def test_a_product():
    layer, x = nn.Linear(5, 7), torch.randn(3, 5)
    assert count_flops(lambda: layer(x)) == 2 * 3 * 5 * 7


def test_a_product_in_place():
    total, left, right = torch.zeros(3, 7), torch.randn(3, 5), torch.randn(5, 7)
    assert count_flops(lambda: total.addmm_(left, right)) == 2 * 3 * 5 * 7


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention(is_causal):
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16)
    flops = count_flops(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal))
    assert flops == 2 * 2 * (2 * 4) * 8 * 8 * 16  # two products of every query with every key


def test_the_backward_of_attention():
    q, k, v = (torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3))
    flops = count_flops(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward())
    assert flops == (2 + 5) * 2 * (2 * 4) * 8 * 8 * 16


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_convolutions(kind, groups):
    layer, x = kind(4, 6, 3, groups=groups), torch.randn(2, 4, 8, 8, requires_grad=True)
    forward = 2 * 2 * 4 * 6 // groups * 9 * (36 if kind is nn.Conv2d else 64)
    assert count_flops(lambda: layer(x)) == forward
    assert count_flops(lambda: layer(x).sum().backward()) == 3 * forward
