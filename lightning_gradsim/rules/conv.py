"""Rules for ``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d`` with every stride, dilation, group and padding form."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gradsim.factors import OuterFactors
from lightning_gradsim.rules.registry import register_rule


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv_factors(layer: nn.Module, activations: Tensor, output_grads: Tensor) -> OuterFactors:
    """Every output pixel is a shared position; its input features are the patch under the kernel.

    Args:
        layer: A convolution.
        activations: Its input, ``[n, channels, *pixels]``.
        output_grads: Gradients by its output, ``[n, channels, *pixels]``.

    Returns:
        Factors with the layer's channel groups; a frozen weight or bias drops out.
    """
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))  # the registry hands over nothing else
    grads = output_grads.flatten(2).unflatten(1, (layer.groups, -1))  # [n, g, o, t]
    return OuterFactors(
        _patches(layer, activations) if layer.weight.requires_grad else None,
        grads.permute(0, 3, 1, 2),
        bias=layer.bias is not None and layer.bias.requires_grad,
    )


def _patches(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, activations: Tensor) -> Tensor:
    """Patches ``[n, t, g, i]``, the input features in the order of the layer's weight."""
    num_dims = len(layer.kernel_size)
    patches = _pad(layer, activations)
    for dim, (size, step, dilation) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True), 2):
        windows = patches.unfold(dim, dilation * (size - 1) + 1, step)
        patches = windows[..., ::dilation]
    patches = patches.unflatten(1, (layer.groups, -1))  # [n, g, c, *out, *kernel]
    out = range(3, 3 + num_dims)
    kernel = range(3 + num_dims, 3 + 2 * num_dims)
    patches = patches.permute(0, *out, 1, 2, *kernel)  # [n, *out, g, c, *kernel]
    unfolded: Tensor = patches.flatten(2 + num_dims).flatten(1, num_dims)
    return unfolded


def _pad(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, activations: Tensor) -> Tensor:
    sides: list[int] = []
    for dim in reversed(range(len(layer.kernel_size))):
        if isinstance(layer.padding, str):
            total = layer.dilation[dim] * (layer.kernel_size[dim] - 1) if layer.padding == "same" else 0
            sides += [total // 2, total - total // 2]
        else:
            sides += [layer.padding[dim], layer.padding[dim]]
    if not any(sides):
        return activations
    return F.pad(activations, sides, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)
