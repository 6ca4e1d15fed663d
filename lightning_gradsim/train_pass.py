"""Ordered reading of training samples with their ids, through a loader of our own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from lightning_gradsim.arguments import with_article
from lightning_gradsim.batches import tensors_of
from lightning_gradsim.datasets import Relabelled, sample_ids
from lightning_gradsim.errors import TrainingDataError

PASS_AS = "`train_data=` to `GradSimCallback`"
WAY_OUT = f"Pass a map-style dataset or a `DataLoader` over one as {PASS_AS}."
FROM_WORKER = "Caught "
"""How torch begins the message of an exception that a worker has raised."""
DEFAULT_BATCH_SIZE = 64
RUNS_A_SHARE = 4
"""Runs of neighbours that a process's share has at least."""


@dataclass(frozen=True, eq=False)
class SampleReader:
    """A map-style dataset, read by sample id in batches of our own, in a fixed order.

    The user's loader is never iterated: its workers, its sampler and the global random numbers stay as they are. The
    dataset is read in worker processes, so that state inside the dataset object is not touched either, unless it is
    known to be pure (tensors) or workers would have to be spawned and the user's own loader has none.

    Attributes:
        dataset: The dataset.
        ids: Sample id of every position that is read, int64 ``[N]``, each id once.
        positions: Position in the dataset of every id, int64 ``[N]``.
        batch_size: Samples a batch.
        options: Further arguments for ``DataLoader``.
        pass_as: As what a user passes other samples, in words.
    """

    dataset: Dataset[Any]
    ids: Tensor
    positions: Tensor
    batch_size: int
    options: Mapping[str, Any]
    pass_as: str = PASS_AS

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.ids)

    @property
    def reads_in_process(self) -> bool:
        """Whether the dataset is read in the training process although it may hold state."""
        return self.options["num_workers"] == 0 and not _is_pure(self.dataset)

    def choose(self, indices: Tensor) -> SampleReader:
        """A reader of some of the samples.

        Args:
            indices: Indices into ``ids``, int64, in the order in which they shall be read.

        Returns:
            The reader.
        """
        return replace(self, ids=self.ids[indices], positions=self.positions[indices])

    def share(self, rank: int, world_size: int) -> SampleReader:
        """A reader of one process's share of the samples.

        Shares are made of runs of neighbours, which are read faster than single samples where they lie side by side in
        a file; but of several runs, spread over the dataset, so that none has all the long ones.

        Args:
            rank: Which of the processes.
            world_size: How many there are.

        Returns:
            The reader, without samples where there are too few. Every sample is in exactly one share.
        """
        run = max(1, min(self.batch_size, len(self) // (RUNS_A_SHARE * world_size)))
        return self.choose((torch.arange(len(self)) // run % world_size == rank).nonzero().flatten())

    def batches(self) -> Iterator[tuple[Tensor, Any]]:
        """All samples in order.

        Yields:
            Pairs of sample ids ``[B]`` and the collated batch, on the CPU.

        Raises:
            TrainingDataError: If the dataset fails; the sample is named.
        """
        if not len(self):
            return
        batches = iter(self._loader(self.positions, self.batch_size, self.options))
        for start, ids in zip(range(0, len(self), self.batch_size), self.ids.split(self.batch_size), strict=True):
            try:
                batch = next(batches)
            except Exception as error:
                # Its workers end now: left to the garbage collector, they wait for five seconds.
                del batches
                clear_frames(error.__traceback__)
                raise TrainingDataError(self._what_failed(start, error)) from error
            yield ids, batch

    def _loader(self, positions: Tensor, batch_size: int, options: Mapping[str, Any]) -> DataLoader[Any]:
        return DataLoader(
            self.dataset,
            batch_sampler=BatchSampler(positions.tolist(), batch_size, drop_last=False),
            # Worker seeds come from here; without it they would be drawn from the global generator.
            generator=torch.Generator().manual_seed(0),
            **options,
        )

    def _what_failed(self, start: int, error: Exception) -> str:
        """Which sample it is: they are read once more, one at a time."""
        kind, num_workers = f"`{type(self.dataset).__name__}`", self.options["num_workers"]
        repair = f"Repair it, or pass other data as {self.pass_as}."
        # A worker that dies says nothing of where, and may have been some batches ahead.
        num_batches = 1 if str(error).startswith(FROM_WORKER) else 1 + 2 * num_workers
        rows = slice(start, start + self.batch_size * num_batches)
        one_ahead = {"num_workers": 1, "prefetch_factor": 1} if num_workers else {}
        sample_ids = iter(self.ids[rows].tolist())
        try:
            for _ in self._loader(self.positions[rows], 1, {**self.options, **one_ahead}):
                next(sample_ids)
        except Exception as own:
            clear_frames(own.__traceback__)
            return f"Sample {next(sample_ids)} of {kind} cannot be read: {_in_words(own)}. {repair}"
        ids = self.ids[start : start + self.batch_size].tolist()
        return f"Samples {ids[:10]} of {kind} can be read one by one, but not as a batch: {_in_words(error)}. {repair}"

    def known(self, sample_ids: Sequence[int]) -> list[int]:
        """Those of some ids that this reader has, in their order."""
        has = torch.isin(torch.tensor(sample_ids, dtype=torch.long), self.ids).tolist()
        return [sample_id for sample_id, is_known in zip(sample_ids, has, strict=True) if is_known]

    def only(self, sample_ids: Sequence[int]) -> SampleReader:
        """A reader of those samples that have one of some ids, in its own order."""
        has = torch.isin(self.ids, torch.tensor(sample_ids, dtype=torch.long))
        return self.choose(has.nonzero().flatten())

    def lookup(self, sample_ids: Sequence[int]) -> SampleReader:
        """A reader of the given samples, one a batch.

        Args:
            sample_ids: Ids that this reader has.

        Returns:
            The reader, in the given order.
        """
        sorted_ids, order = self.ids.sort()
        indices = order[torch.searchsorted(sorted_ids, torch.tensor(sample_ids, dtype=torch.long))]
        return replace(self, ids=self.ids[indices], positions=self.positions[indices], batch_size=1)


def make_reader(
    source: Any, name: str = "the training data", batch_size: int | None = None, pass_as: str = PASS_AS
) -> SampleReader:
    """A reader of what the user trains with.

    Args:
        source: A map-style dataset, or a ``DataLoader`` over one, whose ``collate_fn``, ``worker_init_fn``,
            ``pin_memory`` and batch size are taken over.
        name: What to call the source in messages.
        batch_size: Samples a batch; by default the loader's, else 64.
        pass_as: As what a user passes it, in messages.

    Returns:
        The reader of all samples, each id once.

    Raises:
        TrainingDataError: If samples cannot be read by index, or there are none.
    """
    way_out = WAY_OUT.replace(PASS_AS, pass_as)
    loader = source if isinstance(source, DataLoader) else None
    dataset = source.dataset if loader is not None else source
    if isinstance(dataset, IterableDataset):
        raise TrainingDataError(
            f"{_capital(name)} is an iterable dataset (`{type(dataset).__name__}`), whose samples have no index. "
            f"{way_out}"
        )
    if (loader is None and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))) or _is_collection(
        dataset
    ):
        raise TrainingDataError(
            f"{_capital(name)} is {with_article(f'`{type(source).__name__}`')}. Expected one `DataLoader` or map-style "
            f"dataset. {way_out}"
        )
    if loader is not None and loader.batch_sampler is None:
        raise TrainingDataError(
            f"{_capital(name)} is a `DataLoader` with `batch_size=None`, whose batches are made by the dataset, so "
            f"single samples cannot be read. {way_out}"
        )
    if not hasattr(dataset, "__len__") or len(dataset) == 0:
        raise TrainingDataError(f"{_capital(name)} has no samples. {way_out}")
    ids, positions = _first_of_each(sample_ids(dataset))
    if loader is not None and isinstance(loader.sampler, SubsetRandomSampler):
        drawn = torch.isin(positions, torch.as_tensor(list(loader.sampler.indices), dtype=torch.long))
        ids, positions = ids[drawn], positions[drawn]
    size = batch_size or (loader and loader.batch_size) or DEFAULT_BATCH_SIZE
    return SampleReader(dataset, ids, positions, size, _loader_options(loader, dataset), pass_as)


def is_in_order(loader: Any) -> bool:
    """Whether a validation loader gives the samples of a map-style dataset in the order of their index."""
    return _has_plain_batches(loader) and type(loader.sampler) is SequentialSampler


def ids_in_order(loader: Any) -> Tensor | None:
    """Sample ids in the order in which this process gets them from a validation loader.

    Args:
        loader: The loader.

    Returns:
        Ids, int64, or ``None`` where the order is not known. A ``DistributedSampler`` repeats the first samples to give
        every process the same number: their ids occur once more then, on another process.
    """
    if is_in_order(loader):
        return sample_ids(loader.dataset)
    if not _has_plain_batches(loader) or not _is_distributed_in_order(loader.sampler):
        return None
    sampler = loader.sampler
    positions = sampler.rank + sampler.num_replicas * torch.arange(len(sampler))
    return sample_ids(loader.dataset)[positions % len(sampler.dataset)]


def differs_on_second_read(reader: SampleReader, num_samples: int = 4) -> bool:
    """Whether reading a sample twice gives two different samples (random augmentation).

    Args:
        reader: The reader.
        num_samples: How many samples, spread over the dataset, are read twice.

    Returns:
        Whether any tensor of any of them differs.
    """
    chosen = torch.linspace(0, len(reader) - 1, min(num_samples, len(reader))).long()
    twice = reader.lookup(reader.ids[torch.cat([chosen, chosen])].tolist())
    samples = [list(tensors_of(batch)) for _, batch in twice.batches()]
    first, second = samples[: len(chosen)], samples[len(chosen) :]
    return any(
        not torch.equal(left.nan_to_num(), right.nan_to_num())
        if left.is_floating_point()
        else not torch.equal(left, right)
        for lefts, rights in zip(first, second, strict=True)
        for left, right in zip(lefts, rights, strict=True)
    )


def known_labels(reader: SampleReader) -> Tensor | None:
    """Class indices of a reader's samples, where the dataset holds them all at hand.

    Args:
        reader: The reader.

    Returns:
        int64 ``[N]`` from a ``TensorDataset``'s last tensor or a dataset's ``targets``, through ``Subset``; else
        ``None``.
    """
    dataset: Any = reader.dataset
    positions = reader.positions
    while type(dataset) is Subset:
        positions = torch.as_tensor(dataset.indices, dtype=torch.long)[positions]
        dataset = dataset.dataset
    values = dataset.tensors[-1] if type(dataset) is TensorDataset else getattr(dataset, "targets", None)
    if values is None or len(values) != len(dataset):
        return None
    try:
        labels = torch.as_tensor(values)
    except (TypeError, ValueError):  # names of classes, say: then the labels are read with the samples
        return None
    return labels[positions].long() if labels.ndim == 1 and not labels.is_floating_point() else None


def stratified_indices(labels: Tensor | None, num_samples: int, size: int, seed: int) -> Tensor:
    """A seeded choice of samples in which every class keeps its share.

    Args:
        labels: Class indices ``[N]``, or ``None`` for a plain random choice.
        num_samples: ``N``.
        size: How many to choose, at most ``N``.
        seed: Seed of the choice.

    Returns:
        Sorted indices, int64 ``[size]``.
    """
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
    if labels is not None:
        # Position of every sample among its class, over the class size: the smallest are the first of every class.
        shuffled = labels[order]
        by_class = shuffled.argsort(stable=True)
        counts = torch.unique_consecutive(shuffled[by_class], return_counts=True)[1]
        place = torch.cat([(torch.arange(int(count)) + 0.5) / count for count in counts])
        order = order[by_class][place.argsort(stable=True)]
    return order[:size].sort().values


def _has_plain_batches(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
    )


def _is_distributed_in_order(sampler: Any) -> bool:
    """Whether a sampler gives every n-th sample in order: torch's own, and what Lightning makes of it."""
    if not isinstance(sampler, DistributedSampler) or sampler.shuffle:
        return False
    if type(sampler) is DistributedSampler:
        return True
    # Lightning's wrappers number the samples of another sampler. They are known by their package: this floor does not
    # import it.
    inner = getattr(sampler.dataset, "_sampler", None)
    is_known = type(sampler).__module__.partition(".")[0] in {"lightning", "lightning_fabric", "pytorch_lightning"}
    return is_known and type(inner) in (SequentialSampler, type(None))


def has_known_sampler(loader: Any) -> bool:
    """Whether a loader is known to draw all of its samples, or (``SubsetRandomSampler``) the part that is read.

    Args:
        loader: A ``DataLoader``, or a dataset, which has no sampler.

    Returns:
        ``False`` for samplers and batch samplers of the user's own.
    """
    if not isinstance(loader, DataLoader):
        return True
    known = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
    return isinstance(loader.sampler, known) and isinstance(loader.batch_sampler, BatchSampler)


def _first_of_each(ids: Tensor) -> tuple[Tensor, Tensor]:
    # A `Subset` may name a sample several times (oversampling): it is scored once.
    order = ids.argsort(stable=True)
    is_first = torch.ones(len(ids), dtype=torch.bool)
    is_first[1:] = ids[order][1:] != ids[order][:-1]
    positions = order[is_first].sort().values
    return ids[positions], positions


def _loader_options(loader: DataLoader[Any] | None, dataset: Any) -> dict[str, Any]:
    own_workers = 0 if loader is None else loader.num_workers
    collate: Callable[[list[Any]], Any] = default_collate if loader is None else loader.collate_fn
    context = None if loader is None else loader.multiprocessing_context
    method = multiprocessing.get_start_method() if context is None else context.get_start_method()
    pure = _is_pure(dataset) and collate is default_collate
    num_workers = 0 if pure or (method != "fork" and own_workers == 0) else max(1, min(own_workers, 2))
    return {
        "collate_fn": collate,
        "num_workers": num_workers,
        "worker_init_fn": None if loader is None else loader.worker_init_fn,
        "pin_memory": loader is not None and loader.pin_memory and torch.cuda.is_available(),
        "multiprocessing_context": context if num_workers else None,
    }


def _is_pure(dataset: Any) -> bool:
    if type(dataset) in {Subset, Relabelled}:
        return _is_pure(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(_is_pure(part) for part in dataset.datasets)
    return type(dataset) is TensorDataset


def _is_collection(source: Any) -> bool:
    if isinstance(source, (Mapping, str)):
        return True
    return isinstance(source, (list, tuple)) and any(isinstance(part, (DataLoader, Dataset)) for part in source)


def _in_words(error: Exception) -> str:
    text = str(error).strip().rstrip(".")
    # A worker sends its traceback as the message, whose last line is what was raised.
    return text.splitlines()[-1] if text.startswith(FROM_WORKER) else f"{type(error).__name__}: {text}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
