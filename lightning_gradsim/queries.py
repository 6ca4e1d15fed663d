"""Choosing misclassified validation samples while validation runs, and keeping copies of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_gradsim.adapter import Adapter, Step
from lightning_gradsim.errors import NonFiniteError
from lightning_gradsim.report import Label, to_label
from lightning_gradsim.tasks import Task

QueryPolicy = Literal["highest_loss", "random"]
QUERY_POLICIES: tuple[str, ...] = get_args(QueryPolicy)
_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads consecutive ids over the whole range


@dataclass(frozen=True, eq=False)
class Query:
    """A validation sample that is kept for scoring.

    Attributes:
        data: The sample as a batch of one, on the CPU, sharing no memory with the validation batch.
        sample_id: Index into the validation dataset, or ``None`` where the loader's order is not known.
        dataloader_idx: Which validation loader it came from.
        ordinal: Its place in this validation; orders samples of equal loss.
        label: Given label.
        loss: Loss when validation met it.
    """

    data: Any
    sample_id: int | None
    dataloader_idx: int
    ordinal: int
    label: Label
    loss: float


class ErrorCounts(Metric):
    """Misclassified validation samples by given label.

    Index key: ``c`` class. States are summed over ranks.

    Attributes:
        errors: Misclassified samples of each class, int64 ``[c]``.
        total: Samples seen, int64.
    """

    full_state_update = False
    errors: Tensor
    total: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.add_state("errors", torch.zeros(num_classes, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, labels: Tensor, wrong: Tensor) -> None:
        """Count a batch.

        Args:
            labels: Given labels, int64 ``[B]``; not looked at where there is one class only.
            wrong: Whether the prediction differs, bool ``[B]``.
        """
        classes = len(self.errors)
        counted = labels[wrong] if classes > 1 else wrong.new_zeros(int(wrong.sum()), dtype=torch.long)
        self.errors += torch.bincount(counted.cpu().long(), minlength=classes)
        self.total += len(wrong)

    def compute(self) -> tuple[dict[int, int], int]:
        """Misclassified samples by class (classes without any left out), and samples seen."""
        return {label: int(count) for label, count in enumerate(self.errors) if count}, int(self.total)


class QuerySelection:
    """The queries of one validation, chosen while its batches go by.

    ``highest_loss`` takes the misclassified samples of highest loss, balanced over their labels: first the worst of
    every class, then the second worst, and so on. ``random`` takes a seeded choice. Both depend on the samples alone,
    not on their order, and at no time are more than ``num_queries`` samples kept.

    Attributes:
        num_queries: How many samples to keep at most.
        policy: ``highest_loss`` or ``random``.
        seed: Seed of the random choice.
        task: Kind of task, known after the first batch.
    """

    def __init__(self, num_queries: int, policy: QueryPolicy = "highest_loss", seed: int = 0) -> None:
        self.num_queries = num_queries
        self.policy = policy
        self.seed = seed
        self.task: Task | None = None
        self._kept: list[Query] = []
        self._counts: ErrorCounts | None = None
        self._num_seen = 0

    @property
    def queries(self) -> tuple[Query, ...]:
        """The queries so far, the most telling first."""
        return tuple(self._kept)

    def error_counts(self) -> tuple[dict[int, int], int, int]:
        """Misclassified samples by label (empty without exclusive classes), their number, and samples seen."""
        if self._counts is None:
            return {}, 0, 0
        by_class, total = self._counts.compute()
        has_classes = self.task in (Task.CLASSIFICATION, Task.BINARY)
        return (by_class if has_classes else {}), sum(by_class.values()), total

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
        self._check_finite(losses, ids, dataloader_idx)
        self.task = step.task
        if self._counts is None:
            classes = {Task.CLASSIFICATION: step.logits.shape[-1], Task.BINARY: 2}.get(step.task, 1)
            self._counts = ErrorCounts(classes)
        self._counts.update(outcome.labels, outcome.wrong)
        new: list[tuple[Query, int]] = []
        for row in outcome.wrong.nonzero().flatten().tolist():
            sample_id = None if ids is None else int(ids[row])
            label, loss = to_label(outcome.labels[row]), float(losses[row])
            new.append((Query(None, sample_id, dataloader_idx, self._num_seen + row, label, loss), row))
        self._num_seen += len(losses)
        rows = {query.ordinal: row for query, row in new}
        chosen = self._choose([*self._kept, *(query for query, _ in new)])
        self._kept = [
            self._keep(query, adapter.take_sample(batch, rows[query.ordinal], len(losses)))
            if query.data is None
            else query
            for query in chosen
        ]

    def _keep(self, query: Query, data: Any) -> Query:
        return Query(data, query.sample_id, query.dataloader_idx, query.ordinal, query.label, query.loss)

    def _choose(self, candidates: list[Query]) -> list[Query]:
        if self.policy == "random":
            return sorted(candidates, key=self._lot)[: self.num_queries]
        by_loss = sorted(candidates, key=lambda query: (-query.loss, query.dataloader_idx, *_place(query)))
        if self.task not in (Task.CLASSIFICATION, Task.BINARY):
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

    def _check_finite(self, losses: Tensor, ids: Tensor | None, dataloader_idx: int) -> None:
        finite = losses.isfinite()
        if bool(finite.all()):
            return
        rows = (~finite).nonzero().flatten().cpu()
        names = (ids[rows] if ids is not None else rows + self._num_seen).tolist()
        raise NonFiniteError(
            f"Validation losses are not finite for {len(names)} samples of loader {dataloader_idx} "
            f"({'sample ids' if ids is not None else 'places in this validation'} {names[:10]}). Nothing is scored. "
            "Check the loss in eval mode."
        )


def _place(query: Query) -> tuple[int, int]:
    return query.ordinal if query.sample_id is None else query.sample_id, query.ordinal
