"""Known true labels of the training samples, and how well suspects find those that differ from the given ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gradsim.arguments import check_type
from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.tasks import Task

FIRST_SHARE = 0.01
"""Share of the list that is looked at first."""
SAME_VALUE = 1e-6
"""Relative difference of values of a regression up to which they are the same."""
EXPECTED = "Expected one label a training sample, by sample id: a list, an array or a tensor"


@dataclass(frozen=True)
class SuspectQuality:
    """How well suspects find the labels that are truly wrong; ``None`` where there is nothing to judge by.

    Attributes:
        num_wrong: How many of the samples in the table have a given label that is not the true one, ``n``.
        auroc: Area under the ROC curve of the score, in [0, 1].
        average_precision: Average precision of the score, in [0, 1].
        precision_at_n: Share of wrong labels among the first ``n`` of the table.
        precision_at_1_percent: Share of wrong labels in the first 1 % of the table.
        precision_flagged: Share of wrong labels among the flagged samples.
        recall_flagged: Share of the wrong labels that are flagged.
        suggestion_accuracy: Share of the wrong labels whose suggested label is the true one.
    """

    num_wrong: int
    auroc: float | None
    average_precision: float | None
    precision_at_n: float | None
    precision_at_1_percent: float | None
    precision_flagged: float | None
    recall_flagged: float | None
    suggestion_accuracy: float | None

    def shares(self) -> Iterator[tuple[str, float]]:
        """All figures but the count, by name, without those that are ``None``."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "num_wrong" and value is not None:
                yield each.name, value


class TrueLabels:
    """The true label of every training sample.

    Args:
        values: By sample id: class indices ``[N]``, active labels ``[N, L]`` of a multi-label task as 0 and 1, or
            values of a regression ``[N]``.

    Raises:
        TypeError: If this is no list, array or tensor of numbers.
        ValueError: If it has no samples or another shape, a class index is negative, or a value is not finite.
    """

    def __init__(self, values: Any) -> None:
        self._values = _to_tensor(values)

    def __len__(self) -> int:
        """Number of labels."""
        return len(self._values)

    def check_count(self, num_ids: int) -> None:
        """Refuse another number of labels than there are samples.

        Args:
            num_ids: Length of the training dataset (of the one beneath a ``Subset``).

        Raises:
            ValueError: If the numbers differ.
        """
        if len(self) != num_ids:
            raise ValueError(
                f"`true_labels` holds {len(self)} labels for {num_ids} training samples. {EXPECTED}; of a `Subset`, "
                "for all samples of the dataset beneath."
            )

    def check_task(self, task: Task, num_outputs: int | None = None) -> None:
        """Refuse labels that no sample of such a task can have.

        Args:
            task: Kind of task.
            num_outputs: Logits a sample; ``None`` where not known.

        Raises:
            ValueError: If they are of another kind, or out of range.
        """
        values, is_multilabel = self._values, task is Task.MULTILABEL
        if is_multilabel != (values.ndim == 2) or (is_multilabel and num_outputs not in {None, values.shape[1]}):
            form = f"[N, {num_outputs or 'L'}], one column a label" if is_multilabel else "[N]"
            raise ValueError(
                f"`true_labels` has the shape {list(values.shape)}, and the task is {task.value}. Expected {form}."
            )
        if task is Task.REGRESSION:
            return
        number = num_outputs if task is Task.CLASSIFICATION else 2
        if values.is_floating_point() or (number is not None and int(values.max()) >= number):
            found = "floating-point numbers" if values.is_floating_point() else f"the label {int(values.max())}"
            expected = "class indices" if number is None else f"whole numbers from 0 to {number - 1}"
            raise ValueError(f"`true_labels` holds {found}, and the task is {task.value}. Expected {expected}.")

    def judge(self, table: SuspectTable) -> SuspectQuality | None:
        """How well suspects find the labels that are truly wrong.

        Args:
            table: The suspects.

        Returns:
            The figures; ``None`` for a table without samples.

        Raises:
            ValueError: If labels are of another kind, or a sample of the table has none.
        """
        if not len(table):
            return None
        if int(table.sample_ids.max()) >= len(self):
            self.check_count(int(table.sample_ids.max()) + 1)
        is_regression = table.labels.is_floating_point()
        self.check_task(
            Task.REGRESSION if is_regression else Task.MULTILABEL if table.labels.ndim == 2 else Task.CLASSIFICATION
        )
        true = self._values[table.sample_ids]
        if is_regression:
            given = table.labels.double()
            wrong = (given - true).abs() > SAME_VALUE * torch.maximum(given.abs(), true.double().abs())
        else:
            wrong = (table.labels != true).reshape(len(table), -1).any(1)
        number, first = int(wrong.sum()), math.ceil(FIRST_SHARE * len(table))
        suggested = None if table.suggested_labels is None else table.suggested_labels[wrong] == true[wrong]
        return SuspectQuality(
            num_wrong=number,
            auroc=auroc(table.scores, wrong),
            average_precision=average_precision(table.scores, wrong),
            precision_at_n=_share(wrong[:number]),
            precision_at_1_percent=_share(wrong[:first]),
            precision_flagged=_share(wrong[table.flagged]),
            recall_flagged=_share(table.flagged[wrong]),
            suggestion_accuracy=None if suggested is None else _share(suggested),
        )


