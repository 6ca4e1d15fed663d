"""Several processes on one machine, each a Trainer's rank, with a guard against those that wait for ever."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

SECONDS = 60
"""A process that takes longer hangs: those of the tests take two or three."""


@dataclass(frozen=True)
class Raised:
    """What a process raised instead of returning."""

    kind: str
    message: str


def run_processes(
    job: Callable[[], Any], directory: Path, world_size: int = 2, *, seconds: float = SECONDS
) -> list[Any]:
    """Run a job in processes of their own, as an outer launcher such as ``torchrun`` does; Lightning joins them.

    They are forks of this process: nothing is imported anew, and the job may be any function. What they return, or a
    ``Raised``, comes back in the order of their ranks. The first that hangs fails the test.
    """
    directory.mkdir(parents=True, exist_ok=True)
    context, port = multiprocessing.get_context("fork"), _free_port()
    paths = [directory / f"result{rank}" for rank in range(world_size)]
    processes = [
        context.Process(target=_work, args=(job, paths[rank], rank, world_size, port), daemon=False)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not hanging, f"processes {hanging} hang"
    return [pickle.loads(path.read_bytes()) for path in paths]


def ddp(**options: Any) -> dict[str, Any]:
    """Arguments of a Trainer in a job of two processes."""
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(hours=1), **options)
    return {"strategy": strategy, "devices": 2}


def _work(job: Callable[[], Any], path: Path, rank: int, world_size: int, port: int) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "LOCAL_WORLD_SIZE": world_size}
    variables["OMP_NUM_THREADS"] = 1  # Lightning would set it in the first of several runs
    variables |= {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "1"}
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(1)
    try:
        result = job()
    except Exception as error:
        traceback.print_exc()
        result = Raised(type(error).__name__, str(error))
    partial = path.with_suffix(".part")
    partial.write_bytes(pickle.dumps(result))
    partial.rename(path)
    os._exit(0)  # without what the test session does at its end


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
