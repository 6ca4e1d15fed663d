"""What a report consists of: queries, the training samples behind them, counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_gradsim.plain_values import Label

INFLUENCE_COLUMNS = (
    "query",
    "dataloader_idx",
    "query_id",
    "query_label",
    "prediction",
    "query_probability",
    "query_loss",
    "label_looks_wrong",
    "list",
    "rank",
    "sample_id",
    "label",
    "score",
    "label_is_prediction",
    "is_suspect",
)


@dataclass(frozen=True)
class InfluentialSample:
    """A training sample in one of the lists of a query.

    Attributes:
        sample_id: Index into the training dataset.
        label: Its given label.
        score: Similarity with the query: loss² per parameter² for ``dot``, unitless for ``cosine``, in [-1, 1].
        label_is_prediction: Whether its label equals the query's wrong prediction.
        is_suspect: Whether the suspects of the same report flag it: a second witness that its label is wrong.
    """

    sample_id: int
    label: Label
    score: float
    label_is_prediction: bool
    is_suspect: bool = False


@dataclass(frozen=True)
class QueryReport:
    """A misclassified validation sample and the training samples behind the mistake.

    Attributes:
        sample_id: Index into the validation dataset; ``None`` where the loader's order is not known.
        dataloader_idx: Which validation loader it came from.
        label: Its given label.
        prediction: What the model predicts with the weights present at scoring.
        probability: Probability of the prediction, in [0, 1]; ``None`` in regression.
        loss: Its loss for the given label.
        harmful: Opponents for the given label by the chosen similarity, most harmful first.
        teachers: Proponents for the predicted label by the chosen similarity, strongest first.
        look_alikes: Highest cosine, closest first.
        label_looks_wrong: Whether its own label is doubtful, judged by the closest training samples and by the model.
        wrong_since: First epoch of its latest run of mistakes, as far as validations were looked at; ``None`` where it
            has no id, and outside ``fit``.
    """

    sample_id: int | None
    dataloader_idx: int
    label: Label
    prediction: Label
    probability: float | None
    loss: float
    harmful: tuple[InfluentialSample, ...] = ()
    teachers: tuple[InfluentialSample, ...] = ()
    look_alikes: tuple[InfluentialSample, ...] = ()
    label_looks_wrong: bool = False
    wrong_since: int | None = None


@dataclass(frozen=True)
class QueryAlongRun:
    """A validation sample, and the training samples that mattered for it over the reports of a run.

    Attributes:
        sample_id: Index into the validation dataset.
        dataloader_idx: Which validation loader it came from.
        label: Its given label.
        prediction: What the model predicts with the weights present at scoring, right or wrong.
        probability: Probability of the prediction, in [0, 1]; ``None`` in regression.
        loss: Its loss for the given label.
        since_epoch: Epoch of the first report that counts.
        num_reports: How many count.
        harmful: Opponents by the summed similarity for the given label, most harmful first. Cosines are averaged.
        proponents: Those of the most positive sum: steps on them lowered its loss.
    """

    sample_id: int
    dataloader_idx: int
    label: Label
    prediction: Label
    probability: float | None
    loss: float
    since_epoch: int
    num_reports: int
    harmful: tuple[InfluentialSample, ...] = ()
    proponents: tuple[InfluentialSample, ...] = ()


@dataclass(frozen=True)
class ErrorPair:
    """Misclassified validation samples of one label that are taken for another one.

    Attributes:
        label: The given label.
        prediction: What the model predicts.
        count: How many.
    """

    label: int
    prediction: int
    count: int


@dataclass(frozen=True)
class Histogram:
    """How the squared gradient norms of training samples are distributed.

    Attributes:
        edges: Edges of the bins, in powers of ten, rising.
        counts: Samples in each bin.
        num_zero: Samples of which the norm is zero, in no bin.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    num_zero: int

    def values(self) -> NDArray[np.float64]:
        """The middle of its bin for each sample, in powers of ten, ``[N]``."""
        edges = np.array(self.edges)
        return np.repeat((edges[1:] + edges[:-1]) / 2, self.counts)

    @staticmethod
    def of(values: Tensor, num_bins: int = 30) -> Histogram | None:
        """The histogram of values of at least zero, ``[N]``; ``None`` where none is positive and finite."""
        logs = values[(values > 0) & values.isfinite()].double().log10()
        if not len(logs):
            return None
        low, high = float(logs.min()), float(logs.max())
        low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
        counts = torch.histc(logs, num_bins, low, high).long().tolist()
        edges = torch.linspace(low, high, num_bins + 1, dtype=torch.float64).tolist()
        return Histogram(tuple(edges), tuple(counts), int((values == 0).sum()))


def lists_of(query: QueryReport) -> dict[str, tuple[InfluentialSample, ...]]:
    """The lists of a query by name."""
    return {"harmful": query.harmful, "teachers": query.teachers, "look_alikes": query.look_alikes}


def influence_rows(number: int, query: QueryReport | QueryAlongRun) -> Iterator[dict[str, Any]]:
    """One row per list and rank, with the columns of ``influences.csv``; the query has a number."""
    if isinstance(query, QueryReport):
        lists, label_looks_wrong = lists_of(query), query.label_looks_wrong
    else:
        lists = {"harmful_along_run": query.harmful, "proponents_along_run": query.proponents}
        label_looks_wrong = None
    for list_name, samples in lists.items():
        for rank, sample in enumerate(samples, start=1):
            yield {
                "query": number,
                "dataloader_idx": query.dataloader_idx,
                "query_id": query.sample_id,
                "query_label": query.label,
                "prediction": query.prediction,
                "query_probability": query.probability,
                "query_loss": query.loss,
                "label_looks_wrong": label_looks_wrong,
                "list": list_name,
                "rank": rank,
                **asdict(sample),
            }
