"""Peak memory of a pass: independent of the number of training samples, and within a stated budget.

Run it with `python benchmarks/memory.py`. Every measurement has a process of its own; Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.engine import EngineSettings, run_pass
from lightning_gradsim.query_side import QueryBatch

SIZES = (10_000, 200_000)
STATED_BYTES = 64
"""Bytes a sample that the run statistics take at most: 23 are kept, the rest is for sorting (`SampleStatistics`)."""
REPEATS = 3
"""Processes for each figure; the smallest counts, as what else they allocate only adds to it."""
TOLERANCE = 0.05
BUDGET = 2 * 2**30
MIB = 2**20


class Block(nn.Module):
    """A block of a transformer out of linear layers."""

    def __init__(self, width: int, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, t, width]`` to the same."""
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        hidden: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + hidden


class Transformer(nn.Module):
    """100 million parameters: a table of 19,000 words and 12 blocks of width 768."""

    def __init__(self, width: int = 768, depth: int = 12, words: int = 19_000) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, indices: Tensor) -> Tensor:
        """Logits ``[n, 10]`` of indices ``[n, t]``."""
        logits: Tensor = self.head(self.blocks(self.table(indices)).mean(1))
        return logits


def conv_net() -> nn.Module:
    """The network of `examples/mnist_convnet.py`."""
    first = (nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU())
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10))


def mlp() -> nn.Module:
    """784-512-256-10."""
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


CASES: dict[str, dict[str, Any]] = {
    "conv net, head": {"make": conv_net, "shape": (1, 28, 28), "layers": "last"},
    "MLP, all layers": {"make": mlp, "shape": (784,), "layers": "all"},
    "transformer, last block": {"make": Transformer, "shape": (64,), "layers": "blocks.11"},
}


def inputs(case: dict[str, Any], number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels, made when they are asked for."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (number,), generator=generator)
    if case["make"] is Transformer:
        return torch.randint(19_000, (number, *case["shape"]), generator=generator), labels
    return torch.randn(number, *case["shape"], generator=generator), labels


def batches(case: dict[str, Any], num_samples: int, batch_size: int) -> Iterator[tuple[Tensor, Any]]:
    """Training batches with their ids."""
    for start in range(0, num_samples, batch_size):
        number = min(batch_size, num_samples - start)
        yield torch.arange(start, start + number), inputs(case, number, start)


def status(key: str) -> int:
    """A line of this process' memory status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def measure(name: str, num_samples: int, batch_size: int, budget: int | None) -> dict[str, Any]:
    """Peak resident memory of a pass beyond what the process had before it, in bytes."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    case = CASES[name]
    module = case["make"]()
    adapter = Adapter()
    adapter.bind(module)
    settings = EngineSettings(case["layers"], memory_budget=budget)
    queries = [QueryBatch(range(64), inputs(case, 64, 10**6))]
    # What libraries allocate once is no part of a pass.
    run_pass(module, adapter, queries, batches(case, 2, 2), settings)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    baseline = status("VmRSS")
    result = run_pass(module, adapter, queries, batches(case, num_samples, batch_size), settings)
    assert result.num_samples == num_samples
    return {"samples": num_samples, "peak": status("VmHWM") - baseline, "baseline": baseline}


def in_own_process(*arguments: str, repeats: int = REPEATS) -> dict[str, Any]:
    """The smallest of several measurements."""
    command = [sys.executable, __file__, "--measure", *arguments]
    outputs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(repeats)]
    figures: dict[str, Any] = min((json.loads(output) for output in outputs), key=lambda each: each["peak"])
    return figures


def compare_sizes(name: str, batch_size: int) -> dict[str, Any]:
    """Peaks for few and for many samples."""
    few, many = (in_own_process(name, str(number), str(batch_size)) for number in SIZES)
    stated = STATED_BYTES * (SIZES[1] - SIZES[0])
    growth = (many["peak"] - stated) / few["peak"] - 1
    print(
        f"{name:<26}{few['peak'] / MIB:>10.1f} MiB{many['peak'] / MIB:>10.1f} MiB{stated / MIB:>8.1f} MiB"
        f"{growth:>+9.1%}  {'met' if growth <= TOLERANCE else 'MISSED'}"
    )
    return {"case": name, "few": few, "many": many, "stated": stated, "growth": growth}


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", nargs="+", metavar="ARGUMENT", help="one measurement in this process, as JSON")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)
    if options.measure:
        name, number, batch_size, *budget = options.measure
        print(json.dumps(measure(name, int(number), int(batch_size), int(budget[0]) if budget else None)))
        return
    print(f"{'peak above baseline':<26}{SIZES[0]:>12,} N{SIZES[1]:>12,} N{'stated':>12}{'growth':>9}")
    results = [compare_sizes(name, options.batch_size) for name in ("conv net, head", "MLP, all layers")]
    name = "transformer, last block"
    block = in_own_process(name, "512", str(options.batch_size), str(BUDGET), repeats=1)
    verdict = "met" if block["peak"] <= BUDGET else "MISSED"
    print(f"{name}: {block['peak'] / MIB:,.0f} MiB within {BUDGET / MIB:,.0f} MiB  {verdict}")
    if options.json is not None:
        figures = {"sizes": results, "budget": {"case": name, "budget": BUDGET, **block}}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
