"""From the queries of one validation to its report and pictures, with the run's own ways handed in as callables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.batches import join_samples
from lightning_gradsim.clock import Clock, until
from lightning_gradsim.collation import ONE_AT_A_TIME, reorders_samples
from lightning_gradsim.engine import EngineSettings, Observer, Rounds, ShardResult, merge_shards, score_shard
from lightning_gradsim.errors import BatchFormatError
from lightning_gradsim.memory import default_budget
from lightning_gradsim.queries import Query, QuerySelection
from lightning_gradsim.query_side import QueryBatch
from lightning_gradsim.records import ErrorPair, Histogram, QueryReport
from lightning_gradsim.report import Report
from lightning_gradsim.rereading import NOTHING_CHOSEN, Finding, Rereading, Tapped
from lightning_gradsim.tasks import Task
from lightning_gradsim.train_pass import (
    PASS_AS,
    SampleReader,
    differs_on_second_read,
    has_known_sampler,
    known_labels,
    make_reader,
    stratified_indices,
)

MAX_PAIRS = 1000
NOISY_VALIDATION = 0.3
"""Share of queries whose own label may be wrong from which the report warns of a noisy validation set."""
AUGMENTED = (
    "training samples are augmented at random: what is scored and shown is one view of each. Pass `train_data=` "
    "without augmentation for the samples as they are"
)
RAN_SHORT = (
    "memory did not suffice for what was planned: smaller pieces were taken, with the same results; pass a smaller "
    "`memory_budget=` to plan for it"
)
PARTIAL = (
    "only a part of the training samples was read, to keep within `time_budget`: each pass goes on where the last one "
    "stopped. Pass `final_pass=True` for all of them at the end, or a larger `time_budget=`"
)
FIRST_SHARE = 0.125
"""Share of the training samples that is read while training steps tell too little."""
MIN_FIRST = 512
"""Training samples that are read then at least."""
CURVATURE_SAMPLES = 2000
"""Training samples that the curvature behind ``influence`` is taken from at most."""


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
    """

    seconds: float | None = None
    start: int = 0
    rank: int = 0
    world_size: int = 1
    tapped: Tapped | None = None
    reason: str | None = None
    is_first: bool = False


@dataclass(frozen=True, eq=False)
class Part:
    """What one process found.

    Attributes:
        shard: Of its share of the training samples.
        reached: The first place in the order of reading, over all processes, that this one left unread.
        finding: What became of choosing what is read.
        is_chosen: Whether samples were chosen by what training steps have shown.
        is_first: Whether only a part was to be read.
    """

    shard: ShardResult
    reached: int
    finding: Finding = NOTHING_CHOSEN
    is_chosen: bool = False
    is_first: bool = False


@dataclass(frozen=True, eq=False)
class Reference:
    """The training samples that queries are compared with.

    Attributes:
        reader: Reads them.
        words: Which they are.
        augmented: Whether reading a sample twice gives two different samples.
        class_names: The ``classes`` of the dataset, if it has any.
        notes: What limits a report against them.
        seed: Seed of the order in which passes over a part take turns.
        length: Length of the dataset when it was looked at.
    """

    reader: SampleReader
    words: str
    augmented: bool
    class_names: tuple[str, ...] | None
    notes: tuple[str, ...]
    seed: int
    length: int

    @property
    def change(self) -> str | None:
        """What has become of the length of the dataset since, in words; ``None`` where nothing has."""
        now = _length(self.reader.dataset)
        if now == self.length:
            return None
        return f"the training data have {now:,} samples now, and had {self.length:,} at the last report"

    def in_turn(self, start: int) -> SampleReader:
        """All samples in a random order, beginning at one of its places: any part of it is a fair sample.

        Args:
            start: The place, counted on over passes.

        Returns:
            Their reader.
        """
        order = torch.randperm(len(self.reader), generator=torch.Generator().manual_seed(self.seed))
        return self.reader.choose(order.roll(-(start % max(1, len(order)))))

    def for_curvature(self) -> SampleReader:
        """A seeded choice of at most ``CURVATURE_SAMPLES``, the same for every pass."""
        order = torch.randperm(len(self.reader), generator=torch.Generator().manual_seed(self.seed))
        return self.reader.choose(order[:CURVATURE_SAMPLES].sort().values)


def make_reference(
    source: Any,
    adapter: Adapter,
    max_train_samples: int | None,
    seed: int,
    num_batches: int | None = None,
    pass_as: str = PASS_AS,
) -> Reference:
    """Read what must be known of the training data before a pass.

    Args:
        source: A map-style dataset, or a ``DataLoader`` over one.
        adapter: Finds the targets of batches, for a stratified choice.
        max_train_samples: Compare with at most that many.
        seed: Seed of the choice.
        num_batches: Read the first batches only, for a trial run.
        pass_as: As what a user passes the source, in messages.

    Returns:
        The reference.
    """
    reader = make_reader(source, pass_as=pass_as)
    augmented = differs_on_second_read(reader)
    notes = []
    if reorders_samples(reader):
        reader = replace(reader, batch_size=1)
        notes.append(ONE_AT_A_TIME)
    if augmented:
        notes.append(AUGMENTED)
    if not has_known_sampler(source):
        notes.append(
            "the train loader has a sampler of its own: samples that it never draws are compared with all the same; "
            "pass `train_data=` with those that are trained on"
        )
    if reader.reads_in_process:
        notes.append(
            "the training dataset is read in the training process, since workers would have to be spawned: state "
            "inside the dataset object may change; give the loader a worker to avoid it"
        )
    total = len(reader)
    words = f"all {total:,} training samples"
    if num_batches is not None:
        reader = reader.choose(torch.arange(min(total, num_batches * reader.batch_size)))
        words = f"the first {len(reader):,} of {total:,} training samples"
        total = len(reader)
    if max_train_samples is not None and max_train_samples < total:
        labels = known_labels(reader)
        if labels is None:
            labels = _read_labels(reader, adapter)
        reader = reader.choose(stratified_indices(labels, total, max_train_samples, seed))
        how = "at random" if labels is None else "by class"
        words = f"{max_train_samples:,} of {total:,} training samples, chosen {how}"
    length = _length(reader.dataset)
    return Reference(reader, words, augmented, _class_names(reader.dataset), tuple(notes), seed, length)


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
        for positions, batch in join_samples([query.data for query in selection.queries])
    ]
    reader = reference.reader if reading.seconds is None and not reading.is_first else reference.in_turn(reading.start)
    if reading.is_first:
        reader = reader.choose(torch.arange(min(len(reader), max(MIN_FIRST, int(FIRST_SHARE * len(reader))))))
    share = reader.share(reading.rank, reading.world_size)
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
    return Part(shard, reached, finding, is_first=reading.is_first)


def _read_for_curvature(reference: Reference, run: RunContext, clock: Clock) -> Iterator[tuple[Tensor, Any]]:
    """Every process reads the same ones: several find what one finds, and nothing has to be sent."""
    with clock.working():
        for ids, batch in reference.for_curvature().batches():
            yield ids, run.move(batch)


def make_report(
    parts: Sequence[Part], selection: QuerySelection, reference: Reference, settings: EngineSettings
) -> tuple[Report, tuple[Query, ...]]:
    """The report of what all processes found.

    Args:
        parts: What each of them found.
        selection: The queries, of all processes.
        reference: The training samples.
        settings: Layers, similarity, length of the lists.

    Returns:
        The report, without epoch, step and cost, and the kept copy of each of its queries.

    Raises:
        NonFiniteError: If a loss or gradient of a training sample is not finite; the samples are named.
    """
    result = merge_shards([part.shard for part in parts], settings)
    errors_per_class, num_errors, num_validation_samples = selection.error_counts()
    still_wrong = {i: query for i, query in enumerate(selection.queries) if i in result.queries}
    queries = tuple(
        replace(result.queries[i], sample_id=query.sample_id, dataloader_idx=query.dataloader_idx)
        for i, query in still_wrong.items()
    )
    notes = [*reference.notes, *_notes(selection, queries, has_teachers=result.has_teachers or not queries)]
    if result.ran_short:
        notes.append(RAN_SHORT)
    if result.needed_bytes is not None:
        notes.append(
            f"`memory_budget={settings.memory_budget}` does not suffice for one sample at a time, which takes about "
            f"{result.needed_bytes:,} bytes: the pass took as much"
            if settings.memory_budget is not None
            else f"one sample at a time takes about {result.needed_bytes:,} bytes, more than a quarter of what is free"
        )
    total, finding = len(reference.reader), parts[0].finding
    words, more = _what_was_read(result.num_samples, reference, parts[0])
    notes += more
    if settings.similarity == "influence" and total > CURVATURE_SAMPLES:
        notes.append(f"influence takes its curvature from {CURVATURE_SAMPLES:,} training samples, chosen at random")
    report = Report(
        epoch=0,
        step=0,
        layers=result.layers,
        similarity=settings.similarity,
        reference=words,
        num_train_samples=result.num_samples,
        share_read=result.num_samples / max(1, total),
        recall=finding.recall,
        num_validation_samples=num_validation_samples,
        num_errors=num_errors,
        errors_per_class=errors_per_class,
        error_pairs=tuple(ErrorPair(*pair, count) for pair, count in selection.pair_counts().items())[:MAX_PAIRS],
        self_influence=Histogram.of(result.suspects.scores),
        num_dropped_queries=len(selection.queries) - len(queries),
        queries=queries,
        suspects=result.suspects,
        class_names=reference.class_names,
        notes=tuple(notes),
        augmented=reference.augmented,
        task=(selection.task or Task.CLASSIFICATION).value,
        plan=result.plan,
    )
    return report, tuple(still_wrong.values())


def names_note(report: Report, selection: QuerySelection) -> tuple[str, ...]:
    """What is to be said of class names that are too few or too many.

    Args:
        report: The report, with its class names.
        selection: The queries, of all processes.

    Returns:
        One sentence or none.
    """
    names, number = report.class_names, selection.num_classes
    if names is None or number is None or len(names) == number:
        return ()
    return (
        f"there are {len(names)} class names and {number} classes of the model, so names may be wrong: `class_names=`, "
        "or `classes` of the training dataset, must hold one a class, in their order",
    )


def _what_was_read(number: int, reference: Reference, part: Part) -> tuple[str, list[str]]:
    """Which training samples were read, in words, and what is to be said of it."""
    total, finding = len(reference.reader), part.finding
    notes = [] if finding.reason is None else [f"what was read is not chosen by training steps: {finding.reason}"]
    words = f"{number:,} of {total:,} training samples"
    if part.is_chosen:
        return f"{words}, chosen by what training steps have shown", list(finding.notes(total))
    if number == total:
        return reference.words, notes
    if part.is_first and number >= min(total, max(MIN_FIRST, int(FIRST_SHARE * total))):
        return f"{words}, drawn at random", notes
    return f"{words}, as many as the time budget allows", [*notes, PARTIAL]


def _notes(selection: QuerySelection, queries: Sequence[QueryReport], *, has_teachers: bool) -> list[str]:
    notes = []
    if selection.task is Task.REGRESSION:
        notes.append("no classes: the queries are the validation samples of highest loss")
    if any(query.sample_id is None for query in selection.queries):
        notes.append("a validation loader does not read in the dataset's order: its samples have no id here")
    if not has_teachers:
        notes.append("the loss of a predicted label is not known: there are no teachers")
    doubtful = sum(query.label_looks_wrong for query in queries)
    if len(queries) > 2 and doubtful > NOISY_VALIDATION * len(queries):
        notes.append(
            f"{doubtful} of {len(queries)} queries may be wrongly labelled themselves: with a noisy validation set the "
            "training samples listed as harmful may be right"
        )
    return notes


def _read_labels(reader: SampleReader, adapter: Adapter) -> Tensor | None:
    try:
        labels = torch.cat([adapter.split(batch)[1] for _, batch in reader.batches()])
    except BatchFormatError:  # only the module's own `gradsim_step` reads these batches
        return None
    return labels if labels.ndim == 1 and not labels.is_floating_point() else None


def _length(dataset: Any) -> int:
    return len(dataset)


def _class_names(dataset: Any) -> tuple[str, ...] | None:
    while not hasattr(dataset, "classes") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    return tuple(str(name) for name in names) if isinstance(names, (list, tuple)) else None
