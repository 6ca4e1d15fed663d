"""How much of a run's time our work may take."""

from __future__ import annotations

from lightning_gradsim.clock import Clock

MIN_READING = 1.0
"""Seconds of reading that the first and the last report of a run get in any case: short runs are explained in full."""
WORTH = 2.0
"""A report is made when this many times the seconds that it takes besides reading are left: else little is read."""


class TimeBudget:
    """Shares out the seconds of a run, report by report.

    Args:
        share: Seconds of our work over those of everything else that are allowed; ``None`` for no limit.
        clock: Counts both.
    """

    def __init__(self, share: float | None, clock: Clock) -> None:
        self._share = share
        self._clock = clock
        self._besides_reading: float | None = None

    def allows_report(self) -> bool:
        """Whether enough is left for another report."""
        return self._besides_reading is None or self._left() >= WORTH * self._besides_reading

    def reading_seconds(self, *, is_last: bool) -> float | None:
        """Seconds for which training samples may be read now.

        Args:
            is_last: Whether this is known to be the last report of the run.

        Returns:
            The seconds; ``None`` without a limit.
        """
        if self._share is None:
            return None
        is_first = self._besides_reading is None
        left = self._left() - (self._besides_reading or 0.0)
        return max(left, MIN_READING if is_first or is_last else 0.0)

    def end_report(self, seconds: float, reading_seconds: float) -> None:
        """Learn what a report costs besides reading.

        Args:
            seconds: All seconds of a report.
            reading_seconds: Those of its pass over the training samples.
        """
        self._besides_reading = seconds - reading_seconds

    def _left(self) -> float:
        if self._share is None:
            return float("inf")
        return self._share * self._clock.other_seconds - self._clock.seconds_of_run
