"""The queries of a pass: all that does not depend on training samples, and the lists that come of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lightning_gradsim.adapter import Step
from lightning_gradsim.batch_runner import BatchRunner
from lightning_gradsim.errors import NonFiniteError
from lightning_gradsim.factors import (
    MAX_INTERMEDIATE,
    Factors,
    IndexedFactors,
    concatenate_labels,
    concatenate_layers,
    squared_norms,
)
from lightning_gradsim.plain_values import to_label
from lightning_gradsim.records import InfluentialSample, QueryReport
from lightning_gradsim.sample_statistics import labels_of
from lightning_gradsim.suspects import SuspectTable

NUM_WITNESSES = 8
"""Closest training samples that must agree before a query's own label is called doubtful (see docs/design.md)."""
DOUBTFUL_PROBABILITY = 0.01
"""Probability of the given label below which the model must be, too."""
NORM_SHARE = 0.125
"""Share of the memory budget for one intermediate of their norms."""
QUERY_SHARE = 0.25
"""Share of the memory budget up to which the queries' materialised gradients are kept."""


@dataclass(frozen=True, eq=False)
class QueryBatch:
    """Queries that share a batch.

    Attributes:
        positions: Which queries these are, in the order of the batch.
        batch: The batch, on the module's device.
        predicted: Targets that count as predicted, whatever the weights; ``None`` for what the module predicts.
        for_prediction: Whether these stand for the given ones, too.
    """

    positions: Sequence[int]
    batch: Any
    predicted: Tensor | None = None
    for_prediction: bool = False


@dataclass(frozen=True, eq=False)
class QueryRecords:
    """What a report needs of the ``M`` queries that are still wrong, beside their scores.

    Attributes:
        positions: Which queries these are.
        reports: Their records, without lists.
        label_probabilities: Probabilities of the given labels; 1 where there are no exclusive classes.
        has_teachers: Whether there are gradients for the predicted labels.
        right: Those of the positions that the module gets right: they are scored all the same.
    """

    positions: list[int]
    reports: list[QueryReport]
    label_probabilities: list[float]
    has_teachers: bool
    right: frozenset[int] = frozenset()

    def __len__(self) -> int:
        """Number of queries."""
        return len(self.positions)

    @property
    def num_rows(self) -> int:
        """Rows of scores: harmful and look-alikes of each query; of the predicted labels, too, where there are any."""
        return len(self) * (4 if self.has_teachers else 2)

    def is_improbable(self, row: int) -> bool:
        """Whether the model finds a query's given label so improbable that it may be wrong."""
        return self.label_probabilities[row] < DOUBTFUL_PROBABILITY

    def rows_of(self, positions: Collection[int]) -> list[int]:
        """Rows of scores of some of the queries."""
        return [row for row in range(self.num_rows) if self.positions[row % len(self)] in positions]

    def only(self, positions: Collection[int]) -> QueryRecords:
        """Some of the queries."""
        rows = [row for row, position in enumerate(self.positions) if position in positions]
        return QueryRecords(
            [self.positions[row] for row in rows],
            [self.reports[row] for row in rows],
            [self.label_probabilities[row] for row in rows],
            self.has_teachers,
            self.right.intersection(positions),
        )


@dataclass(frozen=True, eq=False)
class QuerySide:
    """The ``M`` queries that are still wrong, and their gradients.

    Attributes:
        records: Which they are.
        factors: By layer, ``M`` gradients for the given labels, then ``M`` for the predicted ones if there are any.
        squared_norms: Their squared norms, ``[M]`` or ``[2 M]``.
        kept: Layers whose materialised gradients are kept during the pass; those of others would take too much memory.
        compared: Where all gradients follow in ``factors``, multiplied by the inverse curvature: which of them stand
            before these without it, int64.
    """

    records: QueryRecords
    factors: Mapping[str, Factors]
    squared_norms: Tensor
    kept: frozenset[str]
    compared: Tensor | None = None

    @property
    def num_gradients(self) -> int:
        """Gradients that each training sample is compared with."""
        return len(self.squared_norms) + (0 if self.compared is None else len(self.compared))

    def without_kept(self) -> QuerySide:
        """The same queries without anything that was computed and kept."""
        fresh = {name: factors.samples(slice(None)) for name, factors in self.factors.items()}
        return replace(self, factors=fresh, kept=frozenset())


