"""One pass over the training samples: similarities with every query, the best of each list, per-sample statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter, Step
from lightning_gradsim.batch_runner import BatchRunner, ForwardContext
from lightning_gradsim.errors import LabelRangeError, NonFiniteError
from lightning_gradsim.factors import Factors, concatenate_samples, dot_and_squared_norms, squared_norms
from lightning_gradsim.guard import evaluating
from lightning_gradsim.layer_selection import LayerSpec
from lightning_gradsim.report import InfluentialSample, QueryReport, SuspectTable, to_label
from lightning_gradsim.sample_statistics import SampleStatistics, labels_of
from lightning_gradsim.scores import Similarity, compute_similarity
from lightning_gradsim.tasks import Task
from lightning_gradsim.topk import TopK
from lightning_gradsim.wrapper import PerSampleGradients

GROUP_SAMPLES = 1024
"""Training samples that are scored together."""
SMALL_LAYER_ELEMENTS = 2**15
"""Elements of a layer's factors for one batch beyond which they are not kept for a group: joining copies them."""
GROUP_ELEMENTS = 2**23
"""Elements of factors (32 MiB in float32) beyond which a group is scored although it is smaller."""
NUM_WITNESSES = 8
"""Closest training samples that must agree before a query's own label is called doubtful (see docs/design.md)."""
DOUBTFUL_PROBABILITY = 0.01
"""Probability of the given label below which the model must be, too."""


@dataclass(frozen=True)
class EngineSettings:
    """What is computed.

    Attributes:
        layers: The choice of layers.
        similarity: Similarity of harmful samples and teachers.
        top_k: Length of each list.
        teachers: Whether gradients for the queries' predicted labels are computed, too. Without them there are neither
            teachers nor doubts about a query's own label, and half as many products.
        memory_budget: Bytes that a pass may take beyond the module and the batch at hand; ``None`` for a share of the
            free memory.
    """

    layers: LayerSpec = "last"
    similarity: Similarity = "dot"
    top_k: int = 8
    teachers: bool = True
    memory_budget: int | None = None


@dataclass(frozen=True, eq=False)
class QueryBatch:
    """Queries that share a batch.

    Attributes:
        positions: Which queries these are, in the order of the batch.
        batch: The batch, on the module's device.
    """

    positions: Sequence[int]
    batch: Any


@dataclass(frozen=True, eq=False)
class PassResult:
    """What a pass found.

    Attributes:
        layers: Names of the layers.
        queries: By position, the queries that are still wrong, with their lists; those that are right by now are
            absent.
        suspects: All training samples by self-influence.
        has_teachers: Whether predictions have a loss, so that teachers could be found.
        num_samples: Training samples scored.
    """

    layers: tuple[str, ...]
    queries: Mapping[int, QueryReport]
    suspects: SuspectTable
    has_teachers: bool
    num_samples: int


@dataclass(frozen=True, eq=False)
class _QuerySide:
    """All that does not depend on training samples; one row for each of the ``M`` queries that are still wrong."""

    positions: list[int]
    reports: list[QueryReport]  # without lists
    label_probabilities: list[float]  # of the given labels; 1 where there are no exclusive classes
    factors: Mapping[str, Factors]  # M true-label gradients, then M predicted-label gradients if there are any
    squared_norms: Tensor  # [M] or [2 M]
    has_teachers: bool


def run_pass(
    module: nn.Module,
    adapter: Adapter,
    query_batches: Sequence[QueryBatch],
    train_batches: Iterable[tuple[Tensor, Any]],
    settings: EngineSettings,
    forward_context: ForwardContext = nullcontext,
) -> PassResult:
    """Score every training sample against every query, exactly.

    Args:
        module: The user's module; it is left as found.
        adapter: Reads batches; bound to the module.
        query_batches: The queries, on the module's device.
        train_batches: Sample ids ``[B]`` and batch, on the module's device, each id once.
        settings: Layers, similarity, length of the lists.
        forward_context: The precision context of the run.

    Returns:
        Lists of each query and statistics of each training sample. Memory beyond the batches at hand does not grow with
        the number of training samples, apart from 23 bytes a sample of statistics.

    Raises:
        NonFiniteError: If a loss or gradient is not finite; the samples are named.
        LabelRangeError: If a label lies outside the classes; the samples are named.
        GradSimError: If the gradients of the chosen layers cannot be exact.
    """
    with evaluating(module), PerSampleGradients(module, settings.layers) as gradients:
        runner = BatchRunner(module, adapter, gradients, forward_context, settings.memory_budget)
        queries = _prepare_queries(runner, query_batches, settings)
        scorer = _Scorer(queries, settings)
        for ids, batch in train_batches:
            try:
                for portion in runner.run(batch, len(ids)):
                    scorer.update(ids[portion.rows], portion.step, portion.factors)
            except LabelRangeError as error:  # noqa: PERF203 -- names the samples of this batch
                named = ids[list(error.rows)].tolist() if error.rows else ids.tolist()
                raise LabelRangeError(f"Training samples {named[:10]}: {error}", error.rows) from error
        names = tuple(gradients.chosen_names()) if gradients.selection else ()
    suspects = scorer.compute_suspects()
    reports = {} if queries is None else dict(_query_reports(queries, scorer.top, suspects, settings.top_k))
    return PassResult(names, reports, suspects, queries is not None and queries.has_teachers, len(suspects))


