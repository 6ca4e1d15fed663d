"""Two processes under DDP: the callback needs no other arguments, and its report is that of all the data.

Each process explains mistakes with its share of the training samples; what they found is merged, and the first one
writes it. Run it with `python examples/two_processes.py` (half a minute): Lightning starts the second process. With
`--strategy ddp_spawn` or `ddp_fork` the training runs in children, so the report is read from its files.
"""

import argparse
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradsim import GradSimCallback, Report, load_report


class DigitsNet(LightningModule):
    """Two linear layers on 8x8 pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.criterion(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        accuracy = (self(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main(arguments: list[str] | None = None) -> Report:
    """Train in two processes, read the report that the first one has written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one epoch on a part of the digits")
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "ddp_spawn", "ddp_fork"])
    parser.add_argument("--log-dir", type=Path, default=Path("ddp_logs"))
    options = parser.parse_args(arguments)
    seed_everything(0, verbose=False)
    warnings.filterwarnings("ignore", ".*(does not have many workers|is smaller than the logging interval).*")
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    last = 300 if options.smoke else 1400
    train_set, validation_set = TensorDataset(images[:last], labels[:last]), TensorDataset(images[1400:], labels[1400:])

    trainer = Trainer(
        max_epochs=1 if options.smoke else 10,
        accelerator="cpu",
        devices=2,
        strategy=options.strategy,
        callbacks=[GradSimCallback()],
        default_root_dir=options.log_dir,
        enable_model_summary=False,
    )
    trainer.fit(DigitsNet(), DataLoader(train_set, 32, shuffle=True), DataLoader(validation_set, 100))
    report = load_report(options.log_dir)  # of several runs in that folder the newest
    if trainer.is_global_zero:  # the script itself runs twice under "ddp"
        print(f"\n{report.summary(num_queries=3, num_suspects=5)}")
    return report


if __name__ == "__main__":
    main()
