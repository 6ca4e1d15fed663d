"""Files that on disk are either the old version or the new one, never a part of it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of another one at the end, and of none where writing fails.

    Args:
        path: The file that is replaced; its folder is created where it does not exist.

    Yields:
        The file to write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not `tempfile`: its files are readable by their owner only, and the replaced file would be too.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            # Without this, a crash of the machine can leave the new name with no content.
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
