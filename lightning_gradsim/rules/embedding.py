"""Rule for ``nn.Embedding``."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_gradsim.errors import UnsupportedLayerError
from lightning_gradsim.factors import IndexedFactors
from lightning_gradsim.rules.registry import register_rule


@register_rule(nn.Embedding, parameters=("weight",))
def embedding_factors(layer: nn.Module, activations: Tensor, output_grads: Tensor) -> IndexedFactors:
    """Every index is a shared position that uses one row of the table.

    Args:
        layer: An ``nn.Embedding``.
        activations: Its input, indices ``[n, ...]``.
        output_grads: Gradients by its output, ``[n, ..., o]``.

    Returns:
        Factors by row; positions with ``padding_idx`` have no gradient.

    Raises:
        UnsupportedLayerError: If the layer scales gradients by the frequency of an index in the batch, or changes its
            weights in the forward.
    """
    assert isinstance(layer, nn.Embedding)  # the registry hands over nothing else
    if layer.scale_grad_by_freq or layer.max_norm is not None:
        raise UnsupportedLayerError(
            "`nn.Embedding` with `scale_grad_by_freq` makes a sample's gradient depend on its batch, and with "
            "`max_norm` changes its weights in every forward. Leave the layer out of `layers`, or switch both off."
        )
    indices = activations.unsqueeze(1).flatten(1)  # [n, t]
    grads = output_grads.reshape(*indices.shape, layer.embedding_dim)
    if layer.padding_idx is not None:
        grads = grads.masked_fill((indices == layer.padding_idx)[..., None], 0)
    return IndexedFactors(indices, grads, layer.num_embeddings)
