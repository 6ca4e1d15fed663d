"""What is learned from training steps while they run: is our loss theirs, and what do they tell of each sample?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_gradsim import lightning_bridge as bridge
from lightning_gradsim.adapter import Adapter
from lightning_gradsim.clock import Clock
from lightning_gradsim.failures import Failures
from lightning_gradsim.guard import is_compiled
from lightning_gradsim.in_run import InRun
from lightning_gradsim.loss_check import LossCheck
from lightning_gradsim.report import SuspectTable
from lightning_gradsim.sample_id_recorder import SampleIdRecorder
from lightning_gradsim.supervision import Supervisor


class TrainingWatch:
    """Watches training steps: the loss of the first ones, the head in all of them.

    Args:
        adapter: Reads batches; bound to the module when training starts.
        in_run: Gathers what steps tell; ``None`` to gather nothing.
        id_key: Where batches carry sample ids.
        supervisor: Lets our work run.
        clock: Counts its time.
        failures: Tells of what fails.
    """

    def __init__(
        self,
        adapter: Adapter,
        in_run: InRun | None,
        id_key: str | int | None,
        supervisor: Supervisor,
        clock: Clock,
        failures: Failures,
    ) -> None:
        self._adapter = adapter
        self._in_run = in_run
        self._ids = SampleIdRecorder(id_key)
        self._supervisor = supervisor
        self._clock = clock
        self._failures = failures
        self._loss_check = LossCheck()
        self._seconds_at_round = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """What limits reports, as far as the loss is concerned."""
        return tuple(note for note in (self._loss_check.difference, self._loss_check.gap) if note is not None)

    def attach(self, trainer: Trainer) -> None:
        """Watch which samples are drawn.

        Args:
            trainer: The trainer, before it makes its training loader.
        """
        if self._in_run is not None:
            self._ids.attach(trainer)

    def start(self, trainer: Trainer) -> None:
        """Begin with a run.

        Args:
            trainer: The trainer, with its training loader.
        """
        self._loss_check = LossCheck()
        self._seconds_at_round = 0.0
        if self._in_run is not None:
            self._in_run.begin_run(bridge.num_sample_ids(trainer))

    def begin_step(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Watch a step.

        Args:
            trainer: The trainer.
            module: The user's module.
            batch: The training batch.
            batch_idx: Its number in the epoch.
        """
        if self._loss_check.is_open and self._may_watch(module):
            self._supervisor.stage = "the check of the loss"
            with self._supervisor.optional(trainer, self._loss_check.give_up):
                self._loss_check.begin_step(module, is_wrapped=trainer.strategy.model is not module)
        if self._in_run is not None and self._in_run.reason is None:
            self._supervisor.stage = "the watch of training steps"
            with self._supervisor.optional(trainer, self._in_run.give_up):
                self._begin_tap(trainer, module, batch, batch_idx, self._in_run)

    def end_step(self, trainer: Trainer, batch: Any, outputs: Any) -> None:
        """Take in what it has shown.

        Args:
            trainer: The trainer.
            batch: The training batch.
            outputs: What the step returned.
        """
        if self._in_run is not None and self._in_run.reason is None:
            self._supervisor.stage = "the watch of training steps"
            with self._supervisor.optional(trainer, self._in_run.give_up):
                self._in_run.end_step(bridge.loss_of_outputs(outputs, trainer.accumulate_grad_batches))
        if not self._loss_check.is_watching:
            return
        self._supervisor.stage = "the check of the loss"
        with self._supervisor.optional(trainer, self._loss_check.give_up), self._supervisor.isolated(trainer):
            returned = bridge.loss_of_outputs(outputs, trainer.accumulate_grad_batches)
            self._loss_check.end_step(self._adapter, batch, returned)
        self._loss_check.remove()
        if self._loss_check.difference is not None:
            self._failures.warn_once(self._loss_check.difference)

    def end_epoch(self, trainer: Trainer, epoch: int, *, is_last: bool) -> None:
        """Look for neighbours if it is time; with several processes, bring together what they have gathered.

        Args:
            trainer: The trainer.
            epoch: The epoch, from 0; nothing happens for one that was ended before.
            is_last: Whether it is known to be the last one of the run.
        """
        if self._in_run is None or self._in_run.reason is not None:
            return
        self._supervisor.stage = "the watch of training steps"
        with self._supervisor.optional(trainer, self._in_run.give_up), self._supervisor.isolated(trainer):
            now = self._clock.other_seconds
            if self._in_run.end_epoch(epoch + 1, is_last=is_last, seconds=now - self._seconds_at_round):
                self._seconds_at_round = now

    def suspects(
        self, validation_accuracy: float | None, doubted_queries: int, studied_queries: int
    ) -> tuple[SuspectTable | None, tuple[str, ...]]:
        """All samples that training has visited, the most suspect first; see ``InRun.suspects``.

        Args:
            validation_accuracy: In [0, 1]; ``None`` where unknown.
            doubted_queries: Studied validation mistakes whose own label is doubtful.
            studied_queries: Validation mistakes that were studied.

        Returns:
            The table, or ``None`` where nothing is known; and what limits it.
        """
        if self._in_run is None:
            return None, ()
        found = self._in_run.suspects(validation_accuracy, doubted_queries, studied_queries)
        if found is not None:
            return found
        reason = self._in_run.reason
        return None, () if reason is None else (f"suspects are those of largest gradient in this pass: {reason}",)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {} if self._in_run is None else self._in_run.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state: The state.
        """
        if self._in_run is not None:
            self._in_run.load_state_dict(state)

    def remove(self) -> None:
        """Remove every hook."""
        self._loss_check.remove()
        if self._in_run is not None:
            self._in_run.remove()

    def detach(self) -> None:
        """Remove every hook, and leave the trainer as it was."""
        self.remove()
        self._ids.detach()

    def _begin_tap(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, in_run: InRun) -> None:
        _, targets = self._adapter.split(batch)
        loaders = bridge.flatten_loaders(trainer.train_dataloader)
        ids = self._ids.find_ids(loaders, batch, batch_idx, len(targets))
        if ids is None:
            in_run.give_up(f"{self._ids.reason}")
        else:
            in_run.begin_step(module, batch, ids, trainer.global_step, bridge.learning_rate(trainer))

    def _may_watch(self, module: LightningModule) -> bool:
        # A hook inside a compiled module would change what the compiler fuses, and with it the training.
        if is_compiled(module):
            self._loss_check.give_up("the module is compiled")
        elif hasattr(module, "gradsim_step"):
            self._loss_check.give_up("the module has a `gradsim_step` of its own")
        else:
            return True
        return False
