"""Networks of `lds.py`: many of one kind trained side by side, each on its own samples, and kept in a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

MEAN, STD = 0.1307, 0.3081
NUM_TRAIN, NUM_QUERIES, NUM_HALVES, NUM_REPEATED = 5000, 500, 100, 20
BATCH_SIZE, LEARNING_RATE, MOMENTUM = 64, 0.01, 0.9
TOGETHER = 10
"""Networks trained side by side: more leave the caches."""


@dataclass(frozen=True)
class Kind:
    """A kind of network.

    Attributes:
        name: Its name.
        widths: Of its layers, with ReLU and dropout between them.
        dropout: Share of hidden features that a training step leaves out.
        epochs: Passes over the training samples.
    """

    name: str
    widths: tuple[int, ...]
    dropout: float
    epochs: int

    def build(self, weights: Sequence[tuple[Tensor, Tensor]]) -> nn.Sequential:
        """The network in eval mode."""
        layers: list[nn.Module] = []
        for weight, bias in weights:
            layer = nn.Linear(weight.shape[1], weight.shape[0])
            layer.load_state_dict({"weight": weight, "bias": bias})
            layers += [layer, nn.ReLU()]
        return nn.Sequential(*layers[:-1]).eval()


MLP = Kind("mlp", (784, 128, 64, 10), 0.1, 50)
LOGISTIC = Kind("logistic", (784, 10), 0.0, 50)


@dataclass(frozen=True)
class Mnist:
    """5,000 training images, 500 queries.

    Attributes:
        train: Inputs ``[5000, 784]`` and labels.
        queries: Inputs ``[500, 784]`` and labels.
    """

    train: tuple[Tensor, Tensor]
    queries: tuple[Tensor, Tensor]


def load_mnist() -> Mnist:
    """The first images of MNIST's training and test set, from ``mnist_60k.npz`` in ``GRADSIM_DATA``."""
    folder = os.environ.get("GRADSIM_DATA")
    if not folder:
        raise SystemExit("Set GRADSIM_DATA to the folder with mnist_60k.npz.")
    with np.load(Path(folder) / "mnist_60k.npz") as archive:
        parts = []
        for name, number in (("train", NUM_TRAIN), ("test", NUM_QUERIES)):
            pixels = torch.from_numpy(archive[f"x_{name}"][:number]).flatten(1).float() / 255
            parts.append(((pixels - MEAN) / STD, torch.from_numpy(archive[f"y_{name}"][:number]).long()))
    return Mnist(*parts)


