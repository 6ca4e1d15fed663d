"""Per-sample gradients of one layer as a pair of factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


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
        return groups * outputs * self.num_inputs

    @property
    def num_inputs(self) -> int:
        """Number of input features, the ones of the bias included."""
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

    def summed(self) -> OuterFactors:
        """The sum over samples, as one sample with all positions."""
        activations = None if self.activations is None else self.activations.flatten(0, 1)[None]
        return OuterFactors(activations, self.output_grads.flatten(0, 1)[None], self.bias)

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

    @staticmethod
    def concatenate_positions(parts: Sequence[OuterFactors]) -> OuterFactors:
        """Several calls of one layer side by side along ``t``."""
        activations = [part.activations for part in parts if part.activations is not None]
        grads = torch.cat([part.output_grads for part in parts], dim=1)
        return OuterFactors(torch.cat(activations, dim=1) if activations else None, grads, parts[0].bias)

    @staticmethod
    def concatenate_samples(parts: Sequence[OuterFactors]) -> OuterFactors:
        """Several batches of one layer, in order; shorter ones are padded with zero positions, which is exact."""
        length = max(part.num_positions for part in parts)

        def pad(tensor: Tensor) -> Tensor:
            return F.pad(tensor, (0, 0, 0, 0, 0, length - tensor.shape[1]))

        activations = [pad(part.activations) for part in parts if part.activations is not None]
        grads = torch.cat([pad(part.output_grads) for part in parts])
        return OuterFactors(torch.cat(activations) if activations else None, grads, parts[0].bias)
