"""What one visit of a training step says about a sample's label: pure functions of logits, targets and features."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gradsim.errors import BatchFormatError
from lightning_gradsim.precision import raise_half
from lightning_gradsim.tasks import Task

COLUMNS = ("margin", "loss", "prediction", "error_norm", "self_influence", "influence")
"""What can be measured of a visit; ``Visits`` says what each is."""
FROM_FEATURES = ("self_influence", "influence")
"""Those that need the input of the head."""


@dataclass(frozen=True, eq=False)
class Visits:
    """What a batch's samples gave, one row a sample.

    Index key: ``b`` sample, ``c`` class, ``l`` label of a binary (one) or multi-label task.

    Attributes:
        labels: Class indices int64 ``[b]``, active labels int64 ``[b, l]``, or values of a regression ``[b]``.
        usable: Which rows count, bool ``[b]``; values of the others are zero.
        values: By column, float32, or float64 for such logits: ``margin`` ``[b]`` or ``[b, l]``, logit of the label
            minus the largest other; ``loss``, likewise, cross-entropy, or the absolute residual of a regression;
            ``prediction``, probabilities ``[b, c]``, of an active label ``[b, l]``, or the value ``[b, 1]``;
            ``error_norm`` ``[b]``, distance between probabilities and one-hot label; ``self_influence`` and
            ``influence`` ``[b]``.
        mixed: Rows left out since their target is no single class.
        outside: Rows left out since their label is none of the classes (``ignore_index``).
        non_finite: Rows left out since logits or features are NaN or infinite.
    """

    labels: Tensor
    usable: Tensor
    values: dict[str, Tensor]
    mixed: Tensor
    outside: Tensor
    non_finite: Tensor


def measure_visits(
    task: Task,
    logits: Tensor,
    targets: Tensor,
    columns: Collection[str] = ("margin", "loss", "prediction"),
    *,
    features: Tensor | None = None,
    output_grads: Tensor | None = None,
    learning_rate: float = 1.0,
    class_gradients: Tensor | None = None,
) -> Visits:
    """Measure the visits of a batch, without waiting for the device.

    Args:
        task: Kind of task.
        logits: Outputs of the model in the shape that the task names, before the update. Probabilities of
            ``nn.BCELoss`` have to be turned into logits first.
        targets: Targets in the shape that the task names. A row of class probabilities counts only if it is one-hot.
        columns: What to measure, of ``COLUMNS``.
        features: Input of the head ``[b, d]``, for ``self_influence`` and ``influence``.
        output_grads: Gradients of the per-sample losses by the logits; of cross-entropy (in regression, of half the
            squared residual) if ``None``.
        learning_rate: Of this step, a factor on ``self_influence``.
        class_gradients: Mean gradients of validation classes from ``class_gradients``, for ``influence``.

    Returns:
        The visits.

    Raises:
        BatchFormatError: If a column needs features or class gradients that are not given.
    """
    logits = raise_half(logits.detach())
    logits, targets = _canonical(task, logits, targets)
    labels, mixed, outside = _read_labels(task, logits, targets)
    finite = logits.isfinite().all(1)
    if features is not None:
        features = raise_half(features.detach()).flatten(1)
        finite &= features.isfinite().all(1)
    usable = finite & ~mixed & ~outside
    residuals, values = _outputs(task, logits, labels, columns)
    if output_grads is not None:
        residuals = raise_half(output_grads.detach()).reshape(residuals.shape)
    for column in FROM_FEATURES:
        if column in columns:
            given = _required(column, "features", features)
            if column == "self_influence":
                values[column] = learning_rate * residuals.square().sum(1) * (given.square().sum(1) + 1)
            else:
                values[column] = class_influence(
                    given, residuals, _required(column, "class_gradients", class_gradients)
                )
    for value in values.values():  # one NaN would spoil the sum of a sample that is fine in other visits
        value[~usable] = 0
    return Visits(labels, usable, values, mixed, outside & ~mixed, ~finite & ~mixed & ~outside)


def class_gradients(features: Tensor, output_grads: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Mean gradient of the head over the validation samples of each class.

    Args:
        features: Input of the head ``[v, d]``.
        output_grads: Gradients of the losses by the logits ``[v, c]``; for cross-entropy the probabilities minus the
            one-hot label.
        labels: Class indices ``[v]``.
        num_classes: Number of classes ``k``.

    Returns:
        Gradients ``[k, c, d + 1]``, the last column of the bias; zero for a class without samples.
    """
    inputs = F.pad(raise_half(features), (0, 1), value=1.0)
    members = F.one_hot(labels, num_classes).to(inputs.dtype)
    grads = raise_half(output_grads).to(inputs.dtype)
    sums = torch.stack([(grads * members[:, k : k + 1]).T @ inputs for k in range(num_classes)])
    return sums / members.sum(0).clamp(min=1)[:, None, None]


