"""What a whole pass costs on four networks, beside plain forwards, training steps, and the peers that do the same.

Every way but the first two computes the products of the queries' gradients with those of all samples. Each is checked
against autograd for one sample at a time before it is timed; repeats are interleaved. README.md tells how to read it.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from engine_models import NUM_CLASSES, SPECS, Work
from engine_peers import PEERS, ask_peer
from engine_profile import print_profile
from engine_report import print_row, print_summary
from engine_targets import targets_of
from engine_ways import Ways, found_products
from head_pass import TOLERANCE, describe_machine
from timing import fitting_count, time_interleaved
from torch import Tensor

from lightning_gradsim import flops

BATCH_SIZES = {"mlp": [64, 512]}
"""Batch sizes of a network unless told otherwise; 64 alone for all that are not named."""
WHOLE = ("forward", "train", "ours", "teachers")
"""Ways that go through all samples; the others go through as many as fit into `--seconds`, in whole batches."""
MATRIX_SIZE = 1024
EXACT = 1e-7
"""Tolerance of the ways in our own environment, which are checked in float64 (self-influence is kept in float32) and
timed in float32: there, a unit of a ReLU may come out just below zero in one way and just above it in another, and the
gradient of its sample differs by more than rounding."""


class Reference:
    """Gradients by one-sample autograd of the queries and of some samples, and how far a way is from their products."""

    def __init__(self, ways: Ways, part: int) -> None:
        work = ways.work
        self.queries = ways.query_gradients.double()  # [m, p]
        self.samples = torch.stack(list(work.gradients(work.inputs[:part], work.labels[:part]))).double()  # [n, p]
        self.query_norms = self.queries.norm(dim=1)
        self.squared_norms = self.samples.square().sum(1)

    def difference(self, products: Tensor, *, has_head_bias: bool = True) -> float:
        """Largest difference of the products ``[m, n]`` from ours, relative to both norms."""
        # The head is the last layer, and its bias the last of its parameters.
        end = None if has_head_bias else -NUM_CLASSES
        expected = self.queries[:, :end] @ self.samples[:, :end].T
        norms = self.query_norms[:, None] * self.squared_norms.sqrt()
        return float(((products - expected).abs() / norms).max())

    def difference_of_pass(self, ways: Ways, *, teachers: bool) -> float:
        """The same for the lists of a pass, and the relative difference of its self-influence."""
        part = len(self.samples)
        result = ways.our_pass(part, teachers=teachers, top_k=part)
        difference = self.difference(found_products(result, self.squared_norms, self.query_norms))
        expected = self.squared_norms[result.suspects.sample_ids]
        return max(difference, float((result.suspects.scores / expected - 1).abs().max()))


def check_ways(ways: Ways, reference: Reference, chosen: list[str]) -> dict[str, dict[str, Any]]:
    """For each way, its difference from one-sample autograd, or why it is not timed."""
    part = len(reference.samples)
    answers: dict[str, dict[str, Any]] = {}
    for name in chosen:
        if name in {"forward", "train"}:
            answers[name] = {}
            continue
        try:
            if name in {"ours", "teachers"}:
                difference = reference.difference_of_pass(ways, teachers=name == "teachers")
            else:
                difference = reference.difference(ways.by_name()[name](part))
        except NotImplementedError as error:
            answers[name] = {"refused": reason(error)}
            continue
        answers[name] = judge(difference, EXACT)
    return answers


def judge(difference: float, tolerance: float = TOLERANCE) -> dict[str, Any]:
    """The difference, with the verdict if it is too large."""
    if difference <= tolerance:
        return {"difference": difference}
    return {"difference": difference, "refused": f"wrong: differs from one-sample autograd by {difference:.0e}"}


def reason(error: BaseException | str) -> str:
    """Why a peer does not do a row, in a few words."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return "refuses trainable BatchNorm" if "buffers" in text and "BatchNorm" in text else text.splitlines()[0][:90]


