"""Per-sample values of a pass over the training samples, gathered batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_gradsim.errors import NonFiniteError
from lightning_gradsim.plain_values import Label, to_label
from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.tasks import Outcome

MAX_NAMED = 10
MIN_ROWS = 2**16
"""Rows of a column to begin with."""
GROWTH = 1.5
"""Rows of a column that has to grow over those that it has to hold."""


class SampleStatistics:
    """Self-influence, label and prediction of every training sample, its id included.

    With classes these are 23 bytes a sample, half as much in reserve, and at most 64 while ``compute`` sorts them.
    """

    def __init__(self) -> None:
        self._columns: dict[str, Tensor] = {}
        self._length = 0

    def update(
        self, ids: Tensor, squared_norms: Tensor, losses: Tensor, outcome: Outcome, *, has_classes: bool
    ) -> None:
        """Take in a batch.

        Args:
            ids: Sample ids ``[B]``, int64.
            squared_norms: Squared norms of the per-sample gradients, ``[B]``.
            losses: Per-sample losses, ``[B]``.
            outcome: Labels and predictions.
            has_classes: Whether a wrong prediction means anything (not in regression).
        """
        labels = outcome.labels
        columns = {
            "sample_ids": ids,
            "scores": torch.where(losses.detach().isfinite(), squared_norms, torch.nan).float(),
            "labels": labels.to(torch.int32) if labels.dtype == torch.int64 else labels,
            "flagged": outcome.wrong if has_classes else torch.zeros_like(outcome.wrong),
        }
        if outcome.suggested is not None and outcome.suggested_probabilities is not None:
            columns["suggested"] = outcome.suggested.to(torch.int32)
            columns["probabilities"] = outcome.suggested_probabilities.to(torch.float16)
        self._append(columns)

    def compute(self) -> SuspectTable:
        """All samples by falling self-influence, ties by the smaller id. What was gathered is given away.

        Returns:
            The table; empty if there was no batch. What is not finite comes first.
        """
        if not self._columns:
            return SuspectTable.empty()
        # The columns stay on the device until here: a transfer for every batch would wait for the device every time.
        # One after the other, and in order of the ids at once: at the end of a pass this is what takes memory.
        columns, self._columns = self._columns, {}
        by_id = columns["sample_ids"][: self._length].cpu().argsort()
        table = {}
        for name in list(columns):
            table[name] = columns.pop(name)[: self._length].cpu()[by_id]
        del by_id
        self._length = 0
        order = table["scores"].argsort(descending=True, stable=True)
        for name in list(table):
            table[name] = table[name][order]
        return SuspectTable(
            table["sample_ids"],
            table["scores"],
            table["labels"],
            table.get("suggested"),
            table.get("probabilities"),
            table["flagged"],
        )

    def _append(self, values: dict[str, Tensor]) -> None:
        """Write into columns that grow: many small pieces, kept between what a pass allocates, would take much more."""
        stop = self._length + len(values["sample_ids"])
        for name, new in values.items():
            column = self._columns.get(name)
            if column is None or stop > len(column):
                grown = new.new_empty(max(MIN_ROWS, int(GROWTH * stop)), *new.shape[1:])
                if column is not None:
                    grown[: self._length] = column[: self._length]
                self._columns[name] = column = grown
            column[self._length : stop] = new
        self._length = stop


def merge_suspects(tables: Sequence[SuspectTable]) -> SuspectTable:
    """The samples of several tables in one, each id once.

    Args:
        tables: Tables of ``SampleStatistics.compute``, in any order. Of an id in several of them the largest score
            counts.

    Returns:
        All samples by falling score, ties by the smaller id.

    Raises:
        NonFiniteError: If a loss or a gradient of any of them was NaN or infinite; the samples are named.
    """
    tables = [table for table in tables if len(table)]
    merged = tables[0] if len(tables) == 1 else _joined(tables) if tables else SuspectTable.empty()
    check_finite(merged.sample_ids, merged.scores.isfinite())
    return merged


def _joined(tables: Sequence[SuspectTable]) -> SuspectTable:
    ids = torch.cat([table.sample_ids for table in tables])
    scores = torch.cat([table.scores for table in tables])
    order = scores.argsort(descending=True, stable=True)
    order = order[ids[order].argsort(stable=True)]
    is_first = torch.ones(len(ids), dtype=torch.bool)
    is_first[1:] = ids[order][1:] != ids[order][:-1]
    order = order[is_first]
    order = order[scores[order].argsort(descending=True, stable=True)]

    columns = [name for name, value in vars(tables[0]).items() if isinstance(value, Tensor)]
    joined: dict[str, Any] = {name: torch.cat([getattr(table, name) for table in tables])[order] for name in columns}
    return replace(tables[0], **joined)


def labels_of(table: SuspectTable, sample_ids: Sequence[int]) -> dict[int, Label]:
    """Given labels of some training samples.

    Args:
        table: All scored samples.
        sample_ids: Ids that the table holds.

    Returns:
        Labels by id.
    """
    wanted, places = torch.tensor(sample_ids, dtype=torch.long).sort()
    if not len(wanted):
        return {}
    # By search among the few: to sort the many would take more memory than the table.
    nearest = torch.searchsorted(wanted, table.sample_ids, out_int32=True).clamp_(max=len(wanted) - 1)
    found = (wanted[nearest] == table.sample_ids).nonzero().flatten()
    rows = torch.empty_like(wanted)
    rows[places[nearest[found].long()]] = found
    if table.labels.ndim == 1:
        return dict(zip(sample_ids, table.labels[rows].tolist(), strict=True))
    return {sample_id: to_label(table.labels[row]) for sample_id, row in zip(sample_ids, rows.tolist(), strict=True)}


def num_differing_labels(one: SuspectTable, other: SuspectTable) -> int:
    """How many samples have other labels in one table than in the other.

    Args:
        one: A table.
        other: Another, of some of the same samples.

    Returns:
        Number of ids in both whose labels differ; all of them where the labels are of another kind.
    """
    ids, order = one.sample_ids.sort()
    places = torch.searchsorted(ids, other.sample_ids)
    shared = places < len(ids)
    shared[shared.clone()] = ids[places[shared]] == other.sample_ids[shared]
    ours, theirs = one.labels[order[places[shared]]], other.labels[shared]
    if ours.shape != theirs.shape:
        return len(ours)
    differs = (ours.double() - theirs.double()).abs() > 1e-6 * theirs.double().abs()
    return int(differs.reshape(len(ours), ours[:1].numel()).any(1).sum()) if len(ours) else 0


def check_finite(sample_ids: Tensor, finite: Tensor) -> None:
    """Refuse training samples whose losses or gradients are not finite.

    Args:
        sample_ids: Ids, int64 ``[N]``.
        finite: Whether all numbers of a sample are, bool ``[N]``.

    Raises:
        NonFiniteError: If they are not; the samples are named.
    """
    if bool(finite.all()):
        return
    ids = sample_ids[~finite].sort().values.tolist()
    more = f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else ""
    raise NonFiniteError(
        f"Losses or gradients of training samples are not finite (sample ids {ids[:MAX_NAMED]}{more}). Nothing is "
        "scored. Check the loss of these samples in eval mode."
    )
