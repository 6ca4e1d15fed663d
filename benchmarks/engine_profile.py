"""Where the time of a pass goes: by part, by a stopwatch inside the package, and by operation, by torch's profiler."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from unittest import mock

from engine_models import Work
from engine_ways import Ways
from head_pass import STEPS, Stopwatch
from torch.profiler import ProfilerActivity, profile

import lightning_gradsim.scorer
import lightning_gradsim.wrapper
from lightning_gradsim import PerSampleGradients
from lightning_gradsim.recorder import Recorder

PARTS = {
    **STEPS,
    "backward": [(Recorder, "output_grads")],
    "rules": [(PerSampleGradients, "_by_rule")],
    "first-batch checks": [
        (lightning_gradsim.wrapper, "find_wrong_sums"),
        (lightning_gradsim.wrapper, "find_mixed_rows"),
    ],
    "joining of batches": [(lightning_gradsim.scorer, "concatenate_layers")],
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
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        ways.our_pass(num_samples)
    print("  The operations that take the most, without those that they call, by shapes of their inputs:")
    events = profiler.key_averages(group_by_input_shape=True)
    for event in sorted(events, key=lambda event: -event.self_cpu_time_total)[:NUM_OPERATIONS]:
        shapes = " ".join("x".join(map(str, shape)) for shape in event.input_shapes if shape)
        name = event.key.removeprefix("aten::")
        print(f"    {name:<30}{event.self_cpu_time_total / 1000:>9.1f} ms{event.count:>7} calls  {shapes[:80]}")


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
