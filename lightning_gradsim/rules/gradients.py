"""Between the factors of a layer and per-sample gradients by parameter."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor, nn

from lightning_gradsim.factors import Factors, IndexedFactors, OuterFactors, PatchFactors


def split_gradients(layer: nn.Module, factors: Factors, names: Sequence[str]) -> dict[str, Tensor]:
    """Materialised per-sample gradients of a layer's parameters.

    Args:
        layer: The layer.
        factors: Its factors, ``n`` samples.
        names: The parameters in the factors, by their names in the layer, in the order of the factors.

    Returns:
        Gradients ``[n, *shape]`` by name.
    """
    parameters = dict(layer.named_parameters())
    if isinstance(factors, IndexedFactors):
        return {name: factors.materialise() for name in names}
    gradients = factors.gradients
    if factors.activations is None:
        parts = gradients.flatten(1).split([parameters[name].numel() for name in names], dim=1)
    else:
        inputs = factors.activations.shape[-1]
        parts = (gradients[..., :inputs], gradients[..., inputs:])
    return {
        name: part.reshape(len(gradients), *parameters[name].shape) for name, part in zip(names, parts, strict=False)
    }


def keep_parameters(layer: nn.Module, factors: Factors, names: Sequence[str], kept: Collection[str]) -> Factors:
    """The factors of some of a layer's parameters.

    Args:
        layer: The layer.
        factors: Its factors.
        names: The parameters in the factors, by their names in the layer, in the order of the factors.
        kept: Which of them to keep.

    Returns:
        Factors as if the other parameters were frozen.
    """
    if len(kept) == len(names) or isinstance(factors, IndexedFactors):
        return factors
    if factors.activations is None:
        gradients = split_gradients(layer, factors, names)
        return OuterFactors.from_gradients([gradients[name] for name in names if name in kept])
    # Weight and bias: one of them goes.
    has_bias = names[-1] in kept
    if isinstance(factors, PatchFactors) and not has_bias:
        return replace(factors, bias=False)
    return OuterFactors(None if has_bias else factors.activations, factors.output_grads, bias=has_bias)