def halves() -> Tensor:
    """Which training samples are in each random half, bool ``[100, 5000]``."""
    draw = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(NUM_TRAIN, generator=draw)[: NUM_TRAIN // 2] for _ in range(NUM_HALVES)])
    return torch.zeros(NUM_HALVES, NUM_TRAIN, dtype=torch.bool).scatter_(1, chosen, True)


class Trainer:
    """Trains networks of one kind side by side, each on its own samples, in its own order, from its own weights.

    Args:
        kind: The kind.
        inputs: All training inputs.
        labels: Their labels.
        rows: The samples of each network, int64 ``[k, n]``.
        seeds: Seed of each network: weights and order; dropout is drawn with the first for all.
    """

    def __init__(self, kind: Kind, inputs: Tensor, labels: Tensor, rows: Tensor, seeds: Sequence[int]) -> None:
        self._kind, self._inputs, self._labels, self._rows = kind, inputs, labels, rows
        self._draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._dropout = torch.Generator().manual_seed(seeds[0])
        self.weights, self.biases = [], []
        for fan_in, fan_out in zip(kind.widths[:-1], kind.widths[1:], strict=True):
            for shape, parameters in (((fan_out, fan_in), self.weights), ((1, fan_out), self.biases)):
                drawn = [torch.rand(shape, generator=draw).mul_(2).sub_(1) / fan_in**0.5 for draw in self._draws]
                parameters.append(torch.stack(drawn))
        self._parameters = [*self.weights, *self.biases]
        self._velocities = [torch.zeros_like(parameter) for parameter in self._parameters]

    def epoch(self) -> None:
        """One pass of each over its samples."""
        number = self._rows.shape[1]
        orders = torch.stack([torch.randperm(number, generator=draw) for draw in self._draws])
        for rows in self._rows.gather(1, orders).split(BATCH_SIZE, dim=1):
            self._step(self._inputs[rows], self._labels[rows])

    def network(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of weight and bias of each layer of one of them."""
        return [(w[index].clone(), b[index, 0].clone()) for w, b in zip(self.weights, self.biases, strict=True)]

    def losses(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Loss of each network for each sample, ``[k, n]``."""
        hidden = inputs.expand(len(self._draws), -1, -1)
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            hidden = torch.baddbmm(bias, hidden, weight.mT).relu_()
        logits = torch.baddbmm(self.biases[-1], hidden, self.weights[-1].mT)
        return -logits.log_softmax(-1).gather(2, labels.expand(len(logits), -1)[..., None])[..., 0]

    def _step(self, inputs: Tensor, labels: Tensor) -> None:
        features, gates = [inputs], []
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            hidden = torch.baddbmm(bias, features[-1], weight.mT)
            gate = (hidden > 0).float()
            if self._kind.dropout:
                keep = torch.rand(hidden.shape, generator=self._dropout) >= self._kind.dropout
                gate = gate * keep / (1 - self._kind.dropout)
            gates.append(gate)
            features.append(hidden * gate)
        grads = torch.baddbmm(self.biases[-1], features[-1], self.weights[-1].mT).softmax(-1)
        grads.scatter_add_(2, labels[..., None], torch.full((*labels.shape, 1), -1.0)).div_(labels.shape[1])
        of_weights, of_biases = [], []
        for layer in reversed(range(len(self.weights))):
            of_weights.insert(0, grads.mT @ features[layer])
            of_biases.insert(0, grads.sum(1, keepdim=True))
            if layer:
                grads = (grads @ self.weights[layer]) * gates[layer - 1]
        torch._foreach_mul_(self._velocities, MOMENTUM)
        torch._foreach_add_(self._velocities, [*of_weights, *of_biases])
        torch._foreach_add_(self._parameters, self._velocities, alpha=-LEARNING_RATE)


def truth(kind: Kind, data: Mnist, folder: Path) -> tuple[Tensor, Tensor]:
    """Losses of all queries after retraining on each half, ``[100, 500]``, and on the first 20 with another seed."""
    members = halves()
    results = []
    for name, first_seed, number in (("first", 1000, NUM_HALVES), ("second", 2000, NUM_REPEATED)):
        path = folder / f"{kind.name}_{name}.pt"
        if not path.exists():
            begin, parts = time.perf_counter(), []
            for start in range(0, number, TOGETHER):
                chosen = range(start, min(start + TOGETHER, number))
                rows = torch.stack([members[index].nonzero().flatten() for index in chosen])
                trainer = Trainer(kind, *data.train, rows, [first_seed + index for index in chosen])
                for _ in range(kind.epochs):
                    trainer.epoch()
                parts.append(trainer.losses(*data.queries))
                print(f"{kind.name}: {chosen.stop} halves, {time.perf_counter() - begin:.0f} s", flush=True)
            save(torch.cat(parts), path)
        results.append(torch.load(path, weights_only=True))
    return results[0], results[1]


def checkpoints(kind: Kind, data: Mnist, seeds: Sequence[int], folder: Path) -> dict[int, list]:
    """By seed, weights and biases after each epoch of a training on all samples."""
    result = {}
    for seed in seeds:
        path = folder / f"{kind.name}_run{seed}.pt"
        if not path.exists():
            trainer = Trainer(kind, *data.train, torch.arange(NUM_TRAIN)[None], [seed])
            networks = []
            for _ in range(kind.epochs):
                trainer.epoch()
                networks.append(trainer.network(0))
            save(networks, path)
        result[seed] = torch.load(path, weights_only=True)
    return result


def save(value: object, path: Path) -> None:
    """Write a file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)
