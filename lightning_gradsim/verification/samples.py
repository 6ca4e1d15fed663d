"""Samples of a batch, alone and in company: their losses, and their gradients by plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.batches import join_samples, map_tensors, tensors_of
from lightning_gradsim.errors import BatchFormatError, NonFiniteError
from lightning_gradsim.precision import LOSS_SCALE

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest difference of exact values relative to the norms of the gradients, by the dtype of the computation."""

ROUNDING = 10
"""How many times the rounding of plain autograd is allowed, where that is above the tolerance."""
MAX_ALLOWED = 0.05

ForwardContext = Callable[[], AbstractContextManager[Any]]
Parameters = Mapping[str, nn.Parameter]
"""Parameters by their full names in the module."""


class Samples:
    """Some samples of a batch: those with the highest losses, whose gradients rounding disturbs least.

    Args:
        module: The user's module.
        adapter: Reads the batch; bound to the module.
        batch: The batch, on the module's device.
        context: The precision context.
        number: How many samples to choose, at most.

    Attributes:
        rows: The chosen samples, by their place in the batch.
        size: Number of samples ``B`` in the batch.
        tolerance: The tolerance of ``docs/design.md`` for the dtype of the computation.
        noise: What rounding alone does to the gradients, as norms ``[n]``.

    Raises:
        BatchFormatError: If the batch holds fewer than two samples.
        NonFiniteError: If a loss is not finite.
    """

    def __init__(self, module: nn.Module, adapter: Adapter, batch: Any, context: ForwardContext, number: int) -> None:
        self.module, self.adapter, self.batch, self.context = module, adapter, batch, context
        with context():
            losses = adapter.step(module, batch).losses.detach()
        self.size = len(losses)
        if self.size < 2:
            raise BatchFormatError(
                f"`batch` holds {self.size} sample{'' if self.size == 1 else 's'}. Expected at least 2, as a sample is "
                "compared with others and run in their company. Pass a larger batch."
            )
        wrong = (~losses.isfinite()).nonzero().flatten().tolist()
        if wrong:
            raise NonFiniteError(
                f"The losses of samples {wrong[:10]} of `batch` are not finite. Expected numbers. Check the data, and "
                "the module's outputs for them."
            )
        self.rows: list[int] = sorted(losses.float().topk(min(number, self.size)).indices.tolist())
        self.dtype = self._find_dtype()
        self.noise = torch.zeros(len(self.rows), dtype=torch.float64)
        self.tolerance = TOLERANCE.get(self.dtype, TOLERANCE[torch.float32])

    def losses(self, batch: Any) -> Tensor:
        """One loss a sample, ``[B]``."""
        return self.adapter.sample_losses(self.module, batch)

    def take(self, rows: Sequence[int]) -> Any:
        """A batch of the samples in these rows; ``None`` if they cannot be put together."""
        first = next(tensors_of(self.batch), None)
        parts = [self.adapter.take_sample(self.batch, row, self.size) for row in rows]
        if first is not None:
            parts = [map_tensors(part, lambda tensor: tensor.to(first.device)) for part in parts]
        joined = join_samples(parts)
        return joined[0][1] if len(joined) == 1 else None

    def gradients(self, batch: Any, positions: Sequence[int], parameters: Parameters) -> tuple[Tensor, Tensor]:
        """Plain autograd for single losses of a batch.

        Args:
            batch: The batch.
            positions: Whose losses.
            parameters: By what.

        Returns:
            The losses ``[n]`` and the gradients ``[n, P]``, in float64.
        """
        scale = LOSS_SCALE if self.dtype == torch.float16 else 1.0
        with torch.enable_grad(), self.context():
            losses = self.losses(batch)
        rows = []
        for position in positions:
            only_one = torch.zeros_like(losses)
            only_one[position] = scale
            # The stubs of autograd know nothing of `allow_unused`.
            found: tuple[Tensor | None, ...] = torch.autograd.grad(
                losses, list(parameters.values()), only_one, retain_graph=True, allow_unused=True
            )
            rows.append(torch.cat([flatten(g, p) for g, p in zip(found, parameters.values(), strict=True)]) / scale)
        return losses.detach()[list(positions)].double().cpu(), torch.stack(rows)

    def allowed(self, norms: Tensor) -> float:
        """The largest difference of gradients that is none, relative to their norms ``[n]``."""
        # Where the model is sure of a sample, rounding moves its gradient by more than the tolerance. The bound keeps
        # random numbers from passing for rounding.
        noise = float((self.noise / floored(norms)).max())
        return max(self.tolerance, min(ROUNDING * noise, MAX_ALLOWED))

    def _find_dtype(self) -> torch.dtype:
        first = next(self.module.parameters())
        with self.context():
            if torch.is_autocast_enabled(first.device.type):
                return torch.get_autocast_dtype(first.device.type)
        return first.dtype


def relative_difference(found: Tensor, expected: Tensor, norms: Tensor) -> tuple[float, int]:
    """The largest difference of rows relative to their norms.

    Args:
        found: Values ``[n, P]``.
        expected: Values ``[n, P]``.
        norms: What they are relative to, ``[n]``.

    Returns:
        The largest difference, and the position of its row.
    """
    relative = (found - expected).norm(dim=1) / floored(norms)
    relative = relative.nan_to_num(float("inf"))
    return float(relative.max()), int(relative.argmax())


def floored(norms: Tensor) -> Tensor:
    """Norms, or their mean where that is more: a gradient far below the others is what rounding left of larger ones."""
    return norms.clamp(min=float(norms.mean())).clamp(min=1e-300)


def flatten(grad: Tensor | None, parameter: Tensor) -> Tensor:
    """A gradient as a vector in float64 on the CPU; zeros where there is none."""
    if grad is None:
        grad = torch.zeros_like(parameter)
    return (grad.to_dense() if grad.is_sparse else grad).flatten().double().cpu()
