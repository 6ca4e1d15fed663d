"""A pass over the training samples, whole or in shards: similarities with every query, best lists, statistics."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter, Step
from lightning_gradsim.arguments import check_choice, check_count, check_positive
from lightning_gradsim.batch_runner import BatchRunner, ForwardContext
from lightning_gradsim.class_pairs import Mistakes, Pair, PairScorer, PairScores
from lightning_gradsim.factors import Factors
from lightning_gradsim.guard import evaluating
from lightning_gradsim.layer_selection import LayerSpec, check_layer_spec
from lightning_gradsim.plan_record import Plan
from lightning_gradsim.planner import make_plan
from lightning_gradsim.query_curvature import gather_curvature, precondition
from lightning_gradsim.query_side import (
    NUM_WITNESSES,
    QueryBatch,
    QueryRecords,
    QuerySide,
    prepare_queries,
    query_reports,
)
from lightning_gradsim.records import InfluentialSample, QueryReport
from lightning_gradsim.sample_statistics import labels_of, merge_suspects
from lightning_gradsim.scorer import Scorer
from lightning_gradsim.scores import SIMILARITIES, Similarity
from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.topk import ScoreRows, ScoreSums, TopK, merge_largest
from lightning_gradsim.wrapper import PerSampleGradients

Observer = Callable[[Tensor, Step, Mapping[str, Factors]], None]


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
        damping: For the similarity ``influence``: share of the mean eigenvalue of each layer's curvature that is added.
        keep_right: Whether queries that the module gets right are scored, too.

    Raises:
        TypeError: If a value has a wrong type.
        ValueError: If a value is out of range.
    """

    layers: LayerSpec = "last"
    similarity: Similarity = "dot"
    top_k: int = 8
    teachers: bool = True
    memory_budget: int | None = None
    damping: float = 1.0
    keep_right: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        check_layer_spec(self.layers)
        check_choice("similarity", self.similarity, SIMILARITIES)
        check_count("top_k", self.top_k, optional=False)
        check_count("memory_budget", self.memory_budget, optional=True)
        check_positive("damping", self.damping)


