"""Samples of map-style datasets: their ids, and views of datasets with other labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from lightning_gradsim.arguments import with_article
from lightning_gradsim.errors import BatchFormatError

TARGET_KEYS = ("label", "labels", "target", "targets", "y")


class Relabelled(Dataset[Any]):
    """A dataset in which some samples have another label; ids stay as they are, nothing is copied.

    Args:
        dataset: A map-style dataset of ``(inputs, label)`` samples, or mappings with one known target key.
        labels: The other labels, by position.
    """

    def __init__(self, dataset: Dataset[Any], labels: Mapping[int, int]) -> None:
        self.dataset = dataset
        self.labels = dict(labels)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        """The sample, with its label replaced where another one is given."""
        index = range(len(self))[index]  # raises beyond the end, which ends an iteration, and counts from the end
        sample = self.dataset[index]
        return _with_label(sample, self.labels[index]) if index in self.labels else sample


def check_dataset(dataset: object) -> None:
    """Refuse what is no map-style dataset.

    Args:
        dataset: What the user has passed.

    Raises:
        TypeError: If it is a loader, or has no samples by index, or no length.
    """
    if isinstance(dataset, DataLoader) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        way_out = "Pass its `.dataset`." if isinstance(dataset, DataLoader) else "Pass what its loader reads."
        raise TypeError(
            f"`dataset` is {with_article(f'`{type(dataset).__name__}`')}. Expected the training dataset, with samples "
            f"by index. {way_out}"
        )


def sample_ids(dataset: Dataset[Any]) -> Tensor:
    """Sample id of every position of a dataset, stable through ``Subset`` and ``ConcatDataset``.

    Args:
        dataset: A map-style dataset. A ``Subset`` has the ids of the dataset beneath it; a ``ConcatDataset`` counts on
            from the length of what lies beneath each part.

    Returns:
        Ids, int64 ``[len(dataset)]``.
    """
    return _ids_and_span(dataset)[0]


def num_ids(dataset: Dataset[Any]) -> int:
    """Number of sample ids: the length of a dataset, or of what lies beneath it.

    Args:
        dataset: A map-style dataset.

    Returns:
        The number; ids of the dataset are below it.
    """
    return _ids_and_span(dataset)[1]


def _ids_and_span(dataset: Any) -> tuple[Tensor, int]:
    if type(dataset) is Subset:
        indices = torch.as_tensor(dataset.indices, dtype=torch.long)
        if not hasattr(dataset.dataset, "__len__"):
            return indices, int(indices.max()) + 1 if len(indices) else 0
        ids, span = _ids_and_span(dataset.dataset)
        return ids[indices], span
    if type(dataset) is ConcatDataset:
        parts, start = [], 0
        for part in dataset.datasets:
            ids, span = _ids_and_span(part)
            parts.append(ids + start)
            start += span
        return torch.cat(parts), start
    if type(dataset) is Relabelled:
        return _ids_and_span(dataset.dataset)
    return torch.arange(len(dataset)), len(dataset)


def _with_label(sample: Any, label: int) -> Any:
    if isinstance(sample, Mapping):
        keys = [key for key in TARGET_KEYS if key in sample]
        if len(keys) == 1:
            return {**sample, keys[0]: _like(sample[keys[0]], label)}
    elif isinstance(sample, (tuple, list)) and len(sample) >= 2:
        values = [sample[0], _like(sample[1], label), *sample[2:]]
        return type(sample)(*values) if hasattr(sample, "_fields") else type(sample)(values)
    known = ", ".join(TARGET_KEYS)
    raise BatchFormatError(
        f"A sample is a {type(sample).__name__}, whose label cannot be replaced. Expected (inputs, label), or a "
        f"mapping with one of the keys {known}. Correct the labels in the dataset itself, by `report.suspects`."
    )


def _like(old: Any, label: int) -> Any:
    if isinstance(old, (Tensor, np.ndarray)):
        if math.prod(old.shape) != 1:
            raise BatchFormatError(
                f"A label has the shape {tuple(old.shape)}, so a class index cannot replace it. Correct the labels in "
                "the dataset itself, by `report.suspects`."
            )
        return torch.full_like(old, label) if isinstance(old, Tensor) else np.full_like(old, label)
    return type(old)(label) if hasattr(old, "dtype") else label
