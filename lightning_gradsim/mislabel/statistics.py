"""Run-long statistics of every training sample, gathered visit by visit and merged over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_gradsim.errors import TrainingDataError
from lightning_gradsim.mislabel.visits import Visits, measure_visits
from lightning_gradsim.neighbours import NeighbourVotes
from lightning_gradsim.tasks import Task

UNSEEN = -1
SKIPPED = {
    "mixed": "visits with a mixed or smoothed target, which is no label of one class",
    "outside": "visits whose label is none of the classes",
    "non_finite": "visits with logits or features that are NaN or infinite",
    "relabelled": "visits with another label than the sample had before",
}
"""Visits that count for nothing, in words; ``relabelled`` ones do count, for the label of the first visit."""


class RunAverages:
    """Averages over the visits of a run, of every sample that was visited.

    Index key: ``n`` visited sample, ``c`` class, ``l`` label of a binary (one) or multi-label task.

    Attributes:
        task: Kind of task.
        sample_ids: Indices into the training dataset, rising, int64 ``[n]``.
        visits: How often each was visited, int64 ``[n]``.
        labels: Given labels: class indices int64 ``[n]``, active labels int64 ``[n, l]``, values float32 ``[n]``.
        means: Averages by column, float32, as ``Visits.values``.
        neighbours: Neighbour votes against the label, averaged over the rounds, ``[n]`` or ``[n, l]``; NaN for samples
            that no round had; ``None`` before the first round.
        skipped: Visits by reason of ``SKIPPED``, only those that occurred.
    """

    # No dataclass: torchmetrics takes those apart, and tensors of one entry with them.
    def __init__(
        self,
        task: Task,
        sample_ids: Tensor,
        visits: Tensor,
        labels: Tensor,
        means: Mapping[str, Tensor],
        neighbours: Tensor | None,
        skipped: Mapping[str, int],
    ) -> None:
        self.task = task
        self.sample_ids = sample_ids
        self.visits = visits
        self.labels = labels
        self.means = means
        self.neighbours = neighbours
        self.skipped = skipped


class MislabelStatistics(Metric):
    """Sums over the visits of a run, float32, one row a training sample; summed over ranks.

    Feed it with every training step (or with several steps' samples at once), before the update. A sample that is drawn
    several times counts as often; the order and the size of batches change nothing but rounding.

    Index key: ``n`` training sample, ``c`` class or label.

    Attributes:
        columns: What is summed, of ``visits.COLUMNS``.
        visits: Visits ``[n]``, int32.
        labels: Given labels, ``-1`` (in regression minus infinity) where unseen: int32 ``[n]``, int8 ``[n, l]``,
            float32 ``[n]``.
        neighbours: Weighted sums of neighbour votes ``[n]`` or ``[n, l]``, and ``rounds``, sums of the weights ``[n]``.

    Args:
        num_samples: Size of the training dataset ``N``.
        num_outputs: Logits a sample: classes ``C``, labels ``L``, or outputs of a regression.
        task: Kind of task.
        columns: What to sum, as ``scores.choose_columns`` says.
        sync_on_compute: Whether ``compute`` asks all processes, which all have to call it then.

    Example:
        >>> statistics = MislabelStatistics(num_samples=3, num_outputs=2)
        >>> statistics.update(torch.tensor([2, 0]), torch.tensor([[0.0, 2.0], [1.0, 0.0]]), torch.tensor([0, 0]))
        >>> averages = statistics.compute()
        >>> averages.sample_ids.tolist(), averages.means["margin"].tolist()
        ([0, 2], [1.0, -2.0])
    """

    full_state_update = False
    visits: Tensor
    labels: Tensor
    neighbours: Tensor
    rounds: Tensor
    mixed: Tensor
    outside: Tensor
    non_finite: Tensor
    relabelled: Tensor

    def __init__(
        self,
        num_samples: int,
        num_outputs: int,
        task: Task = Task.CLASSIFICATION,
        columns: Sequence[str] = ("margin", "loss", "prediction"),
        *,
        sync_on_compute: bool = True,
    ) -> None:
        super().__init__(compute_with_cache=False, sync_on_compute=sync_on_compute)
        self.num_samples, self.task, self.columns = num_samples, task, tuple(columns)
        shapes = column_shapes(task, num_outputs)
        labelled = () if task in (Task.CLASSIFICATION, Task.REGRESSION) else (num_outputs,)
        dtype = {Task.CLASSIFICATION: torch.int32, Task.REGRESSION: torch.float32}.get(task, torch.int8)
        self._unseen = -torch.inf if task is Task.REGRESSION else UNSEEN
        fills = {"labels": torch.tensor(self._unseen, dtype=dtype), "visits": torch.tensor(0, dtype=torch.int32)}
        self._shapes: dict[str, tuple[int, ...]] = {
            "visits": (),
            "labels": labelled,
            "neighbours": labelled,
            "rounds": (),
        }
        self._shapes |= {column: shapes[column] for column in self.columns}
        # torchmetrics keeps a copy of every default: a number, that ``reset`` makes a column of, takes no memory.
        for name in self._shapes:
            reduce = "max" if name == "labels" else "sum"
            self.add_state(name, fills.get(name, torch.tensor(0.0)), dist_reduce_fx=reduce, persistent=True)
        for reason in SKIPPED:
            self.add_state(reason, torch.tensor(0), dist_reduce_fx="sum", persistent=True)
        self._allocate()

    @property
    def update_called(self) -> bool:
        """Always ``True``: statistics that were loaded count as much as those gathered here."""
        return True

    @property
    def has_neighbours(self) -> bool:
        """Whether there was a round of neighbours."""
        return bool(self.rounds.any())

    def update(
        self,
        ids: Tensor,
        logits: Tensor,
        targets: Tensor,
        *,
        features: Tensor | None = None,
        output_grads: Tensor | None = None,
        learning_rate: float = 1.0,
        class_gradients: Tensor | None = None,
    ) -> None:
        """Take in the samples of a training step.

        Args:
            ids: Sample ids ``[b]``, int64, repeats allowed.
            logits: Outputs of the training forward, before the update.
            targets: Targets.
            features: Input of the head ``[b, d]``, where a column needs it.
            output_grads: Gradients of the losses by the logits; of cross-entropy if ``None``.
            learning_rate: Of this step, for ``self_influence``.
            class_gradients: Mean validation gradients, for ``influence``.

        Raises:
            TrainingDataError: If an id lies outside the dataset.
        """
        if not len(ids):
            return
        self._check_ids(ids)
        ids = ids.to(self.visits.device)
        visits = measure_visits(
            self.task,
            logits,
            targets,
            self.columns,
            features=features,
            output_grads=output_grads,
            learning_rate=learning_rate,
            class_gradients=class_gradients,
        )
        self._count(ids, visits)
        for column, value in visits.values.items():
            total: Tensor = getattr(self, column)
            total.index_add_(0, ids, value.to(total))

    def add_neighbours(self, ids: Tensor, votes: NeighbourVotes, weight: float = 1.0) -> None:
        """Take in a round of neighbours, each sample by the rank that has it.

        What is kept of a round is ``disagreement + margin``: how many neighbours contradict, and how much they agree
        on another label. Votes by the features of another layer may be added to a round, each with its share of
        the weight.

        Args:
            ids: Sample ids ``[b]``, each once.
            votes: Of these samples.
            weight: Epochs since the last round, so that early rounds, which are closer to one another, don't count for
                more.

        Raises:
            TrainingDataError: If an id lies outside the dataset.
        """
        self._check_ids(ids)
        ids = ids.to(self.visits.device)
        values = weight * (votes.disagreement + votes.margin).to(self.neighbours)
        self.neighbours.index_add_(0, ids, values.reshape(len(ids), *self.neighbours.shape[1:]))
        self.rounds.index_add_(0, ids, torch.full_like(ids, weight, dtype=torch.float32))

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._allocate()

    def compute(self) -> RunAverages:
        """Averages over the visits of all ranks, on the CPU.

        Returns:
            The averages of the samples that were visited.
        """
        sample_ids = self.visits.nonzero()[:, 0]
        visits = self.visits[sample_ids]
        means = {}
        for column in self.columns:
            total: Tensor = getattr(self, column)[sample_ids]
            means[column] = total.div_(visits.reshape(-1, *[1] * (total.ndim - 1))).cpu()
        neighbours = None
        if self.has_neighbours:
            neighbours = self.neighbours[sample_ids]
            neighbours = (neighbours / self.rounds[sample_ids].reshape(-1, *[1] * (neighbours.ndim - 1))).cpu()
        labels = self.labels[sample_ids].cpu()
        return RunAverages(
            self.task,
            sample_ids.cpu(),
            visits.long().cpu(),
            labels if self.task is Task.REGRESSION else labels.long(),
            means,
            neighbours,
            {reason: number for reason in SKIPPED if (number := int(getattr(self, reason)))},
        )

    def _count(self, ids: Tensor, visits: Visits) -> None:
        usable = visits.usable.to(self.visits.device)
        self.visits.index_add_(0, ids, usable.to(torch.int32))
        given = visits.labels.to(self.labels)
        before = self.labels[ids]
        seen = (before > self._unseen).reshape(len(ids), -1)[:, 0]
        differs = (before != given).reshape(len(ids), -1).any(1)
        self.relabelled += (usable & seen & differs).sum()
        shape = -1, *[1] * (before.ndim - 1)
        # The largest of what a batch has for a sample, so that repeats in any order give the same.
        fresh = torch.where((usable & ~seen).reshape(shape), given, self._unseen)
        self.labels.scatter_reduce_(0, ids.reshape(shape).expand_as(fresh), fresh, "amax")
        self.mixed += visits.mixed.sum().to(self.mixed)
        self.outside += visits.outside.sum().to(self.outside)
        self.non_finite += visits.non_finite.sum().to(self.non_finite)

    def _check_ids(self, ids: Tensor) -> None:
        lowest, highest = ids.aminmax()
        if bool((lowest < 0) | (highest >= self.num_samples)):
            raise TrainingDataError(
                f"Sample ids from {int(lowest)} to {int(highest)} for a training dataset of {self.num_samples} samples "
                f"(0 to {self.num_samples - 1}). Check what the ids of a batch are taken from."
            )

    def _allocate(self) -> None:
        for name, shape in self._shapes.items():
            fill: Tensor = getattr(self, name)
            setattr(self, name, fill.expand(self.num_samples, *shape).clone(memory_format=torch.contiguous_format))


def column_shapes(task: Task, num_outputs: int) -> dict[str, tuple[int, ...]]:
    """Shape of one sample's entry in each column.

    Args:
        task: Kind of task.
        num_outputs: Logits a sample.

    Returns:
        Shapes by column, without those that the task does not have.
    """
    single: dict[str, tuple[int, ...]] = {"error_norm": (), "self_influence": (), "influence": ()}
    if task is Task.CLASSIFICATION:
        return {"margin": (), "loss": (), "prediction": (num_outputs,), **single}
    if task is Task.REGRESSION:
        return {"loss": (), "prediction": (1,), "self_influence": ()}
    each = (num_outputs,)
    return {"margin": each, "loss": each, "prediction": each, **single}


def bytes_a_sample(task: Task, num_outputs: int, columns: Iterable[str]) -> int:
    """Memory of the statistics, without neighbours.

    Args:
        task: Kind of task.
        num_outputs: Logits a sample.
        columns: What is summed.

    Returns:
        Bytes a sample: 4 for visits, 4 for the label (one for each of a multi-label task), 4 for each entry.
    """
    shapes = column_shapes(task, num_outputs)
    labels = 4 if task in (Task.CLASSIFICATION, Task.REGRESSION) else num_outputs
    return 4 + labels + sum(4 * torch.Size(shapes[column]).numel() for column in columns)
