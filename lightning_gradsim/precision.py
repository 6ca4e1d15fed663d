"""What half precision asks for: raised accumulation, scaled losses, tolerances."""

from __future__ import annotations

import torch
from torch import Tensor

SUM_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Largest relative difference between the sum of per-sample gradients and autograd's gradient of the batch, by the
dtype of the computation.

Far above rounding (1e-6 in float32), far below what a wrong rule or a forgotten use of a weight gives.
"""

LOSS_SCALE = 1024.0
"""Factor on the losses where gradients are float16, as a gradient scaler has for a batch of 64: small ones would vanish
(below 6e-8) without it, and large ones stay far below 65504."""


def raise_half(values: Tensor) -> Tensor:
    """Half precision as float32, in which sums over positions and products are exact enough; other dtypes as they are.

    Args:
        values: Any tensor.

    Returns:
        The values.
    """
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
