"""A pass over many samples takes no more memory than one over few."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "memory.py"


def peak(number):
    command = [sys.executable, str(BENCHMARK), "--measure", "MLP, all layers", str(number), "64"]
    return min(json.loads(subprocess.check_output(command, text=True))["peak"] for _ in range(2))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_samples():
    """64 bytes a sample are stated; what a process allocates beside a pass varies by some megabytes."""
    few, many = peak(2_000), peak(50_000)
    assert many - few < 64 * 48_000 + 16 * 2**20