@dataclass(frozen=True, eq=False)
class _Scored:
    """A batch, or several joined, of which some layers are scored and some wait for others like them."""

    ids: Tensor
    step: Step
    waiting: Mapping[str, Factors]
    products: Tensor | None  # [M or 2 M, B], the sum over the layers scored
    squared_norms: Tensor | None  # [B]


class _Scorer:
    """Scores training samples; small layers in groups of batches, as their calls cost more than what they compute."""

    def __init__(self, queries: _QuerySide | None, settings: EngineSettings) -> None:
        self.top = TopK(max(settings.top_k, NUM_WITNESSES))
        self._queries = queries
        self._similarity = settings.similarity
        self._statistics = SampleStatistics()
        self._waiting: list[_Scored] = []
        self._num_waiting = self._num_elements = 0
        self._form: object = None

    def update(self, ids: Tensor, step: Step, train: dict[str, Factors]) -> None:
        """Take in a batch."""
        small = {name: factors for name, factors in train.items() if factors.num_elements <= SMALL_LAYER_ELEMENTS}
        positions = [(name, type(factors), factors.num_positions) for name, factors in small.items()]
        form = (step.logits.shape[1:], step.targets.shape[1:], positions, len(small) < len(train))
        if form != self._form:
            self._flush()
        self._form = form
        large = {name: factors for name, factors in train.items() if name not in small}
        # Detached: a step that waits must not keep its graph.
        logits, losses = step.logits.detach(), step.losses.detach()
        step = Step(logits, step.targets, losses, step.task, step.are_probabilities)
        self._waiting.append(_Scored(ids, step, small, *self._score(large)))
        self._num_waiting += len(ids)
        self._num_elements += sum(factors.num_elements for factors in small.values())
        if self._num_waiting >= GROUP_SAMPLES or self._num_elements >= GROUP_ELEMENTS:
            self._flush()

    def compute_suspects(self) -> SuspectTable:
        """The table of all samples taken in."""
        self._flush()
        return self._statistics.compute()

    def _score(self, train: Mapping[str, Factors]) -> tuple[Tensor | None, Tensor | None]:
        """Products with all queries and squared norms, summed over layers."""
        queries = {} if self._queries is None else self._queries.factors
        products, norms = [], []
        for name, factors in train.items():
            if name in queries:
                layer_products, layer_norms = dot_and_squared_norms(queries[name], factors)
                products.append(layer_products)
                norms.append(layer_norms)
            else:
                norms.append(squared_norms(factors))
        return _sum(products), _sum(norms)

    def _flush(self) -> None:
        if not self._waiting:
            return
        group, self._waiting = self._waiting, []
        self._num_waiting = self._num_elements = 0
        products, norms = self._score(_join([part.waiting for part in group]) if group[0].waiting else {})
        products = _sum([products, _cat([part.products for part in group])])
        norms = _sum([norms, _cat([part.squared_norms for part in group])])
        assert norms is not None  # there is at least one layer
        ids, first = torch.cat([part.ids for part in group]), group[0].step
        step = Step(
            torch.cat([part.step.logits for part in group]),
            torch.cat([part.step.targets for part in group]),
            torch.cat([part.step.losses for part in group]),
            first.task,
            first.are_probabilities,
        )
        if self._queries is not None and products is not None:
            self.top.update(_scores(self._queries, products, norms, self._similarity), ids.to(norms.device))
        has_classes = step.task is not Task.REGRESSION
        self._statistics.update(ids, norms, step.losses, step.outcome, has_classes=has_classes)


