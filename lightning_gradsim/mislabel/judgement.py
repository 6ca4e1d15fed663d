"""From scores to a ranked list with flags, suggested labels, and what to be careful about."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gradsim.mislabel.scores import DEFAULT, FROM_NEIGHBOURS, log_margin, mislabel_score
from lightning_gradsim.mislabel.statistics import SKIPPED, RunAverages
from lightning_gradsim.tasks import Task

REVIEW_SHARES = (0.01, 0.05)
"""Shares of the ranked list that are worth a look, whatever is flagged."""
RESIDUAL_DEVIATIONS = 3.0
"""Median absolute deviations, scaled to a standard deviation, beyond which a residual is flagged (experimental)."""
MAD_TO_STD = 1.4826


@dataclass(frozen=True, eq=False)
class Judgement:
    """Training samples by falling mislabel score, ties by the smaller id.

    Index key: ``n`` visited sample.

    Attributes:
        sample_ids: Indices into the training dataset, int64 ``[n]``.
        scores: Mislabel scores, float32 ``[n]``.
        parts: Other scores of the same samples, by name, float32 ``[n]``.
        labels: Given labels, as ``RunAverages.labels``.
        suggested: Suggested label, int64 ``[n]``: the most probable other class; in a multi-label task the label that
            is most suspect, to be switched; ``None`` in regression and without predictions.
        probabilities: Averaged probability of what is suggested, ``[n]``; ``None`` likewise.
        flagged: Whether the averaged prediction differs from the label, bool ``[n]``.
        visits: How often each was visited, int64 ``[n]``.
        upper_estimate: Samples above Otsu's threshold: it parts any list in two, a clean one too, so in all settings of
            docs/mislabel.md these are more than are wrong.
        notes: What limits these results, in words.
    """

    sample_ids: Tensor
    scores: Tensor
    parts: Mapping[str, Tensor]
    labels: Tensor
    suggested: Tensor | None
    probabilities: Tensor | None
    flagged: Tensor
    visits: Tensor
    upper_estimate: int
    notes: tuple[str, ...]

    def review(self, share: float = REVIEW_SHARES[0]) -> Tensor:
        """Ids of the first samples of the list.

        Args:
            share: Of all samples, above 0.

        Returns:
            Sample ids, at least one where there are samples.
        """
        return self.sample_ids[: math.ceil(share * len(self.sample_ids))]


def judge(averages: RunAverages, score: str = DEFAULT, parts: Sequence[str] = ()) -> Judgement:
    """Rank, flag and suggest.

    Args:
        averages: Of the run so far.
        score: What to rank by, of ``SCORES``.
        parts: Other scores to report beside it.

    Returns:
        The judgement.
    """
    scores = mislabel_score(score, averages)
    order = scores.argsort(descending=True, stable=True)
    suggested, probabilities = suggest_labels(averages)
    return Judgement(
        averages.sample_ids[order],
        scores[order],
        {name: mislabel_score(name, averages)[order] for name in parts},
        averages.labels[order],
        None if suggested is None else suggested[order],
        None if probabilities is None else probabilities[order],
        find_contradicted(averages)[order],
        averages.visits[order],
        otsu_count(scores),
        _notes(averages, score),
    )


def find_contradicted(averages: RunAverages) -> Tensor:
    """Samples whose averaged prediction differs from their label.

    Args:
        averages: With ``prediction``, or ``margin``.

    Returns:
        bool ``[n]``: for classes ``argmax_c p_c != y``; for labels whether any is on the other side of one half;
        without predictions whether the averaged margin is below zero; in regression (experimental) whether the
        residual lies more than three scaled median absolute deviations above the median residual.
    """
    if averages.task is Task.REGRESSION:
        residuals = log_margin(averages)
        median = residuals.median()
        return residuals - median > RESIDUAL_DEVIATIONS * MAD_TO_STD * (residuals - median).abs().median()
    suspicion = log_margin(averages) if "prediction" in averages.means else -averages.means["margin"]
    return (suspicion > 0).any(1) if suspicion.ndim == 2 else suspicion > 0


def suggest_labels(averages: RunAverages) -> tuple[Tensor | None, Tensor | None]:
    """The most probable label other than the given one.

    Args:
        averages: Of the run so far.

    Returns:
        Labels int64 ``[n]`` (multi-label: which label to switch) and their averaged probabilities ``[n]``, or ``None``
        twice without classes or predictions.
    """
    if averages.task is Task.REGRESSION or "prediction" not in averages.means:
        return None, None
    prediction, labels = averages.means["prediction"], averages.labels
    if averages.task is Task.CLASSIFICATION:
        probabilities, suggested = prediction.scatter(1, labels[:, None], -1.0).max(1)
        return suggested, probabilities
    probabilities, suspect = torch.where(labels == 1, 1 - prediction, prediction).max(1)
    return (1 - labels[:, 0] if averages.task is Task.BINARY else suspect), probabilities


def otsu_count(scores: Tensor) -> int:
    """Number of scores above the threshold that parts them best into two groups.

    Args:
        scores: ``[n]``.

    Returns:
        The size of the upper group; 0 if all scores are equal.

    Source:
        Otsu (1979), IEEE Trans. SMC 9(1), over all cuts between sorted scores instead of a histogram's.
    """
    ordered = scores.double().sort().values
    number = len(ordered)
    if number < 2 or bool(ordered[0] == ordered[-1]):
        return 0
    sums = (ordered - ordered.mean()).cumsum(0)[:-1]
    below = torch.arange(1, number, dtype=torch.float64)
    # Between-class variance, with means about zero: the lower sum is minus the upper one. Among equal scores it is
    # convex, so that the best cut never parts them.
    between = sums.square() / (below * (number - below))
    return number - 1 - int(between.argmax())


def _notes(averages: RunAverages, score: str) -> tuple[str, ...]:
    notes = []
    if score in FROM_NEIGHBOURS and averages.neighbours is None:
        notes.append(
            "No round of neighbours yet: samples are ranked by their margin alone."
            if score == DEFAULT
            else "No round of neighbours yet: samples are not ranked."
        )
    elif score in FROM_NEIGHBOURS and averages.neighbours is not None:
        missing = int(averages.neighbours.reshape(len(averages.visits), -1).isnan().any(1).sum())
        if missing:
            notes.append(f"{missing} samples were in no round of neighbours, and count as average there.")
    if "prediction" not in averages.means:
        notes.append(
            "Predictions of all classes did not fit `max_state_mb`: margins serve instead, no label is suggested."
        )
    if averages.task is Task.REGRESSION:
        notes.append("Suspects of a regression, by residuals, are experimental.")
    notes.extend(f"{number} {SKIPPED[reason]}." for reason, number in averages.skipped.items())
    return tuple(notes)
