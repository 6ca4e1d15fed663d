"""What a batch means: its inputs and targets, the model's outputs for it, one loss a sample."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradsim.arguments import with_article
from lightning_gradsim.batches import take_sample
from lightning_gradsim.datasets import TARGET_KEYS
from lightning_gradsim.errors import BatchFormatError, LossError
from lightning_gradsim.losses import LossFunction, PerSampleLoss, cross_entropy, find_loss, index_hint
from lightning_gradsim.precision import raise_half
from lightning_gradsim.tasks import Outcome, Task, check_class_indices, predicted_targets, read_outcome

INPUT_KEYS = ("image", "images", "pixel_values", "input", "inputs", "x", "features", "input_ids", "data")


@dataclass(frozen=True, eq=False)
class Step:
    """A batch after the forward.

    Attributes:
        logits: Model outputs, first dimension ``B``, floating dtype.
        targets: Targets, first dimension ``B``.
        losses: One loss a sample, ``[B]``, with a graph to the logits where gradients are on.
        task: What outputs and targets mean.
        are_probabilities: Whether the outputs are probabilities already.
    """

    logits: Tensor
    targets: Tensor
    losses: Tensor
    task: Task
    are_probabilities: bool = False

    @cached_property
    def outcome(self) -> Outcome:
        """Labels, predictions and mistakes."""
        return read_outcome(self.task, self.logits, self.targets, are_probabilities=self.are_probabilities)

    def detached(self) -> Step:
        """The same step without its graph, so that it may wait."""
        return Step(self.logits.detach(), self.targets, self.losses.detach(), self.task, self.are_probabilities)


class Adapter:
    """Reads batches of the usual forms; override a method for one that it cannot read.

    A batch is ``(inputs, targets)`` or a mapping with exactly one of the keys ``label``, ``labels``, ``target``,
    ``targets``, ``y``. The entries of a mapping that ``forward`` names are passed to it by name (Hugging Face style);
    otherwise its only entry, or the one known input entry (``image``, ``pixel_values``, ``x``, ...), is passed by
    position. The module returns logits, or an object or mapping with ``logits``. A module that defines
    ``gradsim_step(batch)``, returning logits, targets and one loss a sample, is asked instead.
    """

    def __init__(self) -> None:
        self._loss: PerSampleLoss | None = None

    def bind(self, module: nn.Module, loss_fn: nn.Module | LossFunction | None = None) -> None:
        """Find the loss that the module trains with.

        Args:
            module: The user's module.
            loss_fn: A criterion or a function of (outputs, targets) that takes precedence over the module's own.

        Raises:
            LossError: If the module holds several criteria, or one without a per-sample form, and no ``loss_fn`` or
                ``gradsim_step`` settles it.
        """
        try:
            self._loss = find_loss(module, loss_fn)
        except LossError:
            if not hasattr(module, "gradsim_step"):
                raise

    @property
    def loss_source(self) -> str:
        """Where the per-sample loss comes from, in words."""
        return (self._loss or cross_entropy()).source

    def split(self, batch: Any) -> tuple[Any, Tensor]:
        """Inputs and targets of a batch.

        Args:
            batch: A batch as the loader and the transfer hooks give it.

        Returns:
            The inputs, in whatever form ``forward`` takes, and the targets, first dimension ``B``.

        Raises:
            BatchFormatError: If the batch is neither a pair nor a mapping with one known target key.
        """
        if isinstance(batch, Mapping):
            keys = [key for key in TARGET_KEYS if key in batch]
            if len(keys) == 1 and isinstance(batch[keys[0]], Tensor):
                return {key: value for key, value in batch.items() if key != keys[0]}, batch[keys[0]]
            raise BatchFormatError(
                f"A batch has the keys {sorted(map(str, batch))}; {len(keys)} of them are known target keys. Expected "
                f"one of {', '.join(TARGET_KEYS)} with a tensor. Pass an `Adapter` subclass as `adapter=`."
                if len(keys) != 1
                else f"The entry `{keys[0]}` of a batch is {_no_tensor(batch[keys[0]])}"
            )
        if isinstance(batch, (list, tuple)) and len(batch) == 2 and isinstance(batch[1], Tensor):
            return batch[0], batch[1]
        if isinstance(batch, (list, tuple)) and len(batch) == 2:
            raise BatchFormatError(f"The second part of a batch, its targets, is {_no_tensor(batch[1])}")
        form = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (list, tuple)) else type(batch).__name__
        raise BatchFormatError(
            f"A batch is {with_article(form)}. Expected (inputs, targets) with a tensor of targets, or a mapping with "
            "a target key. Pass an `Adapter` subclass as `adapter=`, or define `gradsim_step(batch)` on the module."
        )

    def forward(self, module: nn.Module, inputs: Any) -> Tensor:
        """Outputs of the model for the inputs of a batch.

        Args:
            module: The user's module.
            inputs: Inputs as ``split`` gives them.

        Returns:
            Logits (or regression outputs), first dimension ``B``.

        Raises:
            BatchFormatError: If the module's outputs hold no logits, or the inputs of a mapping are not known.
        """
        output = module(inputs) if not isinstance(inputs, Mapping) else self._forward_mapping(module, inputs)
        logits = find_logits(output)
        if logits is None:
            raise BatchFormatError(
                f"`{type(module).__name__}` returned {with_article(type(output).__name__)}. Expected a tensor of "
                "logits, or an object or mapping with `logits`. Pass an `Adapter` subclass as `adapter=` that "
                "overrides `forward`."
            )
        return logits

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """One loss a sample.

        Args:
            logits: Model outputs, first dimension ``B``.
            targets: Targets, first dimension ``B``.

        Returns:
            Losses ``[B]``.

        Raises:
            LossError: If no loss is known for these targets.
        """
        return self._loss_for(logits, targets)(logits, targets)

    def take_sample(self, batch: Any, index: int, batch_size: int) -> Any:
        """One sample of a batch as a batch of one on the CPU, sharing no memory with it.

        Args:
            batch: A batch of ``batch_size`` samples.
            index: Which sample.
            batch_size: Number of samples.

        Returns:
            A batch of one, in the same form.
        """
        return take_sample(batch, index, batch_size)

    def step(self, module: nn.Module, batch: Any) -> Step:
        """Run the model on a batch.

        Args:
            module: The user's module.
            batch: A batch as the loader and the transfer hooks give it.

        Returns:
            Logits, targets and per-sample losses.

        Raises:
            BatchFormatError: If batch or outputs have a form that cannot be read.
            LabelRangeError: If a class index lies outside the logits.
            LossError: If there is no loss of one value a sample.
        """
        own_step = getattr(module, "gradsim_step", None)
        if own_step is not None:
            return self._own_step(module, own_step(batch))
        inputs, targets = self.split(batch)
        return self.step_from_logits(self.forward(module, inputs), targets)

    def step_from_logits(self, logits: Tensor, targets: Tensor) -> Step:
        """The step for outputs that are known already.

        Args:
            logits: Model outputs, first dimension ``B``; half precision is raised to float32 for the loss.
            targets: Targets, first dimension ``B``.

        Returns:
            Logits, targets and per-sample losses.

        Raises:
            LabelRangeError: If a class index lies outside the logits.
            LossError: If there is no loss of one value a sample.
        """
        logits = raise_half(logits)
        task, are_probabilities = self._task(logits, targets)
        loss = self._loss_for(logits, targets)
        is_index = not targets.is_floating_point() and logits.ndim > 1
        if is_index and (loss.takes_class_indices or task is Task.CLASSIFICATION):
            check_class_indices(targets, logits.shape[1], loss.ignore_index)
        return Step(logits, targets, self.losses(logits, targets), task, are_probabilities)

    def sample_losses(self, module: nn.Module, batch: Any, targets: Tensor | None = None) -> Tensor:
        """One loss a sample, without the checks of ``step``, so that ``torch.func`` can follow.

        Args:
            module: The user's module.
            batch: A batch that ``step`` has read before, or a part of it.
            targets: Targets to take instead of the batch's own, first dimension ``B``.

        Returns:
            Losses ``[B]``.
        """
        own_step = getattr(module, "gradsim_step", None)
        if own_step is None and type(self).step is Adapter.step:
            inputs, own_targets = self.split(batch)
            logits = raise_half(self.forward(module, inputs))
            return self.losses(logits, own_targets if targets is None else targets)
        step = self.step(module, batch)
        return step.losses if targets is None else self.losses(step.logits, targets)

    def keeps_batches_apart(self, module: nn.Module) -> bool:
        """Whether losses of several batches must not be computed together.

        Args:
            module: The user's module.

        Returns:
            ``False`` where the loss is one of torch's own criteria, and nothing has a step of its own.
        """
        own, default = type(self), Adapter
        is_default = own.step is default.step and own.step_from_logits is default.step_from_logits
        is_default = is_default and own.losses is default.losses and not hasattr(module, "gradsim_step")
        return not is_default or (self._loss or cross_entropy()).keeps_batches_apart

    def predicted_targets(self, step: Step) -> Tensor | None:
        """Targets that say what the model predicts.

        Args:
            step: A step of this adapter.

        Returns:
            Targets in the form of the step's own, or ``None`` where predictions have no loss (regression) or it is not
            known (``gradsim_step`` without a criterion that agrees with it).
        """
        targets = predicted_targets(step.task, step.outcome, step.targets)
        return targets if targets is not None and self._agrees(step) else None

    def batch_loss(self, step: Step) -> Tensor:
        """The loss of the whole batch as the criterion reduces it, a scalar."""
        return self._loss_for(step.logits, step.targets).batch_value(step.logits, step.targets)

    def _forward_mapping(self, module: nn.Module, inputs: Mapping[Any, Any]) -> Any:
        parameters = inspect.signature(module.forward).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        named = {str(key): value for key, value in inputs.items() if takes_any or key in parameters}
        if named:
            return module(**named)
        known = [key for key in INPUT_KEYS if key in inputs] if len(inputs) > 1 else list(inputs)
        if len(known) == 1:
            return module(inputs[known[0]])
        raise BatchFormatError(
            f"None of the batch's keys {sorted(map(str, inputs))} is a parameter of `{type(module).__name__}.forward`, "
            f"and {len(known)} of them are known input keys. Expected one of {', '.join(INPUT_KEYS)}. Pass an "
            "`Adapter` subclass as `adapter=` that overrides `forward`."
        )

    def _own_step(self, module: nn.Module, result: Any) -> Step:
        if not isinstance(result, tuple) or len(result) != 3 or not all(isinstance(part, Tensor) for part in result):
            raise BatchFormatError(
                f"`{type(module).__name__}.gradsim_step` returned {with_article(type(result).__name__)}. Expected the "
                "tuple (logits, targets, losses) of tensors, with one loss a sample."
            )
        logits, targets, losses = result
        if losses.ndim != 1 or len(losses) != len(logits):
            raise LossError(
                f"`{type(module).__name__}.gradsim_step` returned losses of shape {tuple(losses.shape)} for "
                f"{len(logits)} samples. Expected one loss a sample."
            )
        task, are_probabilities = self._task(logits, targets)
        return Step(logits, targets, losses, task, are_probabilities)

    def _agrees(self, step: Step) -> bool:
        try:
            losses = self.losses(step.logits, step.targets)
        except LossError:
            return False
        return torch.allclose(losses.detach(), step.losses.detach(), rtol=1e-4, atol=1e-6)

    def _task(self, logits: Tensor, targets: Tensor) -> tuple[Task, bool]:
        criterion = None if self._loss is None else self._loss.criterion
        if self._loss is not None and self._loss.is_binary:
            task = Task.BINARY if logits[:1].numel() <= 1 else Task.MULTILABEL
            return (task if logits.ndim <= 2 else Task.REGRESSION), self._loss.takes_probabilities
        several = logits.ndim == 2 and logits.shape[1] > 1
        if several and targets.ndim == 1 and not targets.is_floating_point():
            return Task.CLASSIFICATION, False
        if several and isinstance(criterion, nn.CrossEntropyLoss) and targets.shape == logits.shape:
            return Task.CLASSIFICATION, False
        return Task.REGRESSION, False

    def _loss_for(self, logits: Tensor, targets: Tensor) -> PerSampleLoss:
        if self._loss is not None:
            return self._loss
        several = logits.ndim == 2 and logits.shape[1] > 1
        if several and targets.ndim == 1 and not targets.is_floating_point():
            return cross_entropy()
        raise LossError(
            f"No loss is known for outputs of shape {tuple(logits.shape)} and targets of shape {tuple(targets.shape)} "
            f"({targets.dtype}): the module has no criterion attribute, and cross-entropy is the default for integer "
            f"targets [B] and logits [B, C] only. {index_hint(logits, targets)}Pass `loss_fn=` to `GradSimCallback`, "
            "a function of (outputs, targets) that returns one loss a sample."
        )


def _no_tensor(targets: Any) -> str:
    """What targets are that are no tensor, and what to do."""
    kind = f"`{type(targets).__name__}`"
    first = next(iter(targets), None) if isinstance(targets, (list, tuple)) else targets
    words = f"{with_article(kind)} of `{type(first).__name__}`" if first is not targets else with_article(kind)
    if isinstance(first, str):
        return (
            f"{words} such as {first!r:.40}. Expected a tensor, for classes of their numbers. Let the dataset give a "
            "number for each class, or pass an `Adapter` subclass as `adapter=` whose `split` maps them to numbers."
        )
    return (
        f"{words}. Expected a tensor. Let the dataset or its `collate_fn` give one, or pass an `Adapter` subclass as "
        "`adapter=` whose `split` makes one."
    )


def find_logits(output: Any) -> Tensor | None:
    """The logits in what a model returned: the tensor itself, or its entry or attribute ``logits``."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    output = getattr(output, "logits", output)
    return output if isinstance(output, Tensor) else None
