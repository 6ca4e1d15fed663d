"""Sample ids of training batches, while the trainer draws them as it always does."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_gradsim.datasets import sample_ids
from lightning_gradsim.errors import BatchFormatError
from lightning_gradsim.recording_sampler import DrawnIndices, install, uninstall

WAY_OUT = "Let batches carry the ids and name their entry with `id_key=`"


class SampleIdRecorder:
    """Tells which samples a training batch holds.

    Life cycle: ``attach`` before the trainer makes its training loader, ``find_ids`` for every batch in turn,
    ``detach`` at the end.

    Args:
        id_key: Where batches carry sample ids: a key of a mapping or a place in a sequence. ``None`` where they carry
            none: ids are then what the loader's sampler draws.

    Attributes:
        reason: Why the ids of the batch asked for last are not known, in words; ``None`` if they are.
    """

    def __init__(self, id_key: str | int | None = None) -> None:
        self.reason: str | None = None
        self._id_key = id_key
        self._drawn = DrawnIndices()
        self._batch_samplers: weakref.WeakSet[BatchSampler] = weakref.WeakSet()
        self._strategy: Any = None
        self._indices = array("q")
        self._first_batch_idx = 0
        self._problem: str | None = None
        self._loader: Any = None
        self._ids = torch.empty(0, dtype=torch.long)

    def __reduce__(self) -> tuple[type[SampleIdRecorder], tuple[str | int | None]]:
        """Copies watch nothing, and hold neither trainer nor samplers."""
        return type(self), (self._id_key,)

    @property
    def are_carried(self) -> bool:
        """Whether batches carry the ids."""
        return self._id_key is not None

    def attach(self, trainer: Trainer) -> None:
        """Watch the samplers of training loaders from their making on.

        Args:
            trainer: The trainer, before it has made its training loader (``setup`` of ``stage="fit"``).
        """
        self.detach()
        if self._id_key is None:
            self._strategy = trainer.strategy
            # A loader may serve validation as well.
            self._drawn.is_due = lambda: trainer.training
            wrapper = _Processing(trainer, trainer.strategy.process_dataloader, self._watch)
            # On the instance: other trainers' strategies are none of ours.
            trainer.strategy.process_dataloader = wrapper  # type: ignore[method-assign]

    def detach(self) -> None:
        """Leave strategy and samplers as they were."""
        if self._strategy is not None:
            _unwrap(self._strategy, self._watch)
            self._strategy = None
        for batch_sampler in list(self._batch_samplers):
            uninstall(batch_sampler, self._drawn)
        self._batch_samplers.clear()
        self._drawn, self._indices, self._loader = DrawnIndices(), array("q"), None
        self._ids = torch.empty(0, dtype=torch.long)

    def find_ids(self, loaders: Sequence[Any], batch: Any, batch_idx: int, num_samples: int) -> Tensor | None:
        """The ids of a training batch.

        Args:
            loaders: All training loaders.
            batch: The batch.
            batch_idx: Its number in the epoch, as the trainer counts.
            num_samples: Number of its samples ``B``.

        Returns:
            Sample ids, int64 ``[B]`` on the CPU, or ``None`` where they are not known: ``reason`` says why.

        Raises:
            BatchFormatError: If batches do not carry ids where ``id_key`` says.
        """
        if self._id_key is not None:
            return self._carried_ids(batch, num_samples)
        if len(loaders) != 1 or loaders[0] is not self._loader:
            self._begin(loaders)
        self.reason = self._problem
        if self.reason is None and self._drawn.refused is not None:
            self.reason = f"the sampler draws {self._drawn.refused}, which is no index. {WAY_OUT}"
        if self.reason is not None:
            return None
        if self._indices is not self._drawn.indices:
            # A run that is resumed within an epoch counts on, but its loader begins anew.
            self._indices, self._first_batch_idx = self._drawn.indices, batch_idx
        batch_size = loaders[0].batch_sampler.batch_size
        start = (batch_idx - self._first_batch_idx) * batch_size
        positions = self._indices[start : start + batch_size]
        if len(positions) != num_samples:
            self.reason = (
                f"a batch holds {num_samples} samples where the sampler has drawn {len(positions)}: they are dropped, "
                f"added or joined on their way. {WAY_OUT}"
            )
            return None
        return self._ids[torch.frombuffer(positions, dtype=torch.long)] if positions else self._ids[:0]

    def _begin(self, loaders: Sequence[Any]) -> None:
        self._problem = self._find_problem(loaders)
        self._loader = None
        if self._problem is None and self._drawn.refused is None:
            self._loader, self._ids = loaders[0], sample_ids(loaders[0].dataset)

    def _watch(self, loader: Any) -> None:
        if isinstance(loader, DataLoader) and _problem_of(loader) is None:
            assert isinstance(loader.batch_sampler, BatchSampler)
            install(loader.batch_sampler, self._drawn)
            self._batch_samplers.add(loader.batch_sampler)

    def _find_problem(self, loaders: Sequence[Any]) -> str | None:
        if len(loaders) != 1:
            return f"training reads {len(loaders)} loaders at once. {WAY_OUT}"
        problem = _problem_of(loaders[0])
        if problem is None and loaders[0].batch_sampler not in self._batch_samplers:
            return f"the training loader was made before the callback could watch its sampler. {WAY_OUT}"
        return problem

    def _carried_ids(self, batch: Any, num_samples: int) -> Tensor:
        key = self._id_key
        form = f"`id_key={key!r}`"
        try:
            carried = batch[key]
        except (LookupError, TypeError) as error:
            known = f"the keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else f"{len(batch)} entries"
            raise BatchFormatError(
                f"A training batch has no entry for {form}; it has {known}. Name the entry with the sample ids."
            ) from error
        ids = carried if isinstance(carried, Tensor) else torch.as_tensor(carried)
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.shape != (num_samples,):
            raise BatchFormatError(
                f"The entry of {form} has the shape {tuple(ids.shape)} and dtype {ids.dtype} for {num_samples} "
                "samples. Expected one whole number a sample."
            )
        self.reason = None
        return ids.detach().to("cpu", torch.long)


class _Processing:
    """Stands for a strategy's ``process_dataloader``, and shows its results while training."""

    def __init__(self, trainer: Trainer, inner: Callable[[object], object], watch: Callable[[Any], None]) -> None:
        self._trainer, self.inner, self.watch = trainer, inner, watch

    def __call__(self, dataloader: object) -> object:
        processed = self.inner(dataloader)
        if self._trainer.training:
            self.watch(processed)
        return processed


