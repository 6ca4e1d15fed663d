"""Reports in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_gradsim.views.sortable import Table

STEP = "trainer/global_step"
"""Where Lightning's own logger writes the step, which is the axis of its charts."""


class WandbSink:
    """A sink for Weights & Biases.

    Args:
        run: A run of ``wandb``, ``WandbLogger.experiment``.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def write_images(self, images: Mapping[str, NDArray[np.uint8]], step: int) -> None:
        """Write pictures."""
        import wandb

        self._log({tag: wandb.Image(pixels) for tag, pixels in images.items()}, step)

    def write_texts(self, texts: Mapping[str, str], step: int) -> None:
        """Leave out Markdown, for which there is no form here: tables say what it says."""

    def write_tables(self, tables: Mapping[str, Table], step: int) -> None:
        """Write tables, with columns that can be sorted and filtered."""
        import wandb

        self._log(
            {
                f"{tag}_table": wandb.Table(columns=[each.name for each in table.columns], data=table.plain_rows())
                for tag, table in tables.items()
            },
            step,
        )

    def write_histograms(self, histograms: Mapping[str, NDArray[np.float64]], step: int) -> None:
        """Write histograms."""
        import wandb

        self._log({tag: wandb.Histogram(values.tolist()) for tag, values in histograms.items()}, step)

    def write_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        """Write numbers."""
        self._log(dict(scalars), step)

    def _log(self, values: dict[str, Any], step: int) -> None:
        if values:
            self._run.log({**values, STEP: step})
