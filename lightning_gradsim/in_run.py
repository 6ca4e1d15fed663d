"""What the training steps themselves tell of every sample: statistics of wrong labels, features, neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.head_gradients import output_grads
from lightning_gradsim.pass_visits import PassVisits
from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.tap import Tap
from lightning_gradsim.tapped_samples import TappedBlock, TappedSamples
from lightning_gradsim.tasks import Task
from lightning_gradsim.visit_statistics import NEIGHBOURS, InRunSettings, VisitStatistics

STATE_VERSION = 1
CLASS_GRADIENT_SHARE = 0.25
"""Share of the memory for gradients of validation classes."""
INFLUENCE = "influence"
BY_GRADIENTS = ("self_influence", INFLUENCE)
EARLY = "`mislabel_score='influence'` counts training steps from the first validation on"


class InRun:
    """Gathers what training steps tell, or passes where steps tell nothing, and judges labels by it.

    Life cycle: ``begin_run``; ``begin_step`` and ``end_step`` around every training step; ``end_epoch`` after the last
    step of an epoch; ``suspects`` at any time.

    Attributes:
        reason: Why training steps tell nothing, in words; ``None`` while they do.
        passes: What passes tell instead.
    """

    def __init__(self, adapter: Adapter, settings: InRunSettings) -> None:
        self.reason: str | None = "no training step was watched"
        self.passes = PassVisits(settings)
        self._adapter = adapter
        self._settings = settings
        self._tap: Tap | None = None
        self._visits = VisitStatistics(settings, 0)
        self._learning_rate = 1.0
        self._last_round = 0
        self._is_owner = True
        self._state: Mapping[str, Any] = {}
        self._class_gradients: Tensor | None = None

    @property
    def head(self) -> nn.Linear | None:
        """The head, where its gradients of validation samples are of use; ``None`` before the first step."""
        if self.reason is not None or self._tap is None or self._tap.head is None:
            return None
        return self._tap.head[1] if self._settings.score == INFLUENCE else None

    @property
    def needs_validation(self) -> bool:
        """Whether the score compares training steps with validations."""
        return self._settings.score == INFLUENCE

    @property
    def waits_for(self) -> str | None:
        """Why there is nothing yet, in words, where it is not that steps tell nothing."""
        return EARLY if self.needs_validation else None

    @property
    def kind(self) -> tuple[Task, int] | None:
        """Kind of task, and number of logits a sample; ``None`` before the first step that was watched."""
        return self._visits.kind

    @property
    def _samples(self) -> TappedSamples:
        return self._visits.samples

    def __getstate__(self) -> dict[str, Any]:
        """Copies keep what was gathered, and watch nothing."""
        return {**vars(self), "_tap": None}

    def begin_run(self, adapter: Adapter, num_samples: int, *, is_owner: bool) -> None:
        """Watch the steps of a run, and go on from a state that was loaded.

        Args:
            adapter: Reads batches; bound to the module.
            num_samples: One more than the largest sample id.
            is_owner: Whether this process holds the sums of all; the others begin at zero.
        """
        self.reason = None
        self._adapter, self._is_owner = adapter, is_owner
        self._tap = Tap(adapter, self._consume)
        self._visits, self._last_round = VisitStatistics(self._settings, num_samples), 0
        state, self._state = self._state, {}
        if self._visits.load_state_dict(state, is_owner=is_owner):
            self._last_round = int(state["last_round"])
        self._class_gradients = state.get("class_gradients")
        self.passes.begin_run(state.get("passes", {}))

    def forget_state(self) -> None:
        """Do not go on from a state that was loaded."""
        self._state = {}

    def begin_step(self, module: nn.Module, batch: Any, ids: Tensor, step: int, learning_rate: float) -> None:
        """Watch a training step.

        Args:
            module: The user's module.
            batch: The training batch.
            ids: Its sample ids, int64 ``[B]`` on the CPU.
            step: Number of updates so far.
            learning_rate: Of this step.
        """
        if self.reason is None and self._tap is not None:
            if learning_rate != self._learning_rate and self._settings.score == "self_influence":
                self._tap.flush()
            self._learning_rate = learning_rate
            self._tap.begin_step(module, batch, ids, step)
            self._follow(self._tap)

    def end_step(self, returned: Tensor | None) -> None:
        """Take in what it has shown.

        Args:
            returned: The loss that the step returned; ``None`` if it returned none.
        """
        if self.reason is None and self._tap is not None:
            self._tap.end_step(returned)
            self._follow(self._tap)

    def set_class_gradients(self, gradients: Tensor | None) -> None:
        """Compare the steps that follow with the gradients of a validation.

        Args:
            gradients: Mean gradients of the head over the validation samples of each class; ``None`` for none.
        """
        self._flush()  # the steps before belong to the validation before
        if gradients is None or self.reason is not None:
            return
        size = gradients.numel() * 4 / 2**20
        if size > CLASS_GRADIENT_SHARE * self._settings.max_state_mb:
            self.give_up(f"the gradients of {len(gradients)} classes take {size:.0f} MiB, too much for `max_state_mb`")
        else:
            self._class_gradients = gradients

    def give_up(self, reason: str) -> None:
        """Watch no further steps, and forget what they told: it would be half a story.

        Args:
            reason: Why.
        """
        self.remove()
        self.reason, self._visits = reason, VisitStatistics(self._settings, self._visits.num_samples)

    def remove(self) -> None:
        """Remove the hook."""
        if self._tap is not None:
            self._tap.remove()

    def end_epoch(self, epoch: int, *, is_last: bool, seconds: float | None) -> bool:
        """Look for neighbours, after epochs 2, 4, 8, ... and the last one.

        Args:
            epoch: Epochs so far, from 1; nothing happens for one that had its round.
            is_last: Whether the run ends with it.
            seconds: Time that training has taken since the last round, of which neighbours may take a share; ``None``
                for no limit.

        Returns:
            Whether there was a round.
        """
        self._flush()
        is_due = epoch >= 2 and (is_last or epoch & (epoch - 1) == 0)
        if not is_due or epoch <= self._last_round or len(self._visits.samples) <= NEIGHBOURS:
            return False
        since, self._last_round = epoch - self._last_round, epoch
        if self._is_owner:
            self._visits.look_for_neighbours(seconds, weight=since)
        return True

    def suspects(self, validation_accuracy: float | None) -> tuple[SuspectTable, tuple[str, ...]] | None:
        """All samples that were visited, the most suspect first, and what limits the list.

        Args:
            validation_accuracy: In [0, 1]; ``None`` where unknown.

        Returns:
            The table and sentences; ``None`` where nothing is known.
        """
        self._flush()
        if self.reason is None:
            found = self._visits.suspects(validation_accuracy)
            return None if found is None else (found[0], (*found[1], *self._notes()))
        found = self.passes.suspects(validation_accuracy)
        note = f"suspects rest on passes over the training data, one visit each, as steps tell nothing: {self.reason}"
        return None if found is None else (found[0], (note, *found[1]))

    @property
    def num_tapped(self) -> int:
        """Number of samples whose newest visit is known."""
        return len(self._samples)

    def tapped(self) -> tuple[str, TappedBlock] | None:
        """Name of the head, and the newest visit of each sample; ``None`` where nothing is known."""
        self._flush()
        head = None if self._tap is None else self._tap.head
        block = self._samples.compute()
        return None if head is None or block is None else (head[0], block)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        self._flush()
        passes = self.passes.state_dict()
        state: dict[str, Any] = {"version": STATE_VERSION, "last_round": self._last_round, **self._visits.state_dict()}
        if self._class_gradients is not None:
            state["class_gradients"] = self._class_gradients
        return {**state, "passes": passes} if passes else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next ``begin_run``.

        Args:
            state: The state; nothing is taken over from one of another version.
        """
        self._state = state if state.get("version") == STATE_VERSION else {}

    def merge(self, others: Sequence[tuple[str | None, Mapping[str, Any]]], *, is_owner: bool) -> None:
        """Bring together what the processes of a run have gathered.

        Args:
            others: Reason and state of every process, this one included.
            is_owner: Whether this one holds the sums from now on; the others begin at zero.
        """
        reasons = [reason for reason, _ in others if reason is not None]
        if reasons:
            self.give_up(reasons[0])
            return
        states = [state for _, state in others if "statistics" in state]
        if states:
            self._is_owner, self._last_round = is_owner, int(states[0]["last_round"])
            self._visits.merge(states, is_owner=is_owner)

    def _follow(self, tap: Tap) -> None:
        # Where what it handed on has given up, it does not know.
        if tap.reason is not None and self.reason is None:
            self.give_up(tap.reason)

    def _consume(self, block: TappedBlock) -> None:
        if not self._visits.num_samples:
            self.give_up("the number of training samples is not known")
            return
        step = self._adapter.step_from_logits(block.logits, block.targets)
        if self._settings.score == INFLUENCE and step.task is Task.MULTILABEL:
            self.give_up("`mislabel_score='influence'` needs exclusive classes, and the task is multilabel")
            return
        self._visits.prepare(step)
        if self._settings.score == INFLUENCE and self._class_gradients is None:
            return
        needs_gradients = self._settings.score in BY_GRADIENTS
        self._visits.update(
            block.ids,
            step,
            features=block.features,
            output_grads=output_grads(self._adapter, block.logits, block.targets) if needs_gradients else None,
            learning_rate=self._learning_rate,
            class_gradients=self._class_gradients,
        )
        self._visits.samples.update(block)

    def _notes(self) -> Sequence[str]:
        notes = [EARLY] if self._settings.score == INFLUENCE else []
        if self._tap is None or not self._tap.left_out:
            return notes
        left_out = "; ".join(f"{number:,}, as {reason}" for reason, number in self._tap.left_out.items())
        return [*notes, f"suspects leave out visits of training samples: {left_out}"]

    def _flush(self) -> None:
        if self._tap is not None:
            self._tap.flush()
