"""The table of training configurations in which a callback must change nothing: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

NUM_CLASSES, NUM_FEATURES, WIDTH = 4, 8, 12
NUM_TRAIN, NUM_VAL, BATCH_SIZE = 84, 24, 8
"""11 training batches, the last one short: with a validation every 3 or every 5 batches the last validation of an epoch
comes before its end (and under ``accumulate_grad_batches=4`` with pending gradients)."""


@dataclass(frozen=True, eq=False)
class Case:
    """One configuration; every call of its factories gives fresh objects."""

    name: str
    module: Callable[[], LightningModule]
    data: Callable[[], dict[str, Any]]
    """The data arguments of ``Trainer.fit``; the first number of each sample is its id."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    companions: Callable[[], Sequence[Callback]] = tuple
    companions_first: bool = False


class Classifier(LightningModule):
    """A plain classifier with ``(x, y)`` batches, logging in both stages."""

    def __init__(self, *layers: nn.Module) -> None:
        """Chain these layers."""
        super().__init__()
        self.net = nn.Sequential(*layers)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch."""
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean loss, logged by step and by epoch."""
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(y))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy."""
        x, y = batch
        logits = self(x)
        accuracy = (logits.argmax(1) == y).float().mean()
        self.log_dict({"val_loss": self.criterion(logits, y), "val_accuracy": accuracy}, batch_size=len(y))

    def configure_optimizers(self) -> Any:
        """Adam, with a scheduler that acts after each epoch."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class FrozenBatchNormClassifier(Classifier):
    """Its BatchNorm is put into eval once, when training starts: nobody but the user knows that it belongs there."""

    def on_train_start(self) -> None:
        """Freeze the running statistics."""
        for layer in self.net:
            if isinstance(layer, nn.BatchNorm1d):
                layer.eval()


class TransferHookClassifier(Classifier):
    """Normalises every batch, and augments training batches, after they have reached the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Touch everything but the id."""
        x, y = batch
        ids, features = x[:, :1], (x[:, 1:] - 0.1) / 1.5
        if self.trainer.training:
            features = features + 0.1 * torch.randn_like(features)
        return torch.cat([ids, features], dim=1), y


class DropId(nn.Module):
    """Hides the first slice along ``dim``, which holds the sample id, from the layers that follow."""

    def __init__(self, dim: int = 1) -> None:
        """Choose the dimension."""
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """All but the first slice."""
        return x.narrow(self.dim, 1, x.shape[self.dim] - 1)


class NoisyDataset(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise from a generator of its own: every read changes all later ones."""

    def __init__(self, samples: TensorDataset) -> None:
        """Add noise to these samples."""
        self.samples = samples
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The sample with noise on everything but the id."""
        x, y = self.samples[index]
        noise = 0.3 * torch.randn(x.shape, generator=self.generator)
        noise[0] = 0.0
        return x + noise, y


def make_samples(count: int, seed: int, image: bool = False) -> TensorDataset:
    """Samples ``(x, y)`` with their id as first number, and a third of the labels random: some are always wrong."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, NUM_FEATURES, generator=generator)
    labels = (features @ torch.randn(NUM_FEATURES, NUM_CLASSES, generator=torch.Generator().manual_seed(9))).argmax(1)
    noisy = torch.rand(count, generator=generator) < 1 / 3
    labels[noisy] = torch.randint(NUM_CLASSES, (count,), generator=generator)[noisy]
    ids = torch.arange(count, dtype=torch.float32)
    if image:  # one channel of 4 x 4 with the id in the row above
        pixels = torch.cat([ids[:, None].expand(-1, 4), features, features.flip(1)], dim=1)
        return TensorDataset(pixels.view(count, 1, 5, 4), labels)
    return TensorDataset(torch.cat([ids[:, None], features], dim=1), labels)


def mlp(*middle: nn.Module, kind: type[Classifier] = Classifier) -> Classifier:
    """Two Linear layers with ``middle`` between the first one and its activation."""
    return kind(DropId(), nn.Linear(NUM_FEATURES, WIDTH), *middle, nn.ReLU(), nn.Linear(WIDTH, NUM_CLASSES))


def cnn() -> Classifier:
    """A convolution with BatchNorm over images of one channel."""
    return Classifier(
        DropId(dim=2),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(6 * 16, NUM_CLASSES),
    )


def loaders(
    wrap: Callable[[TensorDataset], Dataset[Any]] = lambda samples: samples, image: bool = False, **train: Any
) -> dict[str, Any]:
    """A training loader with these arguments and a plain validation loader."""
    train_set = wrap(make_samples(NUM_TRAIN, seed=1, image=image))
    val_set = make_samples(NUM_VAL, seed=2, image=image)
    return {
        "train_dataloaders": DataLoader(train_set, batch_size=BATCH_SIZE, **train),
        "val_dataloaders": DataLoader(val_set, batch_size=BATCH_SIZE),
    }


def shuffled() -> dict[str, Any]:
    """Loaders whose training order comes from the global generator."""
    return loaders(shuffle=True)


CASES = (
    Case("plain", mlp, loaders),
    Case("shuffle", mlp, shuffled),
    Case("shuffle_own_generator", mlp, lambda: loaders(shuffle=True, generator=torch.Generator().manual_seed(3))),
    Case(
        "persistent_workers",
        mlp,
        lambda: loaders(shuffle=True, num_workers=1, persistent_workers=True),
        {"val_check_interval": 0.5},
    ),
    Case("accumulate", mlp, shuffled, {"accumulate_grad_batches": 4, "val_check_interval": 3}),
    Case("dropout", lambda: mlp(nn.Dropout(0.3)), loaders),
    Case("batchnorm", cnn, lambda: loaders(image=True, shuffle=True)),
    Case(
        "frozen_batchnorm",
        lambda: mlp(nn.BatchNorm1d(WIDTH), kind=FrozenBatchNormClassifier),
        shuffled,
        {"val_check_interval": 0.5},
    ),
    Case("dataset_generator", mlp, lambda: loaders(NoisyDataset)),
    Case("transfer_hooks", lambda: mlp(kind=TransferHookClassifier), loaders),
    Case("bf16_autocast", mlp, shuffled, {"precision": "bf16-mixed"}),
    Case("gradient_clipping", mlp, shuffled, {"gradient_clip_val": 0.1}),
    Case("weight_averaging", mlp, shuffled, companions=lambda: [EMAWeightAveraging(decay=0.9)], companions_first=True),
)

CASE_BY_NAME = {case.name: case for case in CASES}
