"""Networks and training loops of `mislabel.py`, and what a tap would see of each training step."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import mislabel_data as data
import torch
import torch.nn.functional as F
from mislabel_data import Data, Maker
from torch import Tensor, nn

Optimizers = tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]
PAD = 4
"""Pixels by which a picture is shifted at most."""


class Network(nn.Module):
    """A trunk and a head.

    Args:
        trunk: From inputs to the features that the head sees.
        head: From features to logits.
    """

    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and features of a batch."""
        features = self.trunk(inputs)
        return self.head(features), features


def mlp(*widths: int) -> Network:
    """Linear layers with ReLU between them; with two widths a single layer, whose features are the inputs."""
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths[:-1])]
    return Network(nn.Sequential(*layers), nn.Linear(*widths[-2:]))


def conv_net() -> Network:
    """Two convolutions and two linear layers on 28x28 pictures, 14,000 parameters."""
    trunk = nn.Sequential(
        *(nn.Conv2d(1, 8, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(8, 16, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 40), nn.ReLU()),
    )
    return Network(trunk, nn.Linear(40, 10))


def norm_net() -> Network:
    """Convolutions with batch normalisation on 32x32 pictures."""

    def block(inputs: int, outputs: int) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))

    blocks = block(3, 16), block(16, 32), block(32, 64)
    return Network(nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU()), nn.Linear(128, 10))


@dataclass(frozen=True)
class Setting:
    """A data set with its noise, a network and how it is trained.

    Attributes:
        name: Its name.
        make_data: From a seed and the folder for what is kept to the data.
        make_network: The network, with weights from torch's random state.
        epochs: Passes over the training set.
        batch_size: Samples a step.
        learning_rate: Of Adam; the highest of a one-cycle schedule where ``one_cycle``.
        one_cycle: SGD with momentum 0.9 and a one-cycle schedule instead of Adam.
        augment: Random shifts and mirrored pictures.
        kind: ``synthetic``, ``human`` or ``clean``.
    """

    name: str
    make_data: Maker
    make_network: Callable[[], Network]
    epochs: int = 20
    batch_size: int = 32
    learning_rate: float = 1e-3
    one_cycle: bool = False
    augment: bool = False
    kind: str = "human"


def _synthetic(name: str, noise: str) -> Setting:
    kind = "clean" if noise == "clean" else "synthetic"

    def make(seed: int, cache: object) -> Data:
        return data.make_synthetic(name, noise, seed)

    if name == "digits":
        return Setting(f"digits-{noise}", make, lambda: mlp(64, 128, 64, 10), kind=kind)
    return Setting(f"mnist-{noise}", make, conv_net, 14, 64, 0.05, one_cycle=True, kind=kind)


def _cifar_features(labels: str) -> Setting:
    return Setting(
        f"cifar-{labels}-features",
        lambda seed, cache: data.make_cifar("features", f"y_{labels}", seed, cache),
        lambda: mlp(1280, 10),
        15,
        64,
    )


SETTINGS = {
    setting.name: setting
    for setting in [
        *(_synthetic("digits", noise) for noise in ("sym10", "sym20", "pair20", "ambiguous10", "clean")),
        *(_synthetic("mnist", noise) for noise in ("sym10", "sym20", "pair20", "ambiguous10", "clean")),
        Setting("music", lambda seed, _: data.make_music(seed), lambda: mlp(124, 128, 64, 10)),
        Setting("news-embeddings", lambda seed, _: data.make_news("embeddings", seed), lambda: mlp(384, 4), 15, 64),
        Setting("news-tfidf", lambda seed, _: data.make_news("tfidf", seed), lambda: mlp(150, 256, 128, 4), 12),
        *(_cifar_features(labels) for labels in ("aggre", "random1", "worse")),
        Setting(
            "cifar-random1-cnn",
            lambda seed, cache: data.make_cifar("pictures", "y_random1", seed, cache),
            norm_net,
            12,
            64,
            2e-3,
            augment=True,
        ),
    ]
}


@dataclass
class Record:
    """What the training steps of a run gave, by epoch ``e`` and sample ``n``; every sample is visited once an epoch.

    Attributes:
        logits: Float32 ``[e, n, c]``, from the training forward, before the update.
        features: What the head saw, float16 ``[e, n, d]``; one epoch where the trunk has nothing to train.
        rates: Learning rate of the step, ``[e, n]``.
        validation_logits: After each epoch, in eval, ``[e, v, c]``.
        validation_features: Likewise, float16.
        test_accuracy: After the last epoch.
        weights: ``state_dict`` after the last epoch.
    """

    logits: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    rates: list[Tensor] = field(default_factory=list)
    validation_logits: list[Tensor] = field(default_factory=list)
    validation_features: list[Tensor] = field(default_factory=list)
    test_accuracy: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)


