"""Reports in TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_gradsim.views.images import png_size, to_png

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary


class SummaryFile(Protocol):
    """What is used of its ``file_writer``."""

    def add_summary(self, summary: Summary, global_step: int | None = None) -> None:
        """Write a finished summary."""


class TensorBoardWriter(Protocol):
    """What is used of ``torch.utils.tensorboard.SummaryWriter``."""

    file_writer: SummaryFile

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        """Write a number."""

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        """Write Markdown."""

    def add_histogram(self, tag: str, values: NDArray[np.float64], global_step: int | None = None) -> None:
        """Write a histogram of numbers."""

    def flush(self) -> None:
        """Bring to disk what was written."""


class TensorBoardSink:
    """A sink for TensorBoard: one image for each tag and step, as its viewer keeps about ten steps of each by default.

    Args:
        writer: A ``SummaryWriter`` or what behaves like one.
    """

    def __init__(self, writer: TensorBoardWriter) -> None:
        self._writer = writer

    def write_images(self, images: Mapping[str, NDArray[np.uint8]], step: int) -> None:
        """Write pictures; behind the texts, which open a writer that was closed."""
        self.write_pngs({tag: to_png(pixels) for tag, pixels in images.items()}, step)

    def write_pngs(self, pngs: Mapping[str, bytes], step: int) -> None:
        """Write pictures that are encoded already."""
        for tag, png in pngs.items():
            self._writer.file_writer.add_summary(_image_summary(tag, png), step)

    def write_texts(self, texts: Mapping[str, str], step: int) -> None:
        """Write Markdown."""
        for tag, text in texts.items():
            self._writer.add_text(tag, text, global_step=step)

    def write_histograms(self, histograms: Mapping[str, NDArray[np.float64]], step: int) -> None:
        """Write histograms."""
        for tag, values in histograms.items():
            self._writer.add_histogram(tag, values, global_step=step)

    def write_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        """Write numbers, and bring everything to disk."""
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, global_step=step)
        self._writer.flush()


def _image_summary(tag: str, png: bytes) -> Summary:
    # `add_image` scales, resamples and compresses a picture that is finished already: four times the time.
    from tensorboard.compat.proto.summary_pb2 import Summary  # late: most of what importing us would cost

    width, height = png_size(png)
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
    return Summary(value=[Summary.Value(tag=tag, image=image)])
