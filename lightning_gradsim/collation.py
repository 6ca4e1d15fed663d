"""Does a loader's own ``collate_fn`` keep samples in their order? Ids of samples are those of places in a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from lightning_gradsim.batches import tensors_of
from lightning_gradsim.errors import TrainingDataError
from lightning_gradsim.train_pass import SampleReader, make_reader

NUM_SAMPLES = 8
"""Samples that are read together and singly. They come in an order drawn at random: sorting will hardly keep it."""
ONE_AT_A_TIME = (
    "the training loader's `collate_fn` gives samples in another order than it gets them: they were read one at a time"
)


def find_reordering(loader: Any) -> str | None:
    """Why places in a loader's batches do not tell the samples.

    Args:
        loader: A training loader.

    Returns:
        The reason in words; ``None`` where its ``collate_fn`` keeps the order, or that cannot be told.
    """
    if not isinstance(loader, DataLoader) or loader.collate_fn is default_collate:
        return None
    try:
        is_reordered = reorders_samples(make_reader(loader))
    except TrainingDataError:  # whoever reads all of it says what is wrong
        return None
    if not is_reordered:
        return None
    name = getattr(loader.collate_fn, "__qualname__", type(loader.collate_fn).__qualname__)
    return (
        f"the training loader's `collate_fn` (`{name}`) gives samples in another order than it gets them. Let it keep "
        "the order, or let batches carry the ids and name their entry with `id_key=`"
    )


def reorders_samples(reader: SampleReader) -> bool:
    """Whether samples come out of a batch in another order than that in which they were asked for.

    Some samples are read together and singly, and compared where both have the same form; padding at the end does not
    matter, and what is random tells nothing.

    Args:
        reader: The reader.

    Returns:
        Whether some sample stands in another's place.
    """
    if reader.options["collate_fn"] is default_collate or len(reader) < 2:
        return False
    chosen = torch.randperm(len(reader), generator=torch.Generator().manual_seed(0))[:NUM_SAMPLES]
    [(_, batch)] = replace(reader.choose(chosen), batch_size=len(chosen)).batches()
    together = list(tensors_of(batch))
    singles = [list(tensors_of(one)) for _, one in reader.lookup(reader.ids[chosen].tolist()).batches()]
    if any(len(single) != len(together) for single in singles):
        return False
    columns = zip(together, *singles, strict=True)
    return any(_is_reordered(rows, alone) for rows, *alone in columns)


def _is_reordered(rows: Tensor, alone: list[Tensor]) -> bool:
    forms = {each.ndim for each in (rows, *alone)}
    if forms & {0} or len(forms) > 1 or len(rows) != len(alone) or any(len(each) != 1 for each in alone):
        return False
    matches = torch.tensor([[_is_same(row, each[0]) for row in rows] for each in alone])
    return bool(matches.any(1).all()) and not bool(matches.diagonal().all())


def _is_same(row: Tensor, alone: Tensor) -> bool:
    common = tuple(slice(min(left, right)) for left, right in zip(row.shape, alone.shape, strict=True))
    left, right = row[common], alone[common]
    if left.is_floating_point() and right.is_floating_point():
        left, right = left.nan_to_num(), right.nan_to_num()
    return torch.equal(left, right)
