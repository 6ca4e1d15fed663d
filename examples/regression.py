"""Regression: which training samples are behind the largest errors, and which targets may be mistyped?

scikit-learn's diabetes data; in one of forty training samples the progression of the disease has lost a digit. All
validation samples count by their loss, as there is no right and wrong; suspects are those of largest residual over the
run, which is experimental. Run it with `python examples/regression.py` (ten seconds).
"""

import argparse
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradsim import GradSimCallback, Report

NUM_VALIDATION, NUM_WRONG = 112, 8


class Progression(LightningModule):
    """Two linear layers, and one number for each patient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
        self.criterion = nn.MSELoss()

    def forward(self, rows: Tensor) -> Tensor:
        return self.net(rows)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.criterion(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_mse", self.criterion(self(batch[0]), batch[1]), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main(arguments: list[str] | None = None) -> Report:
    """Mistype some targets, train, print what looks wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two epochs")
    parser.add_argument("--log-dir", type=Path, default=Path("regression_logs"))
    options = parser.parse_args(arguments)
    seed_everything(0, verbose=False)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    table = load_diabetes()
    rows = nn.functional.normalize(torch.tensor(table.data, dtype=torch.float32), dim=0) * len(table.data) ** 0.5
    targets = torch.tensor(table.target, dtype=torch.float32) / 100
    validation, train = torch.randperm(len(rows)).split([NUM_VALIDATION, len(rows) - NUM_VALIDATION])
    given = targets[train]
    wrong = given.topk(2 * NUM_WRONG).indices[::2]  # large ones: a small one that lost a digit is still small
    given[wrong] /= 10

    gradsim = GradSimCallback(feature_names=table.feature_names)
    trainer = Trainer(
        max_epochs=2 if options.smoke else 40,
        accelerator="cpu",
        callbacks=[gradsim],
        default_root_dir=options.log_dir,
        log_every_n_steps=10,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(rows[train], given), batch_size=32, shuffle=True)
    trainer.fit(Progression(), loader, DataLoader(TensorDataset(rows[validation], targets[validation]), batch_size=112))

    report = gradsim.report
    query = report.queries[0]
    print(f"\nThe largest error: patient {query.sample_id}, {query.label:.2f} taken for {query.prediction:.2f}")
    print("  pushed there by", ", ".join(f"#{each.sample_id} ({each.label:.2f})" for each in query.harmful[:5]))
    print("Targets that look mistyped:")
    for suspect in report.suspects[:NUM_WRONG]:
        truth = "yes" if suspect.sample_id in wrong else "no"
        print(f"  #{suspect.sample_id:<4} {suspect.label:.3f}  score {suspect.score:.2f}  {truth}")
    print(f"All of it: {Path(trainer.log_dir) / 'gradsim' / 'report.html'}")
    return report


if __name__ == "__main__":
    main()
