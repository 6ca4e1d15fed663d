"""Reports in TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_gradsim.report import Report
from lightning_gradsim.sinks.files import to_png
from lightning_gradsim.views.tables import mistakes_markdown, suspects_markdown

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

    def flush(self) -> None:
        """Bring to disk what was written."""


def write_tensorboard(
    writer: TensorBoardWriter, report: Report, panel: NDArray[np.uint8] | None, tag_prefix: str = "gradsim"
) -> None:
    """Write a report at the step of its validation.

    One image tag, as TensorBoard keeps about ten steps of each by default, and a card for each.

    Logged under ``tag_prefix``:

    - ``mistakes``: the panel
    - ``mistakes``: table of mistakes, Markdown
    - ``suspects``: table of suspects, Markdown
    - ``errors``: misclassified validation samples, count
    - ``suspects_flagged``: training samples that the model predicts otherwise than labelled, count
    - ``suspects_auroc``, ``suspects_average_precision`` and the other figures of ``SuspectQuality``, in [0, 1]; only
      where true labels are known
    - ``overhead_seconds``: time taken for this report, s
    - ``overhead_share``: time taken so far over the time of the run without it, in [0, inf); only where it is known

    Args:
        writer: A ``SummaryWriter`` or what behaves like one.
        report: What the validation showed.
        panel: Picture from ``mistake_panel``, uint8 ``[H, W, 3]``; None leaves the image out.
        tag_prefix: Beginning of every tag, without the slash.
    """
    step = report.step
    writer.add_text(f"{tag_prefix}/mistakes", mistakes_markdown(report), global_step=step)
    if panel is not None:  # behind the text, which opens a writer that was closed
        writer.file_writer.add_summary(_image_summary(f"{tag_prefix}/mistakes", panel), step)
    writer.add_text(f"{tag_prefix}/suspects", suspects_markdown(report), global_step=step)
    writer.add_scalar(f"{tag_prefix}/errors", report.num_errors, global_step=step)
    writer.add_scalar(f"{tag_prefix}/suspects_flagged", report.suspects.num_flagged, global_step=step)
    for name, share in report.suspect_quality.shares() if report.suspect_quality is not None else ():
        writer.add_scalar(f"{tag_prefix}/suspects_{name}", share, global_step=step)
    writer.add_scalar(f"{tag_prefix}/overhead_seconds", report.seconds, global_step=step)
    if report.time_share is not None:
        writer.add_scalar(f"{tag_prefix}/overhead_share", report.time_share, global_step=step)
    writer.flush()


def _image_summary(tag: str, panel: NDArray[np.uint8]) -> Summary:
    # `add_image` scales, resamples and compresses a picture that is finished already: four times the time.
    from tensorboard.compat.proto.summary_pb2 import Summary  # late: most of what importing us would cost

    height, width, _ = panel.shape
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=to_png(panel))
    return Summary(value=[Summary.Value(tag=tag, image=image)])
