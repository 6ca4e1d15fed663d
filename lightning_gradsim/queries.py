"""Choosing misclassified validation samples while validation runs, and keeping copies of them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_gradsim.adapter import Adapter, Step
from lightning_gradsim.errors import NonFiniteError
from lightning_gradsim.history import key_of
from lightning_gradsim.plain_values import Label, to_label
from lightning_gradsim.tasks import Task

QueryPolicy = Literal["highest_loss", "random"]
QUERY_POLICIES: tuple[str, ...] = get_args(QueryPolicy)
_RIGHT = -1
"""Outcome of a sample that is not misclassified; others have their label, or 0 without exclusive classes."""
_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads consecutive ids over the whole range


@dataclass(frozen=True, eq=False)
class Query:
    """A validation sample that is kept for scoring.

    Attributes:
        data: The sample as a batch of one, on the CPU, sharing no memory with the validation batch.
        sample_id: Index into the validation dataset, or ``None`` where the loader's order is not known.
        dataloader_idx: Which validation loader it came from.
        ordinal: Its place in this validation, over all processes; orders samples of equal loss.
        label: Given label.
        loss: Loss when validation met it.
    """

    data: Any
    sample_id: int | None
    dataloader_idx: int
    ordinal: int
    label: Label
    loss: float


class QuerySelection:
    """The queries of one validation, chosen while its batches go by.

    ``highest_loss`` takes the misclassified samples of highest loss, balanced over their labels: first the worst of
    every class, then the second worst, and so on. ``random`` takes a seeded choice. Both depend on the samples alone,
    not on their order, and at no time are more than ``num_queries`` samples kept, beside 16 bytes for each one seen.

    With several processes each has one of its own, which can be pickled; ``merge_selections`` makes one of them all.

    Attributes:
        num_queries: How many samples to keep at most.
        policy: ``highest_loss``, ``random``, or ``all``: the first ones, those that are right included.
        seed: Seed of the random choice.
        rank: Which of the processes this is.
        world_size: How many there are.
        along_run: By key, samples that are kept in any case, right or wrong, and not counted among those above.
        task: Kind of task, known after the first batch.
        num_classes: Number of classes or labels, known then, too; ``None`` in regression.
    """

    def __init__(
        self,
        num_queries: int,
        policy: QueryPolicy | Literal["all"] = "highest_loss",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        along_run: Collection[int] = (),
    ) -> None:
        self.num_queries = num_queries
        self.policy = policy
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.task: Task | None = None
        self.num_classes: int | None = None
        self.along_run: dict[int, Query] = {}
        self._wanted_along_run = frozenset(along_run)
        self._kept: list[Query] = []
        # Key and outcome of every sample seen, so that one that several processes met can be counted once.
        self._keys, self._outcomes, self._predictions = array("q"), array("i"), array("i")

    @property
    def queries(self) -> tuple[Query, ...]:
        """The queries so far, the most telling first."""
        return tuple(self._kept)

    @property
    def scored(self) -> tuple[Query, ...]:
        """The queries, then those samples of ``along_run`` that are not among them."""
        keys = {_key(each.dataloader_idx, each.sample_id, each.ordinal) for each in self._kept}
        return (*self._kept, *(query for key, query in sorted(self.along_run.items()) if key not in keys))

    @property
    def along_run_positions(self) -> dict[int, int]:
        """Places in ``scored`` of the samples of ``along_run``, by key."""
        places = {_key(each.dataloader_idx, each.sample_id, each.ordinal): i for i, each in enumerate(self.scored)}
        return {key: places[key] for key in sorted(self.along_run)}

    def error_counts(self) -> tuple[dict[int, int], int, int]:
        """Misclassified samples by label (empty without exclusive classes), their number, and samples seen."""
        by_class = Counter(outcome for outcome in self._outcomes if outcome != _RIGHT)
        return (dict(sorted(by_class.items())) if self._has_classes else {}), by_class.total(), len(self._outcomes)

    def pair_counts(self) -> dict[tuple[int, int], int]:
        """Misclassified samples by label and prediction, the most frequent pair first; empty without classes."""
        if not self._has_classes:
            return {}
        pairs = zip(self._outcomes, self._predictions, strict=True)
        counts = Counter(pair for pair in pairs if pair[0] != _RIGHT)
        return dict(sorted(counts.items(), key=lambda each: (-each[1], each[0])))

    def known_keys(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Keys of all samples seen that have an id, and of those among them that are misclassified."""
        keys = np.array(self._keys, np.int64)
        return keys[keys >= 0], keys[(keys >= 0) & (np.array(self._outcomes, np.int32) != _RIGHT)]

    def update(self, adapter: Adapter, batch: Any, step: Step, ids: Tensor | None, dataloader_idx: int) -> None:
        """Take in a validation batch.

        Args:
            adapter: The adapter that ran the step; it cuts samples out of the batch.
            batch: The batch, on any device.
            step: The step of this batch.
            ids: Sample ids ``[B]``, or ``None`` if they are not known.
            dataloader_idx: Which validation loader the batch came from.

        Raises:
            NonFiniteError: If a loss is NaN or infinite; the samples are named.
        """
        losses, outcome = step.losses.detach(), step.outcome
        start = len(self._keys)
        ordinals = range(start * self.world_size + self.rank, (start + len(losses)) * self.world_size, self.world_size)
        self._check_finite(losses, ids, ordinals, dataloader_idx)
        self.task = step.task
        if step.task is not Task.REGRESSION:
            self.num_classes = 2 if step.task is Task.BINARY else step.logits.shape[1]
        sample_ids: list[int | None] = [None] * len(losses) if ids is None else ids.tolist()
        self._keys.extend(map(partial(_key, dataloader_idx), sample_ids, ordinals))
        labels = outcome.labels if self._has_classes else outcome.wrong.long() - 1
        self._outcomes.extend(labels.where(outcome.wrong, _RIGHT).tolist())
        predictions = outcome.predictions if self._has_classes else torch.zeros_like(labels)
        self._predictions.extend(predictions.tolist())
        for row, key in enumerate(self._keys[start:]):
            if key in self._wanted_along_run:
                data, label = adapter.take_sample(batch, row, len(losses)), to_label(outcome.labels[row])
                ordinal, loss = ordinals[row], float(losses[row])
                self.along_run[key] = Query(data, sample_ids[row], dataloader_idx, ordinal, label, loss)
        wanted = torch.ones_like(outcome.wrong) if self.policy == "all" else outcome.wrong
        rows = {ordinals[row]: row for row in wanted.nonzero().flatten().tolist()}
        new = [
            Query(None, sample_ids[row], dataloader_idx, ordinal, to_label(outcome.labels[row]), float(losses[row]))
            for ordinal, row in rows.items()
        ]
        self._kept = [
            query
            if query.data is not None
            else replace(query, data=adapter.take_sample(batch, rows[query.ordinal], len(losses)))
            for query in self._choose([*self._kept, *new])
        ]

    @property
    def _has_classes(self) -> bool:
        return self.task in (Task.CLASSIFICATION, Task.BINARY)

    def _choose(self, candidates: list[Query]) -> list[Query]:
        if self.policy == "all":
            return candidates[: self.num_queries]
        if self.policy == "random":
            return sorted(candidates, key=self._lot)[: self.num_queries]
        by_loss = sorted(candidates, key=lambda query: (-query.loss, query.dataloader_idx, *_place(query)))
        if not self._has_classes:
            return by_loss[: self.num_queries]
        # A sample that is not among the first now can only fall further behind, so dropping it loses nothing.
        rank_in_class: Counter[Label] = Counter()
        ranked = []
        for query in by_loss:
            ranked.append((rank_in_class[query.label], query))
            rank_in_class[query.label] += 1
        ranked.sort(key=lambda pair: pair[0])
        return [query for _, query in ranked[: self.num_queries]]

    def _lot(self, query: Query) -> tuple[int, int]:
        key = _place(query)[0] + 1 + (query.dataloader_idx << 48)
        mixed = ((key ^ (self.seed * 0x2545F491)) * _MIX) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 29)) * _MIX) & (2**64 - 1)
        return mixed ^ (mixed >> 32), query.ordinal

    def _check_finite(self, losses: Tensor, ids: Tensor | None, ordinals: range, dataloader_idx: int) -> None:
        finite = losses.isfinite()
        if bool(finite.all()):
            return
        rows = (~finite).nonzero().flatten().cpu()
        names = ids[rows].tolist() if ids is not None else [ordinals[row] for row in rows.tolist()]
        raise NonFiniteError(
            f"Validation losses are not finite for {len(names)} samples of loader {dataloader_idx} "
            f"({'sample ids' if ids is not None else 'places in this validation'} {names[:10]}). Nothing is scored. "
            "Check the loss in eval mode."
        )


