"""What share of a run's time do reports take, with and without a budget, and is every training sample read?

`python benchmarks/budget.py [--layers last:2] [--epochs 10] [--budget 0.1]`. The network of `examples/mnist_convnet.py`
is trained three times: without the callback, with it and no limit, and within the budget. The share is printed as the
callback tells it, and as the clock on the wall does: seconds of the whole `fit` over those without the callback. On a
noisy machine the second may be off by several percent.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradsim import GradSimCallback, Report

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from mnist_convnet import ConvNet, first_samples, make_data


class Reports(Callback):
    """Keeps the reports of a callback."""

    def __init__(self, gradsim: GradSimCallback) -> None:
        self.gradsim = gradsim
        self.reports: list[Report] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep a new one."""
        report = self.gradsim.report
        if report is not None and report not in self.reports:
            self.reports.append(report)


def run(options: argparse.Namespace, gradsim: GradSimCallback | None) -> tuple[float, list[Report]]:
    """Train once.

    Args:
        options: Of the command line.
        gradsim: The callback, or ``None`` for a run without it.

    Returns:
        Seconds of the fit, and the reports.
    """
    seed_everything(options.seed, verbose=False)
    train, validation = make_data(options.seed)
    train, validation = first_samples(train, options.samples), first_samples(validation, options.validation)
    images, labels = train.tensors
    # Shifted copies make the run long enough to speak of shares: the first and last report may read for a second.
    shifted = [images.roll((i // 3 - 1, i % 3 - 1), (2, 3)) for i in range(options.copies)]
    train = TensorDataset(torch.cat(shifted), labels.repeat(options.copies))
    keeper = None if gradsim is None else Reports(gradsim)
    callbacks: list[Callback] = [] if gradsim is None or keeper is None else [gradsim, keeper]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=options.epochs,
            accelerator="cpu",
            callbacks=callbacks,
            logger=TensorBoardLogger(folder),
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        begin = time.perf_counter()
        trainer.fit(ConvNet(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(validation, batch_size=250))
        return time.perf_counter() - begin, [] if keeper is None else keeper.reports


def describe(seconds: float, plain: float, reports: list[Report], num_train: int) -> dict[str, Any]:
    """What a run with the callback cost, and what it read."""
    read = [set(report.suspects.sample_ids.tolist()) for report in reports]
    return {
        "share told": reports[-1].time_share,
        "share on the wall": seconds / plain - 1,
        "reports": len(reports),
        "read each": [round(report.share_read, 3) for report in reports],
        "read at least once": len(set().union(*read)) / num_train,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="last:2")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--copies", type=int, default=6, help="of the samples, each shifted; at most 9")
    parser.add_argument("--validation", type=int, default=500)
    parser.add_argument("--mislabel-score", help="watch training steps, too, for this score")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    plain, _ = run(options, None)
    results: dict[str, Any] = {"seconds without": plain}
    for name, budget in (("no limit", None), (f"budget {options.budget}", options.budget)):
        gradsim = GradSimCallback(
            layers=options.layers, time_budget=budget, mislabel_score=options.mislabel_score, on_error="raise"
        )
        seconds, reports = run(options, gradsim)
        results[name] = describe(seconds, plain, reports, options.samples * options.copies)
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