def class_influence(features: Tensor, output_grads: Tensor, class_gradients: Tensor) -> Tensor:
    """How much a gradient step on a sample raises the loss of the validation class that it harms most.

    Args:
        features: Input of the head ``[b, d]``.
        output_grads: Gradients of the losses by the logits ``[b, c]``.
        class_gradients: Of ``class_gradients``, ``[k, c, d + 1]``.

    Returns:
        ``max_k -<g_b, G_k>``, loss² per parameter², ``[b]``.
    """
    inputs = F.pad(features, (0, 1), value=1.0).to(class_gradients.dtype)
    # Inputs with every row of every class first: `[b, k, c]` is the smallest that any order of the sums goes through.
    products: Tensor = (inputs @ class_gradients.flatten(0, 1).T).unflatten(1, class_gradients.shape[:2])
    return -(products * output_grads.to(inputs.dtype)[:, None, :]).sum(2).amin(1)


def _canonical(task: Task, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``[b, c]``, ``[b, l]`` or ``[b, outputs]``, and targets that fit."""
    if task is Task.CLASSIFICATION:
        return logits, targets
    if not targets.is_floating_point():
        targets = targets.to(logits.dtype)
    logits = logits.reshape(len(logits), -1)
    return logits, targets.reshape(len(logits), -1)


def _read_labels(task: Task, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    if task is Task.REGRESSION:
        return targets.to(logits.dtype).mean(1), none, ~targets.isfinite().all(1)
    if task is not Task.CLASSIFICATION:
        return (targets > 0.5).long(), ((targets != 0) & (targets != 1)).any(1), none
    if targets.is_floating_point():
        return targets.argmax(1), targets.amax(1) != 1, none
    labels = targets.long()
    outside = (labels < 0) | (labels >= logits.shape[1])
    return torch.where(outside, 0, labels), none, outside


def _outputs(task: Task, logits: Tensor, labels: Tensor, columns: Collection[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients of the losses by the logits, and the columns that need no features."""
    if task is Task.REGRESSION:
        values = {"loss": (logits.mean(1) - labels).abs(), "prediction": logits.mean(1, keepdim=True)}
        return logits - labels[:, None], {name: values[name] for name in columns if name in values}
    values = {}
    if task is Task.CLASSIFICATION:
        index = labels[:, None]
        probabilities = logits.softmax(1)
        residuals = probabilities.scatter_add(1, index, torch.full_like(index, -1, dtype=logits.dtype))
        if "margin" in columns:
            others = logits.scatter(1, index, -torch.inf).amax(1)
            values["margin"] = logits.gather(1, index)[:, 0] - others
        if "loss" in columns:
            values["loss"] = F.cross_entropy(logits, labels, reduction="none")
    else:
        probabilities = logits.sigmoid()
        residuals = probabilities - labels
        signed = torch.where(labels == 1, logits, -logits)
        values = {"margin": signed, "loss": F.softplus(-signed)}
        values = {name: value for name, value in values.items() if name in columns}
    if "prediction" in columns:
        values["prediction"] = probabilities
    if "error_norm" in columns:
        values["error_norm"] = residuals.norm(dim=1)
    return residuals, values


def _required(column: str, name: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise BatchFormatError(f"`{column}` is measured from `{name}`, and none are given. Pass `{name}=`.")
    return value
