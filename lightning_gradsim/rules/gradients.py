"""From the factors of a layer to per-sample gradients by parameter."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_gradsim.factors import Factors, IndexedFactors


def split_gradients(layer: nn.Module, factors: Factors) -> dict[str, Tensor]:
    """Materialised per-sample gradients of a layer's own trainable parameters.

    Args:
        layer: The layer.
        factors: Its factors, ``n`` samples.

    Returns:
        Gradients ``[n, *shape]`` by the name of the parameter in the layer.
    """
    parameters = {
        name: parameter for name, parameter in layer.named_parameters(recurse=False) if parameter.requires_grad
    }
    if isinstance(factors, IndexedFactors):
        return {name: factors.materialise() for name in parameters}
    gradients = factors.gradients
    if factors.activations is None:
        parts = gradients.flatten(1).split([parameter.numel() for parameter in parameters.values()], dim=1)
    else:
        inputs = factors.activations.shape[-1]
        parts = (gradients[..., :inputs], gradients[..., inputs:])
    return {
        name: part.reshape(len(gradients), *parameter.shape)
        for (name, parameter), part in zip(parameters.items(), parts, strict=False)
    }
