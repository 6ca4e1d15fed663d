"""Whether a step on a sample's loss moves the losses of others as the similarities say."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gradsim.verification.other_weights import OtherWeights
from lightning_gradsim.verification.record import Check
from lightning_gradsim.verification.samples import Parameters, Samples

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
    # The similarity itself may be made of rounding, for samples that the model is sure of.
    known = dots.T.abs() * precision.tolerance > 4 * (samples.noise[:, None] * norms + norms[:, None] * samples.noise)
    tested = (dots.T.abs() > MIN_COSINE * norms * norms[:, None]) & (predicted.abs() > rounding) & known
    return _judge(samples, moves.double().cpu(), predicted, tested, precision.tolerance)


def _start(samples: Samples, parameters: Parameters) -> tuple[OtherWeights, Tensor, _Precision]:
    """Losses of the samples, now and after steps, in the best precision that the module can run in."""
    wide, own = PRECISIONS
    with suppress(Exception):  # whatever code says that asks for its own dtype: in that the module has run already
        losses = OtherWeights(samples, parameters, wide.dtype)
        before = losses.after(None)
        if before.dtype == wide.dtype:
            return losses, before, wide
    losses = OtherWeights(samples, parameters, own.dtype)
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
