"""Labels and rows as plain values, for files and for reading."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
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


def to_frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Any:
    """Rows as a data frame of pandas, or of polars where only that is installed.

    Args:
        rows: The rows.
        columns: Their keys, in the order of the columns.

    Returns:
        A ``pandas.DataFrame`` or a ``polars.DataFrame``.

    Raises:
        ImportError: If neither is installed.
    """
    content = {column: [row[column] for row in rows] for column in columns}
    for library in ("pandas", "polars"):
        if find_spec(library) is not None:
            return import_module(library).DataFrame(content)
    raise ImportError("A data frame needs pandas or polars, and neither is installed. Install one, or use `to_rows`.")
