"""How much of the exact lists survives where queries are compared with a tenth of the training samples.

    python benchmarks/reference.py

Digits (1,200 training samples, an MLP of 64-64-10) and, where `GRADSIM_DATA` is set, 5,000 samples of MNIST (an MLP of
784-128-64-10), trained for a few epochs; 100 validation samples of highest loss as queries; dot product
of the head and of all layers. "Of the top 8" is the share of the exact list that is among the samples chosen, which
are then scored exactly; "strength" is the sum of the scores of the best 8 among the chosen over that of the exact 8.
Mean and standard deviation over seeds of network and choice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradsim import explain
from lightning_gradsim.report import Report

SEEDS = (0, 1, 2)
SHARE, TOP_K, NUM_QUERIES, EPOCHS = 0.1, 8, 100, 5
WAYS = ("random", "stratified", "prototypes")
LISTS = ("harmful", "look_alikes")

Part = tuple[Tensor, Tensor]


def tasks() -> Iterator[tuple[str, Part, Part, tuple[int, ...]]]:
    """Name, training samples, validation samples and widths."""
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    yield "digits", (x[:1200], y[:1200]), (x[1200:], y[1200:]), (64, 64, 10)
    folder = os.environ.get("GRADSIM_DATA")
    if folder is not None:
        held = np.load(Path(folder) / "mnist_60k.npz")
        x, y = (
            torch.tensor(held["x_train"][:7000]).flatten(1).float() / 255,
            torch.tensor(held["y_train"][:7000]).long(),
        )
        yield "MNIST", (x[:5000], y[:5000]), (x[5000:], y[5000:]), (784, 128, 64, 10)


def train(data: Part, widths: tuple[int, ...], seed: int) -> nn.Module:
    """A network from a seed."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(data[0])).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(data[0][rows]), data[1][rows]).backward()
            optimizer.step()
    return model.eval()


def compare(exact: Report, found: Report) -> dict[str, tuple[float, float]]:
    """By list, the share of the exact lists that was found, and the share of their scores."""
    result = {}
    for name in LISTS:
        shares, strengths = [], []
        for one, other in zip(exact.queries, found.queries, strict=True):
            all_samples, some = getattr(one, name), getattr(other, name)
            if all_samples:
                common = {each.sample_id for each in all_samples} & {each.sample_id for each in some}
                shares.append(len(common) / len(all_samples))
                strengths.append(sum(each.score for each in some) / sum(each.score for each in all_samples))
        result[name] = fmean(shares), fmean(strengths)
    return result


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    print(
        "| data | layers | choice | harmful of the top 8 | strength | look-alikes of the top 8 | strength | seconds |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, data, validation, widths in tasks():
        figures: dict[tuple[str, str], list[list[float]]] = {}
        for seed in SEEDS:
            model = train(data, widths, seed)
            with torch.no_grad():
                loss = F.cross_entropy(model(validation[0]), validation[1], reduction="none")
            hardest = loss.topk(NUM_QUERIES).indices
            queries = TensorDataset(validation[0][hardest], validation[1][hardest])
            loader = DataLoader(TensorDataset(*data), 256)
            for layers in ("last", "all"):
                exact = explain(model, queries, loader, layers=layers, top_k=TOP_K)
                for way in WAYS:
                    begin = time.process_time()
                    number = int(SHARE * len(data[0]))
                    found = explain(
                        model,
                        queries,
                        loader,
                        layers=layers,
                        top_k=TOP_K,
                        max_train_samples=number,
                        reference=way,
                        seed=seed,
                    )
                    seconds = time.process_time() - begin
                    compared = compare(exact, found)
                    row = [*compared["harmful"], *compared["look_alikes"], seconds]
                    figures.setdefault((layers, way), []).append(row)
        for (layers, way), rows in figures.items():
            *shares, seconds = zip(*rows, strict=True)
            cells = " | ".join(f"{fmean(each):.2f} ± {stdev(each):.2f}" for each in shares)
            print(f"| {name} | {layers} | {way} | {cells} | {fmean(seconds):.2f} |", flush=True)


if __name__ == "__main__":
    main()
