"""What of a sample is shown: a picture, a text, named values, or nothing but its id and label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lightning_gradsim.batches import tensors_of
from lightning_gradsim.views.images import RgbImage, shrink, to_rgb

TEXT_KEYS = ("text", "sentence", "content", "review", "question")
TOKEN_KEY, MASK_KEY = "input_ids", "attention_mask"
MAX_TEXT = 2000
"""Characters of a text that are kept."""
MAX_SIDE = 320
"""Pixels of the longer side of a kept picture; what is shown is smaller."""
MAX_NUMBERED = 50
"""Numbers of a vector that are shown although they have no names."""
DUPLICATE_LEVELS = 2.0
"""Mean difference of two pictures, in levels of 256, up to which they count as one."""


@dataclass(frozen=True, eq=False)
class Exhibit:
    """What of a sample is shown.

    Attributes:
        picture: Its input as a picture, shrunk; ``None`` where it is none.
        text: Its input in words; ``None`` where it has none.
        values: Its input as named numbers; ``None`` where there are no names.
        failure: Why there is no text although one was asked for.
        note: What the user can pass to see more of it.
    """

    picture: RgbImage | None = None
    text: str | None = None
    values: tuple[tuple[str, float], ...] | None = None
    failure: str | None = None
    note: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is shown."""
        return self.picture is None and self.text is None and self.values is None


@dataclass(frozen=True, eq=False)
class ExhibitMaker:
    """Makes exhibits of samples; what cannot be shown gives an empty one, never a failure.

    Attributes:
        mean: Mean of the pictures' normalisation, as in ``to_rgb``.
        std: Standard deviation of the pictures' normalisation, as in ``to_rgb``.
        describe: From a sample of the dataset to words, or a tokenizer whose ``decode`` does that for token ids.
        feature_names: Names of the numbers of a vector; without any, those of a short vector are numbered.
    """

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    describe: Any = None
    feature_names: Sequence[str] | None = None

    def make(self, sample: Any, batch: Any) -> Exhibit:
        """The exhibit of a sample.

        Args:
            sample: As the dataset gives it.
            batch: As a batch of one, on the CPU.

        Returns:
            The exhibit.

        Raises:
            ValueError: If ``mean`` or ``std`` do not fit the channels.
        """
        text, failure = self._text(sample, batch)
        values = self._values(batch)
        picture = None if values is not None or (text is not None and self.describe is None) else self._picture(batch)
        if picture is None and values is None:
            picture = self._picture(_as_tensors(sample))
        note = None
        if picture is None and values is None and (text is None or self.feature_names is not None):
            values, note = self._unnamed(batch)
        return Exhibit(picture, None if text is None else _cut(text), values, failure, note)

    def _text(self, sample: Any, batch: Any) -> tuple[str | None, str | None]:
        try:
            if hasattr(self.describe, "decode"):
                tokens = _tokens_of(batch)
                return (None if tokens is None else str(self.describe.decode(tokens))), None
            if self.describe is not None:
                return str(self.describe(sample)), None
        except Exception as error:  # the user's own words for a sample are worth a note, not a report
            return None, f"{type(error).__name__}: {error}"
        return _own_text(sample), None

    def _values(self, batch: Any) -> tuple[tuple[str, float], ...] | None:
        if self.feature_names is None:
            return None
        for tensor in tensors_of(batch):
            if tensor.numel() == len(self.feature_names) and tensor.ndim and not tensor.dtype.is_complex:
                return tuple(zip(map(str, self.feature_names), tensor.double().flatten().tolist(), strict=True))
        return None

    def _unnamed(self, batch: Any) -> tuple[tuple[tuple[str, float], ...] | None, str | None]:
        """The numbers of a vector whose names are not known or do not fit, or what to pass to see them."""
        vectors = (tensor for tensor in tensors_of(batch) if tensor.ndim == 2 and len(tensor) == 1)
        vector = next((each for each in vectors if each.is_floating_point() and each.numel() > 1), None)
        if vector is None:
            return None, None
        if self.feature_names is not None:
            words = f"`feature_names=` has {len(self.feature_names)} names, but an input has {vector.numel()} numbers"
            return None, f"{words}, which are therefore not shown: pass one name for each"
        if vector.numel() <= MAX_NUMBERED and self.describe is None:
            return tuple((str(place), value) for place, value in enumerate(vector.double().flatten().tolist())), None
        words = f"inputs are vectors of {vector.numel():,} numbers, which are not shown"
        return None, f"{words}: pass `feature_names=` or `describe=`"

    def _picture(self, batch: Any) -> RgbImage | None:
        image = next((tensor[0] for tensor in tensors_of(batch) if tensor.ndim in (3, 4)), None)
        picture = to_rgb(image, self.mean, self.std)
        return None if picture is None else shrink(picture, MAX_SIDE)


def are_near_duplicates(one: Exhibit, other: Exhibit) -> bool:
    """Whether two samples show the same input: a training sample like this leaks into validation.

    Args:
        one: What is shown of one sample.
        other: What is shown of the other one.

    Returns:
        True for equal texts or values, and for pictures that hardly differ; False where nothing is shown.
    """
    if one.picture is not None and other.picture is not None:
        first, second = one.picture.pixels, other.picture.pixels
        if first.shape != second.shape or first.min() == first.max():
            return False
        return float(np.abs(first.astype(np.int16) - second).mean()) <= DUPLICATE_LEVELS
    if one.text is not None and other.text is not None:
        return bool(one.text.strip()) and one.text.split() == other.text.split()
    if one.values is not None and other.values is not None:
        return one.values == other.values
    return False


def _own_text(sample: Any) -> str | None:
    """The text of a sample that carries one itself."""
    if isinstance(sample, Mapping):
        return next((sample[key] for key in TEXT_KEYS if isinstance(sample.get(key), str)), None)
    first = sample[0] if isinstance(sample, (tuple, list)) and sample else sample
    return first if isinstance(first, str) else None


def _tokens_of(batch: Any) -> list[int] | None:
    """Token ids of a batch of one, without padding where a mask says which is padding."""
    if isinstance(batch, Mapping) and isinstance(batch.get(TOKEN_KEY), Tensor):
        tokens = batch[TOKEN_KEY].flatten()
        mask = batch.get(MASK_KEY)
        if isinstance(mask, Tensor) and mask.numel() == tokens.numel():
            tokens = tokens[mask.flatten().bool()]
        return [int(token) for token in tokens]
    for part in batch if isinstance(batch, (tuple, list)) else [batch]:
        if isinstance(part, Mapping):
            return _tokens_of(part)
        if isinstance(part, Tensor) and part.ndim == 2 and not part.is_floating_point() and part.dtype != torch.bool:
            return [int(token) for token in part.flatten()]
    return None


def _as_tensors(sample: Any) -> Any:
    """A batch of one whose arrays and pictures are tensors, for datasets whose batches hold neither."""
    if isinstance(sample, Mapping):
        return {key: _as_tensors(value) for key, value in sample.items()}
    if isinstance(sample, (tuple, list)):
        return [_as_tensors(value) for value in sample]
    if isinstance(sample, Image.Image):
        return torch.from_numpy(np.array(sample.convert("RGB")))[None]
    if isinstance(sample, np.ndarray) and sample.dtype.kind in "buif" and sample.ndim in (2, 3):
        return torch.from_numpy(np.ascontiguousarray(sample))[None]
    return None


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
