"""Sums of scores in a file that a checkpoint names, with a hash to know it by."""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
import uuid
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

UNREADABLE = (OSError, RuntimeError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError)
"""What ``read_sums`` raises, too, where a file is not what it should be."""


def write_sums(path: Path, ids: Tensor, sums: Tensor) -> None:
    """Write sums, as a whole or not at all.

    Args:
        path: The file.
        ids: Sample ids, int64 ``[N]``.
        sums: Float32 ``[R, N]``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            torch.save({"ids": ids, "sums": sums.clone()}, file)  # of a view, all that it is a view of would be written
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_sums(path: Path) -> tuple[Tensor, Tensor]:
    """Ids ``[N]`` and sums ``[R, N]`` of a file, mapped into memory."""
    held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return held["ids"].clone(), held["sums"]


def hash_sums(ids: Tensor, sums: Tensor) -> str:
    """A hash of both, SHA-256 in hexadecimal digits."""
    digest = hashlib.sha256(ids.numpy().data)
    for row in sums:
        digest.update(row.contiguous().numpy().data)
    return digest.hexdigest()


def make_room(num_rows: int, num_columns: int, max_bytes: int, folder: Path) -> Tensor:
    """Zeros, float32 ``[num_rows, num_columns]``.

    Args:
        num_rows: Rows.
        num_columns: Columns.
        max_bytes: Beyond that many they lie in a file that is mapped into memory, and goes with them.
        folder: Where that is made.

    Returns:
        The zeros.
    """
    if 4 * num_rows * num_columns <= max_bytes:
        return torch.zeros(num_rows, num_columns)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=(num_rows, num_columns)))
