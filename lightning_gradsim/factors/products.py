"""Products and norms of per-sample gradients, by the way that takes the fewest operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gradsim.factors.indexed import IndexedFactors, indexed_dot, indexed_squared_norms
from lightning_gradsim.factors.outer import OuterFactors

Factors = OuterFactors | IndexedFactors
"""What a rule may return."""

MAX_INTERMEDIATE = 2**24
"""Elements of one intermediate tensor (64 MiB in float32): larger products are computed in chunks of samples."""


def concatenate_positions(parts: Sequence[Factors]) -> Factors:
    """Factors of a layer that was called several times: the calls side by side along ``t``.

    Contracting over the joined ``t`` sums the calls' gradients, so all cross terms come out right by themselves.

    Args:
        parts: One entry per call, all for the same samples.

    Returns:
        Factors with ``t`` the sum of the parts' positions.
    """
    return parts[0] if len(parts) == 1 else type(parts[0]).concatenate_positions(parts)  # type: ignore[arg-type]


def concatenate_samples(parts: Sequence[Factors]) -> Factors:
    """Factors of several batches of one layer, in order; shorter ones are padded with zero positions.

    A position whose output gradient is zero adds nothing to any product, so padding is exact.

    Args:
        parts: One entry per batch, all of the same layer.

    Returns:
        Factors with ``n`` the sum of the parts' samples and ``t`` the longest of theirs.
    """
    return parts[0] if len(parts) == 1 else type(parts[0]).concatenate_samples(parts)  # type: ignore[arg-type]


def dot(queries: Factors, train: Factors, *, max_intermediate: int = MAX_INTERMEDIATE) -> Tensor:
    """Dot products of the per-sample gradients of two sets of samples.

    By the Gram identity ``<G_m, G_n> = sum_ts (a_mt . a_ns)(b_mt . b_ns)``, or by materialised gradients, whichever
    takes fewer operations: ``O(m n t s g (i + o))`` against ``O(n s g i o + m n g i o)``.

    Args:
        queries: Factors of ``m`` samples. Their materialised gradients are computed once and kept.
        train: Factors of ``n`` samples of the same layer.
        max_intermediate: Elements that one intermediate tensor may have; larger products go in chunks of ``n``.

    Returns:
        Products, shape ``[m, n]``, in the dtype of the factors (loss² per parameter²).

    Source:
        Goodfellow (2015), "Efficient per-example gradient computations", arXiv:1510.01799, for the norms.
    """
    if isinstance(queries, IndexedFactors) or isinstance(train, IndexedFactors):
        assert isinstance(queries, IndexedFactors)  # one layer has one kind of factors
        assert isinstance(train, IndexedFactors)
        return indexed_dot(queries, train, max_intermediate)
    if uses_gram(queries, train):
        per_sample = queries.num_samples * queries.num_positions * train.num_positions * train.output_grads.shape[2]
        product = _gram
    else:
        per_sample = train.num_parameters
        product = _materialised
    chunk = max(1, max_intermediate // max(1, per_sample))
    if chunk >= train.num_samples:
        return product(queries, train)
    starts = range(0, train.num_samples, chunk)
    return torch.cat([product(queries, train.samples(slice(start, start + chunk))) for start in starts], dim=1)


def squared_norms(factors: Factors, *, max_intermediate: int = MAX_INTERMEDIATE) -> Tensor:
    """Squared norms of the per-sample gradients.

    Args:
        factors: Factors of ``n`` samples.
        max_intermediate: Elements that one intermediate tensor may have; larger ones go in chunks of ``n``.

    Returns:
        Squared norms, shape ``[n]``, >= 0, in the dtype of the factors (loss² per parameter²).

    Source:
        Goodfellow (2015), arXiv:1510.01799; over positions as in Li et al. (2022), arXiv:2110.05679, section 4.
    """
    if isinstance(factors, IndexedFactors):
        return indexed_squared_norms(factors)
    positions, groups, outputs = factors.output_grads.shape[1:]
    inputs = factors.num_inputs
    if positions == 1:
        grads = factors.output_grads[:, 0]  # [n, g, o]
        scale: Tensor | int = int(factors.bias)
        if factors.activations is not None:
            scale = factors.activations[:, 0].square().sum(-1) + int(factors.bias)  # [n, g]
        return (grads.square().sum(-1) * scale).sum(-1)
    gram = positions * (inputs + outputs) < inputs * outputs
    per_sample = groups * positions**2 if gram else factors.num_parameters
    chunk = max(1, max_intermediate // max(1, per_sample))
    norms = []
    for start in range(0, max(1, factors.num_samples), chunk):
        part = factors.samples(slice(start, start + chunk))
        norms.append(_gram_norms(part) if gram else part.gradients.square().sum((1, 2, 3)))
    return torch.cat(norms)


def uses_gram(queries: OuterFactors, train: OuterFactors) -> bool:
    """Whether the Gram identity takes fewer operations than materialising for these sizes.

    Args:
        queries: Factors of ``m`` samples.
        train: Factors of ``n`` samples of the same layer.

    Returns:
        ``True`` for ``gram``, ``False`` for ``materialise``.
    """
    outputs, inputs = train.output_grads.shape[-1], train.num_inputs
    pairs = queries.num_samples * train.num_samples
    gram = pairs * queries.num_positions * train.num_positions * (inputs + outputs)
    materialise = (train.num_samples * train.num_positions + pairs) * inputs * outputs
    return gram <= materialise


def _gram(queries: OuterFactors, train: OuterFactors) -> Tensor:
    product = _pairs(queries.output_grads, train.output_grads)  # [g, m t, n s]
    if queries.activations is not None and train.activations is not None:
        inputs = _pairs(queries.activations, train.activations)
        product = product * (inputs + 1 if queries.bias else inputs)
    shape = (queries.num_samples, queries.num_positions, train.num_samples, train.num_positions)
    if product.shape[0] == shape[1] == shape[3] == 1:
        return product[0]
    return product.sum(0).view(shape).sum((1, 3))


def _pairs(left: Tensor, right: Tensor) -> Tensor:
    rows = left.permute(2, 0, 1, 3).flatten(1, 2)  # [g, m t, f]
    columns = right.permute(2, 0, 1, 3).flatten(1, 2)  # [g, n s, f]
    return rows @ columns.transpose(1, 2)


def _materialised(queries: OuterFactors, train: OuterFactors) -> Tensor:
    return queries.gradients.flatten(1) @ train.gradients.flatten(1).T


def _gram_norms(factors: OuterFactors) -> Tensor:
    grads = factors.output_grads.transpose(1, 2)  # [n, g, t, o]
    product = grads @ grads.transpose(2, 3)
    if factors.activations is not None:
        inputs = factors.activations.transpose(1, 2)
        inputs = inputs @ inputs.transpose(2, 3)
        product = product * (inputs + 1 if factors.bias else inputs)
    return product.sum((1, 2, 3))
