"""What happens when our own work fails: said once, written down, and an end to it when it goes on."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path

from lightning_gradsim.errors import GradSimError, GradSimWarning
from lightning_gradsim.guard import is_out_of_memory
from lightning_gradsim.memory import release_memory

MAX_FAILURES = 3


class Failures:
    """Counts failures in a row and tells the user about them.

    Attributes:
        owner: Whose failures these are, for messages.
        in_a_row: Failures since the last success.
        aloud: Whether this process warns and writes; of several, one does.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.in_a_row = 0
        self.aloud = True
        self._said: set[str] = set()

    @property
    def are_too_many(self) -> bool:
        """Whether to give up."""
        return self.in_a_row >= MAX_FAILURES

    def record(self, what: str, error: Exception, log: Path) -> None:
        """Count a failure, warn of it, and add its traceback to a log.

        Args:
            what: What failed.
            error: The exception.
            log: Path of the log; its folder is created where it does not exist.
        """
        self.in_a_row += 1
        if not self.aloud:
            return
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{what}:\n{''.join(traceback.format_exception(error))}\n")
            where = f"The traceback is in `{log}`."
        except OSError as failure:
            where = f"The traceback could not be written to `{log}` ({failure})."
        consequence = "Training goes on without it."
        if self.are_too_many:
            consequence = f"Training goes on; after {MAX_FAILURES} failures in a row the callback stops."
        _release(error)
        cause = ": ".join(filter(None, [type(error).__name__, str(error).rstrip().rstrip(".")]))
        sentences = [f"{cause}.", _way_out(error), where, consequence]
        warnings.warn(
            f"`{self.owner}` failed in {what}: {' '.join(filter(None, sentences))}", GradSimWarning, stacklevel=2
        )

    def warn_once(self, message: str) -> None:
        """Warn of something that is no failure, the first time only.

        Args:
            message: A sentence without its full stop.
        """
        if self.aloud and message not in self._said:
            self._said.add(message)
            warnings.warn(f"`{self.owner}`: {message}.", GradSimWarning, stacklevel=2)


def _way_out(error: Exception) -> str:
    """What to do about a failure; nothing where its own message says so."""
    if is_out_of_memory(error):
        return "Memory does not suffice for one sample. Choose fewer `layers=`, or pass a smaller `num_queries=`."
    if isinstance(error, GradSimError):
        return ""
    if "DataLoader worker" in str(error):  # torch says so wherever we are when the process dies
        return "It reads training data: repair the dataset, or pass other training data as `train_data=`."
    if isinstance(error, OSError):  # what fails in reading samples is a `TrainingDataError`
        return "Free space there, or give the logger another folder. The report is in `callback.report`."
    return 'Repair what the traceback shows, or pass `on_error="raise"` to stop at such a failure.'


def _release(error: BaseException | None) -> None:
    """Let go of what the frames of a failure hold: workers that read samples, tensors on the device."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    release_memory()
