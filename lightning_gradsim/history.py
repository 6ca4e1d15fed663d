"""What earlier reports of a run showed: trends, and what became of validation samples that were wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOADER_SHIFT = 48
"""A validation sample's key is its id, plus its loader's number shifted by so many bits."""
MAX_POINTS = 500
MAX_FOLLOWED = 100
MAX_WRONG = 100_000
"""Misclassified samples whose first epoch is remembered, at 12 bytes each."""
MAX_COUNTED = 10_000_000
"""Sample ids up to which is counted how often training samples were flagged, at 4 bytes each."""
TOP_SHARE, MIN_TOP, MAX_TOP = 0.01, 10, 1000


@dataclass(frozen=True)
class TrendPoint:
    """One report in numbers.

    Attributes:
        epoch: Training epoch, from 0.
        step: Global step.
        errors: Misclassified validation samples.
        suspects_flagged: Training samples whose labels look wrong.
        suspects_overlap: Share of the first 1 % of suspects (10 at least) that stood there in the last report, too;
            ``None`` in the first.
        harmful_with_prediction: Share of harmful samples whose label equals the wrong prediction; ``None`` without any.
    """

    epoch: int
    step: int
    errors: int
    suspects_flagged: int
    suspects_overlap: float | None
    harmful_with_prediction: float | None


@dataclass(frozen=True)
class FollowedQuery:
    """A validation sample that was among the first queries of a report, and what has become of it.

    Attributes:
        sample_id: Index into the validation dataset.
        dataloader_idx: Which validation loader it came from.
        label: Its given label.
        prediction: What it was last taken for when it was shown.
        wrong_since: First epoch of its latest run of mistakes, as far as validations were looked at.
        fixed_at: Epoch of the first validation since that had it right; ``None`` while it is wrong.
    """

    sample_id: int
    dataloader_idx: int
    label: Any
    prediction: Any
    wrong_since: int
    fixed_at: int | None

    @property
    def in_words(self) -> str:
        """``"wrong since epoch 2"``, ``"fixed at epoch 7, wrong since epoch 2"``."""
        wrong = f"wrong since epoch {self.wrong_since}"
        return wrong if self.fixed_at is None else f"fixed at epoch {self.fixed_at}, {wrong}"


def key_of(dataloader_idx: int, sample_id: int) -> int:
    """One number for a validation sample of any loader."""
    return sample_id + (dataloader_idx << LOADER_SHIFT)


class History:
    """Remembers what reports of a run need of earlier ones; a few bytes for each mistake and training sample.

    Attributes:
        points: One for each report, the newest last.
    """

    def __init__(self) -> None:
        self.points: tuple[TrendPoint, ...] = ()
        self._wrong_keys: NDArray[np.int64] = np.empty(0, np.int64)
        self._wrong_since: NDArray[np.int32] = np.empty(0, np.int32)
        self._followed: dict[int, FollowedQuery] = {}
        self._top: Tensor = torch.empty(0, dtype=torch.long)
        self._counts = torch.zeros(0, 2, dtype=torch.int16)

    @property
    def followed(self) -> tuple[FollowedQuery, ...]:
        """Queries that are followed, those that are wrong first, and the longest wrong of these first."""
        return tuple(sorted(self._followed.values(), key=lambda each: (each.fixed_at is not None, each.wrong_since)))

    def wrong_since(self, key: int) -> int | None:
        """First epoch of a sample's latest run of mistakes; ``None`` where it is not known to be wrong."""
        place = int(np.searchsorted(self._wrong_keys, key))
        if place < len(self._wrong_keys) and self._wrong_keys[place] == key:
            return int(self._wrong_since[place])
        return None

    def see(self, epoch: int, seen: NDArray[np.int64], wrong: NDArray[np.int64]) -> None:
        """Take in which validation samples are wrong.

        Args:
            epoch: Training epoch.
            seen: Keys of all samples of this validation.
            wrong: Keys of those that are misclassified.
        """
        unseen = ~np.isin(self._wrong_keys, seen)
        wrong = np.unique(wrong)
        since = np.full(len(wrong), epoch, np.int32)
        if len(self._wrong_keys) and len(wrong):
            places = np.searchsorted(self._wrong_keys, wrong).clip(max=len(self._wrong_keys) - 1)
            known = self._wrong_keys[places] == wrong
            since[known] = self._wrong_since[places[known]]
        keys = np.concatenate([self._wrong_keys[unseen], wrong])
        since = np.concatenate([self._wrong_since[unseen], since])
        kept = np.sort(np.argsort(since, kind="stable")[:MAX_WRONG]) if len(keys) > MAX_WRONG else np.arange(len(keys))
        order = kept[np.argsort(keys[kept])]
        self._wrong_keys, self._wrong_since = keys[order], since[order]
        self._followed = {
            key: self._after(query, key, epoch, is_seen=bool(is_seen))
            for (key, query), is_seen in zip(
                self._followed.items(), np.isin(np.array(list(self._followed), np.int64), seen), strict=True
            )
        }

    def follow(self, queries: Sequence[tuple[int, Any, Any]]) -> None:
        """Follow queries from now on; the oldest fixed ones make room.

        Args:
            queries: Key, label and prediction of each; only those that ``see`` has found wrong are followed.
        """
        for key, label, prediction in queries:
            since = self.wrong_since(key)
            if since is not None:
                loader, sample_id = key >> LOADER_SHIFT, key & ((1 << LOADER_SHIFT) - 1)
                self._followed[key] = FollowedQuery(sample_id, loader, label, prediction, since, None)
        fixed = [key for key, query in self._followed.items() if query.fixed_at is not None]
        spare = [*sorted(fixed, key=lambda key: self._followed[key].fixed_at or 0), *self._followed]
        for key in spare[: max(0, len(self._followed) - MAX_FOLLOWED)]:
            self._followed.pop(key, None)

    def overlap(self, ranked: Tensor) -> float | None:
        """Share of the first suspects that stood among the first last time, too; then these are remembered.

        Args:
            ranked: Sample ids, the most suspect first, int64 ``[N]``.

        Returns:
            The share, in [0, 1]; ``None`` the first time.
        """
        number = min(len(ranked), MAX_TOP, max(MIN_TOP, -(-len(ranked) // round(1 / TOP_SHARE))))
        top, before = ranked[:number].clone(), self._top
        self._top = top
        if not len(before) or not len(top):
            return None
        return float(torch.isin(top, before).double().mean())

    def count_flagged(self, sample_ids: Tensor, flagged: Tensor) -> None:
        """Count a report in which training samples were judged.

        Args:
            sample_ids: The samples that it judges, int64 ``[N]``, each once. Nothing is counted for ids beyond
                ``MAX_COUNTED``.
            flagged: Which of them it flags, bool ``[N]``.
        """
        length = int(sample_ids.max()) + 1 if len(sample_ids) else 0
        if not 0 < length <= MAX_COUNTED:
            return
        counts = torch.zeros(max(length, len(self._counts)), 2, dtype=torch.int16)
        counts[: len(self._counts)] = self._counts
        more = torch.stack([flagged, torch.ones_like(flagged)], dim=1)
        counts[sample_ids] = (counts[sample_ids].int() + more).clamp(max=torch.iinfo(torch.int16).max).short()
        self._counts = counts

    def flag_counts(self, sample_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """In how many reports of the run training samples were flagged, and in how many they were judged.

        Args:
            sample_ids: The samples, int64 ``[N]``.

        Returns:
            Both, int16 ``[N]``; ``None`` where there are no samples, or any has not been counted.
        """
        if not len(sample_ids) or int(sample_ids.max()) >= len(self._counts):
            return None
        num_flagged, num_judged = self._counts[sample_ids].unbind(1)
        return num_flagged, num_judged

    def add(self, point: TrendPoint) -> None:
        """Remember a report; of many, every second of the older ones is forgotten."""
        points = (*self.points, point)
        self.points = points if len(points) <= MAX_POINTS else (*points[:-1:2], point)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {
            "points": [asdict(point) for point in self.points],
            "followed": [asdict(query) for query in self._followed.values()],
            "wrong_keys": torch.from_numpy(self._wrong_keys.copy()),
            "wrong_since": torch.from_numpy(self._wrong_since.copy()),
            "top": self._top,
            "counts": self._counts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; an empty one is that of a new run.

        Args:
            state: What ``state_dict`` gave.
        """
        if not state:
            return
        self.points = tuple(TrendPoint(**point) for point in state["points"])
        followed = [FollowedQuery(**query) for query in state["followed"]]
        self._followed = {key_of(query.dataloader_idx, query.sample_id): query for query in followed}
        self._wrong_keys, self._wrong_since = state["wrong_keys"].numpy().copy(), state["wrong_since"].numpy().copy()
        self._top, self._counts = state["top"], state.get("counts", self._counts)

    def _after(self, query: FollowedQuery, key: int, epoch: int, *, is_seen: bool) -> FollowedQuery:
        """A followed query after a validation."""
        if not is_seen:
            return query
        since = self.wrong_since(key)
        if since is not None:
            return replace(query, wrong_since=since, fixed_at=None)
        return query if query.fixed_at is not None else replace(query, fixed_at=epoch)
