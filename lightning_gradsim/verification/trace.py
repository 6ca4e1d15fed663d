"""Which layer treats a sample differently from one forward to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_gradsim.batches import tensors_of


@dataclass(frozen=True, eq=False)
class LayerCall:
    """What one sample was to one call of a layer.

    Attributes:
        name: The layer's name in the module.
        layer: The layer.
        inputs: The sample's rows of what went in.
        outputs: The sample's rows of what came out.
    """

    name: str
    layer: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]


def trace_sample(module: nn.Module, forward: Callable[[], object], size: int, position: int) -> list[LayerCall]:
    """Run a forward, and keep how every layer, at any depth, treats one sample.

    Args:
        module: The user's module; the hooks on it are removed.
        forward: Runs it on a batch.
        size: Number of samples in the batch.
        position: Which of them is followed.

    Returns:
        Calls in the order in which they ended, so that a layer comes before those that it lies in.
    """
    calls: list[LayerCall] = []
    begun: list[list[Tensor]] = []
    handles: list[RemovableHandle] = []

    def rows(values: Any) -> list[Tensor]:
        # Copied: what follows may change it in place.
        return [_row(tensor.detach(), size, position).clone() for tensor in _all_tensors(values)]

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        begun.append(rows([args, kwargs]))

    try:
        for name, layer in module.named_modules():
            if isinstance(layer, torch.jit.ScriptModule):
                continue  # takes no hooks

            def after(layer: nn.Module, _: Any, output: Any, name: str = name) -> None:
                calls.append(LayerCall(name, layer, begun.pop(), rows(output)))

            handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(layer.register_forward_hook(after))
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def find_culprit(first: list[LayerCall], second: list[LayerCall], tolerance: float) -> LayerCall | None:
    """The first call whose outputs for the sample differ although its inputs do not.

    Args:
        first: The calls of one forward.
        second: The calls of the other.
        tolerance: Largest difference, relative to the values, that is none.

    Returns:
        The call, or ``None``.
    """
    for one, other in zip(first, second, strict=False):
        if one.name != other.name:
            return None
        if _agree(one.inputs, other.inputs, tolerance) and not _agree(one.outputs, other.outputs, 10 * tolerance):
            return one
    return None


def find_changed_input(module: nn.Module, forward: Callable[[], object]) -> str | None:
    """The first layer with parameters whose input is changed in place after the layer ran.

    Args:
        module: The user's module; the hooks on it are removed.
        forward: Runs it on a batch.

    Returns:
        Its name, or ``None``.
    """
    seen: list[tuple[str, Tensor, int]] = []
    layers = {name: layer for name, layer in module.named_modules() if any(True for _ in layer.parameters(False))}
    handles = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: seen.extend((name, t, t._version) for t in tensors_of([args, kwargs])),
            with_kwargs=True,
        )
        for name, layer in layers.items()
        if not isinstance(layer, torch.jit.ScriptModule)
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return next((name for name, tensor, version in seen if tensor._version != version), None)


def _agree(ones: list[Tensor], others: list[Tensor], tolerance: float) -> bool:
    if len(ones) != len(others):
        return False
    for one, other in zip(ones, others, strict=True):
        if one.shape != other.shape:
            return False
        difference = (one.double() - other.double()).abs()
        if bool((difference > tolerance * max(1e-300, float(one.double().abs().amax()) if one.numel() else 1.0)).any()):
            return False
    return True


def _row(values: Tensor, size: int, position: int) -> Tensor:
    """The sample's part of a tensor: of the first dimension, of the second (time first), or of ``[n t, ...]``."""
    if values.ndim and values.shape[0] == size:
        return values[position]
    if values.ndim > 1 and values.shape[1] == size:
        return values[:, position]
    if values.ndim and values.shape[0] and values.shape[0] % size == 0:
        return values.reshape(size, -1, *values.shape[1:])[position]
    return values


def _all_tensors(values: Any) -> Iterator[Tensor]:
    yield from tensors_of(values)
    if hasattr(values, "logits"):
        yield values.logits
