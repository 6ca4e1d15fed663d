"""Per-sample gradients of any parameters of any module: samples run again, each on its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from lightning_gradsim.batches import stack_of_samples, take_rows
from lightning_gradsim.errors import SampleMixingError
from lightning_gradsim.guard import is_out_of_memory, without_fast_attention
from lightning_gradsim.precision import (
    SUM_SHARE,
    SUM_TOLERANCE,
    find_scales,
    largest_by_sample,
    raise_half,
    scale_rows,
)

Gradients = dict[str, Tensor]
"""Per-sample gradients ``[B, *shape]`` by parameter."""


@dataclass(frozen=True, eq=False)
class Recompute:
    """How the samples of a batch run again.

    Attributes:
        losses: From a batch to one loss a sample, ``[B]``, through the module's parameters.
        batch: The batch: tensors, numbers and strings in mappings, lists and tuples, samples along the first dimension.
        context: The precision context.
    """

    losses: Callable[[Any], Tensor]
    batch: Any
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


class Owner(nn.Module):
    """Gives the parameters that a function uses an owner that ``functional_call`` can ask.

    Their names begin with ``module.`` there.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], Tensor]) -> Tensor:
        """Call the function."""
        return function()


class WholeModule:
    """Materialised per-sample gradients by ``vmap(grad)`` over the whole module, or one sample at a time.

    The second is taken where the first fails: recurrent layers, control flow that looks at values, random numbers.
    On the first batch of more than one sample the gradients are checked to sum to the batch's own gradient.

    Args:
        module: The user's module.
        parameters: The parameters by their full names; tied ones once.

    Attributes:
        step: The way that is taken: settled by the first batch.
        reason: Why it is not ``vmap``, else empty.

    Source:
        ``torch.func``: https://pytorch.org/docs/stable/func.html.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self.step: Literal["vmap", "one at a time"] = "vmap"
        self.reason = ""
        self._owner = [Owner(module)]
        self._parameters = dict(parameters)
        self._has_run = False
        self._is_checked = False

    def check_again(self) -> None:
        """Check the next batch of more than one sample as if it were the first."""
        self._is_checked = False

    def gradients(self, recompute: Recompute, num_samples: int) -> dict[str, Tensor]:
        """Gradients of each sample's own loss.

        Args:
            recompute: The batch, and how its samples run again.
            num_samples: Number of samples ``B``.

        Returns:
            Gradients ``[B, *shape]`` by parameter; half precision as float32.

        Raises:
            SampleMixingError: If samples taken alone do not give the losses and gradients that they have in the batch.
            BatchFormatError: If the batch cannot be cut into samples.
        """
        if not num_samples:
            return {name: p.new_zeros(0, *p.shape) for name, p in self._parameters.items()}
        dtype = self._dtype(recompute)
        with torch.inference_mode(False), without_fast_attention():
            losses, result, scales = self._scaled(recompute, num_samples, is_half=dtype == torch.float16)
            self._has_run = True
            if not self._is_checked and num_samples > 1:
                self._check(recompute, losses, result, scales, SUM_TOLERANCE[dtype])
                self._is_checked = True
        return result

    def _scaled(
        self, recompute: Recompute, num_samples: int, *, is_half: bool
    ) -> tuple[Tensor, Gradients, Tensor | None]:
        """Losses, gradients, and the scales under which float16 gradients were computed."""
        if not is_half:
            losses, gradients = self._run(recompute, num_samples, None)
            return losses, {name: raise_half(values) for name, values in gradients.items()}, None
        device = next(iter(self._parameters.values())).device
        latest: list[tuple[Tensor, Gradients]] = []

        def largest(scales: Tensor) -> Tensor:
            latest[:] = [self._run(recompute, num_samples, scales)]
            return largest_by_sample(list(latest[0][1].values()), scales)

        scales = find_scales(largest, torch.empty(num_samples, device=device))
        losses, gradients = self._run(recompute, num_samples, scales)
        return losses, {name: scale_rows(g, 1 / scales) for name, g in gradients.items()}, scales

    def _run(self, recompute: Recompute, num_samples: int, scales: Tensor | None) -> tuple[Tensor, Gradients]:
        if self.step == "vmap":
            try:
                return self._vmapped(recompute, num_samples, scales)
            except Exception as error:  # whatever a module may do that vmap cannot follow
                if self._has_run or is_out_of_memory(error):
                    raise
                self.step = "one at a time"
                self.reason = f"vmap fails: {str(error).strip().splitlines()[0] if str(error).strip() else type(error)}"
        return self._one_at_a_time(recompute, num_samples, scales)

    def _vmapped(self, recompute: Recompute, num_samples: int, scales: Tensor | None) -> tuple[Tensor, Gradients]:
        tensors, rebuild = stack_of_samples(recompute.batch, num_samples)

        def loss(parameters: dict[str, Tensor], sample: tuple[Tensor, ...], scale: Tensor) -> tuple[Tensor, Tensor]:
            batch = rebuild([tensor[None] for tensor in sample])
            with recompute.context():
                value = functional_call(self._owner[0], parameters, (lambda: recompute.losses(batch),)).sum()
            return value * scale, value.detach()

        parameters = {f"module.{name}": parameter.detach() for name, parameter in self._parameters.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            scales = torch.ones(num_samples, device=tensors[0].device) if scales is None else scales
            gradients, losses = vmap(grad(loss, has_aux=True), in_dims=(None, 0, 0))(parameters, tuple(tensors), scales)
        # Under autocast the other parameters' casts, which the cache may hold with their graph, would keep it alive.
        return losses.detach(), {name: gradients[f"module.{name}"].detach() for name in self._parameters}

    def _one_at_a_time(self, recompute: Recompute, num_samples: int, scales: Tensor | None) -> tuple[Tensor, Gradients]:
        parameters = list(self._parameters.values())
        columns = [p.new_empty(num_samples, *p.shape) for p in parameters]
        losses = []
        for row in range(num_samples):
            batch = take_rows(recompute.batch, slice(row, row + 1), num_samples)
            with torch.enable_grad(), recompute.context():
                value = recompute.losses(batch).sum()
            losses.append(value.detach())
            for column, found in zip(
                columns, _gradients(value if scales is None else value * scales[row], parameters), strict=True
            ):
                column[row] = found
        return torch.stack(losses), dict(zip(self._parameters, columns, strict=True))

    def _check(
        self,
        recompute: Recompute,
        losses: Tensor,
        gradients: Mapping[str, Tensor],
        scales: Tensor | None,
        tolerance: float,
    ) -> None:
        with torch.enable_grad(), recompute.context():
            together = recompute.losses(recompute.batch)
        weights = torch.ones_like(together)
        if scales is not None:  # in float16, autograd's own sum would vanish or overflow
            weights = (SUM_SHARE * scales).to(together.dtype)
            gradients = {name: scale_rows(values, weights) for name, values in gradients.items()}
        expected = _gradients((together * weights).sum(), list(self._parameters.values()))
        differences = [g.sum(0) - raise_half(e) for g, e in zip(gradients.values(), expected, strict=True)]
        difference = torch.stack([part.norm() for part in differences]).norm()
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        together = together.detach().to(losses.dtype)
        apart = (together - losses).abs() > tolerance * losses.abs().clamp(min=1)
        # Not-a-number passes: the engine names the samples that caused it.
        if bool(apart.any()) or bool(difference > tolerance * norms.sum()):
            raise SampleMixingError(
                "Samples taken alone do not have the losses and gradients that they have in their batch. 1. A layer or "
                "the loss mixes samples (BatchNorm without running statistics, a contrastive loss). 2. The forward "
                "draws random numbers in eval mode. Such a sample has no gradient of its own."
            )

    def _dtype(self, recompute: Recompute) -> torch.dtype:
        first = next(iter(self._parameters.values()))
        with recompute.context():
            if torch.is_autocast_enabled(first.device.type):
                return torch.get_autocast_dtype(first.device.type)
        return first.dtype


def _gradients(value: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    # The stubs of autograd know nothing of `allow_unused`.
    found: tuple[Tensor | None, ...] = torch.autograd.grad(value, parameters, allow_unused=True)
    return [
        torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
        for g, p in zip(found, parameters, strict=True)
    ]
