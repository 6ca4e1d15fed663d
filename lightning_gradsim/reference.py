"""The training samples that queries are compared with: which they are, and what must be known of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.collation import ONE_AT_A_TIME, reorders_samples
from lightning_gradsim.reference_choice import Choice, Features
from lightning_gradsim.train_pass import (
    PASS_AS,
    SampleReader,
    differs_on_second_read,
    has_known_sampler,
    make_reader,
)

AUGMENTED = (
    "training samples are augmented at random: what is scored and shown is one view of each. Pass `train_data=` "
    "without augmentation for the samples as they are"
)
CURVATURE_SAMPLES = 2000
"""Training samples that the curvature behind ``influence`` is taken from at most."""


@dataclass(frozen=True, eq=False)
class Reference:
    """The training samples that queries are compared with.

    Attributes:
        reader: Reads them.
        words: Which they are.
        augmented: Whether reading a sample twice gives two different samples.
        class_names: The ``classes`` of the dataset, if it has any.
        notes: What limits a report against them.
        seed: Seed of the order in which passes over a part take turns.
        length: Length of the dataset when it was looked at.
    """

    reader: SampleReader
    words: str
    augmented: bool
    class_names: tuple[str, ...] | None
    notes: tuple[str, ...]
    seed: int
    length: int

    @property
    def change(self) -> str | None:
        """What has become of the length of the dataset since, in words; ``None`` where nothing has."""
        now = _length(self.reader.dataset)
        if now == self.length:
            return None
        return f"the training data have {now:,} samples now, and had {self.length:,} at the last report"

    def in_turn(self, start: int) -> SampleReader:
        """All samples in a random order, beginning at one of its places: any part of it is a fair sample.

        Args:
            start: The place, counted on over passes.

        Returns:
            Their reader.
        """
        order = torch.randperm(len(self.reader), generator=torch.Generator().manual_seed(self.seed))
        return self.reader.choose(order.roll(-(start % max(1, len(order)))))

    @property
    def num_for_curvature(self) -> int:
        """How many samples the curvature is taken from."""
        return min(len(self.reader), CURVATURE_SAMPLES)

    def for_curvature(self) -> SampleReader:
        """A seeded choice of them, the same for every pass."""
        order = torch.randperm(len(self.reader), generator=torch.Generator().manual_seed(self.seed))
        return self.reader.choose(order[: self.num_for_curvature].sort().values)


def no_features(reader: SampleReader) -> tuple[Tensor, Tensor]:
    """For a choice that needs none."""
    raise NotImplementedError


def make_reference(
    source: Any,
    adapter: Adapter,
    choice: Choice,
    num_batches: int | None = None,
    pass_as: str = PASS_AS,
    *,
    features: Features = no_features,
    known: Tensor | None = None,
) -> Reference:
    """Read what must be known of the training data before a pass.

    Args:
        source: A map-style dataset, or a ``DataLoader`` over one.
        adapter: Finds the targets of batches, for a stratified choice.
        choice: How many, and which.
        num_batches: Read the first batches only, for a trial run.
        pass_as: As what a user passes the source, in messages.
        features: Finds what the module sees of samples.
        known: Ids of an earlier choice by features, which stands.

    Returns:
        The reference.
    """
    reader = make_reader(source, pass_as=pass_as)
    augmented = differs_on_second_read(reader)
    notes = []
    if reorders_samples(reader):
        reader = replace(reader, batch_size=1)
        notes.append(ONE_AT_A_TIME)
    if augmented:
        notes.append(AUGMENTED)
    if not has_known_sampler(source):
        notes.append(
            "the train loader has a sampler of its own: samples that it never draws are compared with all the same; "
            "pass `train_data=` with those that are trained on"
        )
    if reader.reads_in_process:
        notes.append(
            "the training dataset is read in the training process, since workers would have to be spawned: state "
            "inside the dataset object may change; give the loader a worker to avoid it"
        )
    words = None
    if num_batches is not None:
        total, reader = len(reader), reader.choose(torch.arange(min(len(reader), num_batches * reader.batch_size)))
        words = f"the first {len(reader):,} of {total:,} training samples"
    chosen, words_of_choice = choice.apply(reader, adapter, features, known)
    words = words_of_choice if words is None or len(chosen) < len(reader) else words
    length = _length(reader.dataset)
    return Reference(chosen, words, augmented, _class_names(reader.dataset), tuple(notes), choice.seed, length)


def _length(dataset: Any) -> int:
    return len(dataset)


def _class_names(dataset: Any) -> tuple[str, ...] | None:
    while not hasattr(dataset, "classes") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    return tuple(str(name) for name in names) if isinstance(names, (list, tuple)) else None
