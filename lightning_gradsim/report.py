"""Frozen records of one scored validation: the mistakes, the training samples behind them, the suspects, the cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from lightning_gradsim.datasets import Relabelled, check_dataset, sample_ids
from lightning_gradsim.history import FollowedQuery, TrendPoint
from lightning_gradsim.plain_values import Label, to_frame, write_csv
from lightning_gradsim.plan_record import Plan
from lightning_gradsim.records import (
    INFLUENCE_COLUMNS,
    ErrorPair,
    Histogram,
    InfluentialSample,
    QueryAlongRun,
    QueryReport,
    influence_rows,
    lists_of,
)
from lightning_gradsim.suspects import Suspect, SuspectTable
from lightning_gradsim.true_labels import SuspectQuality

REPORT_VERSION = 1


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
        occasion: What was explained instead of a validation of a run, in words; empty in a run.
        seconds: Seconds that the callback took for this report.
        time_share: All seconds of the callback so far over the seconds of the run without it; ``None`` outside ``fit``.
        augmented: Whether reading a training sample twice gives two different samples.
        task: ``classification``, ``binary``, ``multilabel`` or ``regression``.
        plan: How the pass computed; ``None`` without training samples.
        suspect_quality: How well the suspects find wrong labels, where ``true_labels=`` tells which those are.
        recall: Estimated share of the exact lists that is among the samples read, by list (``harmful``,
            ``look_alikes``, ``teachers``), where samples were chosen by what training steps have shown; else ``None``.
        settings: What the callback was given, in words.
        versions: Releases of what the report depends on, by name.
        error_pairs: Misclassified samples by label and prediction, the most frequent first; empty without classes.
        self_influence: Squared gradient norms of the training samples that the pass has read.
        trends: This report and earlier ones of the run in numbers, the newest last.
        followed: What has become of queries of this report and of earlier ones.
        along_run: Validation samples whose similarities are summed over the reports of the run.
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
    suspect_quality: SuspectQuality | None = None
    recall: Mapping[str, float] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    error_pairs: tuple[ErrorPair, ...] = ()
    self_influence: Histogram | None = None
    trends: tuple[TrendPoint, ...] = ()
    followed: tuple[FollowedQuery, ...] = ()
    along_run: tuple[QueryAlongRun, ...] = ()
    occasion: str = ""

    def __repr__(self) -> str:
        """The words of ``summary``: thousands of suspects are no help in a terminal or a notebook."""
        return self.summary()

    @property
    def when_in_words(self) -> str:
        """Epoch and step, or what was explained instead of a validation of a run."""
        return self.occasion or f"epoch {self.epoch}, step {self.step}"

    @property
    def errors_in_words(self) -> str:
        """How many validation samples are wrong; in regression, how many were looked at."""
        if self.task == "regression":
            return f"{self.num_validation_samples:,} validation samples, studied by loss"
        kind = "samples" if self.occasion else "validation samples"
        return f"{self.num_errors:,} of {self.num_validation_samples:,} {kind} wrong"

    @property
    def nothing_in_words(self) -> str:
        """Why there are no queries; empty where there are some."""
        if self.queries:
            return ""
        if self.num_dropped_queries:
            return "what validation met as wrong is right under the weights present at scoring"
        return "no validation sample is misclassified"

    @property
    def cost_in_words(self) -> str:
        """Seconds of this report, and the share of training time that all have taken."""
        return f"{self.seconds:.2f} s{'; ' * (self.time_share is not None)}{self.share_in_words}"

    @property
    def share_in_words(self) -> str:
        """What all reports have cost so far, as a share of training time; empty where it is not known."""
        if self.time_share is None:
            return ""
        words = f"{self.time_share:.1%} of" if self.time_share < 1 else f"{self.time_share:.1f} times"
        return f"so far {words} the time that training took without it"

    @property
    def suspect_queries(self) -> tuple[QueryReport, ...]:
        """Queries whose own label may be wrong."""
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

    def with_suspects(self, table: SuspectTable) -> Report:
        """The report with other suspects, and with those of them marked that stand in the lists of queries.

        Args:
            table: The suspects.

        Returns:
            The report.
        """
        lists = [samples for query in self.queries for samples in lists_of(query).values()]
        lists += [samples for query in self.along_run for samples in (query.harmful, query.proponents)]
        lists += [pair.harmful for pair in self.error_pairs]
        listed = torch.tensor([sample.sample_id for samples in lists for sample in samples], dtype=torch.long)
        flagged = set(listed[torch.isin(listed, table.sample_ids[table.flagged])].tolist())

        def marked(samples: tuple[InfluentialSample, ...]) -> tuple[InfluentialSample, ...]:
            return tuple(replace(sample, is_suspect=sample.sample_id in flagged) for sample in samples)

        queries = tuple(
            replace(
                query,
                harmful=marked(query.harmful),
                teachers=marked(query.teachers),
                look_alikes=marked(query.look_alikes),
            )
            for query in self.queries
        )
        along_run = tuple(
            replace(query, harmful=marked(query.harmful), proponents=marked(query.proponents))
            for query in self.along_run
        )
        error_pairs = tuple(replace(pair, harmful=marked(pair.harmful)) for pair in self.error_pairs)
        return replace(self, suspects=table, queries=queries, along_run=along_run, error_pairs=error_pairs)

    def confusion_in_words(self, limit: int = 5) -> str:
        """Which labels the flagged samples carry, and which are suggested: the most frequent pairs, with their numbers.

        Args:
            limit: Most pairs.

        Returns:
            The words; empty where no label is suggested.
        """
        pairs = list(self.suspects.confusion().items())
        words = [f"{self.name_of(given)} -> {self.name_of(other)} ({count:,})" for (given, other), count in pairs]
        more = [f"{len(pairs) - limit} other pairs"] if len(pairs) > limit else []
        return ", ".join([*words[:limit], *more])

    def flagged_among(self, sample_ids: Sequence[int]) -> dict[int, Suspect]:
        """Those of some training samples whose labels look wrong.

        Args:
            sample_ids: Ids of training samples.

        Returns:
            The flagged suspects among them, by sample id.
        """
        wanted = torch.tensor(list(sample_ids), dtype=torch.long)
        rows = (torch.isin(self.suspects.sample_ids, wanted) & self.suspects.flagged).nonzero().flatten().tolist()
        return {suspect.sample_id: suspect for suspect in (self.suspects[row] for row in rows)}

    def relabel(self, dataset: Dataset[Any], limit: int | None = None, *, all_flagged: bool = False) -> Relabelled:
        """The training data with suggested labels instead of those that look wrong.

        Args:
            dataset: The training dataset, with the ids that it had in training (a ``Subset``, too).
            limit: At most that many samples, the most suspect first.
            all_flagged: Whether all flagged samples count, or only those which their neighbours contradict, too
                (``suspects.confirmed``): the model alone flags what it has not learned yet.

        Returns:
            A view of the dataset: picklable, of the same length, with the same ids.

        Raises:
            TypeError: If this is no dataset, or the limit no whole number.
            ValueError: If the suspects have no suggested labels, or the limit is below 0.
        """
        check_dataset(dataset)
        if self.suspects.suggested_labels is None:
            raise ValueError(
                f"The suspects of a {self.task} task have no suggested labels. Use `report.drop(dataset)`, or correct "
                "the labels by `report.suspects`."
            )
        rows = self.suspects.rows_to_mend(limit, all_flagged=all_flagged)
        suggested = self.suspects.suggested_labels[rows].tolist()
        labels = dict(zip(self.suspects.sample_ids[rows].tolist(), suggested, strict=True))
        ids = sample_ids(dataset).tolist()
        return Relabelled(dataset, {place: labels[each] for place, each in enumerate(ids) if each in labels})

    def drop(self, dataset: Dataset[Any], limit: int | None = None, *, all_flagged: bool = False) -> Subset[Any]:
        """The training data without samples whose labels look wrong.

        Args:
            dataset: The training dataset, with the ids that it had in training (a ``Subset``, too).
            limit: At most that many samples, the most suspect first.
            all_flagged: As in ``relabel``.

        Returns:
            A view of the dataset: picklable, its samples with the ids that they had.

        Raises:
            TypeError: If this is no dataset, or the limit no whole number.
            ValueError: If the limit is below 0.
        """
        check_dataset(dataset)
        dropped = self.suspects.sample_ids[self.suspects.rows_to_mend(limit, all_flagged=all_flagged)]
        return Subset(dataset, (~torch.isin(sample_ids(dataset), dropped)).nonzero().flatten().tolist())

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per query, list and rank, with the columns of ``influences.csv``."""
        queries: list[QueryReport | QueryAlongRun] = [*self.queries, *self.along_run]
        return [row for number, query in enumerate(queries) for row in influence_rows(number, query)]

    def to_frame(self) -> Any:
        """``to_rows`` as a data frame of pandas, or of polars where only that is installed."""
        return to_frame(self.to_rows(), INFLUENCE_COLUMNS)

    def to_csv(self, path: str | Path | None = None) -> str:
        """CSV text of ``to_rows``; also written to ``path`` if one is given."""
        return write_csv(self.to_rows(), INFLUENCE_COLUMNS, path)

    def to_dict(self, max_suspects: int | None = 1000) -> dict[str, Any]:
        """Plain values for JSON, with at most ``max_suspects`` suspects and pairs of labels."""
        values = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in {"queries", "suspects"}
        }
        return {
            "version": REPORT_VERSION,
            **values,
            "plan": None if self.plan is None else asdict(self.plan),
            "suspect_quality": None if self.suspect_quality is None else asdict(self.suspect_quality),
            "error_pairs": [asdict(pair) for pair in self.error_pairs],
            "self_influence": None if self.self_influence is None else asdict(self.self_influence),
            "trends": [asdict(point) for point in self.trends],
            "followed": [asdict(query) for query in self.followed],
            "along_run": [asdict(query) for query in self.along_run],
            "errors_per_class": {str(label): count for label, count in self.errors_per_class.items()},
            "num_flagged": self.suspects.num_flagged,
            "confusion": [
                {"label": given, "suggested_label": suggested, "count": count}
                for (given, suggested), count in list(self.suspects.confusion().items())[:max_suspects]
            ],
            "queries": [asdict(query) for query in self.queries],
            "suspects": self.suspects.to_rows(max_suspects),
            "suspect_score": self.suspects.score_name,
            "suspect_upper_estimate": self.suspects.upper_estimate,
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
        yield f"{self.when_in_words}: {self.errors_in_words}"
        yield f"{len(self.queries)} queries against {self.reference} ({layers}; {self.similarity})"
        if not self.queries:
            yield f"nothing to explain: {self.nothing_in_words}"
        yield f"cost: {self.cost_in_words}"

    def _query_lines(self, query: QueryReport) -> Iterator[str]:
        probability = "" if query.probability is None else f" ({query.probability:.0%})"
        kind = "" if self.occasion else "validation "
        doubt = f"; this {kind}label may be wrong" if query.label_looks_wrong else ""
        name = "?" if query.sample_id is None else str(query.sample_id)
        name += f" of loader {query.dataloader_idx}" if query.dataloader_idx else ""
        verdict = f"{self.name_of(query.label)} -> {self.name_of(query.prediction)}{probability}{doubt}"
        yield f"{kind}sample {name}: {verdict}"
        for title, samples in (("harmful", query.harmful), ("look-alikes", query.look_alikes)):
            tiles = "  ".join(self._tile(sample) for sample in samples[:4])
            yield f"    {title:<12}{tiles or 'none'}"

    def _tile(self, sample: InfluentialSample) -> str:
        suspicion = " (suspect)" if sample.is_suspect else ""
        return f"#{sample.sample_id} {self.name_of(sample.label)} {sample.score:+.3g}{suspicion}"

    def _suspect_lines(self, num_suspects: int) -> Iterator[str]:
        if not len(self.suspects):
            return
        yield f"suspects (training samples, most suspect first; {self.suspects.num_flagged} flagged):"
        if self.suspect_quality is not None:
            shares = [f"{name.replace('_', ' ')} {share:.3f}" for name, share in self.suspect_quality.shares()]
            yield f"    by the true labels {self.suspect_quality.num_wrong} are wrong: {', '.join(shares)}"
        confusion = self.confusion_in_words()
        if confusion:
            yield f"    labels flagged for another one: {confusion}"
        for suspect in self.suspects[:num_suspects]:
            suggestion = ""
            if suspect.suggested_label is not None:
                suggestion = f" -> {self.name_of(suspect.suggested_label)} ({suspect.probability:.0%})"
            yield f"    #{suspect.sample_id:<8}{self.name_of(suspect.label)}{suggestion}  score {suspect.score:.3g}"
