"""Where the time of a pass goes: by part, by a stopwatch inside the package, and by operation, by torch's profiler."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from unittest import mock

from engine_models import Work
from engine_ways import Ways
from head_pass import STEPS, Stopwatch
from torch.profiler import ProfilerActivity, profile

import lightning_gradsim.engine
import lightning_gradsim.wrapper
from lightning_gradsim import PerSampleGradients

PARTS = {
    **STEPS,
    "backward": [(lightning_gradsim.wrapper, "_output_grads")],
    "rules": [(PerSampleGradients, "_one_call")],
    "first-batch checks": [(PerSampleGradients, "_check_sum"), (PerSampleGradients, "_check_rows")],
    "joining of batches": [(lightning_gradsim.engine, "_join")],
}
"""As in `head_pass.py`: the time inside these functions, without that inside others of the list."""
NUM_OPERATIONS = 20


def print_profile(work: Work, batch_size: int, repeats: int = 3) -> None:
    """Print both for a pass over all samples, with one gradient a query."""
    ways, num_samples = Ways(work, batch_size), len(work.labels)
    ways.our_pass(batch_size)
    runs = [_watched(ways, num_samples) for _ in range(repeats)]
    parts = {name: statistics.median(run.get(name, 0.0) for run in runs) for name in [*PARTS, "everything else"]}
    total = sum(parts.values())
    print(f"  Where the {1000 * total:,.0f} ms of a pass go, queries and first batch included (timers add some):")
    for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        print(f"    {name:<20}{1000 * seconds:>9.1f} ms{seconds / total:>6.0%}")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        ways.our_pass(num_samples)
    print(
        profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=NUM_OPERATIONS, max_name_column_width=40)
    )


def _watched(ways: Ways, num_samples: int) -> dict[str, float]:
    watch = Stopwatch()
    with ExitStack() as stack:
        for name, places in PARTS.items():
            for owner, attribute in places:
                timed = watch.watch(name, getattr(owner, attribute))
                stack.enter_context(mock.patch.object(owner, attribute, timed))
        with watch.inside("everything else"):
            ways.our_pass(num_samples)
    return watch.seconds