def auroc(scores: Tensor, positive: Tensor) -> float | None:
    """Area under the ROC curve; equal scores count half.

    Args:
        scores: ``[N]``, higher for positives.
        positive: Which are, bool ``[N]``.

    Returns:
        The area in [0, 1]; ``None`` where all are of one kind.

    Example:
        >>> auroc(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([True, False, True]))
        0.5
    """
    number = int(positive.sum())
    pairs = number * (len(positive) - number)
    if not pairs:
        return None
    counts, hits = _counts_by_score(scores, positive)
    # Of each positive, the negatives below it, and half of those beside it; scores fall.
    others = counts - hits
    below = others.sum() - others.cumsum(0)
    return float((hits * (below + others / 2)).sum() / pairs)


def average_precision(scores: Tensor, positive: Tensor) -> float | None:
    """Precision at every place of a positive, averaged; equal scores share one place.

    Args:
        scores: ``[N]``, higher for positives.
        positive: Which are, bool ``[N]``.

    Returns:
        The average precision in [0, 1]; ``None`` without a positive.

    Example:
        >>> average_precision(torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([True, False, False, True]))
        0.75
    """
    number = int(positive.sum())
    if not number:
        return None
    counts, hits = _counts_by_score(scores, positive)
    return float((hits * hits.cumsum(0) / counts.cumsum(0)).sum() / number)


def _counts_by_score(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Samples, and positives, of each distinct score, the highest first; float64."""
    values, inverse, counts = scores.unique(return_inverse=True, return_counts=True)
    hits = torch.zeros(len(values), dtype=torch.float64).index_add_(0, inverse, positive.double())
    return counts.flip(0).double(), hits.flip(0)


def _share(hits: Tensor) -> float | None:
    return float(hits.double().mean()) if len(hits) else None


def _to_tensor(values: Any) -> Tensor:
    is_list = isinstance(values, (list, tuple, np.ndarray, Tensor))
    check_type("true_labels", values, is_list, EXPECTED.removeprefix("Expected "))
    try:
        tensor = torch.as_tensor(values).detach().to("cpu", copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"`true_labels` holds more than numbers: {str(error).rstrip('.')}. {EXPECTED}.") from error
    if tensor.is_complex():
        raise TypeError(f"`true_labels` holds complex numbers. {EXPECTED}.")
    if tensor.ndim not in {1, 2} or not tensor.numel():
        raise ValueError(f"`true_labels` has the shape {list(tensor.shape)}. {EXPECTED}.")
    if tensor.is_floating_point():
        tensor = tensor.double()
        wrong = (~tensor.isfinite()).reshape(len(tensor), -1).any(1)
    else:
        tensor = tensor.long()
        wrong = (tensor < 0).reshape(len(tensor), -1).any(1)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise ValueError(f"`true_labels[{place}]` is {tensor[place].tolist()}, which is no label. {EXPECTED}.")
    return tensor
