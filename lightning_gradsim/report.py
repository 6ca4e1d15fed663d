"""Frozen records of one scored validation: the mistakes, the training samples behind them, the suspects, the cost."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from lightning_gradsim.datasets import Relabelled, sample_ids
from lightning_gradsim.plan_record import Plan

Label = int | float | tuple[int, ...]
"""A class index; a number in regression; the indices of the active labels in multi-label tasks."""

REPORT_VERSION = 1
SUSPECT_PARTS = ("log_margin", "knn")
"""Scores that stand beside the one that ranks, where they are known."""
SUSPECT_COLUMNS = (
    "rank",
    "sample_id",
    "label",
    "suggested_label",
    "probability",
    "score",
    "flagged",
    *SUSPECT_PARTS,
    "visits",
)
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
)


@dataclass(frozen=True)
class InfluentialSample:
    """A training sample in one of the lists of a query.

    Attributes:
        sample_id: Index into the training dataset.
        label: Its given label.
        score: Similarity with the query: loss² per parameter² for ``dot``, unitless for ``cosine``, in [-1, 1].
        label_is_prediction: Whether its label equals the query's wrong prediction.
    """

    sample_id: int
    label: Label
    score: float
    label_is_prediction: bool


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


@dataclass(frozen=True)
class Suspect:
    """A training sample whose label may be wrong.

    Attributes:
        sample_id: Index into the training dataset.
        label: Its given label.
        suggested_label: The most probable other class; ``None`` where there are no classes.
        probability: Probability of the suggested label, in [0, 1]; ``None`` where there are no classes.
        score: Mislabel score, higher is more suspect.
        flagged: Whether the model's prediction differs from the given label.
        parts: Other scores of it, by name.
        visits: In how many training steps it was seen; ``None`` where training steps were not watched.
    """

    sample_id: int
    label: Label
    suggested_label: int | None
    probability: float | None
    score: float
    flagged: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    visits: int | None = None


@dataclass(frozen=True, eq=False)
class SuspectTable(Sequence[Suspect]):
    """Training samples, the most suspect first; a sequence of ``Suspect`` built on access.

    Attributes:
        sample_ids: Indices into the training dataset, int64 ``[N]``, by falling score, ties by the smaller id.
        scores: Mislabel scores, float32 ``[N]``.
        labels: Given labels, int32 or float32 ``[N]``, or int8 ``[N, L]`` for multi-label tasks.
        suggested_labels: Most probable other class, int32 ``[N]``, or ``None``.
        probabilities: Probability of the suggested label, ``[N]``, or ``None``.
        flagged: Whether the prediction differs from the label, bool ``[N]``.
        score_name: What the score is: ``self_influence`` of one pass, or a score of all training steps.
        parts: Other scores, by name, float32 ``[N]``.
        visits: In how many training steps each was seen, int64 ``[N]``, or ``None``.
    """

    sample_ids: Tensor
    scores: Tensor
    labels: Tensor
    suggested_labels: Tensor | None
    probabilities: Tensor | None
    flagged: Tensor
    score_name: str = "self_influence"
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    visits: Tensor | None = None

    def __len__(self) -> int:
        """Number of scored training samples."""
        return len(self.sample_ids)

    @property
    def num_flagged(self) -> int:
        """How many training samples the model predicts otherwise than labelled."""
        return int(self.flagged.sum())

    @overload
    def __getitem__(self, index: int) -> Suspect: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Suspect, ...]: ...

    def __getitem__(self, index: int | slice) -> Suspect | tuple[Suspect, ...]:
        """One suspect, or a tuple of them for a slice."""
        if isinstance(index, slice):
            return tuple(self._suspect(i) for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"`suspects[{index}]` does not exist; there are {len(self)} scored training samples.")
        return self._suspect(index % len(self))

    def _suspect(self, index: int) -> Suspect:
        return Suspect(
            sample_id=int(self.sample_ids[index]),
            label=to_label(self.labels[index]),
            suggested_label=None if self.suggested_labels is None else int(self.suggested_labels[index]),
            probability=None if self.probabilities is None else float(self.probabilities[index]),
            score=float(self.scores[index]),
            flagged=bool(self.flagged[index]),
            parts={name: float(values[index]) for name, values in self.parts.items()},
            visits=None if self.visits is None else int(self.visits[index]),
        )

    def flagged_rows(self, limit: int | None = None) -> Tensor:
        """Rows of the flagged samples, the most suspect first, at most ``limit`` of them; int64."""
        return self.flagged.nonzero().flatten()[:limit]

    def to_rows(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Rows with the columns of ``suspects.csv``, at most ``limit`` of them."""
        number = len(self) if limit is None else min(limit, len(self))
        none = [None] * number
        columns = (
            range(1, number + 1),
            self.sample_ids[:number].tolist(),
            [to_label(label) for label in self.labels[:number]]
            if self.labels.ndim > 1
            else self.labels[:number].tolist(),
            none if self.suggested_labels is None else self.suggested_labels[:number].tolist(),
            none if self.probabilities is None else self.probabilities[:number].tolist(),
            self.scores[:number].tolist(),
            self.flagged[:number].tolist(),
            *(self.parts[name][:number].tolist() if name in self.parts else none for name in SUSPECT_PARTS),
            none if self.visits is None else self.visits[:number].tolist(),
        )
        return [dict(zip(SUSPECT_COLUMNS, row, strict=True)) for row in zip(*columns, strict=True)]

    def to_csv(self, path: str | Path | None = None, limit: int | None = None) -> str:
        """CSV text of ``to_rows``; also written to ``path`` if one is given."""
        return _write_csv(self.to_rows(limit), SUSPECT_COLUMNS, path)

    @staticmethod
    def empty() -> SuspectTable:
        """A table without samples."""
        none = torch.empty(0)
        return SuspectTable(none.long(), none, none.int(), None, None, none.bool())


