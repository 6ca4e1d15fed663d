"""Where pictures, tables and numbers of a report go, and how they get there though one of the places fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lightning_gradsim.errors import SinkError
from lightning_gradsim.views.images import to_png


@runtime_checkable
class Sink(Protocol):
    """A place for reports, such as a logger: pass your own as ``sinks=``.

    Each method is called once a report, on rank zero. What one raises stops neither other sinks nor training.

    A sink may also have ``write_histograms(histograms, step)``, for arrays of numbers by tag, and
    ``write_pngs(pngs, step)``, which then gets the pictures as contents of PNG files instead of ``write_images``.
    """

    def write_images(self, images: Mapping[str, NDArray[np.uint8]], step: int) -> None:
        """Write pictures, uint8 ``[H, W, 3]`` by tag, at a global step."""

    def write_texts(self, texts: Mapping[str, str], step: int) -> None:
        """Write Markdown by tag, at a global step."""

    def write_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        """Write numbers by tag, at a global step."""


@dataclass(frozen=True, eq=False)
class Publication:
    """What sinks get of a report.

    Attributes:
        step: Global step.
        images: Pictures by tag, uint8 ``[H, W, 3]``.
        texts: Markdown by tag.
        scalars: Numbers by tag.
        histograms: Arrays of numbers by tag.
    """

    step: int
    images: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    @cached_property
    def pngs(self) -> Mapping[str, bytes]:
        """The pictures as contents of PNG files, encoded once for all places."""
        return {tag: to_png(pixels) for tag, pixels in self.images.items()}

    def write_to(self, sink: Sink) -> None:
        """Give everything to a sink.

        Args:
            sink: The sink.
        """
        sink.write_texts(self.texts, self.step)
        write_pngs = getattr(sink, "write_pngs", None)
        if write_pngs is None:
            sink.write_images(self.images, self.step)
        else:
            write_pngs(self.pngs, self.step)
        write_histograms = getattr(sink, "write_histograms", None)
        if write_histograms is not None:
            write_histograms(self.histograms, self.step)
        sink.write_scalars(self.scalars, self.step)


def write_everywhere(writers: Sequence[tuple[str, Callable[[], object]]]) -> None:
    """Let all writers write, whatever happens to the others.

    Args:
        writers: Their names, and what they do.

    Raises:
        Exception: What the only one that failed has raised.
        SinkError: If several failed; they are named.
    """
    outcomes = [(name, _failure_of(write)) for name, write in writers]
    failures = [(name, error) for name, error in outcomes if error is not None]
    if len(failures) == 1:
        raise failures[0][1]
    if failures:
        words = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in failures)
        raise SinkError(f"{len(failures)} of {len(writers)} places took no report. {words}") from failures[0][1]


def _failure_of(write: Callable[[], object]) -> Exception | None:
    try:
        write()
    except Exception as error:  # whatever a logger raises, the others are to be served
        return error
    return None
