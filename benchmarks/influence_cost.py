"""What a pass with `similarity="influence"` costs beside the same pass with `"dot"`: with the moments, and without.

Processor time, so that what else runs on the machine counts little; both passes in turn, the median of their ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engine_models import SPECS, Work
from head_pass import describe_machine
from torch import Tensor

from lightning_gradsim import Adapter, engine
from lightning_gradsim.engine import EngineSettings, PassResult, run_pass
from lightning_gradsim.query_side import QueryBatch

MOMENT_SAMPLES = 2000
MOMENT_STEPS = ("gather_curvature", "precondition")
"""Functions of the engine that a pass with `dot` does not call."""
TARGETS = {"pass": 1.05, "all": 1.2}


class Passes:
    """The two passes over the same samples, in the batches of a loader."""

    def __init__(self, work: Work, batch_size: int) -> None:
        self._work = work
        self._batch_size = batch_size
        self._adapter = Adapter()
        self._adapter.bind(work.model)

    def run(self, similarity: Any) -> tuple[float, float]:
        """Processor seconds of a whole pass, and those of them that the moments take."""
        with ExitStack() as stack:
            spent = [0.0]
            for name in MOMENT_STEPS:
                stack.enter_context(mock.patch.object(engine, name, _timed(getattr(engine, name), spent)))
            begin = time.process_time()
            self._pass(similarity)
            return time.process_time() - begin, spent[0]

    def _pass(self, similarity: Any) -> PassResult:
        work = self._work
        queries = QueryBatch(range(len(work.query_labels)), (work.query_inputs, work.query_labels))
        settings = EngineSettings(work.layers, similarity)
        moments = list(self._batches(min(MOMENT_SAMPLES, len(work.labels))))
        return run_pass(
            work.model, self._adapter, [queries], self._batches(len(work.labels)), settings, curvature_batches=moments
        )

    def _batches(self, number: int) -> Iterator[tuple[Tensor, Any]]:
        ids = torch.arange(number).split(self._batch_size)
        return zip(ids, self._work.batches(self._batch_size, number), strict=True)


def measure(work: Work, batch_size: int, repeats: int) -> dict[str, float]:
    """Seconds of both passes and of the moments, and the ratios, medians over repeats."""
    passes = Passes(work, batch_size)
    dots, influences, moments = [], [], []
    for repeat in range(repeats + 1):
        dot, _ = passes.run("dot")
        influence, own = passes.run("influence")
        if repeat:  # the first pays for what is allocated once
            dots.append(dot)
            influences.append(influence)
            moments.append(own)
    without = [(whole - own) / dot for whole, own, dot in zip(influences, moments, dots, strict=True)]
    whole = [influence / dot for influence, dot in zip(influences, dots, strict=True)]
    return {
        "dot_s": statistics.median(dots),
        "influence_s": statistics.median(influences),
        "moments_s": statistics.median(moments),
        "pass": statistics.median(without),
        "pass_smallest": min(without),
        "all": statistics.median(whole),
        "all_smallest": min(whole),
    }


def _timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        begin = time.process_time()
        try:
            return function(*arguments, **options)
        finally:
            spent[0] += time.process_time() - begin

    return call


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["mlp", "conv"], choices=list(SPECS))
    parser.add_argument("--layers", default="all", choices=["all", "last"])
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()))
    rows = []
    for model in options.models:
        work = Work(model, options.layers, options.samples, options.queries)
        for batch_size in options.batch_sizes:
            row = measure(work, batch_size, options.repeats)
            rows.append({"model": model, "layers": options.layers, "batch_size": batch_size, **row})
            met = {name: "met" if row[name] <= target else "MISSED" for name, target in TARGETS.items()}
            print(
                f"{model}/{options.layers}, {options.samples:,} samples in batches of {batch_size}: "
                f"dot {row['dot_s']:.2f} s, influence {row['influence_s']:.2f} s, of these moments "
                f"{row['moments_s']:.2f} s; without moments {row['pass']:.3f} (smallest {row['pass_smallest']:.3f}, "
                f"target <= {TARGETS['pass']}: {met['pass']}), all included {row['all']:.3f} (smallest "
                f"{row['all_smallest']:.3f}, target <= {TARGETS['all']}: {met['all']})"
            )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
