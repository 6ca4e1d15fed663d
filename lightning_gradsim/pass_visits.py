"""Visits of training samples by passes, for runs whose training steps tell nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gradsim.adapter import Step
from lightning_gradsim.factors import Factors, OuterFactors
from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.tapped_samples import TappedBlock
from lightning_gradsim.tasks import Task
from lightning_gradsim.visit_statistics import InRunSettings, VisitStatistics

NOT_BY_VISITS = ("self_influence", "influence")
"""Scores from gradients. A pass has the first one itself, of whatever layers were chosen."""
NO_LAYER = ""
NO_NEIGHBOURS = "there are no neighbours, as none of the chosen layers sees one vector a sample"


class PassVisits:
    """Statistics of passes: each is one visit of every sample that it reads, and a round of neighbours among them.

    Life cycle: ``begin_run``; for every pass ``begin_pass``, ``see`` for each of its batches, ``state_dict_of_pass``,
    and, if the pass came to its end everywhere, ``end_pass`` with the states of all processes.

    Args:
        settings: How training steps are watched.

    Attributes:
        reason: Why passes tell nothing, either, in words.
    """

    def __init__(self, settings: InRunSettings) -> None:
        self.reason: str | None = None
        self._settings = settings
        self._total: VisitStatistics | None = None
        self._current: VisitStatistics | None = None
        self._layer: str | None = None
        self._state: Mapping[str, Any] = {}
        self._is_of_training = False

    def begin_run(self, state: Mapping[str, Any]) -> None:
        """Forget what was before.

        Args:
            state: What to go on from; may be empty.
        """
        self.reason, self._state, self._total, self._current = None, state, None, None

    def begin_pass(self, num_samples: int, *, is_training: bool) -> bool:
        """Look at what the next pass reads.

        Args:
            num_samples: One more than the largest sample id.
            is_training: Whether the pass belongs to a training run. Others, of which each may be of other weights, are
                not joined to one another, and do not count after those of a run.

        Returns:
            Whether it is to be looked at.
        """
        self._current = None
        is_done = not is_training and self._is_of_training and self._total is not None
        if self.reason is not None or is_done or self._settings.score in NOT_BY_VISITS:
            return False
        if self._total is None or not is_training or self._total.num_samples != num_samples:
            self._total = VisitStatistics(self._settings, num_samples)
            if is_training:
                self._total.load_state_dict(self._state, is_owner=True)
            self._state = {}
        self._is_of_training = is_training
        self._current, self._layer = VisitStatistics(self._settings, num_samples), None
        return True

    def see(self, ids: Tensor, step: Step, factors: Mapping[str, Factors]) -> None:
        """Take in samples of the pass.

        Args:
            ids: Sample ids, int64 ``[B]``.
            step: Their step.
            factors: Factors of their gradients by layer.
        """
        if self._current is None or not len(ids):
            return
        if step.task is Task.REGRESSION and (step.logits[:1].numel() != 1 or step.targets[:1].numel() != 1):
            self.give_up(f"outputs of shape {tuple(step.logits.shape)} have no single label a sample")
            return
        self._current.update(ids, step)
        features = self._features(step, factors)
        if features is None:
            return
        logits = step.logits.detach().reshape(len(ids), -1).cpu()
        half = features.detach().to("cpu", torch.float16)
        block = TappedBlock(ids, half, logits, step.targets.cpu(), torch.zeros_like(ids), half)
        self._current.samples.update(block.rows(half.isfinite().all(1) & logits.half().isfinite().all(1)))

    def give_up(self, reason: str) -> None:
        """Look at no further passes, and forget those before.

        Args:
            reason: Why.
        """
        self.reason, self._total, self._current, self._state = reason, None, None, {}

    def state_dict_of_pass(self) -> tuple[str | None, Mapping[str, Any]]:
        """Why the pass tells nothing, or what it has shown: for ``end_pass`` of all processes."""
        current, self._current = self._current, None
        return self.reason, {} if current is None else current.state_dict()

    def end_pass(self, states: Sequence[tuple[str | None, Mapping[str, Any]]], seconds: float | None) -> None:
        """Count a pass, and look for neighbours among what it has read.

        Args:
            states: What ``state_dict_of_pass`` gave on each process.
            seconds: Time since the last pass, of which neighbours may take a share; ``None`` for no limit.
        """
        reasons = [reason for reason, _ in states if reason is not None]
        if reasons:
            self.give_up(reasons[0])
        shown = [state for _, state in states if state]
        if self._total is None or not shown:
            return
        self._total.merge([self._total.state_dict(with_samples=False), *shown], is_owner=True)
        self._total.look_for_neighbours(seconds, weight=1)

    def suspects(self, validation_accuracy: float | None) -> tuple[SuspectTable, tuple[str, ...]] | None:
        """All samples that passes have read, the most suspect first, and what limits the list.

        Args:
            validation_accuracy: In [0, 1]; ``None`` where unknown.

        Returns:
            The table and sentences; ``None`` where nothing is known.
        """
        found = None if self._total is None else self._total.suspects(validation_accuracy)
        if found is None or self._layer != NO_LAYER:
            return found
        return found[0], (*found[1], NO_NEIGHBOURS)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors; empty before the first pass."""
        if self._total is None or not self._is_of_training:
            return dict(self._state)
        return self._total.state_dict(with_samples=False)

    def _features(self, step: Step, factors: Mapping[str, Factors]) -> Tensor | None:
        """Inputs of the head, or of the last layer that sees one vector a sample, ``[B, i]``."""
        if self._layer is None:
            vectors = {name: each for name, each in factors.items() if _sees_vectors(each)}
            num_outputs = step.logits[:1].numel()
            heads = [name for name, each in vectors.items() if each.output_grads.shape[-1] == num_outputs]
            self._layer = (heads or list(vectors) or [NO_LAYER])[-1]
        found = factors.get(self._layer)
        if not isinstance(found, OuterFactors) or found.activations is None or not _sees_vectors(found):
            return None
        return found.activations[:, 0, 0]


def _sees_vectors(factors: Factors) -> bool:
    if not isinstance(factors, OuterFactors) or factors.activations is None:
        return False
    return factors.num_positions == 1 and factors.num_groups == 1
