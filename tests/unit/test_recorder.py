"""Half precision: small gradients survive, large ones do not overflow."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_gradsim.factors import squared_norms
from lightning_gradsim.wrapper import PerSampleGradients

BATCH, FEATURES, CLASSES = 4, 6, 3


def norms(module, x, y, scale, context=None):
    def losses(batch):
        outputs = module(batch[0]).float() if context is None else autocast_outputs(module, batch[0], context)
        return scale * F.cross_entropy(outputs, batch[1], reduction="none")

    with PerSampleGradients(module, "all") as gradients:
        for _ in range(2):  # with the whole graph, and without the part below the lowest layer
            found = gradients.compute(losses, (x, y))
        return sum(squared_norms(factors.to(dtype=torch.float64)) for factors in found.values())


def autocast_outputs(module, x, dtype):
    with torch.autocast("cpu", dtype=dtype):
        return module(x).float()


@pytest.fixture
def module():
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).eval()


@pytest.fixture
def data():
    return torch.randn(BATCH, FEATURES).half().float(), torch.randint(CLASSES, (BATCH,))


@pytest.mark.parametrize("scale", [1e-9, 1e-6, 1e-3, 1.0, 1e3, 1e6], ids=lambda scale: f"{scale:g}")
def test_float16_gradients_of_any_size(module, data, scale):
    """At 1e-9 gradients lie below the smallest float16 number, at 1e6 above the largest."""
    x, y = data
    module.half().float()
    expected = norms(module, x, y, scale)
    found = norms(module.half(), x.half(), y, scale)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0)


def test_float16_gradients_of_different_size_in_one_batch(module, data):
    x, y = data
    scale = torch.tensor([1e-8, 1e-3, 1.0, 1e5])
    module.half().float()
    expected = norms(module, x, y, scale)
    found = norms(module.half(), x.half(), y, scale)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0)


def test_float16_without_a_gradient(module, data):
    """Ignored samples: nothing to scale."""
    x, y = data
    found = norms(module.half(), x.half(), y, torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert ((found == 0) == torch.tensor([True, False, True, False])).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(module, data, dtype):
    """bfloat16 keeps 8 bits of each factor, float16 keeps 11."""
    x, y = data
    expected = norms(module, x, y, 1.0)
    torch.testing.assert_close(norms(module, x, y, 1.0, dtype), expected, rtol=0.1, atol=0)
