"""Per-sample gradients of one layer as factors, and exact products of them that need no gradient.

Canonical layout, for every kind of layer: activations ``[n, t, g, i]`` and output grads ``[n, t, g, o]``.

Index key: ``n`` / ``m`` sample (training / query), ``t`` / ``s`` shared position (token, pixel; 1 if there is none),
``g`` channel group, ``i`` input feature, ``o`` output feature.

The gradient of sample ``n`` for the layer's weight is ``sum_t output_grads[n, t, g, o] * activations[n, t, g, i]``.
"""

from lightning_gradsim.factors.indexed import IndexedFactors
from lightning_gradsim.factors.outer import OuterFactors
from lightning_gradsim.factors.patches import PatchFactors, Window
from lightning_gradsim.factors.products import (
    MAX_INTERMEDIATE,
    Factors,
    block_elements,
    concatenate_labels,
    concatenate_layers,
    concatenate_positions,
    concatenate_samples,
    count_inputs,
    dot,
    dot_and_squared_norms,
    is_flat,
    product_cost,
    squared_norms,
    uses_gram,
)

__all__ = [
    "MAX_INTERMEDIATE",
    "Factors",
    "IndexedFactors",
    "OuterFactors",
    "PatchFactors",
    "Window",
    "block_elements",
    "concatenate_labels",
    "concatenate_layers",
    "concatenate_positions",
    "concatenate_samples",
    "count_inputs",
    "dot",
    "dot_and_squared_norms",
    "is_flat",
    "product_cost",
    "squared_norms",
    "uses_gram",
]
