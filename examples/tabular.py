"""A table with named columns: which patients does the model get wrong, and which of the training data are like them?

scikit-learn's breast cancer data: 569 samples of 30 numbers. `feature_names=` shows them as a table in which what
differs from the mistake stands out. The module standardises its inputs itself, so the table holds them in their own
units. Run it with `python examples/tabular.py` (ten seconds).
"""

import argparse
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradsim import GradSimCallback, Report

NUM_VALIDATION = 140


class TableNet(LightningModule):
    """Two linear layers behind a standardisation that is part of the module."""

    def __init__(self, mean: Tensor, std: Tensor, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.net = nn.Sequential(nn.Linear(len(mean), 32), nn.ReLU(), nn.Linear(32, num_classes))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, rows: Tensor) -> Tensor:
        return self.net((rows - self.mean) / self.std)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.criterion(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main(arguments: list[str] | None = None) -> Report:
    """Train, and print a mistake beside the samples behind it, column by column."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two epochs")
    parser.add_argument("--log-dir", type=Path, default=Path("table_logs"))
    options = parser.parse_args(arguments)
    seed_everything(0, verbose=False)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    table = load_breast_cancer()
    rows, labels = torch.tensor(table.data, dtype=torch.float32), torch.tensor(table.target)
    validation, train = torch.randperm(len(rows)).split([NUM_VALIDATION, len(rows) - NUM_VALIDATION])
    train_set = TensorDataset(rows[train], labels[train])

    gradsim = GradSimCallback(class_names=list(table.target_names), feature_names=list(table.feature_names))
    trainer = Trainer(
        max_epochs=2 if options.smoke else 30,
        accelerator="cpu",
        callbacks=[gradsim],
        default_root_dir=options.log_dir,
        log_every_n_steps=10,
        enable_model_summary=False,
    )
    module = TableNet(rows[train].mean(0), rows[train].std(0), len(table.target_names))
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    trainer.fit(module, loader, DataLoader(TensorDataset(rows[validation], labels[validation]), batch_size=140))

    report = gradsim.report
    print(f"\n{report.summary(num_queries=3, num_suspects=5)}")
    query = report.queries[0]
    names = [f"mistake #{query.sample_id}", *(f"harmful #{each.sample_id}" for each in query.harmful[:3])]
    values = [rows[validation][query.sample_id], *(rows[train][each.sample_id] for each in query.harmful[:3])]
    print(f"\nMistake 1: {report.name_of(query.label)} taken for {report.name_of(query.prediction)}")
    print(f"{'':<24}" + "".join(f"{name:>16}" for name in names))
    for column in range(8):
        print(f"{table.feature_names[column]:<24}" + "".join(f"{row[column]:>16.4g}" for row in values))
    print(f"All columns: {Path(trainer.log_dir) / 'gradsim' / 'report.html'}")
    return report


if __name__ == "__main__":
    main()
