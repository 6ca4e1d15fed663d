"""The largest scores of a stream, with the samples they belong to, in memory that does not grow with the stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MERGE_COLUMNS = 4096
"""Scores a row that are gathered before they are merged: one merge costs about as much as a small batch's products."""


class TopK:
    """Keeps the ``k`` largest scores of every row, ties by the smaller id, independent of order and batch size.

    Minus infinity stands for no score: which ids it is kept with, where a row has fewer others, means nothing.

    Args:
        k: How many to keep.

    Source:
        Merging by concatenate-and-select as in captum's ``_influence`` utilities; ours is exact for ties.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._scores: Tensor | None = None
        self._ids: Tensor | None = None
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._num_waiting = 0

    def update(self, scores: Tensor, ids: Tensor) -> None:
        """Take in the scores of some samples.

        Args:
            scores: ``[R, B]``, any floating dtype, the same in every call.
            ids: Sample ids ``[B]``, int64, each id once in the whole stream.
        """
        self._waiting.append((scores, ids))
        self._num_waiting += len(ids)
        if self._num_waiting >= MERGE_COLUMNS:
            self._merge()

    def compute(self) -> tuple[Tensor, Tensor]:
        """The scores kept, falling, and their ids, both ``[R, min(k, samples seen)]``; ``[0, 0]`` before any update."""
        if self._waiting:
            self._merge()
        if self._scores is None or self._ids is None:
            return torch.empty(0, 0), torch.empty(0, 0, dtype=torch.long)
        return self._scores, self._ids

    def _merge(self) -> None:
        scores, ids = self._waiting[0]
        if len(self._waiting) > 1:  # to join one would copy it
            scores = torch.cat([part for part, _ in self._waiting], dim=1)
            ids = torch.cat([part for _, part in self._waiting])
        self._waiting, self._num_waiting = [], 0
        if self._scores is not None and self._scores.shape[1] == self._k:
            # The longer the stream, the fewer samples enter any list; one that is not a number stays to be seen.
            stays_out = (scores < self._scores[:, -1:]).logical_or_(scores == -torch.inf)
            enters = stays_out.all(0).logical_not_()
            scores, ids = scores[:, enters], ids[enters]
        scores, columns = _largest_columns(scores, ids, self._k)
        candidates = ids[columns]
        if self._scores is not None and self._ids is not None:
            scores = torch.cat([self._scores, scores], dim=1)
            candidates = torch.cat([self._ids, candidates], dim=1)
        order = _order(scores, candidates)[:, : self._k]
        self._scores, self._ids = scores.gather(1, order), candidates.gather(1, order)


class ScoreSums:
    """Weighted sums over several passes of the scores of every row, for every sample: 4 or 8 bytes each.

    Args:
        ids: All sample ids, int64 ``[N]``.
        k: How many of the largest sums to give.

    Attributes:
        weights: Weight of each row in the pass at hand, ``[R]``, or one for all.
    """

    def __init__(self, ids: Tensor, k: int) -> None:
        self.weights: Tensor | float = 1.0
        self._ids = ids.sort().values
        self._k = k
        self._sums: Tensor | None = None

    def update(self, scores: Tensor, ids: Tensor) -> None:
        """Add the scores of some samples.

        Args:
            scores: ``[R, B]``, any floating dtype, the same in every call.
            ids: Sample ids ``[B]``, int64, each id once a pass.
        """
        if self._sums is None:
            self._ids = self._ids.to(scores.device)
            self._sums = scores.new_zeros(len(scores), len(self._ids))
        weights = self.weights[:, None].to(scores) if isinstance(self.weights, Tensor) else self.weights
        self._sums[:, torch.searchsorted(self._ids, ids)] += weights * scores

    def compute(self) -> tuple[Tensor, Tensor]:
        """The largest sums, falling, and their ids, both ``[R, min(k, N)]``; ``[0, 0]`` before any update."""
        if self._sums is None:
            return torch.empty(0, 0), torch.empty(0, 0, dtype=torch.long)
        values, columns = _largest_columns(self._sums, self._ids, self._k)
        ids = self._ids[columns]
        order = _order(values, ids)
        return values.gather(1, order), ids.gather(1, order)


class ScoreRows:
    """All scores of some rows, in float32: four bytes each.

    Args:
        positions: Of the queries whose rows are meant.
        values: Where they go, float32 ``[R, N]``.
    """

    def __init__(self, positions: Sequence[int], values: Tensor) -> None:
        self.positions = tuple(positions)
        self._values = values
        self._rows = torch.empty(0, dtype=torch.long)
        self._ids: list[Tensor] = []
        self._num = 0

    def choose(self, rows: Sequence[int]) -> None:
        """Tell which rows of scores these are, in the order of ``positions``."""
        self._rows = torch.tensor(rows, dtype=torch.long)

    def update(self, scores: Tensor, ids: Tensor) -> None:
        """Take in the scores of some samples.

        Args:
            scores: ``[rows, B]``.
            ids: Sample ids ``[B]``, int64, each id once in the whole stream.
        """
        stop = self._num + len(ids)
        self._values[:, self._num : stop] = scores[self._rows.to(scores.device)]
        self._ids.append(ids.cpu())
        self._num = stop

    def compute(self) -> tuple[Tensor, Tensor]:
        """Scores ``[R, n]`` and ids ``[n]`` of the samples taken in."""
        ids = torch.cat(self._ids) if self._ids else torch.empty(0, dtype=torch.long)
        return self._values[:, : self._num], ids


def merge_largest(parts: Sequence[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """The largest scores of several streams.

    Args:
        parts: At least one, each with scores ``[R, k']`` and their ids, as ``TopK.compute`` gives them. An id may occur
            in several streams; within one, once a row.
        k: How many to keep.

    Returns:
        Scores, falling, and their ids, both ``[R, min(k, columns of all parts)]``, whatever the order of the parts. Of
        an id that occurs several times the largest score counts; the others are minus infinity, and come last.
    """
    scores = torch.cat([scores for scores, _ in parts], dim=1)
    ids = torch.cat([ids for _, ids in parts], dim=1)
    by_score = scores.argsort(dim=1, descending=True, stable=True)
    order = by_score.gather(1, ids.gather(1, by_score).argsort(dim=1, stable=True))
    scores, ids = scores.gather(1, order), ids.gather(1, order)
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[:, 1:] = ids[:, 1:] == ids[:, :-1]
    scores = scores.masked_fill(repeated, -torch.inf)
    order = _order(scores, ids)[:, :k]
    return scores.gather(1, order), ids.gather(1, order)


def _largest_columns(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, columns = scores.topk(min(k + 1, scores.shape[1]), dim=1)
    if 0 < k < values.shape[1] and bool(((values[:, k - 1] == values[:, k]) & (values[:, k] > -torch.inf)).any()):
        # Equal scores on the edge: topk picks any of them, we want the smaller ids.
        columns = _order(scores, ids.expand_as(scores))
        values = scores.gather(1, columns)
    return values[:, :k], columns[:, :k]


def _order(scores: Tensor, ids: Tensor) -> Tensor:
    by_id = ids.argsort(dim=1)
    by_score = scores.gather(1, by_id).argsort(dim=1, descending=True, stable=True)
    return by_id.gather(1, by_score)
