"""The callback in a configuration file: ``python examples/digits_cli.py fit --config examples/digits_cli.yaml``.

Every argument of the callback can stand in the file, or on the command line; ``--print_config`` shows them all, and
``fit --trainer.callbacks.help lightning_gradsim.GradSimCallback`` explains them.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitsNet(LightningModule):
    """Two linear layers on 8x8 pictures.

    Args:
        width: Features beneath the head.
        learning_rate: Of Adam.
    """

    def __init__(self, width: int = 64, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images."""
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of a batch."""
        images, labels = batch
        return self.criterion(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss."""
        images, labels = batch
        self.log("val_loss", self.criterion(self(images), labels), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class Digits(LightningDataModule):
    """scikit-learn's digits.

    Args:
        num_validation: How many of the 1,797 samples are held out.
        batch_size: Samples a step.
    """

    def __init__(self, num_validation: int = 360, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        data = TensorDataset(images, torch.tensor(digits.target))
        split = [len(data) - num_validation, num_validation]
        self.train, self.validation = random_split(data, split, torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """In order."""
        return DataLoader(self.validation, 2 * self.batch_size)


def main(arguments: list[str] | None = None, *, run: bool = True) -> LightningCLI:
    """Run what the command line says, or only build it."""
    return LightningCLI(DigitsNet, Digits, seed_everything_default=0, args=arguments, run=run)


if __name__ == "__main__":
    main()
