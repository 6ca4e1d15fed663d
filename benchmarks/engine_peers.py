"""Asks the peers that need an environment of their own."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
PEERS = ("alibi", "captum", "dattri")
TIMEOUT_SECONDS = 300


def ask_peer(
    peer: str, model: str, layers: str, num_samples: int, batch_size: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Run a peer's script in its environment.

    Args:
        peer: One of `PEERS`.
        model: Name of the network.
        layers: `all` or `last`.
        num_samples: Training samples.
        batch_size: Samples in a batch, where the peer has batches.
        options: Those of the command line.

    Returns:
        The times of an answer as `engine.py` keeps them, with products ``[m, n]`` of the first samples; or, under
        `refused`, why there are none.
    """
    python = options.peers / peer / "bin" / "python"
    if not python.exists():
        return {"refused": "no environment (make bench-peers)"}
    with tempfile.TemporaryDirectory() as folder:
        products = Path(folder) / "products.pt"
        task = {
            "model": model,
            "layers": layers,
            "samples": num_samples,
            "batch_size": batch_size,
            "products": str(products),
            **{name: getattr(options, name) for name in ("queries", "part", "repeats", "seconds", "threads")},
        }
        answer = _run([str(python.absolute()), str(HERE / "peers" / f"run_{peer}.py"), json.dumps(task)])
        if "refused" not in answer:
            answer["products"] = torch.load(products)
    return answer


def _run(command: list[str]) -> dict[str, Any]:
    # Progress bars cost a little.
    environment = {**os.environ, "PYTHONPATH": str(HERE), "TQDM_DISABLE": "1"}
    try:
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"refused": f"not done after {TIMEOUT_SECONDS} s"}
    if ran.returncode != 0:
        return {"refused": f"failed: {(ran.stderr.strip().splitlines() or ['no word'])[-1][:80]}"}
    answer: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    if "refused" in answer:
        return {"refused": answer["refused"].splitlines()[0][:90]}
    median = statistics.median(answer["ms"])
    return {
        **{name: answer[name] for name in ("way", "has_head_bias", "samples", "us", "forward_us", "torch")},
        "ms": [median, min(answer["ms"]), max(answer["ms"])],
    }
