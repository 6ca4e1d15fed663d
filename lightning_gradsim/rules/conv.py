"""Rules for ``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d`` with every stride, dilation, group and padding form."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gradsim.factors import Factors, OuterFactors, PatchFactors, Window
from lightning_gradsim.rules.registry import register_rule


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv_factors(layer: nn.Module, activations: Tensor, output_grads: Tensor) -> Factors:
    """Every output pixel is a shared position; its input features are the patch under the kernel.

    Args:
        layer: A convolution.
        activations: Its input, ``[n, channels, *pixels]``.
        output_grads: Gradients by its output, ``[n, channels, *pixels]``.

    Returns:
        Factors with the layer's channel groups; a frozen weight or bias drops out.
    """
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))  # the registry hands over nothing else
    bias = layer.bias is not None and layer.bias.requires_grad
    if not layer.weight.requires_grad:
        grads = output_grads.flatten(2).unflatten(1, (layer.groups, -1))  # [n, g, o, t]
        return OuterFactors(None, grads.permute(0, 3, 1, 2), bias)
    images, padding = _pad(layer, activations)
    window = Window(layer.kernel_size, layer.stride, padding, layer.dilation, layer.groups)
    return PatchFactors(images, output_grads, window, bias)


def _pad(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, activations: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The input, padded where its padding is more than equally many zeros on both sides, and those zeros."""
    none = (0,) * len(layer.kernel_size)
    if layer.padding == "valid":
        return activations, none
    if not isinstance(layer.padding, str):
        sides = [(size, size) for size in layer.padding]
    else:
        spans = [step * (size - 1) for step, size in zip(layer.dilation, layer.kernel_size, strict=True)]
        sides = [(span // 2, span - span // 2) for span in spans]
    if layer.padding_mode == "zeros" and all(before == after for before, after in sides):
        return activations, tuple(before for before, _ in sides)
    flat = [size for pair in reversed(sides) for size in pair]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(activations, flat, mode=mode), none