@dataclass(frozen=True, eq=False)
class PassResult:
    """What a pass found.

    Attributes:
        layers: Names of the layers.
        queries: By position, the queries that are still wrong, with their lists; those that are right by now are
            absent.
        right: Those of them that are right all the same: they were to be scored in any case.
        pairs: Harmful samples of class pairs.
        suspects: All training samples by self-influence.
        has_teachers: Whether predictions have a loss, so that teachers could be found.
        num_samples: Training samples scored.
        plan: How it was computed; ``None`` without training samples.
        ran_short: Whether memory did not suffice for what was planned, so that smaller pieces were taken.
        needed_bytes: What a pass takes at least where that is more than the budget, else ``None``.
    """

    layers: tuple[str, ...]
    queries: Mapping[int, QueryReport]
    suspects: SuspectTable
    has_teachers: bool
    num_samples: int
    plan: Plan | None
    ran_short: bool
    needed_bytes: int | None = None
    right: frozenset[int] = frozenset()
    pairs: Mapping[Pair, tuple[InfluentialSample, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ShardResult:
    """What a pass over some of the training samples found: all that is needed to merge it with others, and picklable.

    It holds no gradients: a few numbers a query, and 23 bytes a training sample. Tensors are on the CPU.

    Attributes:
        layers: Names of the layers.
        queries: The queries that are still wrong; ``None`` if there are none.
        best_scores: Largest scores of each row, falling, ``[R, k]``; ``[0, 0]`` without queries or training samples.
        best_ids: The sample ids that they belong to, like ``best_scores``.
        suspects: The training samples of this shard.
        plan: How it was computed; ``None`` without training samples.
        ran_short: Whether memory did not suffice for what was planned.
        needed_bytes: As for ``PassResult``.
        pairs: What was found for class pairs, if any were asked for.
    """

    layers: tuple[str, ...]
    queries: QueryRecords | None
    best_scores: Tensor
    best_ids: Tensor
    suspects: SuspectTable
    plan: Plan | None
    ran_short: bool
    needed_bytes: int | None = None
    pairs: PairScores | None = None


@runtime_checkable
class Rounds(Protocol):
    """Training samples of which each round is chosen by what the rounds before have shown."""

    def batches(self, queries: QuerySide | None) -> Iterable[Iterable[tuple[Tensor, Any]]]:
        """Rounds of sample ids ``[B]`` and batch, on the module's device, each id once; ``None`` without queries."""
        ...

    def see(self, ids: Tensor, factors: Mapping[str, Factors]) -> None:
        """Take in the gradients of samples of the round at hand, by layer."""
        ...


class _OneRound:
    """All samples, whatever they show."""

    def __init__(self, batches: Iterable[tuple[Tensor, Any]]) -> None:
        self._batches = batches

    def batches(self, queries: QuerySide | None) -> Iterable[Iterable[tuple[Tensor, Any]]]:
        return [self._batches]

    def see(self, ids: Tensor, factors: Mapping[str, Factors]) -> None:
        pass


def run_pass(
    module: nn.Module,
    adapter: Adapter,
    query_batches: Sequence[QueryBatch],
    train_batches: Iterable[tuple[Tensor, Any]],
    settings: EngineSettings,
    forward_context: ForwardContext = nullcontext,
    curvature_batches: Iterable[tuple[Tensor, Any]] = (),
) -> PassResult:
    """Score every training sample against every query, exactly.

    Args:
        module: The user's module; it is left as found.
        adapter: Reads batches; bound to the module.
        query_batches: The queries, on the module's device.
        train_batches: Sample ids ``[B]`` and batch, on the module's device, each id once.
        settings: Layers, similarity, length of the lists.
        forward_context: The precision context of the run.
        curvature_batches: Like ``train_batches``, those that the curvature is taken from; read for ``influence`` only.

    Returns:
        Lists of each query and statistics of each training sample. Memory beyond the batches at hand does not grow with
        the number of training samples, apart from 23 bytes a sample of statistics.

    Raises:
        NonFiniteError: If a loss or gradient is not finite; the samples are named.
        LabelRangeError: If a label lies outside the classes; the samples are named.
        GradSimError: If the gradients of the chosen layers cannot be exact.
    """
    return merge_shards(
        [score_shard(module, adapter, query_batches, train_batches, settings, forward_context, curvature_batches)],
        settings,
    )


def score_shard(
    module: nn.Module,
    adapter: Adapter,
    query_batches: Sequence[QueryBatch],
    train_batches: Iterable[tuple[Tensor, Any]] | Rounds,
    settings: EngineSettings,
    forward_context: ForwardContext = nullcontext,
    curvature_batches: Iterable[tuple[Tensor, Any]] = (),
    top: TopK | ScoreSums | None = None,
    observe: Observer | None = None,
    rows: ScoreRows | None = None,
    mistakes: Mistakes | None = None,
) -> ShardResult:
    """Score some of the training samples against every query, exactly.

    Args:
        module: The user's module; it is left as found.
        adapter: Reads batches; bound to the module.
        query_batches: The queries, the same for every shard, on the module's device.
        train_batches: Sample ids ``[B]`` and batch, on the module's device, each id once; may be empty. Or rounds of
            such.
        settings: Layers, similarity, length of the lists.
        forward_context: The precision context of the run.
        curvature_batches: Like ``train_batches``, those that the curvature is taken from, the same for every shard;
            read for ``influence`` only.
        top: Takes the scores; by default one that keeps the best of each list.
        observe: Is shown sample ids, step and factors of everything that is read.
        rows: Takes all scores of the harmful, whose sign is turned, for some queries, which are scored even if right.
        mistakes: Those of class pairs, each of which is one more query.

    Returns:
        What was found. Training samples whose loss or gradient is not finite are in it, for ``merge_shards`` to name
        those of all shards together.

    Raises:
        NonFiniteError: If a query's loss or gradient is not finite.
        LabelRangeError: If a label lies outside the classes; the samples are named.
        GradSimError: If the gradients of the chosen layers cannot be exact.
    """
    plan = None
    rounds = train_batches if isinstance(train_batches, Rounds) else _OneRound(train_batches)
    with evaluating(module), PerSampleGradients(module, settings.layers) as gradients:
        runner = BatchRunner(module, adapter, gradients, forward_context, settings.memory_budget)
        keep_right = settings.keep_right or (() if rows is None else rows.positions)
        queries = prepare_queries(runner, query_batches, teachers=settings.teachers, keep_right=keep_right)
        if rows is not None and queries is not None:
            rows.choose([queries.records.positions.index(each) for each in rows.positions])
        pairs = None if mistakes is None else PairScorer(runner, mistakes, settings.similarity, settings.top_k)
        if (queries is not None or pairs is not None) and settings.similarity == "influence":
            curvature = gather_curvature(runner, curvature_batches)
            if queries is not None:
                # In a sum, the last pass decides whose label is doubtful, and the passes before do not know.
                doubt_all = isinstance(top, ScoreSums)
                budget = runner.memory_budget
                queries = precondition(queries, curvature, settings.damping, budget, doubt_all=doubt_all)
            if pairs is not None:
                pairs.precondition(curvature, settings.damping)
        num_query_gradients = 0 if queries is None else queries.num_gradients
        top = TopK(max(settings.top_k, NUM_WITNESSES)) if top is None else top
        scorer = Scorer(queries, settings.similarity, top, runner.memory_budget, rows)
        for batches in rounds.batches(queries):
            for ids, step, factors in runner.run_all(batches):
                scorer.update(ids, step, factors)
                rounds.see(ids, factors)
                if pairs is not None:
                    pairs.update(ids, factors)
                if observe is not None:
                    observe(ids, step, factors)
                if plan is None and len(ids):
                    plan = make_plan(module, gradients, runner, factors, num_query_gradients, queries)
        names = [name for chosen in gradients.names_by_layer().values() for name in chosen]
    suspects = scorer.compute_suspects()
    scores, ids = (values.cpu() for values in scorer.top.compute())
    ran_short = scorer.ran_short or runner.portions.was_halved
    records = None if queries is None else queries.records
    found = None if pairs is None else pairs.compute()
    return ShardResult(tuple(names), records, scores, ids, suspects, plan, ran_short, runner.needed_bytes, found)


def merge_shards(shards: Sequence[ShardResult], settings: EngineSettings) -> PassResult:
    """What one pass over the samples of all shards finds.

    Args:
        shards: What each pass found, at least one, in any order. A training sample that several of them scored counts
            once.
        settings: The settings of these passes.

    Returns:
        The result. Where weights differ between processes, a query that any of them gets right is absent.

    Raises:
        NonFiniteError: If a loss or gradient of a training sample of any shard is not finite; the samples are named.
    """
    # What all shards say alike is taken from the one with the smallest sample id, in whatever order they come.
    shards = sorted(shards, key=_smallest_id)
    suspects = merge_suspects([shard.suspects for shard in shards])
    all_records = [shard.queries for shard in shards if shard.queries is not None]
    wrong = [set(records.positions) for records in all_records]
    common = set.intersection(*wrong) if len(wrong) == len(shards) else set()
    has_teachers = bool(all_records) and all(records.has_teachers for records in all_records)
    reports = {}
    if common:
        best = merge_largest([_best(shard, common) for shard in shards], max(settings.top_k, NUM_WITNESSES))
        reports = dict(query_reports(all_records[0].only(common), best, suspects, settings.top_k))
    plan = next((shard.plan for shard in shards if shard.plan is not None), None)
    ran_short = any(shard.ran_short for shard in shards)
    needed = max((shard.needed_bytes for shard in shards if shard.needed_bytes is not None), default=None)
    right = frozenset().union(*(records.right for records in all_records))
    pairs = _merge_pairs([shard.pairs for shard in shards if shard.pairs is not None], suspects, settings.top_k)
    return PassResult(
        shards[0].layers, reports, suspects, has_teachers, len(suspects), plan, ran_short, needed, right, pairs
    )


def _merge_pairs(
    shards: Sequence[PairScores], suspects: SuspectTable, top_k: int
) -> dict[Pair, tuple[InfluentialSample, ...]]:
    """Harmful samples of each pair, from the scores of all shards."""
    if not shards:
        return {}
    scores, ids = merge_largest([(each.best_scores, each.best_ids) for each in shards], top_k)
    labels = labels_of(suspects, ids.unique().tolist())
    return {
        pair: tuple(
            InfluentialSample(i, labels[i], -score, labels[i] == pair[1])
            for i, score in zip(ids[row].tolist(), scores[row].tolist(), strict=True)
            if score > 0
        )
        for row, pair in enumerate(shards[0].pairs)
    }


def _smallest_id(shard: ShardResult) -> int:
    return int(shard.suspects.sample_ids.min()) if len(shard.suspects) else sys.maxsize


def _best(shard: ShardResult, positions: Collection[int]) -> tuple[Tensor, Tensor]:
    """The rows of some queries, without columns where the shard has no samples."""
    assert shard.queries is not None
    rows = torch.tensor(shard.queries.rows_of(positions))
    if not len(shard.suspects):
        return torch.empty(len(rows), 0), torch.empty(len(rows), 0, dtype=torch.long)
    return shard.best_scores[rows], shard.best_ids[rows]
