"""Image-like tensors to RGB pixels and tiles."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lightning_gradsim.views.canvas import BACKDROP, MUTED, Canvas, Colour, Pixels, measure_text

ValueRange = Literal["as given", "0-1", "0-255", "stretched"]
"""How the values of an image were read."""

# Both stripes are far from grey, so that a single broken pixel of a grey image is seen, whichever stripe it falls on.
HATCH: tuple[Colour, Colour] = ((204, 0, 204), (176, 112, 176))
_STRIPE = 2
_STRIPES = 40
_CHANNEL_COUNTS = (1, 3, 4)
# Interpolation and half precision leave values slightly outside of 0-1.
_SLACK = 0.01
# Floats from 0 to a small number (4-bit digits: 0-16) would be nearly black as 0-255.
_DARKEST_255 = 64.0
_CONSTANT_LEVEL = 128
# Of flat colours and small pictures, higher levels save nothing and take up to twice the time.
_PNG_LEVEL = 1


@dataclass(frozen=True, eq=False)
class RgbImage:
    """An image ready to draw.

    Attributes:
        pixels: uint8 ``[H, W, 3]``.
        value_range: How its values were read.
        has_non_finite: Whether some pixels are NaN or infinite; they are hatched.
        num_channels: How many channels the image had; of two, the first is shown, of more than three, the first three.
    """

    pixels: Pixels
    value_range: ValueRange
    has_non_finite: bool
    num_channels: int = 3

    @property
    def shown_channels(self) -> str | None:
        """Which channels are shown, in words; ``None`` where all are."""
        if self.num_channels in (1, 3):
            return None
        shown = "channel 1" if self.num_channels < 3 else "channels 1 to 3"
        return f"{shown} of {self.num_channels} shown"


def to_rgb(
    sample: Tensor | None, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> RgbImage | None:
    """Convert an image-like tensor to RGB pixels.

    Integers from 0 to 255 are taken as they are, floats as 0-1 or 0-255 where they fit; anything else is stretched
    between its own lowest and highest finite value. With ``mean`` or ``std``, floats are denormalised
    (``x * std + mean``) before.

    Args:
        sample: Shape ``[C, H, W]``, ``[H, W, C]`` or ``[H, W]``, also behind axes of length 1; any real dtype and
            device. Of two channels the first is shown, of more than three the first three.
        mean: What was subtracted in normalisation: one value, or one for each channel. None: 0.
        std: What was divided by in normalisation: one value, or one for each channel. None: 1.

    Returns:
        The image, or None for what is no image: None, vectors, complex values, other ranks.

    Raises:
        ValueError: If the length of ``mean`` or ``std`` does not fit the channels.

    Example:
        >>> to_rgb(torch.tensor([[0.0, 1.0], [0.5, 0.25]])).pixels[..., 0].tolist()
        [[0, 255], [128, 64]]
    """
    image = _to_channels_last(sample)
    if image is None:
        return None
    channels = image.shape[-1]
    for name, given in (("mean", mean), ("std", std)):
        if given is not None and len(given) not in {1, channels}:
            raise ValueError(
                f"`{name}` has {len(given)} values, but the images have {channels} channels. "
                f"Expected one value, or one for each channel. Pass the `{name}` of your normalisation."
            )
    values, scale = _read_values(image, mean, std)
    finite = np.isfinite(values)
    low, high, value_range = _find_range(values[finite], image.dtype, scale)
    pixels = np.broadcast_to(_to_levels(values, finite, low, high), (*values.shape[:2], 3)).copy()
    broken = ~finite.all(axis=-1)
    if broken.any():
        pixels[broken] = _hatch(*broken.shape)[broken]
    return RgbImage(pixels, value_range, bool(broken.any()), channels)


def shrink(image: RgbImage, longest: int) -> RgbImage:
    """Scale a picture down, so that no more of it is kept than is shown.

    Args:
        image: The picture.
        longest: Pixels of its longer side afterwards, at most.

    Returns:
        The picture itself where it is small enough.
    """
    height, width = image.pixels.shape[:2]
    factor = longest / max(height, width)
    if factor >= 1:
        return image
    height, width = (max(1, round(side * factor)) for side in (height, width))
    return replace(image, pixels=_scale(image.pixels, height, width, factor))


def picture_notes(pictures: Sequence[RgbImage | None]) -> list[str]:
    """What a reader must know about how pictures were read.

    Args:
        pictures: Those that are shown; ``None`` for what has none.

    Returns:
        A line each, none where all pictures are as they were.
    """
    drawn = [picture for picture in pictures if picture is not None]
    notes = []
    num_stretched = sum(picture.value_range == "stretched" for picture in drawn)
    if num_stretched:
        which = "all images" if num_stretched == len(drawn) else f"{num_stretched} of {len(drawn)} images"
        notes.append(f"{which}: values stretched from their own lowest to highest")
    notes += sorted({picture.shown_channels for picture in drawn if picture.shown_channels is not None})
    if any(picture.has_non_finite for picture in drawn):
        notes.append("magenta hatching: NaN or infinite pixels")
    return notes


def to_tile(pixels: Pixels | None, size: int, background: Colour = BACKDROP) -> Pixels:
    """Scale a picture into a square, its proportions kept.

    Args:
        pixels: uint8 ``[H, W, 3]``; None gives a neutral tile with the words "no image".
        size: Side of the tile in pixels, an even number.
        background: RGB of what the picture leaves free.

    Returns:
        uint8 ``[size, size, 3]``.

    Example:
        >>> to_tile(np.zeros((2, 4, 3), np.uint8), 8, background=(9, 9, 9))[:, 0, 0].tolist()
        [9, 9, 0, 0, 0, 0, 9, 9]
    """
    canvas = Canvas(size, size, background)
    if pixels is None:
        font_size = 20
        words = "no image"
        canvas.text((size - measure_text(words, font_size)) / 2, size // 2 + font_size // 3, words, font_size, MUTED)
        return canvas.to_pixels()
    factor = size / max(pixels.shape[:2])
    # Even sides in even places stay as they are where a viewer leaves out every second row and column.
    height, width = (2 * max(1, round(side * factor / 2)) for side in pixels.shape[:2])
    left, top = ((size - side) // 4 * 2 for side in (width, height))
    canvas.paste(_scale(pixels, height, width, factor), left, top)
    return canvas.to_pixels()


def to_png(pixels: Pixels) -> bytes:
    """A picture, uint8 ``[H, W, 3]``, as the content of a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=_PNG_LEVEL)
    return buffer.getvalue()


