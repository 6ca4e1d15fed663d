"""The panel's paper and pens: colours, text that always fits, smooth shapes."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Pixels = NDArray[np.uint8]
"""An RGB picture, uint8 ``[H, W, 3]``."""
Colour = tuple[int, int, int]

PAPER: Colour = (255, 255, 255)
BACKDROP: Colour = (237, 240, 243)
RULE: Colour = (200, 207, 214)
TRACK: Colour = (217, 223, 229)
FRAME: Colour = (134, 142, 150)
INK: Colour = (27, 36, 44)
MUTED: Colour = (86, 97, 108)
# Okabe and Ito's vermillion and blue stay apart for every common form of colour blindness. Their orange (230, 159, 0)
# has a contrast of only 2.2 on white; vermillion has 3.9.
MARK: Colour = (213, 94, 0)
DOUBT: Colour = (0, 114, 178)

MINUS = "−"

# Pillow's built-in font draws ASCII and these; everything else would come out as an empty box. The minus is our own.
_DRAWABLE = frozenset(map(chr, range(32, 127))) | frozenset("«°±·»…™")
_SPELLINGS = str.maketrans(
    dict(zip("\u2010\u2012\u2013\u2014\u2212\u00d7\u2018\u2019\u201c\u201d", "-----x''\"\"", strict=True))
    | {"→": "->", "ß": "ss", "æ": "ae", "Æ": "Ae", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L"}
)
# The horizontal bar of the font's plus, in shares of the font size: left, top, right, foot.
_MINUS_BAR = (0.08, -0.3425, 0.5, -0.2875)
# Text and shapes are drawn this much larger and scaled down: at its true size, the built-in font comes out with word
# gaps rounded to whole pixels, some of them nearly closed.
_OVERSAMPLING = 4
# TensorBoard halves the panel by leaving out every second row and column, and with them thin strokes. Where every pixel
# is the mean of itself and its neighbours above and at the left, whatever is kept is the mean of what it stands for.
_SOFTENING = ImageFilter.Kernel((3, 3), (1, 1, 0, 1, 1, 0, 0, 0, 0))
# The built-in font has one weight, too thin at half the size; outlines of these shares of the size make two others, and
# the letters move apart by as much.
_OUTLINE, _BOLD_OUTLINE = 0.0125, 0.03


def to_plain_text(text: str) -> str:
    """Rewrite text with characters that the built-in font has, as far as they have a plain spelling.

    Args:
        text: Any text, line breaks included.

    Returns:
        One line without accents, typographic dashes and repeated spaces. Letters without a plain spelling stay.

    Example:
        >>> to_plain_text("crème brûlée")
        'creme brulee'
    """
    decomposed = unicodedata.normalize("NFKD", " ".join(text.translate(_SPELLINGS).split()))
    return "".join(character for character in decomposed if not unicodedata.combining(character))


def is_drawable(text: str) -> bool:
    """Whether the built-in font has every character of a text, and there is one.

    Args:
        text: A single line.

    Returns:
        False for an empty text too.
    """
    return bool(text.strip()) and _DRAWABLE.issuperset(text)


def measure_text(text: str, size: int, bold: bool = False) -> float:
    """Width of a text as drawn.

    Args:
        text: A single line, in any script.
        size: Font size in pixels.
        bold: Whether it will be drawn bold.

    Returns:
        Width in pixels.
    """
    return _offset(text, len(text), size, bold) / _OVERSAMPLING


def fit_text(text: str, size: int, max_width: float, bold: bool = False) -> str:
    """Shorten a text with an ellipsis until it fits.

    Args:
        text: A single line, in any script.
        size: Font size in pixels.
        max_width: Available width in pixels.
        bold: Whether it will be drawn bold.

    Returns:
        The text itself where it fits, else its longest fitting beginning with an ellipsis, if need be nothing.
    """
    if measure_text(text, size, bold) <= max_width:
        return text

    def shorten(length: int) -> str:
        return text[:length].rstrip() + "…"

    lengths = range(len(text))
    num_fitting = bisect_right(lengths, max_width, key=lambda length: measure_text(shorten(length), size, bold))
    return shorten(num_fitting - 1) if num_fitting else ""


def fit_size(text: str, sizes: Sequence[int], max_width: float, bold: bool = False) -> tuple[str, int]:
    """Choose the largest size in which a text fits; shorten it where it fits in none.

    Args:
        text: A single line, in any script.
        sizes: Font sizes in pixels, the largest first.
        max_width: Available width in pixels.
        bold: Whether it will be drawn bold.

    Returns:
        The text, and the size to draw it in.
    """
    size = next((size for size in sizes if measure_text(text, size, bold) <= max_width), sizes[-1])
    return fit_text(text, size, max_width, bold), size


def wrap_text(text: str, size: int, max_width: float, max_lines: int) -> list[str]:
    """Break a text into lines at spaces.

    Args:
        text: Words, with middle dots between statements; a dot at a line's end or beginning is dropped.
        size: Font size in pixels.
        max_width: Available width in pixels.
        max_lines: Most lines; the last one is shortened where the text is longer.

    Returns:
        Lines, each of which fits.
    """
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and (measure_text(longer, size) <= max_width or len(lines) == max_lines):
            lines[-1] = longer
        else:
            lines.append(word)
    return [fit_text(line.strip(" ·"), size, max_width) for line in lines]


class Canvas:
    """A picture under construction.

    Attributes:
        width: Width in pixels.
        height: Height in pixels.
    """

    def __init__(self, width: int, height: int, colour: Colour = PAPER) -> None:
        self.width = width
        self.height = height
        self._image = Image.new("RGB", (width, height), colour)
        self._draw = ImageDraw.Draw(self._image)

    def text(self, x: float, baseline: int, text: str, size: int, colour: Colour = INK, bold: bool = False) -> float:
        """Draw one line of text.

        Args:
            x: Left edge in pixels.
            baseline: Foot of the letters in pixels from the top.
            text: A single line; characters that the font lacks become question marks.
            size: Font size in pixels.
            colour: RGB.
            bold: Whether to draw it bold.

        Returns:
            The right edge in pixels.
        """
        left = int(x) - 1
        self._image.paste(colour, (left, baseline - 2 * size), _text_mask(text, size, bold, x - left))
        return x + measure_text(text, size, bold)

    def text_right(self, right: float, baseline: int, text: str, size: int, colour: Colour = INK) -> float:
        """Draw one line of text that ends at ``right``, with the arguments of ``text``; return its left edge."""
        left = right - measure_text(text, size)
        self.text(left, baseline, text, size, colour)
        return left

    def rectangle(self, x: int, y: int, width: int, height: int, colour: Colour) -> None:
        """Fill a rectangle; one without width or height leaves no pixel."""
        if width > 0 and height > 0:
            self._draw.rectangle((x, y, x + width - 1, y + height - 1), fill=colour)

    def frame(self, x: int, y: int, size: int, thickness: int, colour: Colour) -> None:
        """Draw a square frame whose outer edge is ``size`` pixels long."""
        self._draw.rectangle((x, y, x + size - 1, y + size - 1), outline=colour, width=thickness)

    def polygon(self, points: Sequence[tuple[float, float]], colour: Colour) -> None:
        """Fill a polygon with smooth edges.

        Args:
            points: Corners ``(x, y)`` in pixels.
            colour: RGB.
        """
        left, top = (int(min(point[axis] for point in points)) - 1 for axis in (0, 1))
        width, height = (int(max(point[axis] for point in points)) + 3 - low for axis, low in ((0, left), (1, top)))
        scale = _OVERSAMPLING
        mask = Image.new("L", (width * scale, height * scale))
        ImageDraw.Draw(mask).polygon([((x - left) * scale, (y - top) * scale) for x, y in points], fill=255)
        self._fill(mask, left, top, colour)

    def _fill(self, mask: Image.Image, left: int, top: int, colour: Colour) -> None:
        """Lay a colour through an oversampled mask with an empty edge."""
        self._image.paste(colour, (left, top), _soften(mask))

    def paste(self, pixels: Pixels, x: int, y: int) -> None:
        """Copy a picture to the place whose upper left corner is ``(x, y)``."""
        self._image.paste(Image.fromarray(pixels), (x, y))

    def to_pixels(self) -> Pixels:
        """A copy of the picture, uint8 ``[H, W, 3]``."""
        return np.array(self._image, dtype=np.uint8)


@lru_cache(maxsize=32)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


@lru_cache(maxsize=2048)  # labels, titles and captions come again in every panel
def _text_mask(text: str, size: int, bold: bool, start: float) -> Image.Image:
    """Where a text covers its box, whose foot of the letters is two sizes below the top; it begins at ``start``."""
    scale, outline, font = _OVERSAMPLING, _outline(size, bold), _font(size * _OVERSAMPLING)
    mask = Image.new("L", ((int(measure_text(text, size, bold)) + 5) * scale, 3 * size * scale))
    draw, foot = ImageDraw.Draw(mask), 2 * size * scale
    for place, character in enumerate(_replace_undrawable(text)):
        pen = start * scale + outline + _offset(text, place, size, bold)
        if character == MINUS:
            near, top, far, bottom = (share * size * scale for share in _MINUS_BAR)
            bar = (pen + near - outline, foot + top - outline, pen + far + outline - 1, foot + bottom + outline - 1)
            draw.rectangle(bar, fill=255)
        else:
            draw.text((pen, foot), character, fill=255, font=font, anchor="ls", stroke_width=outline)
    return _soften(mask)


def _soften(mask: Image.Image) -> Image.Image:
    return mask.reduce(_OVERSAMPLING).filter(_SOFTENING)


def _outline(size: int, bold: bool) -> int:
    """Width of the outline in oversampled pixels."""
    return round(size * _OVERSAMPLING * (_BOLD_OUTLINE if bold else _OUTLINE))


@lru_cache(maxsize=8192)
def _offset(text: str, place: int, size: int, bold: bool) -> float:
    """Where the character at ``place`` begins, or the text ends, in oversampled pixels."""
    before = _replace_undrawable(text[:place]).replace(MINUS, "+")
    return _font(size * _OVERSAMPLING).getlength(before) + 2 * _outline(size, bold) * place


def _replace_undrawable(text: str) -> str:
    return "".join(character if character in _DRAWABLE or character == MINUS else "?" for character in text)
