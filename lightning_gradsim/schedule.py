"""Which validations are looked at."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gradsim.arguments import check_count, check_type


@dataclass(frozen=True)
class Moment:
    """Where in a run a validation stands.

    Attributes:
        epoch: Training epoch, from 0.
        step: Optimizer steps so far.
        ends_epoch: Whether no further validation falls into this epoch.
        ends_run: Whether no further validation falls into this run; ``False`` where that cannot be known.
    """

    epoch: int
    step: int
    ends_epoch: bool
    ends_run: bool


@dataclass(frozen=True)
class Schedule:
    """A rule for the validations of ``fit``.

    Attributes:
        every_n_epochs: The last validation of every n-th epoch; ``None`` stands for 1, unless another rule is given.
        every_n_steps: Instead, each validation at least that many steps after the last one looked at.
        warmup_epochs: None in that many first epochs.
        last_epoch_only: Instead, only the last validation of the run.

    Raises:
        TypeError: If a value has a wrong type.
        ValueError: If a value is out of range, or two rules contradict each other.
    """

    every_n_epochs: int | None = None
    every_n_steps: int | None = None
    warmup_epochs: int = 0
    last_epoch_only: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        check_count("every_n_epochs", self.every_n_epochs, optional=True)
        check_count("every_n_steps", self.every_n_steps, optional=True)
        check_count("warmup_epochs", self.warmup_epochs, optional=False, at_least=0)
        check_type("last_epoch_only", self.last_epoch_only, isinstance(self.last_epoch_only, bool), "True or False")
        rules = {"every_n_epochs": self.every_n_epochs, "every_n_steps": self.every_n_steps}
        given = [f"{name}={value}" for name, value in rules.items() if value is not None]
        given += ["last_epoch_only=True"] if self.last_epoch_only else []
        if len(given) > 1:
            raise ValueError(f"`{'` and `'.join(given)}` contradict each other. Pass one of them.")

    def is_due(self, moment: Moment, steps_since_last: int) -> bool:
        """Whether a validation is to be looked at.

        Args:
            moment: Where it stands.
            steps_since_last: Steps since the last one looked at, or since the run began.

        Returns:
            The answer. With ``last_epoch_only``, every validation that may turn out to be the last.
        """
        if moment.epoch < self.warmup_epochs:
            return False
        if self.every_n_steps is not None:
            return steps_since_last >= self.every_n_steps
        if self.last_epoch_only:
            return moment.ends_epoch
        return moment.ends_epoch and (moment.epoch + 1) % (self.every_n_epochs or 1) == 0