def _prepare_queries(
    runner: BatchRunner, query_batches: Sequence[QueryBatch], settings: EngineSettings
) -> _QuerySide | None:
    positions: list[int] = []
    reports: list[QueryReport] = []
    label_probabilities: list[float] = []
    given: list[dict[str, Factors]] = []
    predicted: list[dict[str, Factors]] = []
    for part in query_batches:
        for portion in runner.run(part.batch, len(part.positions), predicted=settings.teachers):
            step = portion.step
            _check_query_losses(step)
            # Weights may have changed since validation met the sample (EMA): those that are right by now are dropped.
            rows = step.outcome.wrong.nonzero().flatten()
            given.append(_rows(portion.factors, rows))
            if portion.predicted is not None:
                predicted.append(_rows(portion.predicted, rows))
            positions += [part.positions[portion.rows.start + row] for row in rows.tolist()]
            reports += [_without_lists(step, row) for row in rows.tolist()]
            probabilities = step.outcome.label_probabilities
            label_probabilities += [1.0] * len(rows) if probabilities is None else probabilities[rows].tolist()
    if not positions:
        return None
    has_teachers = len(predicted) == len(given)
    parts = given + predicted if has_teachers else given
    factors = _join(parts)
    norms = reduce(torch.add, [squared_norms(layer_factors) for layer_factors in factors.values()])
    if not bool(norms.isfinite().all()):
        raise NonFiniteError(
            "The gradient of a query is not finite, although its loss is. Nothing is scored. Check the layers above "
            f"{', '.join(f'`{name}`' for name in factors)} in eval mode."
        )
    return _QuerySide(positions, reports, label_probabilities, factors, norms, has_teachers)


def _scores(queries: _QuerySide, products: Tensor, norms: Tensor, similarity: Similarity) -> Tensor:
    """Rows to be maximised: harmful, look-alikes, teachers, look-alikes for the predicted label; up to ``[4 M, B]``."""
    num_queries = len(queries.positions)
    scores = products.new_empty(2 * len(products), products.shape[1])
    for start, sign in ((0, -1), (num_queries, 1))[: 2 if queries.has_teachers else 1]:
        rows = slice(start, start + num_queries)
        both, query_norms = scores[2 * start :], queries.squared_norms[rows]
        values = compute_similarity(similarity, products[rows], query_norms, norms)
        torch.mul(values, sign, out=both[:num_queries])
        both[num_queries : 2 * num_queries] = compute_similarity("cosine", products[rows], query_norms, norms)
    return scores


def _query_reports(
    queries: _QuerySide, top: TopK, suspects: SuspectTable, top_k: int
) -> Iterator[tuple[int, QueryReport]]:
    all_scores, all_ids = (values.cpu() for values in top.compute())
    labels = labels_of(suspects, all_ids.unique().tolist())
    scores, ids = all_scores.tolist(), all_ids.tolist()
    num_queries = len(queries.positions)
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
                label_looks_wrong=queries.label_probabilities[row] < DOUBTFUL_PROBABILITY
                and _agree(look_alikes, predicted_look_alikes),
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


def _join(parts: Sequence[Mapping[str, Factors]]) -> dict[str, Factors]:
    known = {name: factors for part in parts for name, factors in part.items()}
    sizes = [next(iter(part.values())).num_samples for part in parts]
    # A layer that the first queries did not use may be in the parts of later ones only.
    return {
        name: concatenate_samples(
            [part[name] if name in part else some.unused(size) for part, size in zip(parts, sizes, strict=True)]
        )
        for name, some in known.items()
    }


def _sum(values: Sequence[Tensor | None]) -> Tensor | None:
    present = [value for value in values if value is not None]
    return reduce(torch.add, present) if present else None


def _cat(values: Sequence[Tensor | None]) -> Tensor | None:
    present = [value for value in values if value is not None]
    return torch.cat(present, dim=-1) if present else None


def _rows(factors: Mapping[str, Factors], rows: Tensor) -> dict[str, Factors]:
    return {name: layer_factors.samples(rows) for name, layer_factors in factors.items()}


def _check_query_losses(step: Step) -> None:
    if not bool(step.losses.detach().isfinite().all()):
        raise NonFiniteError(
            "The loss of a query is not finite under the weights present at scoring. Nothing is scored. Check the loss "
            "in eval mode."
        )
