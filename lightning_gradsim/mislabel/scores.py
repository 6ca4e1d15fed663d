"""Mislabel scores: pure functions of run averages, higher is more suspect, in one registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gradsim.mislabel.statistics import RunAverages, bytes_a_sample
from lightning_gradsim.tasks import Task

FLOOR = 1e-7
"""Smallest probability that a logarithm sees: what float32 can tell from one, so that both ends are alike."""
DEFAULT = "margin_knn"


@dataclass(frozen=True)
class MislabelScore:
    """A score with its formula.

    Attributes:
        name: Its name.
        formula: Its formula, in words.
        source: Where it comes from.
        columns: Averages that it needs.
        compute: From averages to scores, ``[n]``, or ``[n, l]`` for each label.
        without_prediction: Columns that serve instead where there is no room for predictions.
    """

    name: str
    formula: str
    source: str
    columns: tuple[str, ...]
    compute: Callable[[RunAverages], Tensor]
    without_prediction: tuple[str, ...] | None = None


def standardise(values: Tensor) -> Tensor:
    """``z``: values minus their mean, over their standard deviation.

    Args:
        values: Any shape; NaN where unknown.

    Returns:
        The same shape; 0 where unknown, and everywhere if all are equal.
    """
    known = values[~values.isnan()].double()
    if not len(known):
        return torch.zeros_like(values)
    deviation = known.std(correction=0)
    centred = (values.double() - known.mean()) / torch.where(deviation > 0, deviation, 1)
    return torch.where(values.isnan(), 0, centred).to(values.dtype)


def log_margin(averages: RunAverages) -> Tensor:
    """Log-probability of the best other class minus that of the label, from averaged probabilities.

    Args:
        averages: With ``prediction``.

    Returns:
        ``max_{c != y} log p_c - log p_y`` ``[n]``; by label ``[n, l]``; in regression the residual of the averaged
        prediction ``[n]``.
    """
    prediction, labels = averages.means["prediction"], averages.labels
    if averages.task is Task.REGRESSION:
        return (prediction[:, 0] - labels).abs()
    logs = prediction.clamp(min=FLOOR).log()
    if averages.task is Task.CLASSIFICATION:
        index = labels[:, None]
        return logs.scatter(1, index, -torch.inf).amax(1) - logs.gather(1, index)[:, 0]
    odds = logs - (1 - prediction).clamp(min=FLOOR).log()
    return torch.where(labels == 1, -odds, odds)


def margin_or_aum(averages: RunAverages) -> Tensor:
    """``log_margin`` where predictions were summed, else ``aum``."""
    return log_margin(averages) if "prediction" in averages.means else -averages.means["margin"]


def margin_knn(averages: RunAverages) -> Tensor:
    """``z(L) + z(K)``; ``z(L)`` before the first round of neighbours."""
    margins = standardise(margin_or_aum(averages))
    return margins if averages.neighbours is None else margins + standardise(averages.neighbours)


def knn(averages: RunAverages) -> Tensor:
    """Neighbour votes against the label, averaged over the rounds; 0 where unknown."""
    if averages.neighbours is None:
        return torch.zeros_like(averages.labels, dtype=torch.float32)
    return averages.neighbours.nan_to_num(0.0)


def _mean(column: str, sign: int = 1) -> Callable[[RunAverages], Tensor]:
    return lambda averages: sign * averages.means[column]


SCORES = {
    score.name: score
    for score in [
        MislabelScore(
            "margin_knn",
            "S = z(L) + z(K): `log_margin` and `knn`, each standardised over the samples; L from `aum` where there is "
            "no room for predictions, and z(L) alone before the first round of neighbours",
            "chosen by measurement, benchmarks/mislabel.py",
            ("margin", "prediction"),
            margin_knn,
            ("margin",),
        ),
        MislabelScore(
            "log_margin",
            "L = max_{c != y} log p_c - log p_y, p the average of the probabilities over the visits",
            "Pleiss et al. (2020), arXiv:2001.10528, of averaged probabilities instead of logits",
            ("margin", "prediction"),
            log_margin,
        ),
        MislabelScore(
            "knn",
            "K = (1 - v_y) + (max_{c != y} v_c - v_y), v the shares of the labels among the 25 nearest samples by the "
            "features of the head (cosine about the mean), averaged over epochs 2, 4, 8, 16, ... and the last, each "
            "weighted by the epochs since the one before",
            "after Wilson (1972), IEEE Trans. SMC 2(3), and Bahri et al. (2020), arXiv:2004.12289",
            ("margin",),
            knn,
        ),
        MislabelScore(
            "aum",
            "minus the average over the visits of z_y - max_{c != y} z_c, z the logits",
            "Pleiss et al. (2020), arXiv:2001.10528",
            ("margin",),
            _mean("margin", -1),
        ),
        MislabelScore(
            "loss",
            "average over the visits of the cross-entropy; in regression of the absolute residual",
            "Arpit et al. (2017), arXiv:1706.05394; Huang et al. (2019), O2U-Net, ICCV",
            ("margin", "loss"),
            _mean("loss"),
        ),
        MislabelScore(
            "el2n",
            "average over the visits of the distance between probabilities and one-hot label",
            "Paul et al. (2021), arXiv:2107.07075, over the whole run instead of its first epochs",
            ("margin", "error_norm"),
            _mean("error_norm"),
        ),
        MislabelScore(
            "self_influence",
            "average over the visits of the learning rate times the squared norm of the head's gradient, "
            "|b|² (|a|² + 1) for features a and output gradient b",
            "Pruthi et al. (2020), TracIn, arXiv:2002.08484, equation 2 for the head",
            ("margin", "self_influence"),
            _mean("self_influence"),
        ),
        MislabelScore(
            "influence",
            "average over the visits of max_k -<g, G_k>, g the head's gradient, G_k its mean over the validation "
            "samples of class k",
            "after Nguyen-Duc et al. (2023), arXiv:2305.01384, by first-order gradients",
            ("margin", "influence"),
            _mean("influence"),
        ),
    ]
}
"""All scores by name."""
FROM_NEIGHBOURS = ("margin_knn", "knn")
"""Scores that use rounds of neighbours."""


def mislabel_score(name: str, averages: RunAverages) -> Tensor:
    """Score of every visited sample.

    Args:
        name: One of ``SCORES``.
        averages: Of the run so far.

    Returns:
        Scores float32 ``[n]``, higher is more suspect; of a multi-label sample that of its most suspect label.
    """
    scores = SCORES[name].compute(averages)
    return (scores.amax(1) if scores.ndim == 2 else scores).float()


def choose_columns(
    names: Sequence[str], task: Task, num_samples: int, num_outputs: int, max_state_mb: float = 256.0
) -> tuple[str, ...]:
    """What has to be summed for some scores within a budget.

    Args:
        names: Scores, of ``SCORES``.
        task: Kind of task.
        num_samples: Size of the training dataset.
        num_outputs: Logits a sample.
        max_state_mb: MiB that the statistics may take. Beyond, predictions are not summed: 16 B a sample or less for
            any one score (with a single label), instead of ``4 C + 16`` or less.

    Returns:
        Columns; without ``prediction`` where they would not fit.

    Raises:
        ValueError: If a name is not known, a task has no such score, or a score needs predictions that do not fit.
    """
    wanted: dict[str, None] = {}
    for name in names:
        if name not in SCORES:
            raise ValueError(f"`score={name!r}` is not known. Expected one of {', '.join(map(repr, SCORES))}.")
        wanted.update(dict.fromkeys(_columns_of(name, task)))
    columns = tuple(wanted)
    size = num_samples * bytes_a_sample(task, num_outputs, columns) / 2**20
    if size <= max_state_mb or "prediction" not in columns or task is Task.REGRESSION:
        return columns
    for name in names:
        if "prediction" in SCORES[name].columns and SCORES[name].without_prediction is None:
            raise ValueError(
                f"`score={name!r}` sums the predictions of {num_samples} samples and {num_outputs} classes, {size:.0f} "
                f"MiB, above `max_state_mb={max_state_mb:g}`. Raise it, or use `score='aum'`."
            )
    return tuple(column for column in columns if column != "prediction")


def _columns_of(name: str, task: Task) -> tuple[str, ...]:
    if task is not Task.REGRESSION:
        return SCORES[name].columns
    columns: dict[str, tuple[str, ...]] = dict.fromkeys(("margin_knn", "log_margin", "knn"), ("prediction",))
    columns |= {"loss": ("loss", "prediction"), "self_influence": ("self_influence", "prediction")}
    if name not in columns:
        raise ValueError(f"`score={name!r}` needs classes, and the task is a regression. Use one of {list(columns)}.")
    return columns[name]
