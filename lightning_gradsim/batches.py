"""Nested batches: single samples cut out of them, and samples put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gradsim.arguments import with_article
from lightning_gradsim.errors import BatchFormatError


def take_sample(batch: Any, index: int, batch_size: int) -> Any:
    """One sample of a batch, as a batch of one on the CPU that shares no memory with it.

    Args:
        batch: Tensors, numbers and strings in mappings, lists and tuples.
        index: Which sample.
        batch_size: Number of samples: the length of every tensor and list along the first dimension. Single values
            (numbers, strings, 0-d tensors) are common to all samples and kept.

    Returns:
        The same nesting, with a first dimension of 1.

    Raises:
        BatchFormatError: If the batch holds something that cannot be cut.
    """
    one = take_rows(batch, slice(index, index + 1), batch_size)
    return _map(
        one, lambda leaf: leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf, lambda items: items
    )


def take_rows(batch: Any, rows: slice, batch_size: int) -> Any:
    """Some samples of a batch, as a batch of views on the same device.

    Args:
        batch: A batch as ``take_sample`` takes it.
        rows: Which samples.
        batch_size: Number of samples.

    Returns:
        The same nesting.

    Raises:
        BatchFormatError: If the batch holds something that cannot be cut.
    """

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        _check_length("a tensor", leaf.shape[0], batch_size)
        return leaf[rows]

    def cut_list(items: Sequence[Any]) -> Sequence[Any]:
        _check_length("a list", len(items), batch_size)
        return items[rows]

    return _map(batch, cut, cut_list)


def stack_of_samples(batch: Any, batch_size: int) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors of a batch that differ from sample to sample, and the way back to a batch.

    Args:
        batch: A batch as ``take_sample`` takes it, without lists of numbers or strings.
        batch_size: Number of samples.

    Returns:
        Tensors of ``batch_size`` rows, and a function from as many tensors to a batch that holds them instead.

    Raises:
        BatchFormatError: If the batch holds something that cannot be cut, or a list of numbers or strings.
    """
    tensors: list[Tensor] = []

    def keep(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim:
            _check_length("a tensor", leaf.shape[0], batch_size)
            tensors.append(leaf)
        return leaf

    def refuse(items: Sequence[Any]) -> Sequence[Any]:
        raise BatchFormatError(f"A batch holds a list of {type(items[0]).__name__}. Expected tensors.")

    def rebuild(values: Sequence[Tensor]) -> Any:
        left = iter(values)
        return _map(batch, lambda leaf: next(left) if isinstance(leaf, Tensor) and leaf.ndim else leaf, refuse)

    _map(batch, keep, refuse)
    return tensors, rebuild


def copy_batch(batch: Any) -> Any:
    """A batch with copies of its tensors, which autograd can use even if they came out of inference mode.

    Args:
        batch: Any batch.

    Returns:
        The copy; a batch of the user's own kind itself.
    """
    return map_tensors(batch, Tensor.clone)


def join_samples(samples: Sequence[Any]) -> list[tuple[list[int], Any]]:
    """Batches of one put together into as few batches as their shapes allow, without padding.

    Args:
        samples: Results of ``take_sample``.

    Returns:
        Pairs of the positions in ``samples`` and the batch that holds them, in that order.
    """
    groups: dict[Any, list[int]] = {}
    for position, sample in enumerate(samples):
        groups.setdefault(_signature(sample), []).append(position)
    return [(positions, _join([samples[position] for position in positions])) for positions in groups.values()]


def join_batches(batches: Sequence[Any], sizes: Sequence[int]) -> Any | None:
    """Several batches as one.

    Args:
        batches: Batches of one form.
        sizes: Their numbers of samples.

    Returns:
        The batch, or ``None`` where they are not alike: tensors of other shapes, other common values, or something that
        is nested in neither mappings, lists nor tuples.
    """
    try:
        return _join_alike(batches, sizes)
    except _NotAlikeError:
        return None


class _NotAlikeError(Exception):
    """Batches that cannot be joined."""


def _join_alike(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise _NotAlikeError
    if isinstance(first, Tensor):
        forms = {(part.shape[1:], part.dtype, part.device) for part in parts}
        if first.ndim == 0 or len(forms) > 1 or any(len(p) != size for p, size in zip(parts, sizes, strict=True)):
            raise _NotAlikeError
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        if any(part.keys() != first.keys() for part in parts):
            raise _NotAlikeError
        return {key: _join_alike([part[key] for part in parts], sizes) for key in first}
    if isinstance(first, (list, tuple)):
        if _is_plain(first) or any(len(part) != len(first) for part in parts):
            raise _NotAlikeError
        items = [_join_alike(list(column), sizes) for column in zip(*parts, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if first is None or (isinstance(first, (str, int, float)) and all(part == first for part in parts)):
        return first
    raise _NotAlikeError


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """All tensors of a nested batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_of(value)


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """A nested batch with every tensor replaced, in the order of ``tensors_of``; all else stays.

    Args:
        batch: Anything nested in mappings, lists and tuples.
        function: From a tensor to what takes its place.

    Returns:
        The same nesting.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        items = [map_tensors(item, function) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def _check_length(what: str, length: int, batch_size: int) -> None:
    if length != batch_size:
        raise BatchFormatError(
            f"A batch of {batch_size} samples holds {what} of length {length} along the first dimension, which cannot "
            "be cut into samples. Leave it out of the batch, or override `Adapter.take_sample`."
        )


def _map(batch: Any, leaf: Callable[[Any], Any], leaves: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
    if isinstance(batch, Tensor) or batch is None or isinstance(batch, (str, bytes, bool, int, float)):
        return leaf(batch)
    if isinstance(batch, Mapping):
        return {key: _map(value, leaf, leaves) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        if _is_plain(batch):
            return type(batch)(leaves(batch))
        items = [_map(item, leaf, leaves) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    raise BatchFormatError(
        f"A batch holds {with_article(f'`{type(batch).__name__}`')}, which cannot be cut into samples. Expected "
        "tensors, numbers and strings in mappings, lists and tuples. Return those from the dataset's `collate_fn`."
    )


def _is_plain(items: Sequence[Any]) -> bool:
    # A named tuple is a record whose entries are common to all samples or batches of their own.
    return (
        len(items) > 0
        and not hasattr(items, "_fields")
        and not any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in items)
    )


def _signature(sample: Any) -> Any:
    if isinstance(sample, Tensor):
        return (tuple(sample.shape), sample.dtype) if sample.ndim else sample.item()
    if isinstance(sample, Mapping):
        return tuple((key, _signature(value)) for key, value in sample.items())
    if isinstance(sample, (list, tuple)):
        return type(sample), None if _is_plain(sample) else tuple(_signature(value) for value in sample)
    return sample


def _join(samples: Sequence[Any]) -> Any:
    first = samples[0]
    if isinstance(first, Tensor):
        return torch.cat(list(samples)) if first.ndim else first
    if isinstance(first, Mapping):
        return {key: _join([sample[key] for sample in samples]) for key in first}
    if isinstance(first, (list, tuple)):
        if _is_plain(first):
            return type(first)(item for sample in samples for item in sample)
        items = [_join(list(column)) for column in zip(*samples, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first
