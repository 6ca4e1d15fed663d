"""What the pass over the head layer costs, beside a plain forward and beside one sample at a time.

All from tensors in memory, in one run, with the same batches and threads, repeats interleaved: (a) a forward in eval
without gradients, (b) `run_pass` for the last layer with 64 queries, (c) one sample at a time: its loss, autograd for
the head, and the products with the stored gradients of the queries, timed on a part of the samples and scaled.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from timing import time_interleaved
from torch import Tensor, nn

import lightning_gradsim.adapter
import lightning_gradsim.scorer
from lightning_gradsim import Adapter, PerSampleGradients
from lightning_gradsim.engine import EngineSettings, PassResult, run_pass
from lightning_gradsim.query_side import QueryBatch
from lightning_gradsim.sample_statistics import SampleStatistics
from lightning_gradsim.topk import TopK

EXAMPLE = Path(__file__).parents[1] / "examples" / "mnist_convnet.py"
TOLERANCE = 1e-5  # relative to both norms, for float32: docs/design.md
STEPS: dict[str, list[tuple[Any, str]]] = {
    "forward": [(Adapter, "forward")],
    "losses": [(Adapter, "step")],
    "predictions": [(lightning_gradsim.adapter, "read_outcome")],
    "factors": [(PerSampleGradients, "factors")],
    "products and norms": [
        (lightning_gradsim.scorer, "dot_and_squared_norms"),
        (lightning_gradsim.scorer, "squared_norms"),
    ],
    "similarities": [(lightning_gradsim.scorer, "compute_similarity")],
    "top-k": [(TopK, "update"), (TopK, "compute")],
    "statistics": [(SampleStatistics, "update"), (SampleStatistics, "compute")],
}
"""Parts of the pass for `--profile`: the time inside these functions, without that inside others of the list."""

Batches = list[tuple[Tensor, tuple[Tensor, Tensor]]]


class Work:
    """A network, training samples and queries, and three ways through them."""

    def __init__(self, num_samples: int, num_queries: int) -> None:
        spec = importlib.util.spec_from_file_location("mnist_convnet", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        torch.manual_seed(0)
        self.model: nn.Module = example.ConvNet().eval()
        train_set, validation_set = example.make_data(0)
        self.images, self.labels = (tensor[:num_samples] for tensor in train_set.tensors)
        self.query_images = validation_set.tensors[0][:num_queries]
        with torch.no_grad():
            # Any label but the predicted one: only mistakes are queries.
            self.query_labels = (self.model(self.query_images).argmax(1) + 1) % 10
        self.query_gradients = torch.stack(self._head_gradients(self.query_images, self.query_labels))  # [m, p]
        self.adapter = Adapter()
        self.adapter.bind(self.model)

    def batches(self, batch_size: int, num_samples: int | None = None) -> Batches:
        """Ids and batches of the first samples, or of all."""
        images, labels = self.images[:num_samples], self.labels[:num_samples]
        pairs = zip(images.split(batch_size), labels.split(batch_size), strict=True)
        return list(zip(torch.arange(len(labels)).split(batch_size), pairs, strict=True))

    def forward(self, batches: Batches) -> None:
        """(a): a plain forward."""
        with torch.no_grad():
            for _, (images, _) in batches:
                self.model(images)

    def head_pass(self, batches: Batches, top_k: int = 8) -> PassResult:
        """(b): the pass of the callback."""
        queries = QueryBatch(range(len(self.query_labels)), (self.query_images, self.query_labels))
        return run_pass(self.model, self.adapter, [queries], batches, EngineSettings("last", "dot", top_k))

    def one_by_one(self, num_samples: int) -> tuple[Tensor, Tensor]:
        """(c): dot products ``[m, n]`` and squared norms ``[n]`` of the first samples, one at a time."""
        products, squared_norms = [], []
        for gradient in self._head_gradients(self.images[:num_samples], self.labels[:num_samples]):
            products.append(self.query_gradients @ gradient)
            squared_norms.append(gradient @ gradient)
        return torch.stack(products, dim=1), torch.stack(squared_norms)

    def _head_gradients(self, images: Tensor, labels: Tensor) -> list[Tensor]:
        parameters = list(self.model.get_submodule("fc2").parameters())
        gradients = []
        for image, label in zip(images.split(1), labels.split(1), strict=True):
            loss = F.cross_entropy(self.model(image), label)
            gradients.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, parameters)]))
        return gradients


def check_agreement(work: Work, num_samples: int, batch_size: int) -> float:
    """Largest difference of (b) from (c) on the first samples, relative to both norms; ends the run if it is large."""
    expected, squared_norms = work.one_by_one(num_samples)
    norms = work.query_gradients.norm(dim=1)[:, None] * squared_norms.sqrt()  # [m, n]
    # In lists as long as there are samples, harmful holds all negative products, look-alikes all positive cosines.
    result = work.head_pass(work.batches(batch_size, num_samples), top_k=num_samples)
    found = torch.zeros_like(expected)
    for row, query in result.queries.items():
        for sample in query.harmful:
            found[row, sample.sample_id] = sample.score
        for sample in query.look_alikes:
            found[row, sample.sample_id] = sample.score * norms[row, sample.sample_id]
    difference = float(((found - expected).abs() / norms).max())
    self_influence = squared_norms[result.suspects.sample_ids]
    difference = max(difference, float((result.suspects.scores / self_influence - 1).abs().max()))
    if not difference <= TOLERANCE:
        raise SystemExit(f"The pass differs from one sample at a time by {difference:.1e}, {TOLERANCE:.0e} is allowed.")
    return difference


def measure(work: Work, batch_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Medians, smallest and largest times in ms for all samples, and their ratios."""
    batches, scale = work.batches(batch_size), options.samples / options.part
    ways: dict[str, Callable[[], Any]] = {
        "forward": lambda: work.forward(batches),
        "head pass": lambda: work.head_pass(batches),
        "one by one": lambda: work.one_by_one(options.part),
    }
    times = time_interleaved(ways, options.repeats)
    times["one by one"] = [scale * value for value in times["one by one"]]
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "batch_size": batch_size,
        "difference": check_agreement(work, options.part, batch_size),
        "ms": {name: [medians[name], min(values), max(values)] for name, values in times.items()},
        "head pass / forward": medians["head pass"] / medians["forward"],
        "one by one / head pass": medians["one by one"] / medians["head pass"],
    }


class Stopwatch:
    """Time inside each of several functions that call one another, without the time inside the others."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Count the time spent inside under this name."""
        self._switch()
        self._stack.append(name)
        try:
            yield
        finally:
            self._switch()
            self._stack.pop()

    def watch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.inside(name):
                return function(*args, **kwargs)

        return timed

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now


def profile(work: Work, batch_size: int, repeats: int) -> dict[str, float]:
    """Milliseconds that each part of a pass takes: medians over the repeats."""
    batches = work.batches(batch_size)
    runs = []
    for _ in range(repeats):
        watch = Stopwatch()
        with ExitStack() as stack:
            for name, places in STEPS.items():
                for owner, attribute in places:
                    timed = watch.watch(name, getattr(owner, attribute))
                    stack.enter_context(mock.patch.object(owner, attribute, timed))
            with watch.inside("everything else"):
                work.head_pass(batches)
        runs.append(watch.seconds)
    return {name: 1000 * statistics.median(run[name] for run in runs) for name in [*STEPS, "everything else"]}


def describe_machine() -> dict[str, Any]:
    """Processor, threads, and versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def print_results(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The table of times and ratios."""
    print(
        f"{options.samples:,} samples, {options.queries} queries, head layer; ms as median (min to max) of "
        f"{options.repeats} interleaved repeats; one by one: {options.part} samples, scaled"
    )
    print(f"{'batch':>5}{'(a) forward':>24}{'(b) head pass':>24}{'(c) one by one':>26}{'(b)/(a)':>9}{'(c)/(b)':>9}")
    for result in results:
        cells = ["{:,.0f} ({:,.0f} to {:,.0f})".format(*values) for values in result["ms"].values()]
        ratios = f"{result['head pass / forward']:>9.2f}{result['one by one / head pass']:>9.1f}"
        print(f"{result['batch_size']:>5}{cells[0]:>24}{cells[1]:>24}{cells[2]:>26}{ratios}")
    largest = max(result["difference"] for result in results)
    print(f"(b) equals (c) on these {options.part} samples: largest difference {largest:.0e} of both norms")


def print_profile(result: dict[str, Any]) -> None:
    """Where the time of the pass goes, a line for each part."""
    total = sum(result["profile"].values())
    print(f"\nWhere the {total:,.0f} ms of (b) at batch {result['batch_size']} go (timers add some):")
    for name, milliseconds in result["profile"].items():
        print(f"  {name:<18}{milliseconds:>8.1f} ms{milliseconds / total:>7.0%}")


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--part", type=int, default=400, help="samples of the one-by-one way and of the check")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="also say where the time of the pass goes")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)
    machine = describe_machine()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    work = Work(options.samples, options.queries)
    results = [measure(work, batch_size, options) for batch_size in options.batch_sizes]
    print_results(results, options)
    if options.profile:
        for result in results:
            result["profile"] = profile(work, result["batch_size"], options.repeats)
            print_profile(result)
    if options.json is not None:
        setting = {name: getattr(options, name) for name in ("samples", "queries", "part", "repeats")}
        figures = {"machine": machine, "setting": setting, "results": results}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
