"""What the training steps themselves tell of every sample: statistics of wrong labels, features, neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.arguments import check_choice, check_positive
from lightning_gradsim.head_gradients import output_grads
from lightning_gradsim.mislabel import (
    SCORES,
    MislabelStatistics,
    RunAverages,
    choose_columns,
    find_cautions,
    judge,
)
from lightning_gradsim.neighbours import neighbour_votes
from lightning_gradsim.suspects import SUSPECT_PARTS, SuspectTable
from lightning_gradsim.tap import Tap
from lightning_gradsim.tapped_samples import TappedBlock, TappedSamples
from lightning_gradsim.tasks import Task

STATE_VERSION = 1
IN_RUN_SCORES = tuple(name for name in SCORES if name != "influence")  # it needs gradients of validation samples
NEIGHBOURS = 25
NEIGHBOUR_SHARE = 0.03
"""Share of the training time since the last round that a round of neighbours may take."""
FLOPS_PER_SECOND = 4e10
"""What two slow cores do in products of such sizes: with it, a share of the time becomes a number of operations."""


@dataclass(frozen=True)
class InRunSettings:
    """How training steps are watched.

    Attributes:
        score: What suspects are ranked by, of ``mislabel.SCORES``.
        max_state_mb: MiB that all that is kept may take.
        seed: Seed of choices where not everything fits.

    Raises:
        TypeError: If a value has a wrong type.
        ValueError: If a value is out of range.
    """

    score: str
    max_state_mb: float
    seed: int

    def __post_init__(self) -> None:
        """Check the values."""
        check_choice("mislabel_score", self.score, IN_RUN_SCORES)
        check_positive("max_state_mb", self.max_state_mb)


class InRun:
    """Gathers what training steps tell, and judges labels by it.

    Life cycle: ``begin_run``; ``begin_step`` and ``end_step`` around every training step; ``end_epoch`` after the last
    step of an epoch; ``suspects`` at any time.

    Attributes:
        reason: Why training steps tell nothing, in words; ``None`` while they do.
    """

    def __init__(self, adapter: Adapter, settings: InRunSettings) -> None:
        self.reason: str | None = "no training step was watched"
        self._adapter = adapter
        self._settings = settings
        self._tap: Tap | None = None
        self._num_samples = self._num_outputs = 0
        self._statistics: MislabelStatistics | None = None
        self._samples = self._new_samples()
        self._learning_rate = 1.0
        self._last_round = 0
        self._is_owner = True
        self._num_references: int | None = None
        self._state: Mapping[str, Any] | None = None

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
        self._adapter, self._num_samples, self._is_owner = adapter, num_samples, is_owner
        self._tap = Tap(adapter, self._consume)
        self._statistics, self._samples, self._last_round = None, self._new_samples(), 0
        self._num_references = None
        if self._state is not None:
            self._restore(self._state)
        self._state = None

    def forget_state(self) -> None:
        """Do not go on from a state that was loaded."""
        self._state = None

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

    def give_up(self, reason: str) -> None:
        """Watch no further steps, and forget what they told: it would be half a story.

        Args:
            reason: Why.
        """
        self.remove()
        self.reason, self._statistics, self._samples = reason, None, self._new_samples()

    def remove(self) -> None:
        """Remove the hook."""
        if self._tap is not None:
            self._tap.remove()

    def end_epoch(self, epoch: int, *, is_last: bool, seconds: float) -> bool:
        """Look for neighbours, after epochs 2, 4, 8, ... and the last one.

        Args:
            epoch: Epochs so far, from 1; nothing happens for one that had its round.
            is_last: Whether the run ends with it.
            seconds: Time that training has taken since the last round.

        Returns:
            Whether there was a round.
        """
        self._flush()
        is_due = epoch >= 2 and (is_last or epoch & (epoch - 1) == 0)
        block = self._samples.compute() if is_due and epoch > self._last_round else None
        if block is None or len(block) <= NEIGHBOURS or self._statistics is None:
            return False
        since, self._last_round = epoch - self._last_round, epoch
        if not self._is_owner:
            return True
        votes = neighbour_votes(
            block.features,
            self._labels(block),
            k=NEIGHBOURS,
            max_flops=NEIGHBOUR_SHARE * seconds * FLOPS_PER_SECOND,
            seed=self._settings.seed,
        )
        self._statistics.add_neighbours(block.ids, votes, weight=since)
        self._num_references = votes.num_references if votes.num_references < len(block) else None
        return True

    def suspects(self, validation_accuracy: float | None) -> tuple[SuspectTable, tuple[str, ...]] | None:
        """All samples that training has visited, the most suspect first, and what limits the list.

        Args:
            validation_accuracy: In [0, 1]; ``None`` where unknown.

        Returns:
            The table and sentences; ``None`` where nothing is known.
        """
        self._flush()
        if self._statistics is None:
            return None
        averages = self._statistics.compute()
        if not len(averages.sample_ids):
            return None
        parts = [name for name in SUSPECT_PARTS if name != self._settings.score and self._has(name, averages)]
        judgement = judge(averages, self._settings.score, parts)
        cautions = find_cautions(
            averages,
            train_accuracy=self._train_accuracy(averages.task),
            validation_accuracy=validation_accuracy,
        )
        single = averages.task is Task.BINARY
        labels = judgement.labels[:, 0] if single else judgement.labels
        is_multilabel = averages.task is Task.MULTILABEL
        table = SuspectTable(
            judgement.sample_ids,
            judgement.scores,
            labels if labels.is_floating_point() else labels.to(torch.int8 if is_multilabel else torch.int32),
            None if judgement.suggested is None or is_multilabel else judgement.suggested.to(torch.int32),
            None if is_multilabel else judgement.probabilities,
            judgement.flagged,
            score_name=self._settings.score,
            parts=judgement.parts,
            visits=judgement.visits,
            upper_estimate=judgement.upper_estimate,
        )
        return table, (*judgement.notes, *cautions, *self._notes())

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        self._flush()
        state: dict[str, Any] = {"version": STATE_VERSION, "last_round": self._last_round}
        statistics = self._statistics
        if statistics is not None:
            state["samples"] = self._samples.state_dict()
            state["statistics"] = {
                "num_samples": statistics.num_samples,
                "num_outputs": self._num_outputs,
                "task": statistics.task.value,
                "columns": list(statistics.columns),
                "sums": dict(statistics.state_dict()),
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next ``begin_run``.

        Args:
            state: The state; nothing is taken over from one of another version.
        """
        self._state = state if state.get("version") == STATE_VERSION else None

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
        if not states:
            return
        sums = [state["statistics"]["sums"] for state in states]
        merged = {}
        for name, own in sums[0].items():
            parts = torch.stack([each[name] for each in sums])
            merged[name] = parts.amax(0) if name == "labels" else parts.sum(0, dtype=own.dtype)
        self._is_owner = is_owner
        self._restore({**states[0], "statistics": {**states[0]["statistics"], "sums": merged}})
        self._samples = self._new_samples()
        self._samples.merge([state["samples"] for state in states])

    def _follow(self, tap: Tap) -> None:
        # Where what it handed on has given up, it does not know.
        if tap.reason is not None:
            self.reason = tap.reason

    def _restore(self, state: Mapping[str, Any]) -> None:
        saved = state.get("statistics")
        if saved is None or saved["num_samples"] != self._num_samples:
            return
        wanted = self._columns(Task(saved["task"]), int(saved["num_outputs"]))
        if set(wanted) - set(saved["columns"]):  # another score, which needs what was not summed
            return
        self._last_round = int(state["last_round"])
        self._samples.load_state_dict(state["samples"])
        self._num_outputs = int(saved["num_outputs"])
        self._statistics = MislabelStatistics(
            saved["num_samples"], self._num_outputs, Task(saved["task"]), saved["columns"], sync_on_compute=False
        )
        self._statistics.load_state_dict(saved["sums"])
        if not self._is_owner:
            self._statistics.reset()

    def _consume(self, block: TappedBlock) -> None:
        if not self._num_samples:
            self.give_up("the number of training samples is not known")
            return
        step = self._adapter.step_from_logits(block.logits, block.targets)
        if self._statistics is None:
            self._num_outputs = block.logits.shape[1]
            columns = self._columns(step.task, self._num_outputs)
            self._statistics = MislabelStatistics(
                self._num_samples, self._num_outputs, step.task, columns, sync_on_compute=False
            )
        needs_gradients = "self_influence" in self._statistics.columns
        self._statistics.update(
            block.ids,
            step.logits,
            block.targets,
            features=block.features,
            output_grads=output_grads(self._adapter, block.logits, block.targets) if needs_gradients else None,
            learning_rate=self._learning_rate,
        )
        self._samples.update(block)

    def _columns(self, task: Task, num_outputs: int) -> tuple[str, ...]:
        """What the score needs, and the predictions that labels are suggested from, where there is room."""
        room = self._settings.max_state_mb / 2
        try:
            return choose_columns([self._settings.score, "log_margin"], task, self._num_samples, num_outputs, room)
        except ValueError:
            return choose_columns([self._settings.score], task, self._num_samples, num_outputs, room)

    def _labels(self, block: TappedBlock) -> Tensor:
        assert self._statistics is not None
        labels = self._statistics.labels[block.ids]
        return labels[:, 0] if self._statistics.task is Task.BINARY else labels

    def _train_accuracy(self, task: Task) -> float | None:
        block = self._samples.compute()
        if block is None or task is not Task.CLASSIFICATION:
            return None
        return float((block.logits.argmax(1) == self._labels(block)).float().mean())

    def _has(self, name: str, averages: RunAverages) -> bool:
        needed = {"log_margin": "prediction", "knn": None}[name]
        return averages.neighbours is not None if needed is None else needed in averages.means

    def _notes(self) -> Sequence[str]:
        notes = []
        if self._tap is not None and self._tap.left_out:
            left_out = "; ".join(f"{number} of {reason}" for reason, number in self._tap.left_out.items())
            notes.append(f"suspects leave out visits of training samples: {left_out}")
        if self._num_references is not None:
            notes.append(f"neighbours were looked for among {self._num_references:,} samples, to keep to their time")
        if self._samples.share < 1:
            notes.append(f"features of {self._samples.share:.0%} of the samples are kept, to keep to `max_state_mb`")
        return notes

    def _flush(self) -> None:
        if self._tap is not None:
            self._tap.flush()

    def _new_samples(self) -> TappedSamples:
        return TappedSamples(int(self._settings.max_state_mb / 2 * 2**20), self._settings.seed)
