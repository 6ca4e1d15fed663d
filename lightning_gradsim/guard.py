"""The module as found: eval mode and gradients for our work, everything restored afterwards, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put every submodule into eval mode, leave inference mode, and restore both afterwards.

    The flags are set one by one instead of by ``eval()``: a user's own ``train`` method may do more than set a flag.

    Args:
        module: The user's module.

    Yields:
        Nothing.
    """
    modes = [(submodule, submodule.training) for submodule in module.modules() if submodule.training]
    with torch.inference_mode(False), torch.no_grad():
        try:
            for submodule, _ in modes:
                submodule.training = False
            yield
        finally:
            for submodule, mode in modes:
                submodule.training = mode
