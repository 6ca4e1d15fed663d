"""How much sooner a pass ends in two processes: each scores its share, what they found is sent and merged.

On one machine, one thread each, over gloo, in interleaved repeats: the whole way of the callback from the queries and
the dataset to the report, without pictures and files. Both ways must give the same report. Beside the seconds on the
clock, which say nothing on a busy machine, those of the processor: of the process that works longest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_models import MLP, NUM_CLASSES, ConvNet, ResNet18
from torch import nn
from torch.utils.data import TensorDataset

from lightning_gradsim import Adapter, Report
from lightning_gradsim.engine import EngineSettings
from lightning_gradsim.explanation import make_report
from lightning_gradsim.queries import QuerySelection
from lightning_gradsim.reading import Reading, RunContext, score_part
from lightning_gradsim.reference import make_reference
from lightning_gradsim.reference_choice import Choice


@dataclass(frozen=True)
class Row:
    """What is timed."""

    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    layers: str
    num_samples: int


ROWS = {
    "conv/last": Row(ConvNet, (1, 28, 28), "last", 20_000),
    "conv/all": Row(ConvNet, (1, 28, 28), "all", 10_000),
    "mlp/last": Row(MLP, (784,), "last", 50_000),
    "mlp/all": Row(MLP, (784,), "all", 30_000),
    "resnet/last": Row(ResNet18, (3, 32, 32), "last", 2_000),
    "resnet/all": Row(ResNet18, (3, 32, 32), "all", 400),
}


class Work:
    """A row's network, data and queries, the same in every process."""

    def __init__(self, row: Row, num_samples: int, num_queries: int) -> None:
        torch.manual_seed(0)
        self.module, self.adapter = row.network().eval(), Adapter()
        self.adapter.bind(self.module)
        self.settings = EngineSettings(row.layers)
        data = [
            (torch.randn(number, *row.shape), torch.randint(NUM_CLASSES, (number,)))
            for number in (num_samples, 2 * num_queries)
        ]
        self.reference = make_reference(TensorDataset(*data[0]), self.adapter, Choice())
        self.selection = QuerySelection(num_queries)
        with torch.no_grad():
            step = self.adapter.step(self.module, data[1])
        self.selection.update(self.adapter, data[1], step, None, 0)

    def run(self, rank: int, world_size: int) -> Report:
        """The pass of one process, or what all of them found."""
        as_it_is = RunContext(lambda batch: batch, lambda batch: batch, nullcontext, lambda items, *_: items)
        reading = Reading(rank=rank, world_size=world_size)
        part = score_part(self.module, self.adapter, self.selection, self.reference, self.settings, as_it_is, reading)
        parts: list[Any] = [part]
        if world_size > 1:
            parts = [None] * world_size
            dist.all_gather_object(parts, part)
        return make_report(parts, self.selection, self.reference, self.settings)[0]


def work(rank: int, port: int, arguments: argparse.Namespace, path: Path) -> None:
    """One of the two processes; the second waits while the first does all alone."""
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    results = {}
    for name in arguments.only:
        task = Work(ROWS[name], arguments.samples or ROWS[name].num_samples, arguments.queries)
        times: dict[str, list[float]] = {name: [] for name in ("one", "two", "one, cpu", "two, cpu")}
        reports: dict[str, Report] = {}
        for repeat in range(arguments.repeats + 1):
            for way, world_size in (("one", 1), ("two", 2)):
                dist.barrier()
                begin, cpu_begin = time.perf_counter(), time.process_time()
                if rank < world_size:
                    reports[way] = task.run(rank, world_size)
                measured = torch.tensor([time.perf_counter() - begin, time.process_time() - cpu_begin])
                dist.all_reduce(measured, dist.ReduceOp.MAX)
                if repeat:
                    times[way].append(float(measured[0]))
                    times[f"{way}, cpu"].append(float(measured[1]))
        if rank == 0:
            check(reports["two"], reports["one"])
            results[name] = {"samples": len(task.reference.reader), **times}
            print(line(name, results[name]), flush=True)
    if rank == 0:
        path.write_text(json.dumps(results, indent=2), encoding="utf-8")
    dist.destroy_process_group()


def check(found: Report, expected: Report) -> None:
    """Both ways must list the same samples, but for neighbours whose scores differ in the last digits.

    Args:
        found: The report of two processes.
        expected: The report of one.

    Raises:
        AssertionError: If they differ.
    """
    torch.testing.assert_close(found.suspects.scores, expected.suspects.scores)
    scores = [[row["score"] for row in report.to_rows()] for report in (found, expected)]
    torch.testing.assert_close(*map(torch.tensor, scores))


def line(name: str, result: dict[str, Any]) -> str:
    """A row of the table."""
    cells = []
    for kind in ("", ", cpu"):
        one, two = result[f"one{kind}"], result[f"two{kind}"]
        ratios = [after / before for before, after in zip(one, two, strict=True)]
        cells += [f"{statistics.median(one):.2f}", f"{statistics.median(two):.2f}", in_words(ratios)]
    return row(name, f"{result['samples']:,}", *cells)


def row(*cells: str) -> str:
    """Cells in columns."""
    return "".join(cell.rjust(width) for cell, width in zip(cells, (12, 9, 9, 9, 22, 9, 9, 22), strict=True))


def in_words(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the rows and print a table.

    Args:
        arguments: Of the command line.

    Raises:
        SystemExit: If a process failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows to time")
    parser.add_argument("--samples", type=int, help="training samples, instead of as many as take seconds")
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path(os.devnull), help="where to write all times")
    options = parser.parse_args(arguments)
    print(row("", "samples", "one, s", "two, s", "ratio", "one, CPU", "two, CPU", "ratio"), flush=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, port, options, options.json)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
