"""Kinds of prediction task: from logits and targets to labels, predictions, probabilities and mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from lightning_gradsim.errors import LabelRangeError
from lightning_gradsim.precision import raise_half


class Task(Enum):
    """What the model's outputs and targets mean."""

    CLASSIFICATION = "classification"
    """Logits ``[B, C]``; targets are class indices ``[B]`` or class probabilities ``[B, C]``."""
    BINARY = "binary"
    """One logit a sample, ``[B]`` or ``[B, 1]``; targets of the same shape in [0, 1]."""
    MULTILABEL = "multilabel"
    """One logit a label, ``[B, L]``; targets of the same shape in [0, 1]."""
    REGRESSION = "regression"
    """Anything else with a per-sample loss: no classes, samples are ranked by loss."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a batch's logits say beside its targets.

    Attributes:
        labels: Given labels: class indices int64 ``[B]``, values float ``[B]``, or active labels int8 ``[B, L]``.
        predictions: Predicted labels, like ``labels``.
        probabilities: Probability of the prediction (multi-label: of the least sure label), ``[B]``; ``None`` in
            regression.
        wrong: Whether the prediction differs from the label, bool ``[B]``; all ``True`` in regression.
        suggested: Most probable class other than the label, int64 ``[B]``; ``None`` without exclusive classes.
        suggested_probabilities: Its probability, ``[B]``; ``None`` like ``suggested``.
        label_probabilities: Probability of the label, ``[B]``; ``None`` like ``suggested``.
    """

    labels: Tensor
    predictions: Tensor
    probabilities: Tensor | None
    wrong: Tensor
    suggested: Tensor | None = None
    suggested_probabilities: Tensor | None = None
    label_probabilities: Tensor | None = None


def read_outcome(task: Task, logits: Tensor, targets: Tensor, *, are_probabilities: bool = False) -> Outcome:
    """Labels, predictions and mistakes of a batch.

    Args:
        task: Kind of task.
        logits: Model outputs, in the shape that the task names.
        targets: Targets, in the shape that the task names.
        are_probabilities: Whether the outputs are probabilities already (``nn.BCELoss``).

    Returns:
        The outcome, on the device of the logits.
    """
    logits = raise_half(logits.detach())
    if task is Task.CLASSIFICATION:
        return _classification(logits, targets)
    if task is Task.REGRESSION:
        labels = _one_value(targets)
        return Outcome(
            labels, _one_value(logits), None, torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        )
    probabilities = logits if are_probabilities else logits.sigmoid()
    if task is Task.BINARY:
        return _binary(probabilities.flatten(), targets.flatten())
    labels, predictions = (targets > 0.5), (probabilities > 0.5)
    sureness = torch.where(predictions, probabilities, 1 - probabilities).amin(1)
    return Outcome(labels.to(torch.int8), predictions.to(torch.int8), sureness, (labels != predictions).any(1))


def predicted_targets(task: Task, outcome: Outcome, targets: Tensor) -> Tensor | None:
    """Targets that say what the model predicts, in the form of ``targets``.

    Args:
        task: Kind of task.
        outcome: The batch's outcome.
        targets: The batch's targets.

    Returns:
        Targets of the same shape and dtype, or ``None`` in regression, where a prediction has no loss.
    """
    if task is Task.REGRESSION:
        return None
    if task is Task.CLASSIFICATION and targets.is_floating_point():
        return torch.nn.functional.one_hot(outcome.predictions, targets.shape[1]).to(targets.dtype)
    return outcome.predictions.reshape(targets.shape).to(targets.dtype)


def check_class_indices(targets: Tensor, num_classes: int, ignore_index: int | None) -> None:
    """Refuse class indices that the model has no logit for, before a loss kernel meets them.

    On CUDA an out-of-range target is a device-side assertion that would take the whole training down.

    Args:
        targets: Class indices ``[B]`` of any integer dtype.
        num_classes: Number of logits ``C``.
        ignore_index: A value that marks samples to be ignored, if any.

    Raises:
        LabelRangeError: If a target is neither in ``[0, C)`` nor ``ignore_index``.
    """
    if not targets.numel():
        return
    lowest, highest = targets.aminmax()
    if bool((lowest >= 0) & (highest < num_classes)):
        return
    outside = (targets < 0) | (targets >= num_classes)
    if ignore_index is not None:
        outside &= targets != ignore_index
    if outside.any():
        values = sorted({int(value) for value in targets[outside]})
        raise LabelRangeError(
            f"Labels {values[:10]} lie outside the model's {num_classes} classes (0 to {num_classes - 1}). "
            "Check the targets, or pass `loss_fn=nn.CrossEntropyLoss(ignore_index=...)` if such samples are to be "
            "ignored.",
            outside.nonzero()[:, 0].tolist(),
        )


def _classification(logits: Tensor, targets: Tensor) -> Outcome:
    probabilities = logits.softmax(1)
    top_probabilities, predictions = probabilities.max(1)
    labels = targets.argmax(1) if targets.is_floating_point() else targets.long()
    known = (labels >= 0) & (labels < logits.shape[1])  # ignored samples carry a value outside the classes
    index = labels.clamp(0, logits.shape[1] - 1)[:, None]
    suggested_probabilities, suggested = probabilities.scatter(1, index, -1.0).max(1)
    return Outcome(
        labels,
        predictions,
        top_probabilities,
        known & (predictions != labels),
        suggested,
        suggested_probabilities,
        probabilities.gather(1, index)[:, 0],
    )


def _binary(probabilities: Tensor, targets: Tensor) -> Outcome:
    labels, predictions = (targets > 0.5).long(), (probabilities > 0.5).long()
    of_other = torch.where(labels == 1, 1 - probabilities, probabilities)
    sureness = torch.where(predictions == 1, probabilities, 1 - probabilities)
    return Outcome(labels, predictions, sureness, labels != predictions, 1 - labels, of_other, 1 - of_other)


def _one_value(values: Tensor) -> Tensor:
    # A vector-valued target is shown by its mean: the record names one number a sample.
    return values.detach().to(torch.get_default_dtype()).reshape(len(values), -1).mean(1)
