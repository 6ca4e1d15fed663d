"""A whole case on human label noise: find wrong labels with the callback, act on them, and train again.

Each network is trained in a Trainer with `GradSimCallback()`; what its report says is wrong is dropped or relabelled,
and the same network is trained again, from the same first weights. Controls: as many samples at random, and the truth.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sized
from pathlib import Path
from typing import cast

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from mislabel_data import Data, UnavailableError
from mislabel_train import SETTINGS, Setting, augmented, make_optimizer, predict
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_gradsim import GradSimCallback, Report

HUMAN = ("news-tfidf", "news-embeddings", "music", "cifar-random1-features", "cifar-worse-features")
SEEDS = (5, 6, 7)
"""None of them was used to choose the default score."""
LOOKED_THROUGH = 0.1
"""Share of the training samples that a person looks through, and whose wrong labels that person puts right."""
Train = Callable[[Dataset[tuple[Tensor, ...]]], float]
Figures = dict[str, dict[str, float]]


class Case(LightningModule):
    """A network of the settings in a Trainer.

    Args:
        setting: The network, and how it is trained.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting, self.network = setting, setting.make_network()

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of a batch."""
        return cast(Tensor, self.network(inputs)[0])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of a batch."""
        inputs, labels = batch
        return F.cross_entropy(self(augmented(inputs) if self.setting.augment else inputs), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Nothing: the callback only needs to know that there is a validation."""

    def configure_optimizers(self) -> object:
        """Adam, or SGD with a schedule of steps."""
        steps = int(self.trainer.estimated_stepping_batches) // self.setting.epochs
        optimizer, schedule = make_optimizer(self.setting, self.network, steps)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(arguments: list[str] | None = None) -> None:
    """Run the cases, and print what was found and what it gained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=os.environ.get("GRADSIM_CACHE"), help="or GRADSIM_CACHE")
    parser.add_argument("--only", nargs="+", default=HUMAN, help="settings of mislabel_train.py, by pattern")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)
    if options.cache is None:
        parser.error("features of pictures are kept in a folder outside of the repository: --cache or GRADSIM_CACHE")
    warnings.filterwarnings("ignore", ".*(does not have many workers|no logger takes pictures).*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    chosen = [s for name, s in SETTINGS.items() if any(fnmatch.fnmatch(name, pattern) for pattern in options.only)]
    all_results = {setting.name: run_seeds(setting, options.seeds, Path(options.cache)) for setting in chosen}
    results = {name: seeds for name, seeds in all_results.items() if seeds}
    for part in ("found", "test accuracy"):
        print_table(part, {name: [figures[part] for figures in seeds.values()] for name, seeds in results.items()})
    if options.json is not None:
        versions = {"torch": torch.__version__, "lightning": lightning.__version__}
        text = json.dumps({"setting": {"seeds": options.seeds, **versions}, "results": results}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


def run_seeds(setting: Setting, seeds: Iterable[int], cache: Path) -> dict[int, Figures]:
    """The case with each of the seeds; nothing, with a word, where the data are not there."""
    try:
        return {seed: run(setting, seed, cache) for seed in seeds}
    except UnavailableError as error:
        print(f"{setting.name} is left out: {error}", flush=True)
        return {}


def run(setting: Setting, seed: int, cache: Path) -> Figures:
    """One case: what was found, and test accuracy after each way to act on it."""
    start = time.perf_counter()
    sets = setting.make_data(seed, cache)
    train_set = TensorDataset(sets.train_x, sets.train_y)
    gradsim = GradSimCallback(on_error="raise")
    before = fit(setting, sets, seed, train_set, gradsim)
    report = cast(Report, gradsim.report)

    def again(dataset: Dataset[tuple[Tensor, ...]]) -> float:
        return fit(setting, sets, seed, dataset)

    figures = {"found": find(report, sets), "test accuracy": {"as it is": before, **act(report, sets, seed, again)}}
    print(f"{setting.name}, seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    return figures


def fit(
    setting: Setting,
    sets: Data,
    seed: int,
    dataset: Dataset[tuple[Tensor, ...]],
    gradsim: GradSimCallback | None = None,
) -> float:
    """Train from the first weights of the seed; the test accuracy after the last epoch."""
    seed_everything(seed, verbose=False)
    module = Case(setting)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=setting.epochs,
            accelerator="cpu",
            callbacks=[] if gradsim is None else [gradsim],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        validation = TensorDataset(sets.validation_x, sets.validation_y)
        trainer.fit(module, DataLoader(dataset, setting.batch_size, shuffle=True), DataLoader(validation, 500))
    return float((predict(module.network, sets.test_x)[0].argmax(1) == sets.test_y).float().mean())


def find(report: Report, sets: Data) -> dict[str, float]:
    """How well the report finds the wrong labels."""
    suspects = report.suspects
    wrong = sets.flipped[suspects.sample_ids]
    right = cast(Tensor, suspects.suggested_labels) == sets.true_y[suspects.sample_ids]
    first = wrong[: len(wrong) // 100]
    found = {"wrong labels": sets.flipped, "of the first 1 % wrong": first}
    for name, rows in (("flagged", suspects.flagged), ("confirmed", suspects.confirmed)):
        found |= {name: rows, f"of {name} wrong": wrong[rows], f"of wrong {name}": rows[wrong]}
    found["suggestion right, of confirmed"] = right[suspects.confirmed]
    return {name: float(values.float().mean()) for name, values in found.items()}


def act(report: Report, sets: Data, seed: int, train: Train) -> dict[str, float]:
    """Test accuracy by what is done before the second training."""
    data = TensorDataset(sets.train_x, sets.train_y)
    drawn = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    dropped = report.drop(data)
    looked = round(LOOKED_THROUGH * len(data))

    def corrected(rows: Tensor) -> TensorDataset:
        labels = sets.train_y.clone()
        labels[rows] = sets.true_y[rows]
        return TensorDataset(sets.train_x, labels)

    ways: dict[str, Dataset[tuple[Tensor, ...]]] = {
        "dropped": dropped,
        "relabelled": cast(Dataset[tuple[Tensor, ...]], report.relabel(data)),
        "all flagged dropped": report.drop(data, all_flagged=True),
        "all flagged relabelled": cast(Dataset[tuple[Tensor, ...]], report.relabel(data, all_flagged=True)),
        "as many dropped at random": Subset(data, drawn[: len(cast(Sized, dropped))].tolist()),
        "first tenth put right by a person": corrected(report.suspects.sample_ids[:looked]),
        "a random tenth put right": corrected(drawn[:looked]),
        "wrong ones dropped (the truth)": Subset(data, (~sets.flipped).nonzero().flatten().tolist()),
        "all labels right (the truth)": TensorDataset(sets.train_x, sets.true_y),
    }
    return {name: train(dataset) for name, dataset in ways.items()}


def print_table(title: str, rows: dict[str, list[dict[str, float]]]) -> None:
    """A Markdown table, a column for each setting: mean and standard deviation over the seeds."""
    if not rows:
        return
    print(f"\n| {title} | " + " | ".join(rows) + " |")
    print("| --- " * (len(rows) + 1) + "|")
    for figure in next(iter(rows.values()))[0]:
        cells = [in_words([figures[figure] for figures in seeds]) for seeds in rows.values()]
        print(f"| {figure} | " + " | ".join(cells) + " |")


def in_words(values: list[float]) -> str:
    """Mean and standard deviation."""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


if __name__ == "__main__":
    main()
