"""How well wrong training labels are found: scikit-learn digits, every tenth training label flipped, several seeds.

Trains as `examples/mislabel_digits.py` does, with the callback in the trainer, and compares the report of the last
epoch with the truth about the labels. The validation labels are right.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from lightning_gradsim import GradSimCallback, Report

EXAMPLE = Path(__file__).parents[1] / "examples" / "mislabel_digits.py"
SIMILARITIES: tuple[Literal["dot", "cosine", "asymmetric"], ...] = ("dot", "cosine", "asymmetric")
TOP = 5
HARMFUL_TARGET, AUROC_TARGET = 0.85, 0.95
COLUMNS = {
    "errors": "{:.0f}",
    "queries": "{:.0f}",
    "doubted": "{:.0f}",
    "base rate": "{:.3f}",
    "harmful": "{:.3f}",
    "teachers": "{:.3f}",
    "look-alikes": "{:.3f}",
    "AUROC": "{:.4f}",
    "avg precision": "{:.3f}",
    "precision@n": "{:.3f}",
}


def load_example() -> ModuleType:
    """The demo as a module."""
    spec = importlib.util.spec_from_file_location("mislabel_digits", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_model(example: ModuleType, name: str) -> LightningModule:
    """The demo's network, or a plain one of 64, 64 and 10 units trained in the same way."""
    model = example.DigitsNet()
    assert isinstance(model, LightningModule)
    if name == "mlp":
        model.trunk, model.hidden = nn.Identity(), nn.Linear(64, 64)
    return model


def train(example: ModuleType, options: argparse.Namespace, seed: int) -> tuple[dict[str, Report], Tensor]:
    """Reports of the last epoch by similarity, and which training labels are flipped."""
    seed_everything(seed, verbose=False)
    train_set, validation_set, true_labels = example.make_data(seed)
    similarities = SIMILARITIES if options.all_similarities else SIMILARITIES[:1]
    # A callback leaves training as it was, so several of them see the same run.
    callbacks = {
        similarity: GradSimCallback(similarity=similarity, every_n_epochs=options.epochs, name=similarity)
        for similarity in similarities
    }
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            max_epochs=options.epochs,
            accelerator="cpu",
            callbacks=list(callbacks.values()),
            default_root_dir=directory,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(
            make_model(example, options.model),
            DataLoader(train_set, batch_size=32, shuffle=True),
            DataLoader(validation_set, batch_size=128),
        )
    reports: dict[str, Report] = {}
    for similarity, callback in callbacks.items():
        assert callback.report is not None
        reports[similarity] = callback.report
    return reports, train_set.tensors[1] != true_labels


def measure(report: Report, flipped: Tensor) -> dict[str, float]:
    """Every column of the table for one report."""

    def share(name: str) -> float:
        ids = [sample.sample_id for query in report.queries for sample in getattr(query, name)[:TOP]]
        return float(flipped[ids].float().mean())

    ranked = flipped[report.suspects.sample_ids]
    # Ranks for scores: torchmetrics sends what lies outside of [0, 1] through a sigmoid, which makes ties of the top.
    scores = torch.linspace(1, 0, len(ranked), dtype=torch.float64)
    number = int(flipped.sum())
    return {
        "errors": report.num_errors,
        "queries": len(report.queries),
        "doubted": len(report.suspect_queries),
        "base rate": float(flipped.float().mean()),
        "harmful": share("harmful"),
        "teachers": share("teachers"),
        "look-alikes": share("look_alikes"),
        "AUROC": float(binary_auroc(scores, ranked.long())),
        "avg precision": float(binary_average_precision(scores, ranked.long())),
        "precision@n": float(ranked[:number].float().mean()),
    }


def summarise(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and spread of every column over the seeds."""
    spreads: dict[str, Callable[[Sequence[float]], float]] = {
        "mean": statistics.fmean,
        "std": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
        "min": min,
        "max": max,
    }
    return {
        name: {column: float(spread([row[column] for row in rows])) for column in COLUMNS}
        for name, spread in spreads.items()
    }


def print_row(name: str, row: dict[str, float] | None = None) -> None:
    """One line of the table; the headings without a row."""
    cells = [column if row is None else form.format(row[column]) for column, form in COLUMNS.items()]
    print(f"{name:<6}" + "".join(f"{cell:>{len(column) + 2}}" for cell, column in zip(cells, COLUMNS, strict=True)))


def print_results(results: dict[str, list[dict[str, float]]], seeds: list[int]) -> None:
    """A table for each similarity."""
    for similarity, rows in results.items():
        print(f"\nsimilarity {similarity}; harmful, teachers, look-alikes: share of flipped among the top {TOP}")
        print_row("seed")
        for seed, row in zip(seeds, rows, strict=True):
            print_row(str(seed), row)
        for name, row in summarise(rows).items():
            print_row(name, row)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and say whether the targets are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("cnn", "mlp"), default="cnn")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--all-similarities", action="store_true", help="cosine and asymmetric beside dot")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)

    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", ".*no logger takes pictures.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(2)
    example = load_example()
    results: dict[str, list[dict[str, float]]] = {}
    for seed in options.seeds:
        reports, flipped = train(example, options, seed)
        for similarity, report in reports.items():
            results.setdefault(similarity, []).append(measure(report, flipped))

    print(f"digits, {example.FLIP_SHARE:.0%} flips, {options.model}, head layer, epoch {options.epochs}")
    print_results(results, options.seeds)
    means = summarise(results["dot"])["mean"]
    for column, target in (("harmful", HARMFUL_TARGET), ("AUROC", AUROC_TARGET)):
        verdict = "met" if means[column] >= target else "MISSED"
        print(f"\ntarget {verdict}: {column} {means[column]:.3f} on average, wanted at least {target}", end="")
    print()
    if options.json is not None:
        figures = {
            similarity: {"seeds": dict(zip(map(str, options.seeds), rows, strict=True)), **summarise(rows)}
            for similarity, rows in results.items()
        }
        setting = {"model": options.model, "epochs": options.epochs, "torch": torch.__version__}
        options.json.write_text(json.dumps({"setting": setting, "results": figures}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
