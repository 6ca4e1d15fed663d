"""How long our work takes, beside the run that it is part of."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """Adds up the seconds of our own work, those of the work at hand included."""

    def __init__(self) -> None:
        self._finished = 0.0
        self._begin: float | None = None
        self._validation_begin = 0.0
        self._run_begin: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        """Seconds of work so far, over all runs that this clock has seen."""
        return self._finished + (0.0 if self._begin is None else time.perf_counter() - self._begin)

    @property
    def validation_seconds(self) -> float:
        """Seconds of work since the last ``start_validation``."""
        return self.seconds - self._validation_begin

    @property
    def seconds_of_run(self) -> float:
        """Seconds of work since ``start_run``; 0 outside a run."""
        return 0.0 if self._run_begin is None else self.seconds - self._run_begin[1]

    @property
    def other_seconds(self) -> float:
        """Seconds of everything else since ``start_run``; 0 outside a run."""
        return 0.0 if self._run_begin is None else time.perf_counter() - self._run_begin[0] - self.seconds_of_run

    @property
    def share(self) -> float | None:
        """Seconds of work since ``start_run`` over those of everything else, in [0, inf); ``None`` outside a run."""
        return self.seconds_of_run / self.other_seconds if self.other_seconds > 0 else None

    def carry_over(self, seconds: float) -> None:
        """Go on from the seconds of an earlier run."""
        self._finished = seconds

    def start_run(self) -> None:
        """Mark the begin of training."""
        self._run_begin = (time.perf_counter(), self.seconds)

    def end_run(self) -> None:
        """Mark the end of training."""
        self._run_begin = None

    def start_validation(self) -> None:
        """Count the seconds of a validation from zero."""
        self._validation_begin = self.seconds

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time spent inside, once where such times lie inside each other.

        Yields:
            Nothing.
        """
        if self._begin is not None:
            yield
            return
        self._begin = time.perf_counter()
        try:
            yield
        finally:
            self._finished, self._begin = self.seconds, None


def until(items: Iterable[T], seconds: float | None, before: Clock | None = None) -> Iterator[T]:
    """The items, until the time is over; one in any case.

    Args:
        items: What is iterated.
        seconds: The time, from the first item on; ``None`` for no end.
        before: What it has counted when the first item is asked for is part of the time.

    Yields:
        The items.
    """
    begin = time.perf_counter() - (0.0 if before is None else before.seconds)
    for item in items:
        yield item
        if seconds is not None and time.perf_counter() - begin >= seconds:
            return