def png_size(png: bytes) -> tuple[int, int]:
    """Width and height of a PNG file, by its content."""
    with Image.open(io.BytesIO(png)) as image:  # reads the header only
        return image.size


def to_jpeg(pixels: Pixels) -> bytes:
    """A picture, uint8 ``[H, W, 3]``, as the content of a JPEG file: nearly as it was."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=90)
    return buffer.getvalue()


def _to_channels_last(sample: object) -> Tensor | None:
    if not isinstance(sample, Tensor) or sample.dtype.is_complex or sample.numel() == 0:
        return None
    image = sample.detach().cpu()
    while image.ndim > 3 and image.shape[0] == 1:
        image = image[0]
    if image.ndim == 2:
        image = image[..., None]
    elif image.ndim == 3:
        first, last = image.shape[0], image.shape[-1]
        is_channels_first = first in _CHANNEL_COUNTS or (last not in _CHANNEL_COUNTS and first <= last)
        image = image.movedim(0, -1) if is_channels_first else image
    # A row of numbers with axes of length 1 around it is a vector, not a picture.
    return image if image.ndim == 3 and min(image.shape[:2]) > 1 else None


def _read_values(
    image: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[NDArray[np.float64], float | None]:
    """The shown channels, denormalised, and the value of white where it is known."""
    shown = 3 if image.shape[-1] >= 3 else 1
    values = image[..., :shown].to(torch.float64).numpy()
    if image.dtype == torch.bool:
        return values, 1.0
    if not image.dtype.is_floating_point or (mean is None and std is None):
        return values, None
    means, stds = (np.asarray([0.0] if mean is None else mean), np.asarray([1.0] if std is None else std))
    return values * stds[:shown] + means[:shown], 255.0 if max(means.max(), stds.max()) > 1 else 1.0


def _find_range(
    values: NDArray[np.float64], dtype: torch.dtype, scale: float | None
) -> tuple[float, float, ValueRange]:
    """Which values become black and white; ``scale`` is white where it is known."""
    if not values.size:
        return 0.0, 1.0, "as given"
    low, high = float(values.min()), float(values.max())
    if scale is None and not dtype.is_floating_point:
        return (0.0, 255.0, "as given") if low >= 0 and high <= 255 else (low, high, "stretched")
    if scale != 255 and low >= -_SLACK and high <= 1 + _SLACK:
        return 0.0, 1.0, "0-1"
    slack = 255 * _SLACK if scale == 255 else 0.0
    if low >= -slack and high <= 255 + slack and (scale == 255 or high >= _DARKEST_255):
        return 0.0, 255.0, "0-255"
    return low, high, "stretched"


def _to_levels(values: NDArray[np.float64], finite: NDArray[np.bool_], low: float, high: float) -> Pixels:
    if low == high:
        return np.full(values.shape, _CONSTANT_LEVEL, dtype=np.uint8)
    share = (np.where(finite, values, low) - low) / (high - low)
    levels: Pixels = np.rint(share.clip(0, 1) * 255).astype(np.uint8)
    return levels


def _hatch(height: int, width: int) -> Pixels:
    # Of a large image, stripes as wide as in a small one would melt into one colour on a tile.
    stripe = max(_STRIPE, max(height, width) // _STRIPES)
    diagonals = np.add.outer(np.arange(height), np.arange(width)) // stripe % 2
    hatch: Pixels = np.asarray(HATCH, dtype=np.uint8)[diagonals]
    return hatch


def _scale(pixels: Pixels, height: int, width: int, factor: float) -> Pixels:
    image = Image.fromarray(pixels)
    if factor >= 2:
        # Straight nearest neighbour would make some source pixels wider than others unless the factor is whole.
        whole = int(np.ceil(factor))
        image = image.resize((image.width * whole, image.height * whole), Image.Resampling.NEAREST)
        return np.asarray(image.resize((width, height), Image.Resampling.BOX))
    return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS))