def prepare_queries(
    runner: BatchRunner,
    query_batches: Sequence[QueryBatch],
    *,
    teachers: bool,
    keep_right: bool | Collection[int] = False,
) -> QuerySide | None:
    """Gradients of the queries that are still wrong.

    Args:
        runner: Runs batches.
        query_batches: The queries.
        teachers: Whether gradients for the predicted labels are wanted, too.
        keep_right: Whether those that are right are queries, too, or the positions at which they are.

    Returns:
        The queries, or ``None`` if none is wrong under the weights present.

    Raises:
        NonFiniteError: If a query's loss or gradient is not finite.
    """
    positions: list[int] = []
    reports: list[QueryReport] = []
    label_probabilities: list[float] = []
    given: list[dict[str, Factors]] = []
    predicted: list[dict[str, Factors]] = []
    right: set[int] = set()
    for part in query_batches:
        predicted_targets = teachers if part.predicted is None else part.predicted
        for portion in runner.run(part.batch, len(part.positions), predicted=predicted_targets):
            step = portion.step
            _check_query_losses(step)
            # Weights may have changed since validation met the sample (EMA): those that are right by now are dropped.
            own = part.positions[portion.rows]
            is_wrong = step.outcome.wrong.tolist()
            chosen = [row for row, each in enumerate(own) if is_wrong[row] or _is_among(each, keep_right)]
            rows = torch.tensor(chosen, dtype=torch.long, device=step.losses.device)
            of_predictions = portion.predicted if part.for_prediction else None
            given.append(_rows(portion.factors if of_predictions is None else of_predictions, rows))
            if portion.predicted is not None:
                predicted.append(_rows(portion.predicted, rows))
            positions += [own[row] for row in chosen]
            right |= {own[row] for row in chosen if not is_wrong[row]}
            reports += [_without_lists(step, row) for row in chosen]
            probabilities = None if part.for_prediction else step.outcome.label_probabilities
            label_probabilities += [1.0] * len(chosen) if probabilities is None else probabilities[rows].tolist()
    if not positions:
        return None
    has_teachers = len(predicted) == len(given)
    by_labels = [concatenate_layers(parts) for parts in ([given, predicted] if has_teachers else [given])]
    factors = {name: concatenate_labels([each[name] for each in by_labels]) for name in by_labels[0]}
    elements = max(1, min(MAX_INTERMEDIATE, int(NORM_SHARE * runner.memory_budget / 4)))
    norms = reduce(torch.add, [squared_norms(part, max_intermediate=elements) for part in factors.values()])
    if not bool(norms.isfinite().all()):
        raise NonFiniteError(
            "The gradient of a query is not finite, although its loss is. Nothing is scored. Check the layers above "
            f"{', '.join(f'`{name}`' for name in factors)} in eval mode."
        )
    kept = fitting_layers(factors, QUERY_SHARE * runner.memory_budget)
    records = QueryRecords(positions, reports, label_probabilities, has_teachers, frozenset(right))
    return QuerySide(records, factors, norms, kept)


def query_reports(
    queries: QueryRecords, best: tuple[Tensor, Tensor], suspects: SuspectTable, top_k: int
) -> Iterator[tuple[int, QueryReport]]:
    """The queries' records with their lists.

    Args:
        queries: The queries.
        best: The largest scores of the rows of ``scorer.Scorer`` and the ids they belong to, on the CPU.
        suspects: All training samples.
        top_k: Length of each list.

    Yields:
        Position and record of each query.
    """
    labels = labels_of(suspects, best[1].unique().tolist())
    scores, ids = (values.tolist() for values in best)
    num_queries = len(queries)
    for row, (position, report) in enumerate(zip(queries.positions, queries.reports, strict=True)):
        lists = [
            tuple(
                # The first rows, those of the harmful, hold similarities with their sign turned.
                InfluentialSample(
                    i, labels[i], -score if place < num_queries else score, labels[i] == report.prediction
                )
                for i, score in zip(ids[place], scores[place], strict=True)
                if score > 0  # an opponent opposes and a proponent supports, however few samples there are
            )
            for place in range(row, len(scores), num_queries)
        ]
        harmful, look_alikes, *for_prediction = lists
        teachers, predicted_look_alikes = for_prediction or ((), ())
        yield (
            position,
            replace(
                report,
                harmful=harmful[:top_k],
                look_alikes=look_alikes[:top_k],
                teachers=teachers[:top_k],
                label_looks_wrong=queries.is_improbable(row) and _agree(look_alikes, predicted_look_alikes),
            ),
        )


def _agree(given: Sequence[InfluentialSample], predicted: Sequence[InfluentialSample]) -> bool:
    """Whether the closest samples, whichever of the two labels is right, all carry the predicted one."""
    if len(predicted) < NUM_WITNESSES:
        return False
    closest = sorted([*given, *predicted], key=lambda sample: (-sample.score, sample.sample_id))[:NUM_WITNESSES]
    return all(sample.label_is_prediction for sample in closest)


def _without_lists(step: Step, row: int) -> QueryReport:
    outcome = step.outcome
    return QueryReport(
        sample_id=None,
        dataloader_idx=0,
        label=to_label(outcome.labels[row]),
        prediction=to_label(outcome.predictions[row]),
        probability=None if outcome.probabilities is None else float(outcome.probabilities[row]),
        loss=float(step.losses[row].detach()),
    )


def _is_among(position: int, chosen: bool | Collection[int]) -> bool:
    return chosen if isinstance(chosen, bool) else position in chosen


def _rows(factors: Mapping[str, Factors], rows: Tensor) -> dict[str, Factors]:
    return {name: layer_factors.samples(rows) for name, layer_factors in factors.items()}


def _check_query_losses(step: Step) -> None:
    if not bool(step.losses.detach().isfinite().all()):
        raise NonFiniteError(
            "The loss of a query is not finite under the weights present at scoring. Nothing is scored. Check the loss "
            "in eval mode."
        )


def gradient_bytes(factors: Factors) -> int:
    """Bytes that the materialised gradients of all samples take; none for a table, whose entries are kept."""
    if isinstance(factors, IndexedFactors):
        return 0
    return factors.num_samples * factors.num_parameters * factors.output_grads.element_size()


def fitting_layers(factors: Mapping[str, Factors], num_bytes: float) -> frozenset[str]:
    """Layers whose gradients fit together, the small ones first."""
    kept = set()
    for name, size in sorted(((name, gradient_bytes(f)) for name, f in factors.items()), key=lambda item: item[1]):
        num_bytes -= size
        if num_bytes < 0:
            break
        kept.add(name)
    return frozenset(kept)
