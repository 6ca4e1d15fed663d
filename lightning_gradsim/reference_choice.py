"""Which part of the training samples queries are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.arguments import check_choice, check_count, check_count_or_ids, check_seed
from lightning_gradsim.errors import BatchFormatError, TrainingDataError
from lightning_gradsim.prototypes import select_prototypes
from lightning_gradsim.train_pass import SampleReader, known_labels, stratified_indices

WAYS = ("random", "stratified", "prototypes")
MAX_NAMED = 10
Features = Callable[[SampleReader], tuple[Tensor, Tensor]]
"""From samples to features ``[N, d]`` and labels ``[N]``."""
ReferenceFunction = Callable[[Tensor, Tensor, int | None], Any]
"""From features ``[N, d]``, labels ``[N]`` and a number of samples, if one was passed, to the places of some."""
ReferenceWay = str | Sequence[int] | ReferenceFunction


@dataclass(frozen=True, eq=False)
class Choice:
    """How many of the training samples, and which.

    Attributes:
        number: At most that many; ``None`` for all.
        way: ``random``, ``stratified`` (every class keeps its share), ``prototypes`` (that cover their class by the
            module's features), sample ids, or a function.
        seed: Seed of the choice.

    Raises:
        TypeError: If a value has a wrong type.
        ValueError: If a value is out of range, or they contradict each other.
    """

    number: int | None = None
    way: ReferenceWay = "stratified"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        check_seed(self.seed)
        check_count("max_train_samples", self.number, optional=True)
        if isinstance(self.way, str):
            check_choice("reference", self.way, WAYS)
            if self.number is None and self.way != "stratified":
                raise ValueError(
                    f"`reference={self.way!r}` chooses a part of the training samples, and `max_train_samples=None` "
                    "asks for all of them. Pass a number of samples, too."
                )
        elif not callable(self.way):
            if isinstance(self.way, (int, float)) or self.way is None:
                raise TypeError(
                    f"`reference={self.way!r}` is not known. Expected one of {', '.join(map(repr, WAYS))}, a list of "
                    "sample ids, or a function of features, labels and a number. A number of samples is "
                    "`max_train_samples`."
                )
            check_count_or_ids("reference", self.way)
            if self.number is not None:
                raise ValueError(
                    f"`reference=` has {len(self.way)} sample ids, and `max_train_samples={self.number}` is another "
                    "choice. Leave one of them out."
                )

    @property
    def needs_features(self) -> bool:
        """Whether it depends on the weights of the module."""
        return callable(self.way) or (isinstance(self.way, str) and self.way == "prototypes")

    def apply(
        self, reader: SampleReader, adapter: Adapter, features: Features, known: Tensor | None = None
    ) -> tuple[SampleReader, str]:
        """Make the choice.

        Args:
            reader: All samples.
            adapter: Finds labels in batches.
            features: Finds features and labels.
            known: Ids of an earlier choice by features, which stands.

        Returns:
            A reader of those chosen, and which they are in words.

        Raises:
            TrainingDataError: If ids are not there, or what a function gives are no places of samples.
        """
        total = len(reader)
        if self.needs_features and (callable(self.way) or self._number(total) < total):
            how = "chosen as prototypes" if self.way == "prototypes" else "chosen by `reference=`"
            if known is not None and bool(torch.isin(known, reader.ids).all()):
                chosen = reader.only(known.tolist())
            else:
                chosen = reader.choose(self._by_features(*features(reader)).sort().values)
        elif not isinstance(self.way, str):
            how, chosen = "chosen by their ids", reader.only(self._known_ids(reader))
        elif self._number(total) < total:
            labels = None if self.way == "random" else _labels(reader, adapter)
            how = "chosen at random" if labels is None else "chosen by class"
            chosen = reader.choose(stratified_indices(labels, total, self._number(total), self.seed))
        else:
            return reader, f"all {total:,} training samples"
        return chosen, f"{len(chosen):,} of {total:,} training samples, {how}"

    def _number(self, total: int) -> int:
        return total if self.number is None else min(total, self.number)

    def _known_ids(self, reader: SampleReader) -> list[int]:
        assert not isinstance(self.way, str)
        assert not callable(self.way)
        ids = torch.tensor([int(each) for each in self.way])
        unknown = ids[~torch.isin(ids, reader.ids)].tolist()
        if unknown:
            more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
            raise TrainingDataError(
                f"`reference` names training samples {unknown[:MAX_NAMED]}{more}, which the training data do not have. "
                f"Expected ids from {int(reader.ids.min())} to {int(reader.ids.max())}."
            )
        return ids.tolist()

    def _by_features(self, features: Tensor, labels: Tensor) -> Tensor:
        total = len(features)
        if callable(self.way):
            places = torch.as_tensor(self.way(features, labels, self.number))
            is_index = places.ndim == 1 and len(places) > 0 and places.dtype in {torch.int64, torch.int32}
            if not is_index or len(places.unique()) < len(places) or not 0 <= places.min() <= places.max() < total:
                raise TrainingDataError(
                    f"`reference=` returned {places.tolist()!s:.80}. Expected different places of samples, whole "
                    f"numbers from 0 to {total - 1}, at least one."
                )
            return places.long()
        if labels.ndim != 1 or labels.is_floating_point():
            raise TrainingDataError(
                '`reference="prototypes"` needs exclusive classes, and there are none. Pass `reference="random"`.'
            )
        number = self._number(total)
        chosen = select_prototypes(features, labels, number, seed=self.seed)
        # Where no further prototype would help, the rest keeps the shares of the classes.
        is_left = torch.ones(total, dtype=torch.bool)
        is_left[chosen] = False
        rest = is_left.nonzero().flatten()
        return torch.cat([chosen, rest[stratified_indices(labels[rest], len(rest), number - len(chosen), self.seed)]])


def _labels(reader: SampleReader, adapter: Adapter) -> Tensor | None:
    labels = known_labels(reader)
    if labels is not None:
        return labels
    try:
        labels = torch.cat([adapter.split(batch)[1] for _, batch in reader.batches()])
    except BatchFormatError:  # only the module's own `gradsim_step` reads these batches
        return None
    return labels if labels.ndim == 1 and not labels.is_floating_point() else None
