"""What a loader's sampler draws, written down without changing it."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler


class DrawnIndices:
    """Indices that the newest iteration over any of some samplers has drawn so far.

    Args:
        is_due: Asked at the beginning of each iteration: whether it counts, or is somebody else's.

    Attributes:
        indices: Positions in the dataset, in order; empty before the first one.
        refused: An index that is no whole number, as the user wrote it; ``None`` while there is none.
    """

    def __init__(self, is_due: Callable[[], bool] | None = None) -> None:
        self.is_due = _always if is_due is None else is_due
        self.indices = array("q")
        self.refused: str | None = None

    def begin(self) -> array[int]:
        """Forget what was drawn before: a new epoch begins.

        Returns:
            An empty list for the indices to come; what older iterations still draw goes into lists of their own.
        """
        self.indices, self.refused = array("q"), None
        return self.indices


class RecordingSampler:
    """Stands in a batch sampler for the user's own sampler: yields what that one draws, and keeps a note.

    Everything else, ``set_epoch`` and attributes included, is read from and written to the user's sampler. No random
    number is drawn here.

    Args:
        sampler: The user's sampler, or any iterable of indices.
        drawn: Where the indices go; several recorders may share one.
    """

    def __init__(self, sampler: Any, drawn: DrawnIndices) -> None:
        object.__setattr__(self, "_recorded", sampler)
        object.__setattr__(self, "_drawn", drawn)

    def __iter__(self) -> Iterator[Any]:
        """An iteration of the user's sampler."""
        # Begun here and not in the generator: a sampler may draw its random numbers as soon as it is asked.
        iterator = iter(self._recorded)
        return self._note(iterator) if self._drawn.is_due() else iterator

    def __len__(self) -> int:
        """Length of the user's sampler."""
        return len(self._recorded)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the user's sampler."""
        return getattr(self._recorded, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the user's sampler."""
        setattr(self._recorded, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the user's sampler."""
        delattr(self._recorded, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, also in another process, is one of the user's sampler alone."""
        return operator.getitem, ([self._recorded], 0)

    def _note(self, iterator: Iterator[Any]) -> Iterator[Any]:
        drawn: DrawnIndices = self._drawn
        append = drawn.begin().append
        for index in iterator:
            try:
                append(index)
            except (TypeError, OverflowError):
                drawn.refused = drawn.refused or repr(index)
            yield index


def install(batch_sampler: BatchSampler, drawn: DrawnIndices) -> None:
    """Put a recorder in front of a batch sampler's sampler, unless there is one for the same notes already.

    Args:
        batch_sampler: The loader's batch sampler.
        drawn: Where the indices go.
    """
    if _find(batch_sampler, drawn) is None:
        batch_sampler.sampler = RecordingSampler(batch_sampler.sampler, drawn)


def uninstall(batch_sampler: BatchSampler, drawn: DrawnIndices) -> None:
    """Take the recorder out again, wherever it stands in a row of several.

    Args:
        batch_sampler: The loader's batch sampler.
        drawn: Where its indices went.
    """
    found = _find(batch_sampler, drawn)
    if found is None:
        return
    before, recorder = found
    if before is None:
        batch_sampler.sampler = recorder._recorded
    else:
        object.__setattr__(before, "_recorded", recorder._recorded)


def _find(batch_sampler: BatchSampler, drawn: DrawnIndices) -> tuple[RecordingSampler | None, RecordingSampler] | None:
    """The recorder for these notes, and the one in front of it."""
    before, sampler = None, batch_sampler.sampler
    while isinstance(sampler, RecordingSampler):
        if sampler._drawn is drawn:
            return before, sampler
        before, sampler = sampler, sampler._recorded
    return None


def _always() -> bool:
    return True
