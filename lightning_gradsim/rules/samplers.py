"""Layers without a rule of ours for which Opacus has one that is right."""

from __future__ import annotations

import logging

from torch import Tensor, nn

from lightning_gradsim.factors import OuterFactors
from lightning_gradsim.rules.registry import Rule


def find_sampler(layer: nn.Module) -> Rule | None:
    """The sampler of Opacus for a layer, if it is known to be right for the layer's type and settings.

    The list is short on purpose: samplers of Opacus are silently wrong for some settings (padding modes, running
    statistics, ``padding_idx``), so only what the tests compare with autograd is on it.

    Args:
        layer: The layer.

    Returns:
        A rule, or ``None``.
    """
    # With running statistics Opacus normalises by the sample's own all the same.
    if type(layer) in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d) and not layer.track_running_stats:
        return sampler_factors
    return None


def sampler_factors(layer: nn.Module, activations: Tensor, output_grads: Tensor) -> OuterFactors:
    """Per-sample gradients by Opacus' sampler for the layer's type.

    Args:
        layer: A layer that ``find_sampler`` knows.
        activations: Its input, first dimension ``n``.
        output_grads: Gradients by its output, first dimension ``n``.

    Returns:
        Materialised gradients, one value a trainable parameter.

    Source:
        Yousefpour et al. (2021), arXiv:2109.12298.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    from opacus.grad_sample import GradSampleModule  # here, because importing it adds a handler to the root logger

    root.handlers[:] = handlers
    root.setLevel(level)
    gradients = GradSampleModule.GRAD_SAMPLERS[type(layer)](layer, [activations], output_grads)
    return OuterFactors.from_gradients([gradients[p] for p in layer.parameters() if p.requires_grad])
