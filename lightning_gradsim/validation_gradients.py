"""Mean gradients of the head over the validation samples of each class, gathered while a validation runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.head_gradients import class_gradients, output_grads
from lightning_gradsim.head_search import has_row_a_sample
from lightning_gradsim.mislabel.visits import measure_visits
from lightning_gradsim.precision import raise_half
from lightning_gradsim.tasks import Task

Sums = tuple[Tensor, Tensor]
"""Sums of gradients ``[k, o, i + 1]``, and numbers of samples ``[k]``, float64."""


class ValidationGradients:
    """Takes the head's inputs and outputs of forwards in eval mode, whoever runs them.

    Index key: ``k`` class, ``o`` output of the head, ``i`` feature; the last column is that of the bias.

    Attributes:
        sums: What was gathered; ``None`` before the first batch.
    """

    def __init__(self) -> None:
        self.sums: Sums | None = None
        self._seen: tuple[Sequence[Any], Any] | None = None

    @contextmanager
    def watching(self, head: nn.Linear) -> Iterator[None]:
        """Keep what the last call of the head inside shows.

        Args:
            head: The head.

        Yields:
            Nothing.
        """
        handle = head.register_forward_hook(self._see)
        try:
            yield
        finally:
            handle.remove()

    def take(self, adapter: Adapter, batch: Any) -> None:
        """Gather the gradients of a batch that has been watched.

        Args:
            adapter: Reads batches; bound to the module.
            batch: The batch.
        """
        seen, self._seen = self._seen, None
        targets = adapter.split(batch)[1]
        if seen is None or not has_row_a_sample(*seen, len(targets)):
            return
        features, logits = raise_half(seen[0][0]), raise_half(seen[1])
        step = adapter.step_from_logits(logits, targets)
        visits = measure_visits(step.task, step.logits, targets, (), features=features)
        labels = torch.where(visits.usable, visits.labels.reshape(len(logits), -1)[:, 0], -1)
        number = 2 if step.task is Task.BINARY else logits.shape[1]
        means = class_gradients(features, output_grads(adapter, logits, targets), labels, number, bias=True)
        counts = torch.bincount(labels[visits.usable], minlength=number).double().cpu()
        sums = means.double().cpu() * counts[:, None, None]
        self.sums = (sums, counts) if self.sums is None else (self.sums[0] + sums, self.sums[1] + counts)

    def _see(self, layer: nn.Module, args: Sequence[Any], output: Any) -> None:
        copies = [part.detach().clone() for part in (*args, output) if isinstance(part, Tensor)]
        self._seen = copies[:-1], copies[-1] if copies else None


def merge_sums(parts: Sequence[Sums | None]) -> Tensor | None:
    """Mean gradients by class, of what several processes have gathered.

    Args:
        parts: What each has.

    Returns:
        Means, float32 ``[k, o, i + 1]``, zero for a class without samples; ``None`` if none has anything.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return None
    sums, counts = (torch.stack([part[place] for part in known]).sum(0) for place in (0, 1))
    return (sums / counts.clamp(min=1)[:, None, None]).float()
