"""How `engine.py` and the scripts of the peers time: on as many samples as fit, interleaved, after a warm-up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def fitting_count(way: Callable[[int], Any], unit: int, most: int, seconds: float) -> int:
    """How many samples a way gets through in the given time, as far as a few runs can tell.

    Args:
        way: Works through the given number of samples.
        unit: Samples of the first run; the answer is a multiple of it.
        most: The largest answer.
        seconds: Time that one run may take.

    Returns:
        Number of samples; at least one unit, however long that takes.
    """
    unit = count = min(unit, most)
    while True:
        begin = time.perf_counter()
        way(count)
        duration = time.perf_counter() - begin
        # The first run pays for set-up: go up in steps, and never trust one run for more than eight times as much.
        fitting = int(count * min(seconds / max(duration, 1e-9), 8.0)) // unit * unit
        if fitting <= 2 * count or count == most:
            return max(unit, min(most, fitting))
        count = min(most, fitting)


def time_interleaved(
    ways: dict[str, Callable[[], Any]], repeats: int, patience: float = float("inf"), *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Milliseconds of every way, once in each repeat, after one run of each to warm up.

    Args:
        ways: What is timed, by name.
        repeats: Times that each runs.
        patience: Seconds after which no repeat begins any more, once there are two.
        warm_up: Whether there is one run of each before.

    Returns:
        Times by name, as many as there were repeats.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    start = time.perf_counter()
    for repeat in range(0 if warm_up else 1, repeats + 1):
        if repeat > 2 and time.perf_counter() - start > patience:
            break
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            if repeat:
                times[name].append(1000 * (time.perf_counter() - begin))
    return times
