"""The module as found: eval mode and gradients for our work, everything restored afterwards, whatever happens."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn


@contextmanager
def preserving(module: nn.Module) -> Iterator[None]:
    """Leave inference mode, and restore it, the mode of every submodule and every buffer afterwards.

    Compiled modules run eagerly meanwhile, as our hooks would not fire inside them. Buffers that a forward changes even
    in eval mode (counters, moving averages) get their values back.

    Args:
        module: The user's module.

    Yields:
        Nothing.
    """
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    buffers = [
        (owner, name, buffer, buffer.clone(), 0 if buffer.is_inference() else buffer._version)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    eager = torch.compiler.set_stance("force_eager") if is_compiled(module) else nullcontext()
    with torch.inference_mode(False), torch.no_grad(), eager, without_fast_attention():
        try:
            yield
        finally:
            for submodule, mode in modes:
                if submodule.training != mode:
                    submodule.training = mode
            for owner, name, buffer, value, version in buffers:
                if getattr(owner, name) is not buffer:
                    setattr(owner, name, buffer)
                # By version, not by value: a comparison would wait for the device.
                if not buffer.is_inference() and buffer._version != version:
                    buffer.copy_(value)
                elif _may_hold_running_statistics(buffer):
                    buffer.data.copy_(value)


@contextmanager
def with_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Give buffers other values, and restore what ``preserving`` does.

    Args:
        module: The user's module.
        values: Values of all buffers by name, on any device; none at all leaves them as they are.

    Yields:
        Nothing.
    """
    with preserving(module):
        if values:
            for name, buffer in module.named_buffers():
                buffer.copy_(values[name])
        yield


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put every submodule into eval mode, and restore what ``preserving`` does.

    The flags are set one by one instead of by ``eval()``: a user's own ``train`` method may do more than set a flag.

    Args:
        module: The user's module.

    Yields:
        Nothing.
    """
    with preserving(module):
        for submodule in module.modules():
            if submodule.training:
                submodule.training = False
        yield


def _may_hold_running_statistics(buffer: Tensor) -> bool:
    # PyTorch's batch normalisation writes its running statistics past the version counter.
    return buffer.ndim == 1 and buffer.is_floating_point() and buffer.is_contiguous() and not buffer.is_inference()


@contextmanager
def without_fast_attention() -> Iterator[None]:
    """Keep PyTorch's attention and encoder layers from their fused path for inference, which calls no layer inside.

    Yields:
        Nothing.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory did not suffice, on the device or beside it.

    Args:
        error: The exception.

    Returns:
        The answer.
    """
    # On the CPU, torch has no class of its own for it.
    words = "can't allocate memory" in str(error) or "not enough memory" in str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (isinstance(error, RuntimeError) and words)


def copy_uncompiled(module: nn.Module) -> nn.Module:
    """A copy that computes with its own weights.

    Args:
        module: The module; compiled parts are bound to its weights, and a plain copy would call them.

    Returns:
        The copy, whose compiled parts run as they are written.
    """
    copied = copy.deepcopy(module)
    for part in list(copied.modules()):
        for name, child in part.named_children():
            if hasattr(child, "_orig_mod"):
                setattr(part, name, child._orig_mod)
        vars(part).pop("_compiled_call_impl", None)
        if hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable"):
            del part.forward
    return copied


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has been at work on a module, as a whole or in parts.

    Args:
        module: The user's module.

    Returns:
        Whether any submodule was compiled in place or wrapped, or the module's own ``forward`` replaced, as Lightning
        does for ``fit(torch.compile(module))``.
    """
    if hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
        return True
    return any(
        getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod")
        for part in module.modules()
    )
