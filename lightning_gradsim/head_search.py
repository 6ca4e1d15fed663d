"""Which layer's output are the logits? Seen on a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_gradsim.adapter import find_logits
from lightning_gradsim.layer_selection import THE_MODULE, trainable_layers

Seen = tuple[Tensor, Tensor, list[Tensor]]
"""Features of the head, logits and, once there was a backward, the gradient by the logits."""


class HeadSearch:
    """Watches all modules for one step: which layer's output are the logits?

    Those are the output of the module itself where the step calls it, else of the child whose output explains the loss,
    else of the child that it called last.
    """

    def __init__(self, module: nn.Module, num_samples: int) -> None:
        self.seen: Seen | None = None
        self.problem: str | None = None
        self._names = {id(layer): name for name, layer in trainable_layers(module).items()}
        self._owners = {id(module): -1} | {id(child): place for place, child in enumerate(module.children())}
        self._num_samples = num_samples
        self._last: tuple[nn.Module, Sequence[Any], Any] | None = None
        # By owner: what was found wrong, or the head with copies of its input and output.
        self._candidates: dict[int, tuple[str, nn.Linear, Seen] | str] = {}
        self._with_grad: set[int] = set()

    def see(self, module: nn.Module, args: Sequence[Any], output: Any) -> None:
        """The hook."""
        if id(module) in self._names and not self._only_holds_the_last(module, output):
            self._last = module, args, output
        owner = self._owners.get(id(module))
        if owner is None or owner in self._with_grad or self._last is None:
            return
        logits = find_logits(output)
        # Criteria and metrics are children too; their outputs have no row a sample.
        if logits is None or not logits.is_floating_point() or logits.shape[:1] != (self._num_samples,):
            return
        if owner not in self._candidates or logits.requires_grad:
            self._candidates[owner] = self._judge(*self._last, logits)
            if logits.requires_grad:
                self._with_grad.add(owner)

    def find(self, explains: Callable[[Tensor], bool]) -> tuple[str, nn.Linear] | None:
        """The head.

        Args:
            explains: Whether logits give the loss of the step.

        Returns:
            Name and layer; ``None`` if there is none: ``problem`` says why, unless nothing was called at all.
        """
        found = list(self._candidates.values())
        if -1 in self._candidates:
            chosen = self._candidates[-1]
        elif found:
            good = [each for each in found if not isinstance(each, str) and explains(each[2][1])]
            chosen = (good or found)[-1]
        else:
            return None
        if isinstance(chosen, str):
            self.problem = chosen
            return None
        name, layer, self.seen = chosen
        return name, layer

    def _only_holds_the_last(self, module: nn.Module, output: Any) -> bool:
        """Whether a module with parameters of its own (a class token) gives what a layer inside of it gave."""
        if self._last is None or not isinstance(output, Tensor):
            return False
        layer, _, inner = self._last
        is_inside = layer is not module and any(layer is part for part in module.modules())
        return is_inside and isinstance(inner, Tensor) and _same(inner, output)

    def _judge(
        self, layer: nn.Module, args: Sequence[Any], output: Any, logits: Tensor
    ) -> tuple[str, nn.Linear, Seen] | str:
        name = self._names[id(layer)]
        if not isinstance(output, Tensor) or output.shape[:1] != logits.shape[:1] or not _same(output, logits):
            return f"the logits are not the output of one layer (the last one called is `{name or THE_MODULE}`)"
        if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward or is_parametrized(layer):
            return f"the head `{name or THE_MODULE}` (`{type(layer).__name__}`) is no plain `Linear`"
        if not layer.weight.requires_grad:
            return f"the weight of the head `{name}` is frozen"
        if not has_row_a_sample(args, output, self._num_samples):
            return f"the head `{name}` gives {tuple(output.shape)} for {self._num_samples} samples, not one row each"
        return name, layer, take_copies(args[0], output)


def has_row_a_sample(args: Sequence[Any], output: Any, num_samples: int) -> bool:
    """Whether a call of a layer turns one vector a sample into another.

    Args:
        args: Positional arguments of the call.
        output: What it returned.
        num_samples: Number of samples ``B``.

    Returns:
        Whether input and output are matrices of ``B`` rows.
    """
    return (
        len(args) == 1
        and isinstance(args[0], Tensor)
        and isinstance(output, Tensor)
        and args[0].ndim == output.ndim == 2
        and len(output) == num_samples
    )


def take_copies(features: Tensor, logits: Tensor) -> Seen:
    """What is kept of a call of the head; its gradient is filled in by the first backward.

    Args:
        features: Its input ``[B, i]``.
        logits: Its output ``[B, o]``.

    Returns:
        Features in half precision, logits of at least float32, gradients.
    """
    # Copies at once: what follows may write into them. Half precision is raised when losses are taken.
    dtype = torch.promote_types(logits.dtype, torch.float32)
    grads: list[Tensor] = []
    if logits.requires_grad:

        def keep(grad: Tensor) -> None:
            if not grads:
                grads.append(grad.detach().to(dtype, copy=True))

        logits.register_hook(keep)
    return features.detach().to(torch.float16, copy=True), logits.detach().to(dtype, copy=True), grads


def _same(output: Tensor, logits: Tensor) -> bool:
    """Whether the logits are the layer's output, possibly reshaped or in another precision."""
    if output.numel() != logits.numel():
        return False
    output, logits = output.detach().flatten(), logits.detach().flatten()
    return torch.equal(output.to(logits.dtype), logits) or torch.equal(output, logits.to(output.dtype))
