"""The short way through a head whose output is the logits: forwards alone, losses for many batches together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter, Step
from lightning_gradsim.factors import Factors
from lightning_gradsim.wrapper import PerSampleGradients


@dataclass(frozen=True, eq=False)
class HeadOutput:
    """What a forward leaves of some samples where the head is served the short way.

    Attributes:
        features: The head's input, ``[B, i]``.
        logits: Its output, ``[B, o]``.
        targets: Targets, first dimension ``B``.
    """

    features: Tensor
    logits: Tensor
    targets: Tensor

    @property
    def form(self) -> tuple[Any, ...]:
        """What outputs must have in common to be joined."""
        parts = (self.features, self.logits, self.targets)
        return tuple((part.shape[1:], part.dtype, part.device) for part in parts)

    @property
    def num_elements(self) -> int:
        """Elements of all three."""
        return self.features.numel() + self.logits.numel() + self.targets.numel()


class HeadShortcut:
    """Factors of a linear head from its features and logits, without a graph through the model.

    Open to models whose only chosen layer is a ``Linear`` whose output is the logits, with a loss that torch defines
    sample by sample. A batch that went the ordinary way must have shown all this, and the same gradients.

    Args:
        module: The user's module.
        adapter: Reads batches; bound to the module.
        gradients: Watches the module.

    Attributes:
        is_open: Whether batches may go this way; settled by the first batch with gradients after the checked one.
    """

    def __init__(self, module: nn.Module, adapter: Adapter, gradients: PerSampleGradients) -> None:
        self._module = module
        self._adapter = adapter
        self._gradients = gradients
        self._is_settled = adapter.keeps_batches_apart(module)
        self._name = ""
        self.is_open = False

    def serves(self, step: Step) -> bool:
        """Whether a step looks like one of a head served the short way, before its graph is used.

        Args:
            step: The step of the forward that was recorded last.

        Returns:
            The answer; ``False`` also once it does not matter any more.
        """
        if self._is_settled:
            return False
        name = self._gradients.served_alone()
        if name is None or not self._gradients.puts_out(name, step.logits):
            return False
        self._name = name
        return isinstance(self._module.get_submodule(name), nn.Linear) and step.logits.ndim == 2

    def compare(self, step: Step, factors: Mapping[str, Factors]) -> None:
        """Open the short way if it finds the gradients that the ordinary way has found.

        Args:
            step: A step that ``serves`` has accepted.
            factors: Its factors.
        """
        expected = factors[self._name].output_grads
        if not bool(expected.any()):
            return
        grads = self._logit_grads(self._joined_step(step.logits, step.targets))
        self._is_settled = True
        self.is_open = grads.dtype == expected.dtype and torch.allclose(
            grads, expected[:, 0, 0], rtol=1e-5, atol=1e-7, equal_nan=True
        )

    def forward(self, batch: Any, num_samples: int) -> HeadOutput | None:
        """A forward without gradients.

        Args:
            batch: A batch.
            num_samples: Its number of samples ``B``.

        Returns:
            What it leaves, or ``None`` if the head did something else than before; the short way is closed then.
        """
        with self._gradients.outputs() as calls:
            inputs, targets = self._adapter.split(batch)
            logits = self._adapter.forward(self._module, inputs)
        self.is_open = False
        if len(calls) != 1 or calls[0].output is not logits or not calls[0].is_unchanged:
            return None
        features = calls[0].activations
        plain = logits.dtype in {torch.float32, torch.float64} and features.dtype == logits.dtype
        sizes = {len(part) if part.ndim else 0 for part in (features, logits, targets)}
        if not plain or features.ndim != 2 or logits.ndim != 2 or sizes != {num_samples}:
            return None
        self.is_open = True
        return HeadOutput(_alone(features), _alone(logits), _alone(targets))

    def finish(self, outputs: Sequence[HeadOutput]) -> tuple[Step, dict[str, Factors]]:
        """Steps and factors of several outputs of one form.

        Args:
            outputs: At least one.

        Returns:
            The step of all their samples and its factors.

        Raises:
            LabelRangeError: If a label lies outside the classes.
        """
        features, logits, targets = (
            torch.cat([getattr(output, name) for output in outputs]) for name in ("features", "logits", "targets")
        )
        step = self._joined_step(logits, targets)
        factors = self._gradients.factors_of(self._name, features, self._logit_grads(step))
        return step.detached(), {self._name: factors}

    def _joined_step(self, logits: Tensor, targets: Tensor) -> Step:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            # As a model's output, the logits are no leaf: what watches the criterion's inputs might not expect one.
            return self._adapter.step_from_logits(leaf.view_as(leaf), targets)

    def _logit_grads(self, step: Step) -> Tensor:
        return torch.autograd.grad(step.losses, step.logits, torch.ones_like(step.losses))[0]


def _alone(part: Tensor) -> Tensor:
    """A tensor that keeps no larger one alive, such as the tokens of which it is the first."""
    part = part.detach()
    return part.clone() if part.untyped_storage().nbytes() > 2 * part.numel() * part.element_size() else part
