"""Rules for normalisation layers whose scale and shift act entry by entry."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gradsim.errors import SampleMixingError
from lightning_gradsim.factors import OuterFactors
from lightning_gradsim.rules.registry import register_rule


@register_rule(nn.LayerNorm, nn.RMSNorm)
def layer_norm_factors(layer: nn.Module, activations: Tensor, output_grads: Tensor) -> OuterFactors:
    """The normalised input scales the output gradient; positions before the normalised dimensions are summed.

    Args:
        layer: An ``nn.LayerNorm`` or ``nn.RMSNorm``.
        activations: Its input, ``[n, ..., *normalized_shape]``.
        output_grads: Gradients by its output, of the same shape.

    Returns:
        Materialised gradients, one value a trainable parameter.
    """
    assert isinstance(layer, (nn.LayerNorm, nn.RMSNorm))
    shape = list(layer.normalized_shape)
    if isinstance(layer, nn.RMSNorm):
        normalised = F.rms_norm(activations, shape, eps=layer.eps)
    else:
        normalised = F.layer_norm(activations, shape, eps=layer.eps)
    return _affine(layer, normalised, output_grads, summed=range(1, activations.ndim - len(shape)))


@register_rule(nn.GroupNorm)
def group_norm_factors(layer: nn.Module, activations: Tensor, output_grads: Tensor) -> OuterFactors:
    """One scale and shift a channel; pixels are summed.

    Args:
        layer: An ``nn.GroupNorm``.
        activations: Its input, ``[n, channels, ...]``.
        output_grads: Gradients by its output, of the same shape.

    Returns:
        Materialised gradients, one value a trainable parameter.
    """
    assert isinstance(layer, nn.GroupNorm)
    normalised = F.group_norm(activations, layer.num_groups, eps=layer.eps)
    return _affine(layer, normalised, output_grads, summed=range(2, activations.ndim))


@register_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm_factors(layer: nn.Module, activations: Tensor, output_grads: Tensor) -> OuterFactors:
    """In eval mode the running statistics are constants, and samples stay apart.

    Args:
        layer: A batch normalisation.
        activations: Its input, ``[n, channels, ...]``.
        output_grads: Gradients by its output, of the same shape.

    Returns:
        Materialised gradients, one value a trainable parameter.

    Raises:
        SampleMixingError: If the layer normalises by the statistics of the batch.
    """
    assert isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
    mean, variance = layer.running_mean, layer.running_var
    if layer.training or mean is None or variance is None:
        raise SampleMixingError(
            f"`{type(layer).__name__}` normalises by the statistics of the batch, so a sample has no gradient of its "
            "own. Put it into eval mode, and keep `track_running_stats=True`."
        )
    normalised = F.batch_norm(activations, mean, variance, eps=layer.eps)
    return _affine(layer, normalised, output_grads, summed=range(2, activations.ndim))


def _affine(layer: nn.Module, normalised: Tensor, output_grads: Tensor, summed: range) -> OuterFactors:
    trainable = {name for name, parameter in layer.named_parameters() if parameter.requires_grad}
    parts = []
    if "weight" in trainable:
        parts.append(_sum(output_grads * normalised, summed))
    if "bias" in trainable:
        parts.append(_sum(output_grads, summed))
    return OuterFactors.from_gradients(parts)


def _sum(values: Tensor, summed: range) -> Tensor:
    return (values.sum(tuple(summed)) if len(summed) else values).flatten(1)
