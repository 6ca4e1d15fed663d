"""The user's module run with other parameters, or in float64, by functional calls."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from lightning_gradsim.batches import map_tensors
from lightning_gradsim.verification.samples import Parameters, Samples, flatten
from lightning_gradsim.whole_module import Owner


def find_noise(samples: Samples, parameters: Parameters) -> Tensor:
    """How far rounding takes plain autograd in float32 from autograd in float64.

    Args:
        samples: The samples.
        parameters: The chosen parameters.

    Returns:
        Norms ``[n]`` of the differences; zeros in other dtypes, and for a module that runs in its own only.
    """
    if samples.dtype == torch.float32:
        with suppress(Exception):  # code that asks for its own dtype, or for more than one sample
            exact = OtherWeights(samples, parameters, torch.float64).gradients()
            own = [samples.gradients(samples.take([row]), [0], parameters)[1] for row in samples.rows]
            noise: Tensor = (torch.cat(own) - exact).norm(dim=1)
            return noise
    return torch.zeros(len(samples.rows), dtype=torch.float64)


class OtherWeights:
    """The module with other parameters, or in another dtype; its own stay as they are.

    Args:
        samples: The samples.
        parameters: The chosen parameters.
        dtype: The dtype of parameters, buffers and batch; ``None`` for their own.

    Attributes:
        parameter_norm: Norm of the chosen parameters.
    """

    def __init__(self, samples: Samples, parameters: Parameters, dtype: torch.dtype | None) -> None:
        self._samples = samples
        self._dtype = dtype
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
        with torch.no_grad():
            return self._call(tensors, self._samples.batch)[self._samples.rows].cpu()

    def gradients(self) -> Tensor:
        """Gradients ``[n, P]`` of the samples' losses by the chosen parameters, each sample alone."""
        rows = []
        for row in self._samples.rows:
            tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
            chosen = [tensors[name].requires_grad_() for name in self._names]
            with torch.enable_grad():
                loss = self._call(tensors, self._samples.take([row])).sum()
            # The stubs of autograd know nothing of `allow_unused`.
            found: tuple[Tensor | None, ...] = torch.autograd.grad(loss, chosen, allow_unused=True)
            rows.append(torch.cat([flatten(g, p) for g, p in zip(found, chosen, strict=True)]))
        return torch.stack(rows)

    def _call(self, tensors: Mapping[str, Tensor], batch: Any) -> Tensor:
        context: AbstractContextManager[Any] = nullcontext() if self._dtype is not None else self._samples.context()
        batch = map_tensors(batch, self._cast)
        with context:
            losses: Tensor = functional_call(
                self._owner, dict(tensors), (lambda: self._samples.losses(batch),), strict=False
            )
        return losses

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor
