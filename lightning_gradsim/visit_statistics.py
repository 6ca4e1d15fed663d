"""What visits tell of every training sample: sums over all of them, the newest features, and suspects from both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gradsim.adapter import Step
from lightning_gradsim.arguments import check_choice, check_positive
from lightning_gradsim.mislabel import (
    SCORES,
    MislabelStatistics,
    RunAverages,
    choose_columns,
    find_cautions,
    judge,
)
from lightning_gradsim.neighbours import neighbour_votes
from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.tapped_samples import TappedBlock, TappedSamples
from lightning_gradsim.tasks import Task

PARTS = ("log_margin", "knn")
"""Scores that stand beside the one that ranks, where they are known."""
NEIGHBOURS = 25
NEIGHBOUR_SHARE = 0.03
"""Share of the training time since the last round that a round of neighbours may take."""
FLOPS_PER_SECOND = 4e10
"""What two slow cores do in products of such sizes: with it, a share of the time becomes a number of operations."""
SMALLEST_PROBABILITY = 1e-7
"""Where models give probabilities, those that a logit is finite for: what float32 can tell from 0 and 1."""


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
        check_choice("mislabel_score", self.score, tuple(SCORES))
        check_positive("max_state_mb", self.max_state_mb)


class VisitStatistics:
    """Statistics of the visits of all samples, and the newest features of as many as there is room for.

    Args:
        settings: How training steps are watched.
        num_samples: One more than the largest sample id.

    Attributes:
        num_samples: The same.
        samples: The newest visit of each sample.
    """

    def __init__(self, settings: InRunSettings, num_samples: int) -> None:
        self.samples = TappedSamples(int(settings.max_state_mb / 2 * 2**20), settings.seed)
        self._settings = settings
        self.num_samples = num_samples
        self._num_outputs = 0
        self._statistics: MislabelStatistics | None = None
        self._num_references: int | None = None

    @property
    def kind(self) -> tuple[Task, int] | None:
        """Kind of task, and number of logits a sample; ``None`` before the first visit."""
        return None if self._statistics is None else (self._statistics.task, self._num_outputs)

    @property
    def columns(self) -> tuple[str, ...]:
        """What is summed; empty before the first visit."""
        return () if self._statistics is None else self._statistics.columns

    def update(
        self,
        ids: Tensor,
        step: Step,
        *,
        features: Tensor | None = None,
        output_grads: Tensor | None = None,
        learning_rate: float = 1.0,
        class_gradients: Tensor | None = None,
    ) -> None:
        """Take in visits.

        Args:
            ids: Sample ids, int64 ``[B]``.
            step: Logits and targets.
            features: Input of the head ``[B, i]``.
            output_grads: Gradients of the losses by the logits ``[B, o]``.
            learning_rate: Of the step.
            class_gradients: Mean gradients of the head over the validation samples of each class.
        """
        self.prepare(step)
        assert self._statistics is not None
        logits = torch.logit(step.logits, SMALLEST_PROBABILITY) if step.are_probabilities else step.logits
        self._statistics.update(
            ids,
            logits,
            step.targets,
            features=features,
            output_grads=output_grads,
            learning_rate=learning_rate,
            class_gradients=class_gradients,
        )

    def prepare(self, step: Step) -> None:
        """Choose what is summed, if that was not done before.

        Args:
            step: Any step: it tells the kind of task and the number of logits.
        """
        if self._statistics is None:
            self._num_outputs = step.logits[:1].numel()
            columns = self._choose_columns(step.task, self._num_outputs)
            self._statistics = MislabelStatistics(
                self.num_samples, self._num_outputs, step.task, columns, sync_on_compute=False
            )

    def look_for_neighbours(self, seconds: float | None, weight: float) -> None:
        """A round of neighbours among the newest features; ``NEIGHBOURS`` samples or fewer make none.

        Args:
            seconds: Time since the last round, of which a share may be taken; ``None`` for no limit.
            weight: Weight of the round.
        """
        block = self.samples.compute()
        if block is None or len(block) <= NEIGHBOURS or self._statistics is None:
            return
        votes = neighbour_votes(
            block.features,
            self._labels(block),
            k=NEIGHBOURS,
            max_flops=None if seconds is None else NEIGHBOUR_SHARE * seconds * FLOPS_PER_SECOND,
            seed=self._settings.seed,
        )
        self._statistics.add_neighbours(block.ids, votes, weight=weight)
        self._num_references = votes.num_references if votes.num_references < len(block) else None

    def suspects(self, validation_accuracy: float | None) -> tuple[SuspectTable, tuple[str, ...]] | None:
        """All samples that were visited, the most suspect first, and what limits the list.

        Args:
            validation_accuracy: In [0, 1]; ``None`` where unknown.

        Returns:
            The table and sentences; ``None`` where nothing is known.
        """
        if self._statistics is None:
            return None
        averages = self._statistics.compute()
        if not len(averages.sample_ids):
            return None
        parts = [name for name in PARTS if name != self._settings.score and self._has(name, averages)]
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

    def state_dict(self, *, with_samples: bool = True) -> dict[str, Any]:
        """Plain values and tensors.

        Args:
            with_samples: Whether the newest visits are in it, too.

        Returns:
            The state; empty before the first visit.
        """
        statistics = self._statistics
        if statistics is None:
            return {}
        state: dict[str, Any] = {"samples": self.samples.state_dict()} if with_samples else {}
        state["statistics"] = {
            "num_samples": statistics.num_samples,
            "num_outputs": self._num_outputs,
            "task": statistics.task.value,
            "columns": list(statistics.columns),
            "sums": dict(statistics.state_dict()),
        }
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, is_owner: bool) -> bool:
        """Go on from a state.

        Args:
            state: The state.
            is_owner: Whether this process holds the sums of all; the others begin at zero.

        Returns:
            Whether it was taken over: not if it is empty, of another dataset, or lacks what the score needs.
        """
        saved = state.get("statistics")
        if saved is None or saved["num_samples"] != self.num_samples:
            return False
        wanted = self._choose_columns(Task(saved["task"]), int(saved["num_outputs"]))
        if set(wanted) - set(saved["columns"]):  # another score, which needs what was not summed
            return False
        if "samples" in state:
            self.samples.load_state_dict(state["samples"])
        self._num_outputs = int(saved["num_outputs"])
        self._statistics = MislabelStatistics(
            saved["num_samples"], self._num_outputs, Task(saved["task"]), saved["columns"], sync_on_compute=False
        )
        self._statistics.load_state_dict(saved["sums"])
        if not is_owner:
            self._statistics.reset()
        return True

    def merge(self, states: Sequence[Mapping[str, Any]], *, is_owner: bool) -> None:
        """Become what several have gathered together.

        Args:
            states: Of each of them, at least one that is not empty.
            is_owner: Whether this process holds the sums of all; the others begin at zero.
        """
        states = [state for state in states if state]
        sums = [state["statistics"]["sums"] for state in states]
        merged = {}
        for name, own in sums[0].items():
            parts = torch.stack([each[name] for each in sums])
            merged[name] = parts.amax(0) if name == "labels" else parts.sum(0, dtype=own.dtype)
        first = {**states[0]["statistics"], "sums": merged}
        self.load_state_dict({"statistics": first}, is_owner=is_owner)
        self.samples = TappedSamples(int(self._settings.max_state_mb / 2 * 2**20), self._settings.seed)
        self.samples.merge([state["samples"] for state in states if "samples" in state])

    def _choose_columns(self, task: Task, num_outputs: int) -> tuple[str, ...]:
        """What the score needs, and the predictions that labels are suggested from, where there is room."""
        room = self._settings.max_state_mb / 2
        try:
            return choose_columns([self._settings.score, "log_margin"], task, self.num_samples, num_outputs, room)
        except ValueError:
            return choose_columns([self._settings.score], task, self.num_samples, num_outputs, room)

    def _labels(self, block: TappedBlock) -> Tensor:
        assert self._statistics is not None
        labels = self._statistics.labels[block.ids]
        return labels[:, 0] if self._statistics.task is Task.BINARY else labels

    def _train_accuracy(self, task: Task) -> float | None:
        block = self.samples.compute()
        if block is None or task is not Task.CLASSIFICATION:
            return None
        return float((block.logits.argmax(1) == self._labels(block)).float().mean())

    def _has(self, name: str, averages: RunAverages) -> bool:
        needed = {"log_margin": "prediction", "knn": None}[name]
        return averages.neighbours is not None if needed is None else needed in averages.means

    def _notes(self) -> Sequence[str]:
        notes = []
        if self._num_references is not None:
            notes.append(f"neighbours were looked for among {self._num_references:,} samples, to keep to their time")
        if self.samples.share < 1:
            notes.append(f"features of {self.samples.share:.0%} of the samples are kept, to keep to `max_state_mb`")
        return notes