@dataclass(frozen=True)
class Report:
    """What one validation showed.

    Attributes:
        epoch: Training epoch, from 0.
        step: Global step.
        layers: Names of the layers whose gradients were compared.
        similarity: The similarity of harmful samples and teachers.
        reference: Which training samples were read, in words.
        num_train_samples: How many were read.
        share_read: Their share of those that queries are to be compared with, in [0, 1]; below 1 under a time budget.
        num_validation_samples: How many validation samples were looked at.
        num_errors: How many of them were misclassified.
        errors_per_class: Misclassified samples by given label; empty where there are no classes.
        num_dropped_queries: Kept queries that are right under the weights present at scoring.
        queries: The queries with their lists.
        suspects: All scored training samples, the most suspect first.
        class_names: Names of the classes, if known.
        notes: Everything that limits this report, a sentence each.
        seconds: Seconds that the callback took for this report.
        time_share: All seconds of the callback so far over the seconds of the run without it; ``None`` outside ``fit``.
        augmented: Whether reading a training sample twice gives two different samples.
        task: ``classification``, ``binary``, ``multilabel`` or ``regression``.
        plan: How the pass computed; ``None`` without training samples.
    """

    epoch: int
    step: int
    layers: tuple[str, ...]
    similarity: str
    reference: str
    num_train_samples: int
    num_validation_samples: int
    num_errors: int
    errors_per_class: Mapping[int, int] = field(default_factory=dict)
    num_dropped_queries: int = 0
    queries: tuple[QueryReport, ...] = ()
    suspects: SuspectTable = field(default_factory=SuspectTable.empty)
    class_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    time_share: float | None = None
    augmented: bool = False
    task: str = "classification"
    plan: Plan | None = None
    share_read: float = 1.0

    @property
    def errors_in_words(self) -> str:
        """How many validation samples are wrong; in regression, how many were looked at."""
        if self.task == "regression":
            return f"{self.num_validation_samples:,} validation samples, studied by loss"
        return f"{self.num_errors:,} of {self.num_validation_samples:,} validation samples wrong"

    @property
    def suspect_queries(self) -> tuple[QueryReport, ...]:
        """Queries whose own label looks wrong."""
        return tuple(query for query in self.queries if query.label_looks_wrong)

    def name_of(self, label: Label) -> str:
        """The class name of a label, or the label in words where no name is known."""
        if isinstance(label, tuple):
            return " + ".join(self.name_of(index) for index in label) or "none"
        if isinstance(label, float):
            return f"{label:.4g}"
        if self.class_names is not None and 0 <= label < len(self.class_names):
            return self.class_names[label]
        return str(label)

    def relabel(self, dataset: Dataset[Any], limit: int | None = None) -> Relabelled:
        """The training data with suggested labels instead of those that look wrong.

        Args:
            dataset: The training dataset, with the ids that it had in training (a ``Subset``, too).
            limit: At most that many of the flagged samples, the most suspect first.

        Returns:
            A view of the dataset: picklable, of the same length, with the same ids.

        Raises:
            ValueError: If the suspects have no suggested labels.
        """
        if self.suspects.suggested_labels is None:
            raise ValueError(
                f"The suspects of a {self.task} task have no suggested labels. Use `report.drop(dataset)`, or correct "
                "the labels by `report.suspects`."
            )
        rows = self.suspects.flagged_rows(limit)
        suggested = self.suspects.suggested_labels[rows].tolist()
        labels = dict(zip(self.suspects.sample_ids[rows].tolist(), suggested, strict=True))
        ids = sample_ids(dataset).tolist()
        return Relabelled(dataset, {place: labels[each] for place, each in enumerate(ids) if each in labels})

    def drop(self, dataset: Dataset[Any], limit: int | None = None) -> Subset[Any]:
        """The training data without samples whose labels look wrong.

        Args:
            dataset: The training dataset, with the ids that it had in training (a ``Subset``, too).
            limit: At most that many of the flagged samples, the most suspect first.

        Returns:
            A view of the dataset: picklable, its samples with the ids that they had.
        """
        dropped = self.suspects.sample_ids[self.suspects.flagged_rows(limit)]
        return Subset(dataset, (~torch.isin(sample_ids(dataset), dropped)).nonzero().flatten().tolist())

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per query, list and rank, with the columns of ``influences.csv``."""
        return [row for number, query in enumerate(self.queries) for row in _query_rows(number, query)]

    def to_csv(self, path: str | Path | None = None) -> str:
        """CSV text of ``to_rows``; also written to ``path`` if one is given."""
        return _write_csv(self.to_rows(), INFLUENCE_COLUMNS, path)

    def to_dict(self, max_suspects: int | None = 1000) -> dict[str, Any]:
        """Plain values for JSON, with at most ``max_suspects`` suspects."""
        values = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in {"queries", "suspects"}
        }
        return {
            "version": REPORT_VERSION,
            **values,
            "plan": None if self.plan is None else asdict(self.plan),
            "errors_per_class": {str(label): count for label, count in self.errors_per_class.items()},
            "num_flagged": self.suspects.num_flagged,
            "queries": [asdict(query) for query in self.queries],
            "suspects": self.suspects.to_rows(max_suspects),
        }

    def summary(self, num_queries: int = 6, num_suspects: int = 10) -> str:
        """The report in words, for a terminal.

        Args:
            num_queries: How many queries to list.
            num_suspects: How many suspects to list.

        Returns:
            Lines of text.
        """
        return "\n".join(
            [
                *self._head_lines(),
                *(line for query in self.queries[:num_queries] for line in self._query_lines(query)),
                *self._suspect_lines(num_suspects),
                *(f"note: {note}" for note in self.notes),
            ]
        )

    def _head_lines(self) -> Iterator[str]:
        layers = ", ".join(self.layers)
        yield f"epoch {self.epoch}, step {self.step}: {self.errors_in_words}"
        yield f"{len(self.queries)} queries against {self.reference} ({layers}; {self.similarity})"
        if not self.queries:
            dropped = "what validation met as wrong is right under the weights present at scoring"
            reason = dropped if self.num_dropped_queries else "no validation sample is misclassified"
            yield f"nothing to explain: {reason}"
        share = ""
        if self.time_share is not None:
            words = f"{self.time_share:.1%} of" if self.time_share < 1 else f"{self.time_share:.1f} times"
            share = f"; so far {words} the time that training took without it"
        yield f"cost: {self.seconds:.2f} s{share}"

    def _query_lines(self, query: QueryReport) -> Iterator[str]:
        probability = "" if query.probability is None else f" ({query.probability:.0%})"
        doubt = "; this validation label looks wrong" if query.label_looks_wrong else ""
        name = "?" if query.sample_id is None else str(query.sample_id)
        name += f" of loader {query.dataloader_idx}" if query.dataloader_idx else ""
        verdict = f"{self.name_of(query.label)} -> {self.name_of(query.prediction)}{probability}{doubt}"
        yield f"validation sample {name}: {verdict}"
        for title, samples in (("harmful", query.harmful), ("look-alikes", query.look_alikes)):
            tiles = "  ".join(f"#{s.sample_id} {self.name_of(s.label)} {s.score:+.3g}" for s in samples[:4])
            yield f"    {title:<12}{tiles or 'none'}"

    def _suspect_lines(self, num_suspects: int) -> Iterator[str]:
        if not len(self.suspects):
            return
        yield f"suspects (training samples, most suspect first; {self.suspects.num_flagged} flagged):"
        for suspect in self.suspects[:num_suspects]:
            suggestion = ""
            if suspect.suggested_label is not None:
                suggestion = f" -> {self.name_of(suspect.suggested_label)} ({suspect.probability:.0%})"
            yield f"    #{suspect.sample_id:<8}{self.name_of(suspect.label)}{suggestion}  score {suspect.score:.3g}"


def to_label(value: Tensor) -> Label:
    """A stored label as a plain value: float for floating dtypes, active indices for a vector, else int."""
    if value.ndim:
        return tuple(int(i) for i in value.nonzero().flatten())
    return float(value) if value.is_floating_point() else int(value)


def _query_rows(number: int, query: QueryReport) -> Iterator[dict[str, Any]]:
    lists = {"harmful": query.harmful, "teachers": query.teachers, "look_alikes": query.look_alikes}
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
                "label_looks_wrong": query.label_looks_wrong,
                "list": list_name,
                "rank": rank,
                **asdict(sample),
            }


def _write_csv(rows: list[dict[str, Any]], columns: Sequence[str], path: str | Path | None) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if path is not None:
        Path(path).write_text(buffer.getvalue(), encoding="utf-8")
    return buffer.getvalue()
