"""Circumstances under which flags are less to be believed, in words."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gradsim.mislabel.judgement import find_contradicted, suggest_labels
from lightning_gradsim.mislabel.statistics import RunAverages
from lightning_gradsim.tasks import Task

MEMORISED = 0.98
"""Accuracy for the given training labels from which a model may have learned the wrong ones, too."""
MEMORISING_GAP = 0.1
"""How much lower validation accuracy then is. All of these are read off the settings of docs/mislabel.md."""
UNSURE = 0.4
"""Median probability of what is suggested to flagged samples, below which the model does not know better."""
NEAR_ERROR = 0.8
"""Share of flagged samples over the validation error from which flags may be the model's own mistakes."""
UNDERFITTING_SHARE = 0.2
"""Share of flagged samples from which that matters."""
DOUBTED_SHARE = 0.3
"""Share of doubtful labels among the studied validation mistakes."""
MIN_DOUBTED = 5


def find_cautions(
    averages: RunAverages,
    *,
    train_accuracy: float | None = None,
    validation_accuracy: float | None = None,
    doubted_queries: int = 0,
    studied_queries: int = 0,
) -> tuple[str, ...]:
    """What to be careful about.

    Args:
        averages: Of the run so far.
        train_accuracy: Of the last epoch, for the given labels, in [0, 1]; ``None`` where unknown.
        validation_accuracy: For the given validation labels, in [0, 1]; ``None`` where unknown.
        doubted_queries: Studied validation mistakes whose own label is doubtful.
        studied_queries: Validation mistakes that were studied.

    Returns:
        Sentences, each naming its figures; empty if all is well.
    """
    found = []
    if train_accuracy is not None and validation_accuracy is not None:
        gap = train_accuracy - validation_accuracy
        if train_accuracy >= MEMORISED and gap >= MEMORISING_GAP:
            found.append(
                f"Memorising model: {train_accuracy:.0%} of the training labels are learned, and "
                f"{validation_accuracy:.0%} of the validation labels. Wrong labels are learned, too, so few are "
                "flagged: go by the ranking, and look at its first 5 %."
            )
    found.extend(_underfitting(averages, validation_accuracy))
    if doubted_queries >= MIN_DOUBTED and doubted_queries >= DOUBTED_SHARE * studied_queries:
        found.append(
            f"Noisy validation set: the label of {doubted_queries} of {studied_queries} studied validation mistakes is "
            "doubtful. Harmful samples and teachers swap meaning there, and `influence` and `trusted_val` mislead; the "
            "other scores do not use the validation set."
        )
    return tuple(found)


def _underfitting(averages: RunAverages, validation_accuracy: float | None) -> list[str]:
    probabilities = suggest_labels(averages)[1]
    if averages.task is not Task.CLASSIFICATION or probabilities is None or validation_accuracy is None:
        return []
    flagged = find_contradicted(averages)
    share, error = float(flagged.float().mean()), 1 - validation_accuracy
    if not share >= UNDERFITTING_SHARE or not NEAR_ERROR <= share / max(error, 1e-9) <= 1 / NEAR_ERROR:
        return []
    sureness = float(_median(probabilities[flagged]))
    if sureness >= UNSURE:
        return []
    return [
        f"Underfitting model: {share:.0%} of the samples are flagged, about as many as it gets wrong on the validation "
        f"set ({error:.0%}), half of them for a class that it gives {sureness:.0%} or less. Many flags may be its own "
        "mistakes: go by the ranking, and look at its first 1 %."
    ]


def _median(values: Tensor) -> Tensor:
    return torch.quantile(values.float(), 0.5) if len(values) < 2**24 else values.median()
