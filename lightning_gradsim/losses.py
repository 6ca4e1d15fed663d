"""One loss value a sample, derived from the criterion that the user trains with."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from lightning_gradsim.errors import LossError

LossFunction = Callable[[Tensor, Tensor], Tensor]

PAIRWISE_CRITERIA: tuple[type[nn.Module], ...] = (
    nn.CrossEntropyLoss,
    nn.NLLLoss,
    nn.BCEWithLogitsLoss,
    nn.BCELoss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.PoissonNLLLoss,
    nn.KLDivLoss,
    nn.MultiMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.SoftMarginLoss,
)
"""Criteria of the form ``criterion(outputs, targets)`` whose ``reduction="none"`` keeps samples apart."""

ELEMENTWISE_CRITERIA: tuple[type[nn.Module], ...] = (
    nn.BCEWithLogitsLoss,
    nn.BCELoss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.PoissonNLLLoss,
)
"""Criteria that compare outputs and targets entry by entry and so need both in one shape."""


ELEMENTWISE_FUNCTIONS: tuple[LossFunction, ...] = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)
"""Functions that do the same."""


class PerSampleLoss:
    """A loss that gives one value a sample, and the user's own batch loss beside it.

    Attributes:
        source: Where the loss comes from, in words.
        criterion: The criterion it was derived from, or ``None`` for a function.
    """

    def __init__(self, source: str, loss: nn.Module | LossFunction) -> None:
        self.source = source
        self.criterion = loss if isinstance(loss, nn.Module) else None
        self._loss = loss
        self._unreduced = _without_reduction(loss)

    @property
    def keeps_batches_apart(self) -> bool:
        """Whether a sample's value might depend on the batch it is in: torch's own criteria know no such thing."""
        return type(self.criterion) not in PAIRWISE_CRITERIA

    @property
    def ignore_index(self) -> int | None:
        """The target value that the loss ignores, if it has one."""
        if self.criterion is not None:
            return getattr(self.criterion, "ignore_index", None)
        default = _parameters(self._loss).get("ignore_index")
        return default if isinstance(default, int) else None

    @property
    def is_binary(self) -> bool:
        """Whether every output is the logit or probability of a label of its own."""
        kinds = (nn.BCEWithLogitsLoss, nn.BCELoss, nn.MultiLabelSoftMarginLoss)
        functions = (F.binary_cross_entropy_with_logits, F.binary_cross_entropy)
        return isinstance(self.criterion, kinds) or self._loss in functions

    @property
    def takes_probabilities(self) -> bool:
        """Whether the outputs are probabilities already."""
        return isinstance(self.criterion, nn.BCELoss) or self._loss is F.binary_cross_entropy

    @property
    def takes_class_indices(self) -> bool:
        """Whether integer targets name one of the outputs."""
        kinds = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
        return isinstance(self.criterion, kinds) or self._loss in (F.cross_entropy, F.nll_loss, F.multi_margin_loss)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """One loss a sample.

        Args:
            logits: Model outputs, first dimension ``B``.
            targets: Targets, first dimension ``B``. Criteria that compare entry by entry take ``[B]`` for outputs
                ``[B, 1]`` and integers for 0/1 targets: broadcasting would pair every sample with every other.

        Returns:
            Losses ``[B]``, with a graph to the logits. Further dimensions (tokens, regression outputs) are averaged,
            or summed where the criterion's own reduction is a sum over them.

        Raises:
            LossError: If the loss does not give at least one value a sample.
        """
        targets = self._align(logits, targets)
        self._follow(logits.device)
        try:
            values = self._unreduced(logits, targets)
        except (TypeError, ValueError, RuntimeError) as error:
            raise LossError(
                f"The loss from {self.source} failed on outputs of shape {tuple(logits.shape)} ({logits.dtype}) and "
                f"targets of shape {tuple(targets.shape)} ({targets.dtype}): {str(error).rstrip('.')}. "
                f"{index_hint(logits, targets)}Pass `loss_fn=` to `GradSimCallback`, a function of (outputs, targets) "
                "that returns one loss a sample."
            ) from error
        if values.ndim == 0 or values.shape[0] != logits.shape[0]:
            raise LossError(
                f"The loss from {self.source} returned shape {tuple(values.shape)} for {logits.shape[0]} samples. "
                "Expected one value a sample. Pass `loss_fn=` to `GradSimCallback`, a function of (outputs, targets) "
                'that does not reduce over the batch (`reduction="none"`).'
            )
        return self._reduce_rest(values, targets)

    def batch_value(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of the whole batch as the user would compute it, a scalar."""
        self._follow(logits.device)
        if self.criterion is not None and getattr(self.criterion, "reduction", "mean") != "none":
            return cast(Tensor, self.criterion(logits, self._align(logits, targets)))
        return self(logits, targets).mean()

    def _follow(self, device: torch.device) -> None:
        # A criterion passed as `loss_fn` is no part of the module, so nobody moves its class weights.
        if self.criterion is not None and any(buffer.device != device for buffer in self.criterion.buffers()):
            self.criterion = copy.deepcopy(self.criterion).to(device)
            self._loss = self.criterion
            self._unreduced = _without_reduction(self.criterion)

    def _align(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not isinstance(self.criterion, ELEMENTWISE_CRITERIA) and self._loss not in ELEMENTWISE_FUNCTIONS:
            return targets
        if not targets.is_floating_point():
            targets = targets.to(logits.dtype)
        return targets.reshape(logits.shape) if targets.numel() == logits.numel() else targets

    def _reduce_rest(self, values: Tensor, targets: Tensor) -> Tensor:
        if values.ndim == 1:
            return values
        flat = values.flatten(1)
        if getattr(self.criterion, "reduction", "mean") in ("sum", "batchmean"):
            return flat.sum(1)
        if self.ignore_index is not None and not targets.is_floating_point():
            return flat.sum(1) / (targets != self.ignore_index).flatten(1).sum(1).clamp(min=1)
        return flat.mean(1)


def find_loss(module: nn.Module, loss_fn: nn.Module | LossFunction | None = None) -> PerSampleLoss | None:
    """The per-sample form of the user's loss.

    Args:
        module: The user's module, searched for a criterion attribute where ``loss_fn`` is ``None``.
        loss_fn: A criterion or a function of (outputs, targets); takes precedence.

    Returns:
        The loss, or ``None`` where the module has no criterion.

    Raises:
        LossError: If the module holds several criteria, or one that has no known per-sample form.
    """
    if loss_fn is not None:
        return PerSampleLoss("`loss_fn`", loss_fn)
    criteria = {name: child for name, child in module.named_modules() if isinstance(child, _Loss)}
    if len(criteria) > 1:
        names = ", ".join(f"`{name}` ({type(child).__name__})" for name, child in criteria.items())
        raise LossError(
            f"`{type(module).__name__}` holds several criteria: {names}. Which one is the loss of a sample cannot be "
            "told. Pass it as `loss_fn=` to `GradSimCallback`."
        )
    for name, criterion in criteria.items():
        if not isinstance(criterion, PAIRWISE_CRITERIA):
            raise LossError(
                f"The criterion `{name}` ({type(criterion).__name__}) has no known per-sample form. Pass `loss_fn=` to "
                "`GradSimCallback`, a function of (outputs, targets) that returns one loss a sample."
            )
        return PerSampleLoss(f"`{type(module).__name__}.{name}` ({type(criterion).__name__})", criterion)
    return None


def index_hint(logits: Tensor, targets: Tensor) -> str:
    """What to do about targets that may be class indices in another form.

    Args:
        logits: Model outputs.
        targets: Targets that a loss has refused.

    Returns:
        Sentences; empty where they are something else.
    """
    is_column = targets.ndim == 2 and targets.shape[1] == 1
    several = logits.ndim == 2 and logits.shape[1] > 1
    change = f"{'[:, 0]' if is_column else ''}{'.long()' if targets.is_floating_point() else ''}"
    if not change or not several or not (is_column or targets.ndim == 1) or not _are_whole(targets):
        return ""
    return (
        f"If these targets are class indices, let the dataset give integers [B], or pass an `Adapter` subclass as "
        f"`adapter=` whose `split` returns `targets{change}`. Otherwise: "
    )


def _are_whole(values: Tensor) -> bool:
    return not values.is_floating_point() or bool((values == values.round()).all())


@functools.cache
def cross_entropy() -> PerSampleLoss:
    """The default for integer targets."""
    return PerSampleLoss("the default for integer targets (cross-entropy)", nn.CrossEntropyLoss())


def _without_reduction(loss: nn.Module | LossFunction) -> LossFunction:
    if isinstance(loss, nn.Module):
        if not hasattr(loss, "reduction"):
            return cast(LossFunction, loss)
        # A shallow copy shares the buffers (class weights) and leaves the user's criterion as it is.
        unreduced: Any = copy.copy(loss)
        unreduced.reduction = "none"
        return cast(LossFunction, unreduced)
    if "reduction" in _parameters(loss):
        return functools.partial(cast(Any, loss), reduction="none")
    return loss


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Parameters of a function with their defaults."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return {}
    return {name: parameter.default for name, parameter in parameters.items()}
