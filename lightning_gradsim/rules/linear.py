"""Rule for ``nn.Linear`` on inputs of any rank."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_gradsim.factors import OuterFactors
from lightning_gradsim.rules.registry import register_rule


@register_rule(nn.Linear)
def linear_factors(layer: nn.Module, activations: Tensor, output_grads: Tensor) -> OuterFactors:
    """Every position before the last dimension is shared: ``[n, ..., i]`` becomes ``[n, t, 1, i]``.

    Args:
        layer: An ``nn.Linear``.
        activations: Its input, ``[n, ..., i]``.
        output_grads: Gradients by its output, ``[n, ..., o]``.

    Returns:
        Factors with one channel group; a frozen weight or bias drops out.
    """
    assert isinstance(layer, nn.Linear)  # narrows the type: the registry hands over nothing else
    return OuterFactors(
        _positions(activations) if layer.weight.requires_grad else None,
        _positions(output_grads),
        bias=layer.bias is not None and layer.bias.requires_grad,  # type: ignore[redundant-expr]
    )


def _positions(values: Tensor) -> Tensor:
    return values.reshape(values.shape[0], values.shape[1:-1].numel(), 1, values.shape[-1])  # [n, t, 1, i]
