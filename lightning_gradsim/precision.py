"""What half precision asks for: raised accumulation, scaled losses, tolerances."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SUM_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Largest relative difference between the sum of per-sample gradients and autograd's gradient of the batch, by the
dtype of the computation.

Far above rounding (1e-6 in float32), far below what a wrong rule or a forgotten use of a weight gives.
"""

LOSS_SCALE = 1024.0
"""Factor on the losses to begin with where gradients are float16, as a gradient scaler has for a batch of 64."""
GOOD_SIZE = 2.0**8, 2.0**14
"""Largest entry of a sample's float16 gradients between which little of it vanishes (below 6e-8), and nothing overflows
(above 65504)."""
SUM_SHARE = 2.0**-7
"""Factor on these scales for a sum over samples and positions, which must not overflow either."""
MAX_RESCALES = 5
"""Backwards tried to find scales: each multiplies one by up to 2^39."""


def find_scales(largest: Callable[[Tensor], Tensor], losses: Tensor) -> Tensor:
    """Loss scales under which float16 gradients have a good size, sample by sample.

    Args:
        largest: From scales ``[B]`` to the largest entry of each sample's gradients under them, ``[B]``; infinite on
            overflow.
        losses: Losses ``[B]``.

    Returns:
        Scales, powers of two, ``[B]``.
    """
    scales = torch.full_like(losses.detach(), LOSS_SCALE)
    low, high = GOOD_SIZE
    for _ in range(MAX_RESCALES):
        sizes = largest(scales)
        good = (sizes >= low) & (sizes <= high) | (sizes == 0) & (scales >= 2.0**40)
        if bool(good.all()):
            break
        # Where everything vanishes or overflows the size is not known: a bold step in its direction.
        steps = torch.exp2(torch.floor(torch.log2(high / sizes.clamp(2.0**-25, 2.0**25))))
        scales = torch.where(good, scales, scales * steps)
    return scales


def largest_by_sample(gradients: Sequence[Tensor], losses: Tensor) -> Tensor:
    """Largest entry of each sample's gradients.

    Args:
        gradients: Tensors ``[B, ...]``.
        losses: Losses ``[B]``.

    Returns:
        Sizes ``[B]``; infinite where an entry is not finite.
    """
    sizes = [g.abs().flatten(1).amax(1).to(losses.dtype) for g in gradients if g[:1].numel()]
    return torch.stack(sizes).amax(0).nan_to_num(torch.inf) if sizes else torch.zeros_like(losses)


def scale_rows(values: Tensor, factors: Tensor) -> Tensor:
    """Values with each row multiplied by a factor of its own.

    Args:
        values: ``[B, ...]``.
        factors: ``[B]``.

    Returns:
        The products, at least float32.
    """
    values = raise_half(values)
    return values * factors.to(values.dtype).reshape(-1, *[1] * (values.ndim - 1))


def raise_half(values: Tensor) -> Tensor:
    """Half precision as float32, in which sums over positions and products are exact enough; other dtypes as they are.

    Args:
        values: Any tensor.

    Returns:
        The values.
    """
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
