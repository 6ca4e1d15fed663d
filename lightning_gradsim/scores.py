"""Similarities of gradients from their dot products and norms."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Similarity = Literal["dot", "cosine", "asymmetric", "influence"]
SIMILARITIES: tuple[str, ...] = get_args(Similarity)


def compute_similarity(
    similarity: Similarity,
    products: Tensor,
    query_squared_norms: Tensor,
    train_squared_norms: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """One of the similarities of design.md for every pair of a query and a training sample.

    Args:
        similarity: ``dot``; ``cosine`` = dot over both norms; ``asymmetric`` = dot over the squared training norm;
            ``influence`` = dot of the query gradient preconditioned by the damped curvature.
        products: Dot products of the gradients, ``[M, B]``; for ``influence`` those of preconditioned queries.
        query_squared_norms: ``[M]``, >= 0.
        train_squared_norms: ``[B]``, >= 0.
        out: Where to write cosines, ``[M, B]``; other similarities don't look at it.

    Returns:
        Similarities ``[M, B]`` in the dtype of ``products``: loss² per parameter² for ``dot``, unitless otherwise;
        ``cosine`` lies in [-1, 1]. A zero gradient is similar to nothing: 0.

    Source:
        ``dot``: Pruthi et al. (2020), TracIn, arXiv:2002.08484; ``cosine`` and ``asymmetric``: Charpiat et al. (2019),
        "Input similarity from the neural network perspective", arXiv:2102.05262; ``influence``: Koh and Liang (2017),
        arXiv:1703.04730, with the curvature of Martens and Grosse (2015), arXiv:1503.05671.
    """
    if similarity in {"dot", "influence"}:
        return products
    if similarity == "asymmetric":
        return products * _reciprocal(train_squared_norms)
    # The roots are taken apart: the product of two small squared norms underflows in float32.
    cosines = torch.mul(products, _reciprocal(query_squared_norms.sqrt())[:, None], out=out)
    return cosines.mul_(_reciprocal(train_squared_norms.sqrt())).clamp_(-1, 1)


def _reciprocal(values: Tensor) -> Tensor:
    return torch.where(values > 0, values.reciprocal(), 0)
