"""Queries of one validation, collected while its batches go by, with their places in the datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.batches import copy_batch
from lightning_gradsim.errors import LabelRangeError
from lightning_gradsim.guard import evaluating
from lightning_gradsim.queries import QuerySelection
from lightning_gradsim.train_pass import SampleReader, ids_in_order, make_reader


class QueryCollector:
    """Runs validation batches once more for their per-sample losses, and keeps what is misclassified.

    What fails while it collects is kept until somebody asks for the queries: only then do all processes meet.
    """

    def __init__(self, loaders: Sequence[Any], selection: QuerySelection) -> None:
        self._selection = selection
        self._failure: Exception | None = None
        self._loaders = loaders
        self._ids: dict[int, Tensor | None] = dict.fromkeys(range(len(loaders)))
        self._num_seen = dict.fromkeys(self._ids, 0)
        try:
            self._ids = {i: ids_in_order(each) for i, each in enumerate(loaders)}
        except Exception as error:
            self._failure = error

    def collect(
        self,
        adapter: Adapter,
        module: nn.Module,
        batch: Any,
        dataloader_idx: int,
        forward_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Take in a validation batch.

        Args:
            adapter: Reads batches; bound to the module.
            module: The user's module; it is left as found.
            batch: The batch, on the module's device.
            dataloader_idx: Which validation loader it came from.
            forward_context: The precision context of the run.
        """
        if self._failure is None:
            try:
                self._collect(adapter, module, batch, dataloader_idx, forward_context)
            except Exception as error:
                self._failure = error

    def result(self) -> QuerySelection:
        """The queries of this process.

        Returns:
            The selection.

        Raises:
            Exception: What failed while they were collected.
        """
        if self._failure is not None:
            raise self._failure
        return self._selection

    def readers(self, dataloader_indices: Iterable[int]) -> dict[int, SampleReader]:
        """Readers of those validation datasets whose samples have known places.

        Args:
            dataloader_indices: Which loaders are asked for.

        Returns:
            The readers by loader.
        """
        return {i: make_reader(self._loaders[i]) for i in dataloader_indices if self._ids[i] is not None}

    def _collect(
        self,
        adapter: Adapter,
        module: nn.Module,
        batch: Any,
        dataloader_idx: int,
        forward_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        start, ids = self._num_seen[dataloader_idx], self._ids[dataloader_idx]
        with evaluating(module), forward_context():
            batch = copy_batch(batch)  # in `trainer.validate` it is made of inference tensors
            try:
                step = adapter.step(module, batch)
            except LabelRangeError as error:
                places = [start + row for row in error.rows]
                named = f"samples {ids[places].tolist()}" if ids is not None else f"samples at places {places}"
                raise LabelRangeError(f"Validation {named} of loader {dataloader_idx}: {error}", error.rows) from error
        stop = self._num_seen[dataloader_idx] = start + len(step.losses)
        self._selection.update(adapter, batch, step, None if ids is None else ids[start:stop], dataloader_idx)