def time_ways(ways: Ways, answers: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Add samples, milliseconds and microseconds a sample to the answers of those that are right."""
    num_samples, batch_size = len(ways.work.labels), ways.batch_size
    functions = ways.by_name()
    counts: dict[str, int] = {}
    timed: dict[str, Callable[[], Any]] = {}
    for name, answer in answers.items():
        if "refused" in answer:
            continue
        function, count = functions[name], num_samples
        if name not in WHOLE:
            unit = 16 if name == "loop" else batch_size
            count = fitting_count(function, unit, num_samples, options.seconds)
        counts[name] = count
        timed[name] = functools.partial(function, count)
        if name in {"ours", "teachers"} and num_samples > batch_size:
            timed[f"{name}, one batch"] = functools.partial(function, batch_size)
    times = time_interleaved(timed, options.repeats)
    for name, count in counts.items():
        answers[name] |= {"samples": count, "ms": summarise(times[name])}
        one_batch = times.get(f"{name}, one batch")
        if one_batch is None:
            answers[name]["us"] = 1000 * statistics.median(times[name]) / count
        else:
            # Queries and first-batch checks are paid once a pass, however long it is.
            further = [whole - first for whole, first in zip(times[name], one_batch, strict=True)]
            answers[name]["us"] = max(1000 * statistics.median(further) / (count - batch_size), 1e-3)
            answers[name]["once_ms"] = statistics.median(times[name]) - answers[name]["us"] * count / 1000


def add_ratios(answers: dict[str, dict[str, Any]]) -> None:
    """Add to each way how many plain forwards of its own environment it costs, and that over ours."""
    for answer in answers.values():
        forward = answer.get("forward_us", answers.get("forward", {}).get("us"))
        if "us" in answer and forward:
            answer["over_forward"] = answer["us"] / forward
    ours = answers.get("ours", {}).get("over_forward")
    for answer in answers.values():
        if ours and "over_forward" in answer:
            answer["over_ours"] = answer["over_forward"] / ours


def summarise(times: list[float]) -> list[float]:
    """Median, smallest and largest."""
    return [statistics.median(times), min(times), max(times)]


def count_flops(ways: Ways, chosen: list[str]) -> dict[str, float]:
    """Floating-point operations a sample of forward, training step and our pass, the latter's once-only part apart."""
    num_samples, batch_size = len(ways.work.labels), ways.batch_size

    def count(function: Callable[[int], Any], number: int) -> float:
        return float(flops.count_flops(lambda: function(number)))

    functions = ways.by_name()
    counted = {name: count(functions[name], batch_size) / batch_size for name in ("forward", "train")}
    if "ours" in chosen:
        first, whole = count(functions["ours"], batch_size), count(functions["ours"], num_samples)
        further = num_samples - batch_size
        counted["ours"] = (whole - first) / further if further else whole / num_samples
    return counted


def matrix_rate(repeats: int = 7) -> float:
    """Floating-point operations a second of a float32 matrix product: the best of several."""
    left, right = torch.rand(2, MATRIX_SIZE, MATRIX_SIZE)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - begin)
    return 2 * MATRIX_SIZE**3 / best


def measure(model: str, layers: str, batch_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one row."""
    num_samples = options.samples or SPECS[model].num_samples
    work = Work(model, layers, num_samples, options.queries)
    ways = Ways(work, batch_size)
    rate = matrix_rate()
    exact, part = Ways(work.exact(), batch_size), min(options.part, num_samples)
    answers = check_ways(exact, Reference(exact, part), [name for name in options.ways if name not in PEERS])
    del exact  # and the gradients of its queries
    time_ways(ways, answers, options)
    peers = [name for name in options.ways if name in PEERS]
    reference = Reference(ways, part) if peers else None
    for peer in peers:
        answers[peer] = ask_peer(peer, model, layers, num_samples, batch_size, options)
        products = answers[peer].pop("products", None)
        if products is not None and reference is not None:
            found = judge(reference.difference(products, has_head_bias=answers[peer]["has_head_bias"]))
            answers[peer] = found if "refused" in found else answers[peer] | found
    add_ratios(answers)
    row = {
        "row": f"{model}/{layers}",
        "batch_size": batch_size,
        "samples": num_samples,
        "parameters": sum(parameter.numel() for parameter in work.parameters.values()),
        "flops": count_flops(ways, options.ways),
        # The best of two moments: whatever else runs on the machine can only lower it.
        "matrix_rate": max(rate, matrix_rate()),
        "ways": answers,
    }
    return row | {"targets": targets_of(model, layers, batch_size, answers)}


def rows(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Network, layers and batch size of each chosen row."""
    for model in SPECS:
        for layers in ("all", "last"):
            row = f"{model}/{layers}"
            if options.only and not any(fnmatch.fnmatch(row, pattern) for pattern in options.only):
                continue
            for batch_size in options.batch_sizes or BATCH_SIZES.get(model, [64]):
                yield model, layers, batch_size


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    known = ["forward", "train", "ours", "teachers", "loop", "vmap", "opacus", *PEERS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows such as conv/last or 'mlp/*'; all by default")
    parser.add_argument("--ways", nargs="+", default=known, choices=known, metavar="WAY", help=", ".join(known))
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="for all networks; by default 64, mlp also 512")
    parser.add_argument("--samples", type=int, help="training samples of every row; by default a number for each model")
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--part", type=int, default=64, help="samples of the check")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="time of a repeat for all but forward, train, ours")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", type=Path, default=Path(".bench"), help="where the peers' environments are")
    parser.add_argument("--profile", action="store_true", help="also say where the time of the pass goes")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    machine = describe_machine()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    results = []
    with warnings.catch_warnings():
        # vmap and Opacus warn of how they work inside.
        warnings.filterwarnings("ignore", category=UserWarning, module="torch|opacus|engine_")
        for model, layers, batch_size in rows(options):
            results.append(measure(model, layers, batch_size, options))
            print_row(results[-1], options.queries)
            if options.profile:
                print_profile(Work(model, layers, results[-1]["samples"], options.queries), batch_size)
    print_summary(results)
    if options.json is not None:
        setting = {name: getattr(options, name) for name in ("queries", "part", "repeats", "seconds")}
        figures = {"machine": machine, "setting": setting, "results": results}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
