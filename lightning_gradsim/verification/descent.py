"""Whether a step on a sample's loss moves the losses of others as the similarities say."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from lightning_gradsim.batches import map_tensors
from lightning_gradsim.verification.record import Check
from lightning_gradsim.verification.samples import Parameters, Samples
from lightning_gradsim.whole_module import Owner

NAME = "sign"
MIN_COSINE = 0.02
"""Below it, second-order terms and not the similarity may decide what a step does."""
ROUNDING = 100
"""A change of a loss counts if it is this many units of rounding."""


@dataclass(frozen=True)
class _Precision:
    """How the steps are computed: in float64, so that they can be small, or as the module is."""

    dtype: torch.dtype | None
    step_size: float
    tolerance: float


PRECISIONS = (_Precision(torch.float64, 1e-6, 0.05), _Precision(None, 1e-3, 0.5))


def check_sign(
    samples: Samples, parameters: Parameters, gradients: Tensor, dots: Tensor, step_size: float | None
) -> Check:
    """Take a small SGD step on each sample's loss, on copies of the parameters, and watch the losses of all.

    Args:
        samples: The samples.
        parameters: The chosen parameters.
        gradients: Their gradients by plain autograd, ``[n, P]``: the directions of the steps.
        dots: Dot products as a pass computes them, ``[n, n]``: what is to be confirmed.
        step_size: Length of a step relative to the norm of the parameters, or ``None`` for one that suits the dtype.

    Returns:
        The check.
    """
    losses, before, precision = _start(samples, parameters)
    size = precision.step_size if step_size is None else step_size
    norms = gradients.norm(dim=1)
    length = size * (losses.parameter_norm or 1.0)
    safe = norms.clamp(min=1e-300)
    moves = torch.stack([losses.after(-length * g / n) - before for g, n in zip(gradients, safe, strict=True)])
    predicted = -length * dots.T / safe[:, None]  # [step, query]
    rounding = ROUNDING * torch.finfo(before.dtype).eps * before.abs().double().clamp(min=1).cpu()
    tested = (dots.T.abs() > MIN_COSINE * norms * norms[:, None]) & (predicted.abs() > rounding)
    return _judge(samples, moves.double().cpu(), predicted, tested, precision.tolerance)


def _start(samples: Samples, parameters: Parameters) -> tuple[_Losses, Tensor, _Precision]:
    """Losses of the samples, now and after steps, in the best precision that the module can run in."""
    wide, own = PRECISIONS
    with suppress(Exception):  # whatever code says that asks for its own dtype: in that the module has run already
        losses = _Losses(samples, parameters, wide.dtype)
        before = losses.after(None)
        if before.dtype == wide.dtype:
            return losses, before, wide
    losses = _Losses(samples, parameters, own.dtype)
    return losses, losses.after(None), own


def _judge(samples: Samples, moves: Tensor, predicted: Tensor, tested: Tensor, tolerance: float) -> Check:
    number = int(tested.sum())
    proponents = int((tested & (predicted < 0)).sum())
    count = f"{number} of {tested.numel()} pairs, {proponents} proponents"
    if not number:
        return Check(NAME, None, "No pair of samples has gradients large and aligned enough to tell.", count=count)
    difference = ((moves - predicted).abs() / predicted.abs()).nan_to_num(float("inf")).masked_fill(~tested, 0)
    largest, worst = float(difference.max()), int(difference.argmax())
    if largest > tolerance:
        step, query = divmod(worst, len(samples.rows))
        message = (
            f"A step on sample {samples.rows[step]} changes the loss of sample {samples.rows[query]} by "
            f"{moves[step, query]:.3g}. Expected {predicted[step, query]:.3g} by their dot product, to "
            f"{100 * tolerance:.0f} %. 1. The gradients are wrong: see the other checks. 2. The loss is not smooth: "
            "try a smaller `step_size`."
        )
        return Check(NAME, False, message, largest, count)
    message = (
        "a small SGD step lowers the losses of those it is a proponent of and raises the others', as the dot products "
        f"say, to {100 * tolerance:.0f} %"
    )
    return Check(NAME, True, message, largest, count)


class _Losses:
    """Losses of the samples with other parameters, in another dtype; the module's own stay as they are."""

    def __init__(self, samples: Samples, parameters: Parameters, dtype: torch.dtype | None) -> None:
        self._samples = samples
        self._dtype = dtype
        self._batch = map_tensors(samples.batch, self._cast)
        module = samples.module
        self._owner = Owner(module)
        self._tensors = {
            f"module.{name}": self._cast(tensor.detach()).clone()
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        }
        own_names = {id(parameter): f"module.{name}" for name, parameter in module.named_parameters()}
        self._names = [own_names[id(parameter)] for parameter in parameters.values()]
        self.parameter_norm = float(torch.stack([self._tensors[name].double().norm() for name in self._names]).norm())

    def after(self, step: Tensor | None) -> Tensor:
        """Losses ``[n]`` of the samples, the parameters moved by a step ``[P]``."""
        tensors = dict(self._tensors)
        if step is not None:
            parts = step.split([self._tensors[name].numel() for name in self._names])
            for name, part in zip(self._names, parts, strict=True):
                old = tensors[name]
                tensors[name] = old + part.reshape(old.shape).to(dtype=old.dtype, device=old.device)
        # A forward may change buffers: each call gets its own.
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return self._call(tensors)[self._samples.rows].cpu()

    def _call(self, tensors: Mapping[str, Tensor]) -> Tensor:
        context: AbstractContextManager[Any] = nullcontext() if self._dtype is not None else self._samples.context()
        with torch.no_grad(), context:
            losses: Tensor = functional_call(
                self._owner, dict(tensors), (lambda: self._samples.losses(self._batch),), strict=False
            )
        return losses

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor
