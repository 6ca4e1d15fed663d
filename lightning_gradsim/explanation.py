"""From what all processes found to the report, with what limits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_gradsim.engine import EngineSettings, PassResult, merge_shards
from lightning_gradsim.queries import Query, QuerySelection
from lightning_gradsim.reading import Part, num_first
from lightning_gradsim.records import ErrorPair, Histogram, QueryAlongRun, QueryReport
from lightning_gradsim.reference import Reference
from lightning_gradsim.report import Report
from lightning_gradsim.tasks import Task

MAX_PAIRS = 1000
NOISY_VALIDATION = 0.3
"""Share of queries whose own label looks wrong from which the report warns of a noisy validation set."""
RAN_SHORT = (
    "memory did not suffice for what was planned: smaller pieces were taken, with the same results; pass a smaller "
    "`memory_budget=` to plan for it"
)
PARTIAL = (
    "only a part of the training samples was read, to keep within `time_budget`: each pass goes on where the last one "
    "stopped. Pass `final_pass=True` for all of them at the end, or a larger `time_budget=`"
)


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
    right = frozenset[int]() if settings.keep_right else result.right
    found = result.queries.keys() - right
    still_wrong = {i: query for i, query in enumerate(selection.queries) if i in found}
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
    if settings.similarity == "influence" and total > reference.num_for_curvature:
        notes.append(
            f"influence takes its curvature from {reference.num_for_curvature:,} training samples, chosen at random"
        )
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
        along_run=_along_run(selection, result),
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
    if part.is_first and number >= num_first(total):
        return f"{words}, drawn at random", notes
    return f"{words}, as many as the time budget allows", [*notes, PARTIAL]


def _along_run(selection: QuerySelection, result: PassResult) -> tuple[QueryAlongRun, ...]:
    """The samples that similarities are summed for, without lists: those come of all reports."""
    found = []
    for key, position in selection.along_run_positions.items():
        query, now = selection.along_run[key], result.queries[position]
        assert query.sample_id is not None  # they are told apart by it
        found.append(
            QueryAlongRun(
                query.sample_id,
                query.dataloader_idx,
                now.label,
                now.prediction,
                now.probability,
                now.loss,
                since_epoch=0,
                num_reports=0,
            )
        )
    return tuple(found)


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
            f"{doubtful} of {len(queries)} queries look wrongly labelled themselves: with a noisy validation set the "
            "training samples listed as harmful may be right"
        )
    return notes
