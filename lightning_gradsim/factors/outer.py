"""Per-sample gradients of one layer as a pair of factors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """A part of materialised per-sample gradients.

    Attributes:
        rows: Which samples.
        columns: Which parameters, in the order of ``flat``.
        gradients: Their gradients, ``[rows, columns]``.
    """

    rows: slice
    columns: slice
    gradients: Tensor

    def moved(self, by: int) -> Block:
        """The same block where the samples are those from ``by`` on."""
        return replace(self, rows=slice(self.rows.start + by, self.rows.stop + by))


class Materialisable(Protocol):
    """Factors whose gradients can be had in blocks."""

    @property
    def num_samples(self) -> int:
        """Number of samples ``n``."""
        ...

    @property
    def num_parameters(self) -> int:
        """Number of parameters ``p`` that the gradient covers."""
        ...

    def blocks(self, max_elements: int) -> Iterator[Block]:
        """Blocks that together are all gradients."""
        ...


def block_length(length: int, size: int, max_elements: int) -> int:
    """Entries of a block when a dimension is cut into equal ones: a small remainder would cost almost a block.

    Args:
        length: Entries of the dimension.
        size: Elements of an entry.
        max_elements: Elements of a block, exceeded by up to a half where that saves one.

    Returns:
        At least 1.
    """
    number = max(1, round(length * size / max(1, max_elements)))
    return max(1, -(-length // number))


def fill_flat(factors: Materialisable, like: Tensor, max_elements: int = 2**22) -> Tensor:
    """All materialised gradients ``[n, p]``.

    Args:
        factors: Factors of ``n`` samples.
        like: A tensor of the dtype and on the device of the gradients.
        max_elements: Elements of one block.

    Returns:
        The gradients of the weight, then those of the bias.
    """
    flat = like.new_empty(factors.num_samples, factors.num_parameters)
    for block in factors.blocks(max_elements):
        flat[block.rows, block.columns] = block.gradients
    return flat


@dataclass(frozen=True, eq=False)
class OuterFactors:
    """The per-sample gradients of one layer, as the pair whose contraction over ``t`` they are.

    Attributes:
        activations: Layer inputs ``[n, t, g, i]``, or ``None`` where the weight is frozen or absent.
        output_grads: Gradients of each sample's loss by the layer's output, ``[n, t, g, o]``.
        bias: Whether a trainable bias takes part; it acts as one more input feature that is always 1.
        rows: Where samples share inputs: the row of the activations that belongs to each sample, int64 ``[n]``.
    """

    activations: Tensor | None
    output_grads: Tensor
    bias: bool
    rows: Tensor | None = None

    @classmethod
    def from_gradients(cls, parts: Sequence[Tensor]) -> OuterFactors:
        """Per-sample gradients that are materialised already, in the same form.

        They act as the gradients of a bias: one shared position, one channel group, one output feature a parameter.

        Args:
            parts: Gradients by parameter, each ``[n, ...]``, in the order of the layer's parameters.

        Returns:
            Factors without activations.
        """
        flat = [part.flatten(1) for part in parts]
        return cls(None, (flat[0] if len(flat) == 1 else torch.cat(flat, dim=1))[:, None, None], bias=True)

    @property
    def num_samples(self) -> int:
        """Number of samples ``n``."""
        return self.output_grads.shape[0]

    @property
    def own_rows(self) -> Tensor:
        """Row of the activations of each sample, int64 ``[n]``."""
        return torch.arange(self.num_samples, device=self.output_grads.device) if self.rows is None else self.rows

    @property
    def own_activations(self) -> Tensor | None:
        """Layer inputs of each sample, ``[n, t, g, i]``: a copy where they are shared."""
        return self.activations if self.activations is None or self.rows is None else self.activations[self.rows]

    @property
    def num_positions(self) -> int:
        """Number of shared positions ``t``."""
        return self.output_grads.shape[1]

    @property
    def num_groups(self) -> int:
        """Number of channel groups ``g``."""
        return self.output_grads.shape[2]

    @property
    def num_outputs(self) -> int:
        """Number of output features ``o``."""
        return self.output_grads.shape[3]

    @property
    def outer(self) -> OuterFactors:
        """Themselves; other factors of an outer product are brought into this form."""
        return self

    @property
    def num_elements(self) -> int:
        """Elements of both factors."""
        return self.output_grads.numel() + (0 if self.activations is None else self.activations.numel())

    @property
    def num_parameters(self) -> int:
        """Number of parameters that the gradient covers."""
        _, _, groups, outputs = self.output_grads.shape
        return groups * outputs * self.num_inputs

    @property
    def num_inputs(self) -> int:
        """Number of input features, the ones of the bias included."""
        return (0 if self.activations is None else self.activations.shape[-1]) + self.bias

    @cached_property
    def gradients(self) -> Tensor:
        """Materialised per-sample gradients ``[n, g, o, i]``, the bias as the last ``i``; same dtype as the factors."""
        by_output = self.output_grads.permute(0, 2, 3, 1)  # [n, g, o, t]
        parts, activations = [], self.own_activations
        if activations is not None:
            parts.append(by_output @ activations.transpose(1, 2))
        if self.bias:
            parts.append(by_output.sum(-1, keepdim=True))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    @cached_property
    def flat(self) -> Tensor:
        """Materialised per-sample gradients ``[n, p]``: all of the weight, then all of the bias."""
        if self.activations is None and self.num_positions == 1:
            return self.output_grads.flatten(1)
        return fill_flat(self, self.output_grads)

    def blocks(self, max_elements: int) -> Iterator[Block]:
        """The parts of ``flat``, each with at most so many elements where a sample's gradient allows.

        A block holds some of the outputs of all samples rather than all outputs of some: what it is multiplied with is
        then read once.

        Args:
            max_elements: Elements that a block should have at most.

        Yields:
            The blocks.
        """
        rows, weights, all_inputs = slice(0, self.num_samples), 0, self.own_activations
        if all_inputs is not None:
            groups, outputs, inputs = self.num_groups, self.num_outputs, all_inputs.shape[-1]
            weights = groups * outputs * inputs
            step = block_length(outputs, self.num_samples * inputs, max_elements)
            for group in range(groups):
                by_output = self.output_grads[:, :, group].transpose(1, 2)  # [n, o, t]
                activations = all_inputs[:, :, group]  # [n, t, i]
                for start in range(0, outputs, step):
                    stop = min(start + step, outputs)
                    part = torch.bmm(by_output[:, start:stop], activations)  # [n, some o, i]
                    first = group * outputs * inputs
                    yield Block(rows, slice(first + start * inputs, first + stop * inputs), part.flatten(1))
        if self.bias:
            grads = self.output_grads[:, 0] if self.num_positions == 1 else self.output_grads.sum(1)
            yield Block(rows, slice(weights, self.num_parameters), grads.flatten(1))

    def summed(self) -> OuterFactors:
        """The sum over samples, as one sample with all positions."""
        activations = self.own_activations
        activations = None if activations is None else activations.flatten(0, 1)[None]
        return OuterFactors(activations, self.output_grads.flatten(0, 1)[None], self.bias)

    def samples(self, index: slice | Tensor) -> OuterFactors:
        """The factors of some samples: a slice (no copy) or indices, int64."""
        if self.rows is not None:
            return replace(self, output_grads=self.output_grads[index], rows=self.rows[index])
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
        return replace(self, activations=activations, output_grads=self.output_grads.to(dtype))

    @staticmethod
    def concatenate_positions(parts: Sequence[OuterFactors]) -> OuterFactors:
        """Several calls of one layer side by side along ``t``."""
        activations = [inputs for part in parts if (inputs := part.own_activations) is not None]
        grads = torch.cat([part.output_grads for part in parts], dim=1)
        return OuterFactors(torch.cat(activations, dim=1) if activations else None, grads, parts[0].bias)

    @staticmethod
    def concatenate_samples(parts: Sequence[OuterFactors]) -> OuterFactors:
        """Several batches of one layer, in order; shorter ones are padded with zero positions, which is exact."""
        length = max(part.num_positions for part in parts)

        def pad(tensor: Tensor) -> Tensor:
            missing = length - tensor.shape[1]
            return F.pad(tensor, (0, 0, 0, 0, 0, missing)) if missing else tensor  # by nothing, too, it would copy

        activations = [pad(part.activations) for part in parts if part.activations is not None]
        grads = torch.cat([pad(part.output_grads) for part in parts])
        rows = None
        if any(part.rows is not None for part in parts):
            starts = itertools.accumulate([0, *map(len, activations)])
            own = [
                torch.arange(part.num_samples, device=grads.device) if part.rows is None else part.rows
                for part in parts
            ]
            rows = torch.cat([start + part for start, part in zip(starts, own, strict=False)])
        return OuterFactors(torch.cat(activations) if activations else None, grads, parts[0].bias, rows)

    @staticmethod
    def concatenate_labels(parts: Sequence[OuterFactors]) -> OuterFactors:
        """The same samples with several labels, one after the other; equal inputs are kept once."""
        first, *others = parts
        inputs = first.activations
        if inputs is None or not all(
            part.activations is not None and torch.equal(part.activations, inputs) for part in others
        ):
            return OuterFactors.concatenate_samples(parts)
        rows = torch.arange(len(inputs), device=inputs.device).repeat(len(parts))
        return OuterFactors(inputs, torch.cat([part.output_grads for part in parts]), first.bias, rows)
