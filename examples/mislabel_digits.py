"""Train a small network on digits of which every tenth training label is wrong, and see which samples are to blame.

Run it with `make demo`. It takes about a minute on two cores, and leaves pictures and tables in `demo_logs/`.
"""

import argparse
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_gradsim import GradSimCallback, Report

NUM_VALIDATION, FLIP_SHARE = 360, 0.1
SETTINGS = {"accelerator": "cpu", "log_every_n_steps": 10, "enable_model_summary": False}


class DigitsNet(LightningModule):
    """Two convolutions and two linear layers on 8x8 pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.hidden, self.head = nn.Linear(32 * 4 * 4, 64), nn.Linear(64, 10)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.hidden(self.trunk(images).flatten(1)).relu())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.criterion(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def make_data(seed: int) -> tuple[TensorDataset, TensorDataset, Tensor]:
    """Training set with flipped labels, clean validation set, and the true training labels."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    held_out, train = order.split([NUM_VALIDATION, len(order) - NUM_VALIDATION])
    given_labels = labels[train]
    flipped = torch.randperm(len(train), generator=generator)[: int(FLIP_SHARE * len(train))]
    given_labels[flipped] = (given_labels[flipped] + torch.randint(1, 10, (len(flipped),), generator=generator)) % 10
    return TensorDataset(images[train], given_labels), TensorDataset(images[held_out], labels[held_out]), labels[train]


def print_findings(report: Report, true_labels: Tensor, is_flipped: Tensor) -> None:
    """A table of mistakes and one of suspects, each training sample with the truth about its label."""

    def verdict(sample_id: int, label: object) -> str:
        truth = int(true_labels[sample_id])
        return f"#{sample_id} labelled {label}, " + ("label right" if truth == label else f"FLIPPED from {truth}")

    print(f"\n{report.errors_in_words}. Who pushed towards it?")
    for query in report.queries[:6]:
        print(f"  validation sample {query.sample_id}: {query.label} -> {query.prediction} ({query.probability:.0%})")
        for sample in query.harmful[:3]:
            print(f"      harmful    {sample.score:+8.1f}  {verdict(sample.sample_id, sample.label)}")
        for sample in query.look_alikes[:1]:
            print(f"      look-alike {sample.score:+8.2f}  {verdict(sample.sample_id, sample.label)}")
    print("\nProbably wrong labels (training samples, most suspect first):")
    for each in report.suspects[:10]:
        print(f"  {each.score:9.2f}  {verdict(each.sample_id, each.label)}; suggested {each.suggested_label}")
    share = is_flipped[[each.sample_id for query in report.queries for each in query.harmful[:5]]].float().mean()
    print(f"\n{share:.0%} of the top 5 harmful samples carry a flipped label ({FLIP_SHARE:.0%} of all samples do).")
    flagged = [suspect for suspect in report.suspects if suspect.flagged]
    right = sum(suspect.suggested_label == int(true_labels[suspect.sample_id]) for suspect in flagged)
    print(f"{len(flagged)} labels are flagged, {is_flipped.sum()} are wrong; {right} suggested ones are the true ones.")


def train(train_set: Dataset, validation_set: Dataset, options: argparse.Namespace, *callbacks: Callback) -> Trainer:
    """Train the same network from the same seed."""
    seed_everything(options.seed, verbose=False)
    logger, epochs = TensorBoardLogger(options.log_dir, name="digits"), 1 if options.smoke else options.epochs
    trainer = Trainer(max_epochs=epochs, callbacks=[*callbacks], logger=logger, **SETTINGS)
    trainer.fit(DigitsNet(), DataLoader(train_set, 32, shuffle=True), DataLoader(validation_set, 128))
    return trainer


def main(arguments: list[str] | None = None) -> Report:
    """Train, print, and say where to look."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="one epoch, to see that it runs")
    parser.add_argument("--log-dir", type=Path, default=Path("demo_logs"))
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    train_set, validation_set, true_labels = make_data(options.seed)
    gradsim = GradSimCallback()
    runs = {"as it was": train(train_set, validation_set, options, gradsim)}
    print_findings(report := gradsim.report, true_labels, true_labels != train_set.tensors[1])
    print("\nTraining again without these samples, and with the suggested labels, from the same weights ...")
    runs["without them"] = train(report.drop(train_set), validation_set, options)
    runs["with suggested labels"] = train(report.relabel(train_set), validation_set, options)
    for words, run in runs.items():
        print(f"  validation accuracy {words:<22} {run.callback_metrics['val_accuracy']:.1%}")
    print(f"The callback took {report.time_share:.0%} of the time that training took without it.")
    for note in report.notes:
        print(f"Note: {note}.")
    print(f"Panel: {Path(runs['as it was'].log_dir) / 'gradsim' / 'mistakes.png'}")
    print(f"All of it: tensorboard --logdir {options.log_dir}")
    return report


if __name__ == "__main__":
    main()
