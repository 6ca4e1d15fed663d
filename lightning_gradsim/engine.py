"""One pass over the training samples: similarities with every query, the best of each list, per-sample statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.batch_runner import BatchRunner, ForwardContext
from lightning_gradsim.guard import evaluating
from lightning_gradsim.layer_selection import LayerSpec
from lightning_gradsim.plan_record import Plan
from lightning_gradsim.planner import make_plan
from lightning_gradsim.query_side import NUM_WITNESSES, QueryBatch, prepare_queries, query_reports
from lightning_gradsim.report import QueryReport, SuspectTable
from lightning_gradsim.scorer import Scorer
from lightning_gradsim.scores import Similarity
from lightning_gradsim.wrapper import PerSampleGradients


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
class PassResult:
    """What a pass found.

    Attributes:
        layers: Names of the layers.
        queries: By position, the queries that are still wrong, with their lists; those that are right by now are
            absent.
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
    plan = None
    with evaluating(module), PerSampleGradients(module, settings.layers) as gradients:
        runner = BatchRunner(module, adapter, gradients, forward_context, settings.memory_budget)
        queries = prepare_queries(runner, query_batches, teachers=settings.teachers)
        num_query_gradients = 0 if queries is None else len(queries.squared_norms)
        num_kept = max(settings.top_k, NUM_WITNESSES)
        scorer = Scorer(queries, settings.similarity, num_kept, runner.memory_budget)
        for ids, step, factors in runner.run_all(train_batches):
            scorer.update(ids, step, factors)
            if plan is None and len(ids):
                plan = make_plan(module, gradients, runner, factors, num_query_gradients, queries)
        names = [name for chosen in gradients.names_by_layer().values() for name in chosen]
    suspects = scorer.compute_suspects()
    reports = {} if queries is None else dict(query_reports(queries, scorer.top, suspects, settings.top_k))
    has_teachers = queries is not None and queries.has_teachers
    ran_short = scorer.ran_short or runner.portions.was_halved
    return PassResult(
        tuple(names), reports, suspects, has_teachers, len(suspects), plan, ran_short, runner.needed_bytes
    )
