"""Labels and rows as plain values, for files and for reading."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

Label = int | float | tuple[int, ...]
"""A class index; a number in regression; the indices of the active labels in multi-label tasks."""


def to_label(value: Tensor) -> Label:
    """A stored label as a plain value: float for floating dtypes, active indices for a vector, else int."""
    if value.ndim:
        return tuple(int(i) for i in value.nonzero().flatten())
    return float(value) if value.is_floating_point() else int(value)


def write_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], path: str | Path | None = None) -> str:
    """CSV text of rows; also written to ``path`` if one is given."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if path is not None:
        Path(path).write_text(buffer.getvalue(), encoding="utf-8")
    return buffer.getvalue()
