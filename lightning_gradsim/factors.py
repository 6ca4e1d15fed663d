"""Per-sample gradients of one layer as factors, and exact products of them that need no gradient.

Canonical layout, for every kind of layer: activations ``[n, t, g, i]`` and output grads ``[n, t, g, o]``.

Index key: ``n`` / ``m`` sample (training / query), ``t`` / ``s`` shared position (token, pixel; 1 if there is none),
``g`` channel group, ``i`` input feature, ``o`` output feature.

The gradient of sample ``n`` for the layer's weight is ``sum_t output_grads[n, t, g, o] * activations[n, t, g, i]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_INTERMEDIATE = 2**24
"""Elements of one intermediate tensor (64 MiB in float32): larger products are computed in chunks of samples."""


@dataclass(frozen=True, eq=False)
class OuterFactors:
    """The per-sample gradients of one layer, as the pair whose contraction over ``t`` they are.

    Attributes:
        activations: Layer inputs ``[n, t, g, i]``, or ``None`` where the weight is frozen or absent.
        output_grads: Gradients of each sample's loss by the layer's output, ``[n, t, g, o]``.
        bias: Whether a trainable bias takes part; it acts as one more input feature that is always 1.
    """

    activations: Tensor | None
    output_grads: Tensor
    bias: bool

    @property
    def num_samples(self) -> int:
        """Number of samples ``n``."""
        return self.output_grads.shape[0]

    @property
    def num_positions(self) -> int:
        """Number of shared positions ``t``."""
        return self.output_grads.shape[1]

    @property
    def num_elements(self) -> int:
        """Elements of both factors."""
        return self.output_grads.numel() + (0 if self.activations is None else self.activations.numel())

    @property
    def num_parameters(self) -> int:
        """Number of parameters that the gradient covers."""
        _, _, groups, outputs = self.output_grads.shape
        return groups * outputs * self._num_inputs

    @property
    def _num_inputs(self) -> int:
        return (0 if self.activations is None else self.activations.shape[-1]) + self.bias

    @cached_property
    def gradients(self) -> Tensor:
        """Materialised per-sample gradients ``[n, g, o, i]``, the bias as the last ``i``; same dtype as the factors."""
        by_output = self.output_grads.permute(0, 2, 3, 1)  # [n, g, o, t]
        parts = []
        if self.activations is not None:
            parts.append(by_output @ self.activations.transpose(1, 2))
        if self.bias:
            parts.append(by_output.sum(-1, keepdim=True))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def samples(self, index: slice | Tensor) -> OuterFactors:
        """The factors of some samples: a slice (no copy) or indices, int64."""
        activations = None if self.activations is None else self.activations[index]
        return OuterFactors(activations, self.output_grads[index], self.bias)

    def unused(self, num_samples: int) -> OuterFactors:
        """Factors of the same layer for samples that did not pass through it: no positions, hence zero gradients."""
        groups, outputs = self.output_grads.shape[2:]
        activations = None
        if self.activations is not None:
            activations = self.activations.new_zeros(num_samples, 0, groups, self.activations.shape[-1])
        return OuterFactors(activations, self.output_grads.new_zeros(num_samples, 0, groups, outputs), self.bias)

    def to(self, *, dtype: torch.dtype) -> OuterFactors:
        """The same factors in another dtype; themselves if they have it."""
        if self.output_grads.dtype == dtype and (self.activations is None or self.activations.dtype == dtype):
            return self
        activations = None if self.activations is None else self.activations.to(dtype)
        return OuterFactors(activations, self.output_grads.to(dtype), self.bias)


def concatenate_positions(parts: Sequence[OuterFactors]) -> OuterFactors:
    """Factors of a layer that was called several times: the calls side by side along ``t``.

    Contracting over the joined ``t`` sums the calls' gradients, so all cross terms come out right by themselves.

    Args:
        parts: One entry per call, all for the same samples.

    Returns:
        Factors with ``t`` the sum of the parts' positions.
    """
    if len(parts) == 1:
        return parts[0]
    activations = [part.activations for part in parts if part.activations is not None]
    return OuterFactors(
        torch.cat(activations, dim=1) if activations else None,
        torch.cat([part.output_grads for part in parts], dim=1),
        parts[0].bias,
    )


def concatenate_samples(parts: Sequence[OuterFactors]) -> OuterFactors:
    """Factors of several batches of one layer, in order; shorter ones are padded with zero positions.

    A position whose output gradient is zero adds nothing to any product, so padding is exact.

    Args:
        parts: One entry per batch, all of the same layer.

    Returns:
        Factors with ``n`` the sum of the parts' samples and ``t`` the longest of theirs.
    """
    if len(parts) == 1:
        return parts[0]
    length = max(part.num_positions for part in parts)

    def pad(tensor: Tensor) -> Tensor:
        return F.pad(tensor, (0, 0, 0, 0, 0, length - tensor.shape[1]))

    activations = [pad(part.activations) for part in parts if part.activations is not None]
    return OuterFactors(
        torch.cat(activations) if activations else None,
        torch.cat([pad(part.output_grads) for part in parts]),
        parts[0].bias,
    )


def dot(queries: OuterFactors, train: OuterFactors, *, max_intermediate: int = MAX_INTERMEDIATE) -> Tensor:
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


def squared_norms(factors: OuterFactors, *, max_intermediate: int = MAX_INTERMEDIATE) -> Tensor:
    """Squared norms of the per-sample gradients.

    Args:
        factors: Factors of ``n`` samples.
        max_intermediate: Elements that one intermediate tensor may have; larger ones go in chunks of ``n``.

    Returns:
        Squared norms, shape ``[n]``, >= 0, in the dtype of the factors (loss² per parameter²).

    Source:
        Goodfellow (2015), arXiv:1510.01799; over positions as in Li et al. (2022), arXiv:2110.05679, section 4.
    """
    positions, groups, outputs = factors.output_grads.shape[1:]
    inputs = factors._num_inputs
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
    outputs, inputs = train.output_grads.shape[-1], train._num_inputs
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
