"""Queries of a validation scored against one process's share of the training samples, in the run's own ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.batches import join_samples
from lightning_gradsim.clock import Clock, until
from lightning_gradsim.engine import EngineSettings, Observer, Rounds, ShardResult, score_shard
from lightning_gradsim.memory import default_budget
from lightning_gradsim.queries import QuerySelection
from lightning_gradsim.query_side import QueryBatch
from lightning_gradsim.reference import Reference
from lightning_gradsim.rereading import NOTHING_CHOSEN, Finding, Rereading, Tapped
from lightning_gradsim.topk import ScoreRows
from lightning_gradsim.train_pass import SampleReader

FIRST_SHARE = 0.125
"""Share of the training samples that is read while training steps tell too little."""
MIN_FIRST = 512
"""Training samples that are read then at least."""


@dataclass(frozen=True, eq=False)
class RunContext:
    """How the training run treats batches.

    Attributes:
        move: From a batch of a loader to the batch that the training step sees.
        to_device: A batch that was moved before, back on the module's device.
        forward_context: The precision context.
        show_progress: Items, their number and a description to the items with a progress bar.
        observe: Is shown all training samples that are read.
    """

    move: Callable[[Any], Any]
    to_device: Callable[[Any], Any]
    forward_context: Callable[[], AbstractContextManager[Any]]
    show_progress: Callable[[Iterable[Any], int, str], Iterable[Any]]
    observe: Observer | None = None


@dataclass(frozen=True)
class Reading:
    """How much of the reference a pass reads.

    Attributes:
        seconds: Time for it; what then has not been read, the next passes read. ``None`` for all of it.
        start: Where the last pass stopped, in the order of ``Reference.in_turn``.
        rank: Which of several processes reads; each reads a share.
        world_size: How many there are.
        tapped: What training steps have shown, to choose by it what is read; ``None`` to choose nothing.
        reason: Why there is nothing to choose by, in words, where there should be.
        is_first: Whether a part will do, since training steps will tell more by the next time.
        make_rows: From a number of rows and of training samples to room for all scores of the queries along the run;
            ``None`` where there are none.
    """

    seconds: float | None = None
    start: int = 0
    rank: int = 0
    world_size: int = 1
    tapped: Tapped | None = None
    reason: str | None = None
    is_first: bool = False
    make_rows: Callable[[int, int], Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Part:
    """What one process found.

    Attributes:
        shard: Of its share of the training samples.
        reached: The first place in the order of reading, over all processes, that this one left unread.
        finding: What became of choosing what is read.
        is_chosen: Whether samples were chosen by what training steps have shown.
        is_first: Whether only a part was to be read.
        rows: All scores of the queries along the run.
    """

    shard: ShardResult
    reached: int
    finding: Finding = NOTHING_CHOSEN
    is_chosen: bool = False
    is_first: bool = False
    rows: ScoreRows | None = None


def score_part(
    module: nn.Module,
    adapter: Adapter,
    selection: QuerySelection,
    reference: Reference,
    settings: EngineSettings,
    run: RunContext,
    reading: Reading = Reading(),
) -> Part:
    """Score the queries of a validation against this process's share of the reference.

    Args:
        module: The user's module; it is left as found.
        adapter: Reads batches; bound to the module.
        selection: The queries, of all processes.
        reference: The training samples.
        settings: Layers, similarity, length of the lists.
        run: How the run treats batches.
        reading: How much of the reference is read.

    Returns:
        What was found.
    """
    query_batches = [
        QueryBatch(positions, run.to_device(batch))
        for positions, batch in join_samples([query.data for query in selection.scored])
    ]
    reader = reference.reader if reading.seconds is None and not reading.is_first else reference.in_turn(reading.start)
    if reading.is_first:
        reader = reader.choose(torch.arange(num_first(len(reader))))
    share = reader.share(reading.rank, reading.world_size)
    along_run = list(selection.along_run_positions.values())
    rows = None
    if along_run and reading.make_rows is not None:
        rows = ScoreRows(along_run, reading.make_rows(len(along_run), len(share)))
    curvature_clock = Clock()

    def read(samples: SampleReader, seconds: float | None) -> Iterable[tuple[Tensor, Any]]:
        num_batches = -(-len(samples) // samples.batch_size)
        batches = run.show_progress(
            until(samples.batches(), seconds, curvature_clock), num_batches, "gradient similarity"
        )
        return ((ids, run.move(batch)) for ids, batch in batches)

    if settings.memory_budget is None:
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        settings = replace(settings, memory_budget=default_budget(device, reading.world_size))
    curvature_batches = _read_for_curvature(reference, run, curvature_clock)

    def score(train_batches: Iterable[tuple[Tensor, Any]] | Rounds) -> ShardResult:
        return score_shard(
            module,
            adapter,
            query_batches,
            train_batches,
            settings,
            run.forward_context,
            curvature_batches,
            observe=run.observe,
            rows=rows,
        )

    if reading.tapped is None:
        shard = score(read(share, reading.seconds))
        finding = Finding(reading.reason)
    else:
        rounds = Rereading(
            module,
            adapter,
            reading.tapped,
            reference.reader,
            settings,
            read,
            lambda: read(share, reading.seconds),
            seconds=reading.seconds,
            seed=reference.seed,
            is_reader=reading.rank == 0,
        )
        shard = score(rounds)
        finding = rounds.finding
        if finding.reason is None:
            return Part(shard, 0, finding, is_chosen=True)
    unread = share.ids[len(shard.suspects) :]
    reached = int((reader.ids == unread[0]).nonzero()) if len(unread) else len(reader)
    return Part(shard, reached, finding, is_first=reading.is_first, rows=rows)


def num_first(total: int) -> int:
    """How many of so many training samples are read while training steps tell too little."""
    return min(total, max(MIN_FIRST, int(FIRST_SHARE * total)))


def _read_for_curvature(reference: Reference, run: RunContext, clock: Clock) -> Iterator[tuple[Tensor, Any]]:
    """Every process reads the same ones: several find what one finds, and nothing has to be sent."""
    with clock.working():
        for ids, batch in reference.for_curvature().batches():
            yield ids, run.move(batch)