def knn_epochs(epochs: int) -> list[int]:
    """Epochs 2, 4, 8, ... (counted from 1) up to the last."""
    return [2**power for power in range(1, 10) if 2**power <= epochs]


def train(
    setting: Setting,
    sets: Data,
    seed: int,
    keep: Tensor | None = None,
    labels: Tensor | None = None,
    checkpoints: list[tuple[dict[str, Tensor], float]] | None = None,
) -> Record:
    """Train once, and record every step.

    Args:
        setting: What to train and how.
        sets: The data.
        seed: For weights, order and augmentation.
        keep: Rows of the training set to train on; all if ``None``.
        labels: Labels instead of the given ones ``[N]``.
        checkpoints: Takes weights and learning rate after epochs 2, 4, 8, ... and the last.

    Returns:
        The record; rows that are left out are zero.
    """
    torch.manual_seed(seed)
    network = setting.make_network()
    given = sets.train_y if labels is None else labels
    rows = torch.arange(len(given)) if keep is None else keep
    steps = -(-len(rows) // setting.batch_size)
    optimizer, schedule = make_optimizer(setting, network, steps)
    frozen = not list(network.trunk.parameters())
    record = Record()
    for epoch in range(1, setting.epochs + 1):
        seen = _train_epoch(setting, sets, network, (optimizer, schedule), given, rows)
        record.logits.append(seen["logits"])
        record.rates.append(seen["rates"])
        logits, features = predict(network, sets.validation_x)
        record.validation_logits.append(logits)
        if not (frozen and record.features):
            record.features.append(seen["features"])
            record.validation_features.append(features.half())
        if checkpoints is not None and (epoch in knn_epochs(setting.epochs) or epoch == setting.epochs):
            checkpoints.append((copy.deepcopy(network.state_dict()), optimizer.param_groups[0]["lr"]))
    record.test_accuracy = float((predict(network, sets.test_x)[0].argmax(1) == sets.test_y).float().mean())
    record.weights = network.state_dict()
    return record


def _train_epoch(
    setting: Setting, sets: Data, network: Network, optimizers: Optimizers, given: Tensor, rows: Tensor
) -> dict[str, Tensor]:
    """What a tap would see in one epoch, by sample."""
    optimizer, schedule = optimizers
    network.train()
    seen: dict[str, Tensor] = {}
    for ids in rows[torch.randperm(len(rows))].split(setting.batch_size):
        inputs = sets.train_x[ids]
        logits, features = network(augmented(inputs) if setting.augment else inputs)
        rates = torch.full((len(ids),), optimizer.param_groups[0]["lr"])
        for name, value in {"logits": logits, "features": features.half(), "rates": rates}.items():
            if name not in seen:
                seen[name] = value.new_zeros(len(given), *value.shape[1:]).detach()
            seen[name][ids] = value.detach()
        optimizer.zero_grad()
        F.cross_entropy(logits, given[ids]).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return seen


def predict(network: Network, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and features in eval."""
    network.eval()
    with torch.no_grad():
        parts = [network(batch)[:2] for batch in inputs.split(500)]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def augmented(images: Tensor) -> Tensor:
    """Each picture shifted by up to four pixels and mirrored by chance."""
    size, number = images.shape[-1], len(images)
    padded = F.pad(images, [PAD] * 4)
    top, left = torch.randint(2 * PAD + 1, (2, number))
    span = torch.arange(size)
    columns = torch.where(torch.rand(number)[:, None] < 0.5, span.flip(0), span) + left[:, None]
    picked = padded[torch.arange(number)[:, None, None], :, (top[:, None] + span)[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2)  # [n, rows, columns, channels] -> [n, channels, rows, columns]


def make_optimizer(setting: Setting, network: nn.Module, steps: int) -> Optimizers:
    """The optimizer of a setting, and its schedule for epochs of so many steps."""
    if not setting.one_cycle:
        return torch.optim.Adam(network.parameters(), lr=setting.learning_rate), None
    optimizer = torch.optim.SGD(network.parameters(), lr=setting.learning_rate, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=setting.learning_rate, total_steps=steps * setting.epochs
    )
