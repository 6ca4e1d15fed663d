"""Reports as files; each file on disk is either the old version or the new one, never a part of it."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from lightning_gradsim.report import Report

# More than anyone relabels in one go; about 0.5 MB and half a second at every validation.
MAX_CSV_SUSPECTS = 10_000


def write_report_files(report: Report, directory: str | Path) -> tuple[Path, ...]:
    """Write ``suspects.csv``, ``influences.csv`` and ``report.json``, each atomically.

    Args:
        report: What the validation showed.
        directory: Folder of the files; created with its parents where it does not exist.

    Returns:
        Paths of the three files, in this order.
    """
    contents = {
        "suspects.csv": report.suspects.to_csv(limit=MAX_CSV_SUSPECTS),
        "influences.csv": report.to_csv(),
        "report.json": json.dumps(_to_json_value(report.to_dict()), allow_nan=False) + "\n",
    }
    return tuple(write_text_atomically(text, Path(directory) / name) for name, text in contents.items())


def write_text_atomically(text: str, path: str | Path) -> Path:
    """Replace a file by a text in UTF-8, or leave it as it was.

    Args:
        text: Content; line ends are written as they are.
        path: The file; its folder is created where it does not exist.

    Returns:
        The path.
    """
    return write_bytes_atomically(text.encode("utf-8"), path)


def write_bytes_atomically(content: bytes, path: str | Path) -> Path:
    """Replace a file, or leave it as it was.

    Args:
        content: Content, such as a picture in PNG.
        path: The file; its folder is created where it does not exist.

    Returns:
        The path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not `tempfile`: its files are readable by their owner only, and the replaced file would be too.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            # Without this, a crash of the machine can leave the new name with no content.
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _to_json_value(value: object) -> object:
    """The value with what JSON lacks replaced: tuples by lists, NaN and infinities by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json_value(item) for item in value]
    return value
