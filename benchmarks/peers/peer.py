"""What the scripts of all peers share: the same networks and data, the same timing, JSON on the last line.

Each script runs in an environment of its own, started by `engine.py` with one JSON argument.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any, Protocol

import torch
from engine_models import Work
from timing import fitting_count, time_interleaved
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

PATIENCE = 40.0
"""Seconds after which a peer is spared further repeats."""
SLOW = 15.0
"""Seconds for the check beyond which there is a single repeat: some need a minute for a batch."""


class Peer(Protocol):
    """A package that computes products of per-sample gradients.

    Attributes:
        package: Its name on PyPI.
        way: What of it is used.
        has_head_bias: Whether the bias of the last layer counts.
        pays_once: Whether a run goes through the queries once, however many samples it has.
        unit: Samples of the smallest run.
    """

    package: str
    way: str
    has_head_bias: bool
    pays_once: bool
    unit: int

    def products(self, num_samples: int) -> Tensor:
        """Dot products of the queries' gradients with those of the first samples, ``[m, n]``."""
        ...


class _Samples(Dataset[Any]):
    """Tensors that are indexed once a batch: peers are not to be charged for collating samples one by one."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.tensors = (inputs, labels)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        return self.tensors[0][index], self.tensors[1][index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self[slice(indices[0], indices[-1] + 1)]


def make_loader(inputs: Tensor, labels: Tensor, batch_size: int) -> Iterable[Any]:
    """A loader in order, without workers."""
    return DataLoader(_Samples(inputs, labels), batch_size, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


def run(make: Callable[[Work, int], Peer]) -> None:
    """Check, time and print, as the argument on the command line asks; what a peer raises becomes its answer."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    warnings.filterwarnings("ignore")
    work = Work(options["model"], options["layers"], options["samples"], options["queries"])
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = _measure(work, make(work, options["batch_size"]), options)
    except Exception as error:  # whatever it is: the table says so
        answer = {"refused": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))


def _measure(work: Work, peer: Peer, options: dict[str, Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    torch.save(peer.products(options["part"]).detach().clone(), options["products"])
    is_slow = time.perf_counter() - begin > SLOW
    most, seconds, batch_size = options["samples"], options["seconds"], options["batch_size"]
    count = peer.unit if is_slow else fitting_count(peer.products, peer.unit, most, seconds)
    if peer.pays_once:
        # One unit is taken off: what remains must not be small beside the queries.
        count = min(most, max(count, peer.unit + options["queries"]))
    forward_count = fitting_count(lambda n: work.forward(batch_size, n), batch_size, most, seconds)
    ways: dict[str, Callable[[], object]] = {
        "forward": lambda: work.forward(batch_size, forward_count),
        "products": lambda: peer.products(count),
    }
    if peer.pays_once and count > peer.unit:
        ways["unit"] = lambda: peer.products(peer.unit)
    repeats = 1 if is_slow else options["repeats"]
    times = time_interleaved(ways, repeats, PATIENCE, warm_up=not is_slow)
    us = statistics.median(times["products"]) / count
    if "unit" in times:
        further = [whole - unit for whole, unit in zip(times["products"], times["unit"], strict=True)]
        us = statistics.median(further) / (count - peer.unit)
        if us <= 0:
            raise RuntimeError("lost in noise, give more --seconds")
    return {
        "way": f"{peer.package} {version(peer.package)} {peer.way}",
        "has_head_bias": peer.has_head_bias,
        "samples": count,
        "ms": times["products"],
        "us": 1000 * us,
        "forward_us": 1000 * statistics.median(times["forward"]) / forward_count,
        "torch": torch.__version__,
    }
