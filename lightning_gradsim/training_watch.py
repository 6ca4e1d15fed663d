"""What is learned from training steps while they run: is our loss theirs, and what do they tell of each sample?"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_gradsim import lightning_bridge as bridge
from lightning_gradsim.adapter import Adapter, Step
from lightning_gradsim.clock import Clock
from lightning_gradsim.collation import find_reordering
from lightning_gradsim.engine import Observer
from lightning_gradsim.errors import BatchFormatError
from lightning_gradsim.factors import Factors
from lightning_gradsim.failures import Failures
from lightning_gradsim.in_run import InRun
from lightning_gradsim.loss_check import LossCheck
from lightning_gradsim.mislabel import check_classes
from lightning_gradsim.report import Report
from lightning_gradsim.rereading import Tapped
from lightning_gradsim.sample_id_recorder import SampleIdRecorder
from lightning_gradsim.supervision import Supervisor
from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.tasks import Task
from lightning_gradsim.true_labels import TrueLabels
from lightning_gradsim.validation_gradients import ValidationGradients, merge_sums

WATCH = "the watch of training steps"
WATCH_OF_PASSES = "the watch of what passes read"
LOSS_CHECK = "the check of the loss"
FIRST_EPOCH = "until the second epoch training steps tell too little of which samples are worth reading"

VisitsOfPass = tuple[str | None, Mapping[str, Any]]
"""Why a pass tells nothing, or what it has shown."""


class TrainingWatch:
    """Watches training steps: the loss of the first ones, the head in all of them.

    Args:
        adapter: Reads batches; bound to the module when training starts.
        in_run: Gathers what steps tell; ``None`` to gather nothing.
        id_key: Where batches carry sample ids.
        supervisor: Lets our work run.
        clock: Counts its time.
        failures: Tells of what fails.
        true_labels: Known true labels, to be checked as soon as the kind of task is known.
        trusted_val: Whether validation labels are to be learned, likewise.
        has_budget: Whether looking for neighbours has to keep to a share of the training time.
    """

    def __init__(
        self,
        adapter: Adapter,
        in_run: InRun | None,
        id_key: str | int | None,
        supervisor: Supervisor,
        clock: Clock,
        failures: Failures,
        true_labels: TrueLabels | None = None,
        *,
        trusted_val: bool = False,
        has_budget: bool = True,
    ) -> None:
        self._adapter = self._step_adapter = adapter
        self._in_run = in_run
        self._ids = SampleIdRecorder(id_key)
        self._supervisor = supervisor
        self._clock = clock
        self._failures = failures
        self._true_labels, self._trusted_val = true_labels, trusted_val
        self._has_budget = has_budget
        self._loss_check = LossCheck()
        self._seconds_at_round = self._seconds_at_pass = 0.0
        self._gradients = ValidationGradients()
        self._is_given_up = self._asks_users_code = self._knows_kind = False

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
            self._in_run.forget_state()  # of a test or validation before; what a resume loads comes later
            self._ids.attach(trainer)

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Begin with a run.

        Args:
            trainer: The trainer, with its training loader.
            module: The user's module.
        """
        self._asks_users_code = type(self._adapter) is not Adapter or self._adapter.keeps_batches_apart(module)
        self._loss_check = LossCheck()
        self._seconds_at_round = self._seconds_at_pass = 0.0
        self._is_given_up = self._knows_kind = False
        self._supervisor.stage = WATCH
        with self._supervisor.optional(trainer, self._give_up):
            # A loss of the user's may keep a state, which is none of ours to change.
            self._step_adapter = copy.deepcopy(self._adapter) if self._asks_users_code else self._adapter
            if self._in_run is not None:
                is_owner = trainer.is_global_zero
                self._in_run.begin_run(self._step_adapter, bridge.num_sample_ids(trainer), is_owner=is_owner)
                with self._supervisor.isolated(trainer):
                    reordering = None if self._ids.are_carried else find_reordering(trainer.train_dataloader)
                if reordering is not None:
                    self._in_run.give_up(reordering)

    def begin_step(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Watch a step.

        Args:
            trainer: The trainer.
            module: The user's module.
            batch: The training batch.
            batch_idx: Its number in the epoch.
        """
        if self._loss_check.is_open and self._loss_check.may_watch(module):
            self._supervisor.stage = LOSS_CHECK
            with self._supervisor.optional(trainer, self._loss_check.give_up):
                self._loss_check.begin_step(module, is_wrapped=trainer.strategy.model is not module)
        if self._in_run is not None and self._in_run.reason is None:
            self._supervisor.stage = WATCH
            with self._isolated_if_needed(trainer):
                ids = self._find_ids(trainer, batch, batch_idx, self._in_run)
            with self._supervisor.optional(trainer, self._in_run.give_up), self._isolated_if_needed(trainer):
                if ids is not None:
                    rate = bridge.learning_rate(trainer)
                    self._in_run.begin_step(module, batch, ids, trainer.global_step, rate)

    def end_step(self, trainer: Trainer, batch: Any, outputs: Any) -> None:
        """Take in what it has shown.

        Args:
            trainer: The trainer.
            batch: The training batch.
            outputs: What the step returned.
        """
        if self._in_run is not None and self._in_run.reason is None:
            self._supervisor.stage = WATCH
            with self._supervisor.optional(trainer, self._in_run.give_up), self._isolated_if_needed(trainer):
                self._in_run.end_step(bridge.loss_of_outputs(outputs, trainer.accumulate_grad_batches))
            self._check_kind(self._in_run)
        if not self._loss_check.is_watching:
            return
        self._supervisor.stage = LOSS_CHECK
        with self._supervisor.optional(trainer, self._loss_check.give_up), self._supervisor.isolated(trainer):
            returned = bridge.loss_of_outputs(outputs, trainer.accumulate_grad_batches)
            self._loss_check.end_step(self._step_adapter, batch, returned)
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
        self._supervisor.stage = WATCH
        with self._supervisor.optional(trainer, self._in_run.give_up), self._supervisor.isolated(trainer):
            now = self._clock.other_seconds
            seconds = now - self._seconds_at_round if self._has_budget else None
            if self._in_run.end_epoch(epoch + 1, is_last=is_last, seconds=seconds):
                self._seconds_at_round = now

    @contextmanager
    def watching_validation(self, trainer: Trainer, batch: Any) -> Iterator[None]:
        """Gather gradients of the head from the forward of a validation batch, where the score needs them.

        Args:
            trainer: The trainer.
            batch: The batch.

        Yields:
            Nothing.
        """
        in_run = self._in_run
        head = None if in_run is None or trainer.state.fn != "fit" else in_run.head
        if in_run is None or head is None:
            yield
            return
        with self._gradients.watching(head):
            yield
        self._supervisor.stage = WATCH
        with self._supervisor.optional(trainer, in_run.give_up):
            self._gradients.take(self._step_adapter, batch)

    def end_validation(self, trainer: Trainer) -> None:
        """Compare the training steps that follow with this validation; with several processes, all of them must ask.

        Args:
            trainer: The trainer.
        """
        in_run, gradients = self._in_run, self._gradients
        self._gradients = ValidationGradients()
        if in_run is None or not in_run.needs_validation or self._is_given_up:
            return
        self._supervisor.stage = WATCH
        with self._supervisor.optional(trainer, in_run.give_up), self._supervisor.isolated(trainer):
            in_run.set_class_gradients(merge_sums(self._supervisor.on_all_ranks(trainer, lambda: gradients.sums)))

    def share(self, trainer: Trainer) -> None:
        """With several processes, bring together what they have gathered; all of them must ask.

        Args:
            trainer: The trainer.
        """
        in_run = self._in_run
        if in_run is None or trainer.world_size == 1 or self._is_given_up:
            return
        self._supervisor.stage = WATCH
        with self._supervisor.optional(trainer, in_run.give_up), self._supervisor.isolated(trainer):
            parts = self._supervisor.on_all_ranks(trainer, lambda: (in_run.reason, in_run.state_dict()))
            # From what all processes see alike: what fails in one only, such as the merge, is told to all next time.
            self._is_given_up = any(reason is not None for reason, _ in parts)
            in_run.merge(parts, is_owner=trainer.is_global_zero)

    def why_not_tapped(self, epoch: int) -> str | None:
        """Why steps do not tell which training samples are worth reading again, in words; ``None`` where they do.

        Args:
            epoch: The epoch, from 0.

        Returns:
            The reason.
        """
        if self._in_run is None:
            return "training steps are not watched (`mislabel_score=None`)"
        return self._in_run.reason or (FIRST_EPOCH if epoch < 1 or not self._in_run.num_tapped else None)

    def tapped(self) -> Tapped | None:
        """What the steps have shown; ``None`` where nothing is known."""
        found = None if self._in_run is None else self._in_run.tapped()
        return None if found is None else Tapped(*found)

    def observer(self, trainer: Trainer, num_samples: int) -> Observer | None:
        """What is to be shown all that the next pass reads.

        Args:
            trainer: The trainer.
            num_samples: One more than the largest sample id.

        Returns:
            The observer; ``None`` where training steps tell enough.
        """
        in_run = self._in_run
        if in_run is None or in_run.reason is None:
            return None
        if not in_run.passes.begin_pass(num_samples, is_training=trainer.state.fn == "fit"):
            return None

        def observe(ids: Tensor, step: Step, factors: Mapping[str, Factors]) -> None:
            stage, self._supervisor.stage = self._supervisor.stage, WATCH_OF_PASSES
            with self._supervisor.optional(trainer, in_run.passes.give_up):
                in_run.passes.see(ids, step, factors)
            self._supervisor.stage = stage

        return observe

    def visits_of_pass(self) -> VisitsOfPass:
        """What this process has seen of a pass."""
        return (None, {}) if self._in_run is None else self._in_run.passes.state_dict_of_pass()

    def suspects(self, report: Report, visits: Sequence[VisitsOfPass]) -> tuple[SuspectTable | None, tuple[str, ...]]:
        """All samples that training has visited, or passes where training steps tell nothing, the most suspect first.

        Args:
            report: The report of the pass, for the cautions that depend on validation.
            visits: What ``visits_of_pass`` gave on each process.

        Returns:
            The table, or ``None`` where nothing is known; and what limits it.
        """
        if self._in_run is None:
            return None, ()
        now = self._clock.other_seconds
        seconds = now - self._seconds_at_pass + self._clock.validation_seconds if self._has_budget else None
        self._in_run.passes.end_pass(visits, seconds)
        self._seconds_at_pass = now
        accuracy = None
        if report.task != Task.REGRESSION.value and report.num_validation_samples:
            accuracy = 1 - report.num_errors / report.num_validation_samples
        found = self._in_run.suspects(accuracy)
        if found is not None:
            return found
        reason = self._in_run.passes.reason or self._in_run.reason or self._in_run.waits_for
        return None, () if reason is None else (f"suspects are those of largest gradient in this pass: {reason}",)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        if self._in_run is None:
            return {}
        try:  # whoever saves a checkpoint is not to fail for it, nor to see another random state
            with self._clock.working(), bridge.isolated_rng(), torch.inference_mode(False), torch.no_grad():
                return self._in_run.state_dict()
        except Exception as error:
            self._in_run.give_up(f"{type(error).__name__}: {error}")
            return {}

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

    def _check_kind(self, in_run: InRun) -> None:
        """Refuse arguments that do not fit the task: these raise in any case."""
        if self._knows_kind or in_run.kind is None:
            return
        self._knows_kind = True
        if self._true_labels is not None:
            self._true_labels.check_task(*in_run.kind)
        if self._trusted_val:
            check_classes(in_run.kind[0])

    def _isolated_if_needed(self, trainer: Trainer) -> AbstractContextManager[None]:
        # An adapter or a loss of the user's may draw random numbers. To keep all states at every step costs too much
        # where nobody can touch them.
        return self._supervisor.isolated(trainer) if self._asks_users_code else nullcontext()

    def _find_ids(self, trainer: Trainer, batch: Any, batch_idx: int, in_run: InRun) -> Tensor | None:
        """Ids of the batch; raises only where batches do not carry them as the user says."""
        try:
            _, targets = self._step_adapter.split(batch)
        except Exception as error:  # the collection of queries reads batches, too, and says what is wrong
            own = isinstance(error, BatchFormatError)
            in_run.give_up(str(error) if own else f"{type(error).__name__}: {error}")
            return None
        ids = None
        with self._clock.working(), self._supervisor.optional(trainer, in_run.give_up, raising=BatchFormatError):
            loaders = bridge.flatten_loaders(trainer.train_dataloader)
            ids = self._ids.find_ids(loaders, batch, batch_idx, len(targets))
        if ids is None and in_run.reason is None:
            in_run.give_up(f"{self._ids.reason}")
        return ids

    def _give_up(self, reason: str) -> None:
        self._loss_check.give_up(reason)
        if self._in_run is not None:
            self._in_run.give_up(reason)
