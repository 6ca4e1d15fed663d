"""Floating-point operations of a piece of code, as PyTorch counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

Shape = Sequence[int]


def count_flops(run: Callable[[], Any]) -> int:
    """Operations of matrix products, convolutions and attention; two for every multiply-add.

    Args:
        run: The code.

    Returns:
        The number.
    """
    formulas = {
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "convolution_backward": _convolution_backward,
        "addmm_": _product_in_place,
    }
    own = {getattr(torch.ops.aten, name): f for name, f in formulas.items() if hasattr(torch.ops.aten, name)}
    # Attention on the CPU and products in place are not in PyTorch's own table, whose formula for convolutions counts
    # groups as if they met.
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        run()
    return int(counter.get_total_flops())


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    pairs = torch.Size(query[:-1]).numel() * key[-2]
    return 2 * pairs * (query[-1] + value[-1])


def _attention_backward(_: Shape, query: Shape, key: Shape, value: Shape, *__: Any, **___: Any) -> int:
    # The scores once more, and a product for each of the gradients of scores, values, queries and keys.
    pairs = torch.Size(query[:-1]).numel() * key[-2]
    return 2 * pairs * (3 * query[-1] + 2 * value[-1])


def _product_in_place(_: Shape, left: Shape, right: Shape, *__: Any, **___: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _convolution_backward(output_grads: Shape, images: Shape, weight: Shape, *settings: Any, **_: Any) -> int:
    is_transposed, output_mask = settings[4], settings[7]
    # Every entry of the weight meets every pixel once, for each of the two gradients that are asked for.
    pixels = torch.Size((images if is_transposed else output_grads)[2:]).numel()
    return int(2 * images[0] * pixels * torch.Size(weight).numel() * sum(output_mask[:2]))
