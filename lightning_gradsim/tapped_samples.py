"""What training steps left of each sample: its newest features, logits and target, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

STATE_VERSION = 1
AVERAGE_DECAY = 0.5
"""Weight of earlier visits in the average: dropout and single steps move features more than a few epochs do."""
KEPT_SHARE = 0.9
"""Share of the room that is filled after a thinning: the smaller, the rarer they are."""
INDEX_BYTES = 32
"""Bytes that id, place, step and their index take for a sample."""


@dataclass(frozen=True, eq=False)
class TappedBlock:
    """Samples of some training steps, in order; a sample may be there several times.

    Attributes:
        ids: Sample ids, int64 ``[B]``.
        features: Inputs of the head, float16 ``[B, i]``.
        logits: Its outputs ``[B, o]``, at least float32.
        targets: Targets, first dimension ``B``.
        steps: Number of updates before each, int64 ``[B]``.
        averages: Features averaged over visits, float16 ``[B, i]``; of single visits the features themselves.
    """

    ids: Tensor
    features: Tensor
    logits: Tensor
    targets: Tensor
    steps: Tensor
    averages: Tensor

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.ids)

    def rows(self, rows: Tensor) -> TappedBlock:
        """Some of the rows.

        Args:
            rows: Indices, or a mask ``[B]``.

        Returns:
            The block of those.
        """
        return TappedBlock(**{name: values[rows] for name, values in vars(self).items()})


class TappedSamples:
    """The newest visit of every sample, or of a seeded choice of samples where there is no room for all.

    Which samples those are depends on ids and seed alone, not on the order of visits.

    Args:
        max_bytes: Bytes that all of it may take.
        seed: Seed of the choice.

    Attributes:
        share: Share of all samples that are kept, as the choice was drawn; 1 while there is room for all.
        num_relabelled: Visits at which a sample came with another target than before: its ids cannot be trusted.
    """

    def __init__(self, max_bytes: int, seed: int = 0) -> None:
        self.share = 1.0
        self.num_relabelled = 0
        self._max_bytes = max_bytes
        self._seed = seed
        self._rows: TappedBlock | None = None  # room for more than is filled
        self._num_rows = 0
        self._sorted_ids = torch.empty(0, dtype=torch.long)
        self._places = torch.empty(0, dtype=torch.long)

    def __len__(self) -> int:
        """Number of samples."""
        return self._num_rows

    def update(self, block: TappedBlock) -> None:
        """Take in visits.

        Args:
            block: The visits, on the CPU.
        """
        block = _newest(block)
        if self.share < 1.0:
            block = block.rows(_draw(block.ids, self._seed) < self.share)
        if self._rows is not None and _form(block) != _form(self._rows):
            self._forget()  # another head has taken its place
        known = torch.searchsorted(self._sorted_ids, block.ids)
        is_known = torch.zeros(len(block), dtype=torch.bool)
        inside = known < self._num_rows
        is_known[inside] = self._sorted_ids[known[inside]] == block.ids[inside]
        if self._rows is not None:
            places = self._places[known[is_known]]
            old = block.rows(is_known)
            changed = (self._rows.targets[places] != old.targets).reshape(len(old), self._rows.targets[:1].numel())
            self.num_relabelled += int(changed.any(1).sum())
            before = self._rows.averages[places].float()
            average = AVERAGE_DECAY * before + (1 - AVERAGE_DECAY) * old.features.float()
            _write(self._rows, places, replace(old, averages=average))
        self._append(block.rows(~is_known))

    def compute(self) -> TappedBlock | None:
        """All samples by rising id, as copies, logits in half precision; ``None`` before any visit."""
        return None if self._rows is None else self._rows.rows(self._places)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        rows = self.compute()
        state: dict[str, Any] = {"version": STATE_VERSION, "seed": self._seed, "share": self.share}
        state["num_relabelled"] = self.num_relabelled
        return state if rows is None else state | dict(vars(rows))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state: The state; nothing is taken over from one of another version.
        """
        self._forget()
        self.merge([state])

    def merge(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Take in the states of others, such as other ranks: of each sample the newest visit.

        Args:
            states: The states, with the same seed.
        """
        for state in states:
            if state.get("version") != STATE_VERSION:
                continue
            self._seed = int(state["seed"])
            self.num_relabelled += int(state["num_relabelled"])
            if float(state["share"]) < self.share:
                self.share = float(state["share"])
                self._keep_share()
            if "ids" not in state:
                continue
            theirs = TappedBlock(**{name: state[name] for name in TappedBlock.__dataclass_fields__})
            own = self.compute()
            if own is not None and _form(own) == _form(theirs):
                both = TappedBlock(*(torch.cat([getattr(own, name), getattr(theirs, name)]) for name in vars(own)))
                theirs = both.rows(both.steps.argsort(stable=True))
            num_relabelled = self.num_relabelled
            self._forget(share=self.share)
            self.update(theirs)
            self.num_relabelled = num_relabelled

    def _append(self, block: TappedBlock) -> None:
        if not len(block):
            return
        start, end = self._num_rows, self._num_rows + len(block)
        if self._rows is None or end > len(self._rows):
            self._rows = _room(block, self._rows, start, max(end, min(2 * end, self._capacity(block))))
        places = torch.arange(start, end)
        _write(self._rows, places, block)
        self._num_rows = end
        # Both parts are sorted: no need to sort all of it again.
        where = torch.searchsorted(self._sorted_ids, block.ids) + torch.arange(len(block))
        is_old = torch.ones(end, dtype=torch.bool)
        is_old[where] = False
        ids, all_places = torch.empty(end, dtype=torch.long), torch.empty(end, dtype=torch.long)
        ids[where], all_places[where] = block.ids, places
        ids[is_old], all_places[is_old] = self._sorted_ids, self._places
        self._sorted_ids, self._places = ids, all_places
        capacity = self._capacity(block)
        if end > capacity:
            draws = _draw(self._rows.ids[:end], self._seed)
            self.share = float(draws.kthvalue(max(1, int(KEPT_SHARE * capacity))).values)
            self._keep_share()

    def _capacity(self, block: TappedBlock) -> int:
        per_sample = INDEX_BYTES + 4 * block.features.shape[1] + 2 * block.logits.shape[1]
        per_sample += block.targets[:1].numel() * block.targets.element_size()
        return max(1, self._max_bytes // per_sample)

    def _keep_share(self) -> None:
        """Drop the samples that are not among the chosen."""
        if self._rows is None:
            return
        rows = self._rows.rows(self._places[_draw(self._sorted_ids, self._seed) < self.share])
        self._rows, self._num_rows = rows, len(rows)
        self._sorted_ids, self._places = rows.ids.clone(), torch.arange(len(rows))

    def _forget(self, share: float = 1.0) -> None:
        self._rows, self._num_rows, self.share, self.num_relabelled = None, 0, share, 0
        self._sorted_ids = self._places = torch.empty(0, dtype=torch.long)


def _newest(block: TappedBlock) -> TappedBlock:
    """The last visit of each sample, by rising id."""
    ids, order = block.ids.sort(stable=True)
    is_last = torch.ones(len(ids), dtype=torch.bool)
    is_last[:-1] = ids[1:] != ids[:-1]
    return block.rows(order[is_last])


def _form(block: TappedBlock) -> tuple[Any, ...]:
    return block.features.shape[1:], block.logits.shape[1:], block.targets.shape[1:], block.targets.dtype


def _room(block: TappedBlock, old: TappedBlock | None, num_old: int, num_rows: int) -> TappedBlock:
    room = TappedBlock(
        block.ids.new_zeros(num_rows),
        block.features.new_zeros(num_rows, *block.features.shape[1:]),
        block.logits.new_zeros(num_rows, *block.logits.shape[1:], dtype=torch.float16),
        block.targets.new_zeros(num_rows, *block.targets.shape[1:]),
        block.steps.new_zeros(num_rows),
        block.features.new_zeros(num_rows, *block.features.shape[1:]),
    )
    if old is not None:
        _write(room, torch.arange(num_old), old.rows(torch.arange(num_old)))
    return room


def _write(rows: TappedBlock, places: Tensor, block: TappedBlock) -> None:
    for name, values in vars(rows).items():
        values[places] = getattr(block, name).to(values.dtype)


def _draw(ids: Tensor, seed: int) -> Tensor:
    """A number in [0, 1) for each id, as if drawn at random, float64 ``[B]``: the mixing steps of SplitMix64."""
    mixed = ids.numpy().astype(np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)
