"""How long our work takes, beside the run that it is part of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the seconds of our own work.

    Attributes:
        seconds: Seconds of work so far, over all runs that this clock has seen.
        validation_seconds: Seconds of work for the validation at hand.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.validation_seconds = 0.0
        self._started: float | None = None
        self._begun = 0.0
        self._seconds_at_start = 0.0

    def start_run(self) -> None:
        """Mark the begin of training."""
        self._started, self._seconds_at_start = time.perf_counter(), self.seconds

    def end_run(self) -> None:
        """Mark the end of training; there is no share of time outside of it."""
        self._started = None

    def start_validation(self) -> None:
        """Count the seconds of a validation from zero."""
        self.validation_seconds = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time spent inside.

        Yields:
            Nothing.
        """
        self._begun = time.perf_counter()
        try:
            yield
        finally:
            self.lap()

    def lap(self) -> None:
        """Count the work at hand up to now, for a report that is made inside of it."""
        now = time.perf_counter()
        self.seconds += now - self._begun
        self.validation_seconds += now - self._begun
        self._begun = now

    def share(self) -> float | None:
        """Seconds of our work since the begin of training over the seconds of everything else, in [0, inf).

        Returns:
            The share, or ``None`` outside of training.
        """
        if self._started is None:
            return None
        ours = self.seconds - self._seconds_at_start
        others = time.perf_counter() - self._started - ours
        return ours / others if others > 0 else None
