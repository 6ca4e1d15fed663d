"""Per-sample gradients of an embedding: output gradients with the rows that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class IndexedFactors:
    """The gradients of a table of which every position uses one row.

    The gradient of sample ``n`` has ``sum_t output_grads[n, t]`` in row ``indices[n, t]`` and is zero elsewhere. It is
    the contraction with one-hot activations, which are never built.

    Attributes:
        indices: Rows used, int64 ``[n, t]``.
        output_grads: Gradients of each sample's loss by the layer's output, ``[n, t, o]``.
        num_rows: Rows of the table.
    """

    indices: Tensor
    output_grads: Tensor
    num_rows: int

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
        """Elements of indices and output gradients."""
        return self.output_grads.numel() + self.indices.numel()

    @property
    def num_parameters(self) -> int:
        """Number of parameters that the gradient covers."""
        return self.num_rows * self.output_grads.shape[2]

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The rows that any sample uses, rising, int64 ``[r]``, and every sample's gradient for them, ``[r, n, o]``."""
        used, places = self.indices.unique(return_inverse=True)
        grads = self.output_grads.new_zeros(len(used), self.num_samples, self.output_grads.shape[2])
        samples = torch.arange(self.num_samples, device=places.device)[:, None].expand_as(places)
        return used, grads.index_put_((places, samples), self.output_grads, accumulate=True)

    def materialise(self) -> Tensor:
        """Dense gradients ``[n, rows, o]``."""
        used, grads = self.rows
        dense = grads.new_zeros(self.num_samples, self.num_rows, grads.shape[2])
        dense[:, used] = grads.transpose(0, 1)
        return dense

    def samples(self, index: slice | Tensor) -> IndexedFactors:
        """The factors of some samples: a slice (no copy) or indices, int64."""
        return IndexedFactors(self.indices[index], self.output_grads[index], self.num_rows)

    def summed(self) -> IndexedFactors:
        """The sum over samples, as one sample."""
        return IndexedFactors(self.indices.reshape(1, -1), self.output_grads.flatten(0, 1)[None], self.num_rows)

    def unused(self, num_samples: int) -> IndexedFactors:
        """Factors of the same layer for samples that did not pass through it: no positions, hence zero gradients."""
        grads = self.output_grads.new_zeros(num_samples, 0, self.output_grads.shape[2])
        return IndexedFactors(self.indices.new_zeros(num_samples, 0), grads, self.num_rows)

    def to(self, *, dtype: torch.dtype) -> IndexedFactors:
        """The same factors in another dtype; themselves if they have it."""
        if self.output_grads.dtype == dtype:
            return self
        return IndexedFactors(self.indices, self.output_grads.to(dtype), self.num_rows)

    @staticmethod
    def concatenate_positions(parts: Sequence[IndexedFactors]) -> IndexedFactors:
        """Several calls of one layer side by side along ``t``."""
        indices = torch.cat([part.indices for part in parts], dim=1)
        return IndexedFactors(indices, torch.cat([part.output_grads for part in parts], dim=1), parts[0].num_rows)

    @staticmethod
    def concatenate_samples(parts: Sequence[IndexedFactors]) -> IndexedFactors:
        """Several batches of one layer, in order; shorter ones are padded with zero positions, which is exact."""
        length = max(part.num_positions for part in parts)
        indices = [F.pad(part.indices, (0, length - part.num_positions)) for part in parts]
        grads = [F.pad(part.output_grads, (0, 0, 0, length - part.num_positions)) for part in parts]
        return IndexedFactors(torch.cat(indices), torch.cat(grads), parts[0].num_rows)


def indexed_dot(queries: IndexedFactors, train: IndexedFactors, max_intermediate: int) -> Tensor:
    """Dot products ``[m, n]`` over the rows that both touch: ``O(m n s o)`` time at most.

    Args:
        queries: Factors of ``m`` samples; their gradients by row are computed once and kept.
        train: Factors of ``n`` samples of the same layer.
        max_intermediate: Elements that one intermediate tensor may have.

    Returns:
        Products, shape ``[m, n]``.
    """
    used, grads = queries.rows
    flat = train.indices.flatten()
    place = torch.searchsorted(used, flat).clamp(max=max(len(used) - 1, 0))
    shared = (used[place] == flat).nonzero().flatten() if len(used) else flat[:0]
    samples = torch.div(shared, max(train.num_positions, 1), rounding_mode="floor")
    products = grads.new_zeros(train.num_samples, queries.num_samples)
    chunk = max(1, max_intermediate // max(1, queries.num_samples * grads.shape[2]))
    for part in shared.split(chunk):
        by_query = grads[place[part]] @ train.output_grads.flatten(0, 1)[part][:, :, None]  # [p, m, 1]
        products.index_add_(0, samples[: len(part)], by_query[..., 0])
        samples = samples[len(part) :]
    return products.T


def indexed_squared_norms(factors: IndexedFactors) -> Tensor:
    """Squared norms ``[n]``: positions of one sample that use the same row are summed first."""
    used, places = factors.indices.unique(return_inverse=True)
    samples = torch.arange(factors.num_samples, device=places.device)[:, None]
    keys, inverse = (samples * max(len(used), 1) + places).flatten().unique(return_inverse=True)
    grads = factors.output_grads.new_zeros(len(keys), factors.output_grads.shape[2])
    grads.index_add_(0, inverse, factors.output_grads.flatten(0, 1))
    norms = grads.new_zeros(factors.num_samples)
    owners = torch.div(keys, max(len(used), 1), rounding_mode="floor")
    return norms.index_add_(0, owners, grads.square().sum(1))