def merge_selections(selections: Sequence[QuerySelection]) -> QuerySelection:
    """The selection of one process that met the samples of all.

    Args:
        selections: Those of all processes, in any order, at least one, with one set of arguments.

    Returns:
        Their queries and counts in one. A sample with an id that several of them met counts once; so do those that a
        ``DistributedSampler`` repeats to give every process the same number. Samples without an id count each time.
    """
    first = selections[0]
    if len(selections) == 1:
        return first
    merged = QuerySelection(first.num_queries, first.policy, first.seed)
    merged.task = next((each.task for each in selections if each.task is not None), None)
    merged.num_classes = next((each.num_classes for each in selections if each.num_classes is not None), None)
    columns = ("_keys", "_outcomes", "_predictions")
    keys, outcomes, predictions = (
        np.concatenate([np.array(getattr(each, name)) for each in selections]) for name in columns
    )
    wrong_first = np.argsort(-outcomes, kind="stable")
    keys, places = np.unique(keys[wrong_first], return_index=True)
    merged._keys.frombytes(keys.tobytes())
    merged._outcomes.frombytes(outcomes[wrong_first][places].tobytes())
    merged._predictions.frombytes(predictions[wrong_first][places].tobytes())
    by_loss = sorted((query for each in selections for query in each.queries), key=lambda q: (-q.loss, q.ordinal))
    kept: dict[int, Query] = {}
    for query in by_loss:
        kept.setdefault(_key(query.dataloader_idx, query.sample_id, query.ordinal), query)
    merged._kept = merged._choose(list(kept.values()))
    merged.along_run = {key: query for each in selections for key, query in each.along_run.items()}
    return merged


def _key(dataloader_idx: int, sample_id: int | None, ordinal: int) -> int:
    """One number for a sample of any loader; negative without an id."""
    return -1 - ordinal if sample_id is None else key_of(dataloader_idx, sample_id)


def _place(query: Query) -> tuple[int, int]:
    return query.ordinal if query.sample_id is None else query.sample_id, query.ordinal
