"""Our own work inside somebody else's run: isolated, timed, agreed on by all processes, and harmless when it fails."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import format_exception
from typing import TypeVar, cast

import torch
from lightning.pytorch import Trainer

from lightning_gradsim import lightning_bridge as bridge
from lightning_gradsim.clock import Clock
from lightning_gradsim.errors import ProcessError
from lightning_gradsim.failures import Failures

T = TypeVar("T")


class Supervisor:
    """Lets work run so that the run it is part of stays as it is.

    Args:
        clock: Counts the time of the work.
        failures: Tells of what fails.
        raises: Whether failures arrive.

    Attributes:
        stage: What is being done, for messages.
    """

    def __init__(self, clock: Clock, failures: Failures, *, raises: bool) -> None:
        self.stage = ""
        self._clock = clock
        self._failures = failures
        self._raises = raises

    @contextmanager
    def isolated(self, trainer: Trainer) -> Iterator[None]:
        """Keep the run as it is, random numbers included, and count the time.

        Args:
            trainer: The trainer.

        Yields:
            Nothing.
        """
        # What is made in inference mode, as in `trainer.validate`, has no gradient ever after.
        with self._clock.working(), bridge.isolated_rng(trainer), torch.inference_mode(False), torch.no_grad():
            yield

    @contextmanager
    def protected(self, trainer: Trainer, epoch: int, directory: Path) -> Iterator[None]:
        """Turn failures, which are those of all processes, into warnings if they shall not raise.

        Args:
            trainer: The trainer.
            epoch: The epoch, for messages.
            directory: Where the log of failures lies.

        Yields:
            Nothing.
        """
        try:
            with self.isolated(trainer):
                yield
        except Exception as error:
            if self._raises or bridge.is_trial_run(trainer):
                raise
            self._failures.record(f"{self.stage} of epoch {epoch}", error, directory / "errors.log")

    @contextmanager
    def optional(
        self, trainer: Trainer, give_up: Callable[[str], None], raising: type[Exception] | tuple[()] = ()
    ) -> Iterator[None]:
        """For what a report can do without, and processes need not agree on: if it fails, it is given up.

        Args:
            trainer: The trainer.
            give_up: Takes the reason.
            raising: Arrives in any case: a wrong argument.

        Yields:
            Nothing.
        """
        try:
            with self._clock.working():
                yield
        except Exception as error:
            if self._raises or bridge.is_trial_run(trainer) or isinstance(error, raising):
                raise
            reason = f"{type(error).__name__}: {error}"
            give_up(reason)
            self._failures.warn_once(f"{self.stage} was given up. {reason.rstrip('.')}")

    def on_all_ranks(self, trainer: Trainer, work: Callable[[], T]) -> list[T]:
        """Results of all processes, in the order of their ranks; what fails in one of them fails in all.

        Args:
            trainer: The trainer.
            work: What every process does; its result can be pickled.

        Returns:
            The results.

        Raises:
            Exception: What this process failed with.
            ProcessError: If another one failed.
        """
        if trainer.world_size == 1:
            return [work()]
        packed, failure = b"", ""
        error: Exception | None = None
        try:
            packed = pickle.dumps(work())  # what cannot be pickled must fail before the others wait for it
        except Exception as caught:
            error, failure = caught, "".join(format_exception(caught))
        outcomes = bridge.gather(trainer, (packed, failure))
        if error is not None:
            raise error
        for rank, (_, failure) in enumerate(outcomes):
            if failure:
                raise ProcessError(f"Process {rank} of {trainer.world_size} failed: {failure.rstrip()}")
        return [cast("T", pickle.loads(packed)) for packed, _ in outcomes]

    def on_rank_zero(self, trainer: Trainer, work: Callable[[], T]) -> T:
        """What rank zero finds, on all ranks: clocks differ, decisions must not.

        Args:
            trainer: The trainer.
            work: What is found.

        Returns:
            The finding.
        """
        return trainer.strategy.broadcast(work())