def _unwrap(strategy: Any, watch: Callable[[Any], None]) -> None:
    """Take our own stand-in out, also from beneath that of another callback."""
    before, current = None, vars(strategy).get("process_dataloader")
    while isinstance(current, _Processing) and current.watch != watch:
        before, current = current, current.inner
    if not isinstance(current, _Processing):
        return
    if before is not None:
        before.inner = current.inner
    elif getattr(current.inner, "__func__", None) is getattr(type(strategy), "process_dataloader", None):
        del strategy.process_dataloader
    else:
        strategy.process_dataloader = current.inner


def _problem_of(loader: Any) -> str | None:
    """Why a loader's sampler does not tell the samples of its batches."""
    if not isinstance(loader, DataLoader):
        return f"the training loader is a `{type(loader).__name__}`, no `DataLoader`. {WAY_OUT}"
    if isinstance(loader.dataset, IterableDataset):
        return (
            f"the training data is an iterable dataset (`{type(loader.dataset).__name__}`), whose samples have no "
            f"index. {WAY_OUT}"
        )
    if loader.batch_sampler is None:
        return f"the training loader has `batch_size=None`: its batches are made by the dataset. {WAY_OUT}"
    if type(loader.batch_sampler) is not BatchSampler:
        return (
            f"the training loader has a batch sampler of its own (`{type(loader.batch_sampler).__name__}`). {WAY_OUT}"
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        return f"the training loader gives batches in whatever order its workers end (`in_order=False`). {WAY_OUT}"
    return None
