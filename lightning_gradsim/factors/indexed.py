"""Per-sample gradients of an embedding: output gradients with the rows that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Entries:
    """Rows of gradients that are not zero.

    Attributes:
        rows: Row of the table, int64 ``[e]``, rising.
        samples: Sample, int64 ``[e]``.
        grads: Gradient of this sample for this row, ``[e, o]``.
    """

    rows: Tensor
    samples: Tensor
    grads: Tensor


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
    def entries(self) -> Entries:
        """What is not zero, sorted by row and then by sample."""
        count = max(self.num_samples, 1)
        samples = torch.arange(self.num_samples, device=self.indices.device)[:, None]
        keys, places = (self.indices * count + samples).flatten().unique(return_inverse=True)
        # Positions of one sample that use the same row are summed.
        grads = self.output_grads.new_zeros(len(keys), self.output_grads.shape[2])
        grads.index_add_(0, places, self.output_grads.flatten(0, 1))
        return Entries(torch.div(keys, count, rounding_mode="floor"), keys % count, grads)

    def materialise(self) -> Tensor:
        """Dense gradients ``[n, rows, o]``."""
        entries = self.entries
        dense = entries.grads.new_zeros(self.num_samples, self.num_rows, entries.grads.shape[1])
        dense[entries.samples, entries.rows] = entries.grads
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
        queries: Factors of ``m`` samples; their entries are sorted once and kept.
        train: Factors of ``n`` samples of the same layer.
        max_intermediate: Elements that one intermediate tensor may have.

    Returns:
        Products, shape ``[m, n]``.
    """
    ours, theirs = queries.entries, train.entries
    first = torch.searchsorted(ours.rows, theirs.rows)
    counts = torch.searchsorted(ours.rows, theirs.rows, right=True) - first
    products = ours.grads.new_zeros(queries.num_samples * train.num_samples)
    shared = counts.nonzero().flatten()
    # A row has at most one entry of every query.
    chunk = max(1, max_intermediate // max(1, queries.num_samples * ours.grads.shape[1]))
    for part in shared.split(chunk):
        right = part.repeat_interleave(counts[part])  # every entry of `theirs`, once for each of `ours` in its row
        starts = counts[part].cumsum(0) - counts[part]
        left = torch.arange(len(right), device=right.device) + (first[part] - starts).repeat_interleave(counts[part])
        values = (ours.grads[left] * theirs.grads[right]).sum(1)
        products.index_add_(0, ours.samples[left] * train.num_samples + theirs.samples[right], values)
    return products.view(queries.num_samples, train.num_samples)


def indexed_squared_norms(factors: IndexedFactors) -> Tensor:
    """Squared norms ``[n]``: positions of one sample that use the same row are summed first."""
    entries = factors.entries
    norms = entries.grads.new_zeros(factors.num_samples)
    return norms.index_add_(0, entries.samples, entries.grads.square().sum(1))
