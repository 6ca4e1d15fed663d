"""Several labels a sample: pictures of digits with four yes-or-no questions, some of which are answered wrongly.

A sample with several labels has a binary loss for each; a mistake is a sample with any wrong answer, and a suspect
counts with its most suspect label. `class_names=` names the answers. Run it with `python examples/multilabel.py`
(20 seconds).
"""

import argparse
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradsim import GradSimCallback, Report

QUESTIONS = {"even": {0, 2, 4, 6, 8}, "prime": {2, 3, 5, 7}, "round": {0, 6, 8, 9}, "large": {5, 6, 7, 8, 9}}
NUM_VALIDATION, NUM_WRONG = 360, 80


class Answers(LightningModule):
    """One logit a question."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, len(QUESTIONS)))
        self.criterion = nn.BCEWithLogitsLoss()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.criterion(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        all_right = ((self(batch[0]) > 0) == batch[1].bool()).all(1)
        self.log("val_all_right", all_right.float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main(arguments: list[str] | None = None) -> Report:
    """Turn some answers round, train, print which look wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two epochs")
    parser.add_argument("--log-dir", type=Path, default=Path("multilabel_logs"))
    options = parser.parse_args(arguments)
    seed_everything(0, verbose=False)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    answers = torch.tensor([[float(digit in yes) for yes in QUESTIONS.values()] for digit in digits.target])
    validation, train = torch.randperm(len(images)).split([NUM_VALIDATION, len(images) - NUM_VALIDATION])
    given = answers[train]
    rows, columns = torch.randperm(len(given))[:NUM_WRONG], torch.randint(len(QUESTIONS), (NUM_WRONG,))
    given[rows, columns] = 1 - given[rows, columns]

    gradsim = GradSimCallback(class_names=list(QUESTIONS))
    trainer = Trainer(
        max_epochs=2 if options.smoke else 30,
        accelerator="cpu",
        callbacks=[gradsim],
        default_root_dir=options.log_dir,
        log_every_n_steps=10,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(images[train], given), batch_size=32, shuffle=True)
    trainer.fit(Answers(), loader, DataLoader(TensorDataset(images[validation], answers[validation]), batch_size=180))

    report = gradsim.report
    print(f"\n{report.summary(num_queries=3, num_suspects=0)}\n\nAnswers that look wrong:")
    wrong = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    for suspect in report.suspects[:10]:
        digit, asked = digits.target[train[suspect.sample_id]], list(QUESTIONS)[wrong.get(suspect.sample_id, 0)]
        truth = f"yes, {asked!r} was turned round" if suspect.sample_id in wrong else "no, it is right"
        print(f"  #{suspect.sample_id:<5} a {digit} said to be {report.name_of(suspect.label)}: {truth}")
    found = sum(suspect.sample_id in wrong for suspect in report.suspects[:NUM_WRONG])
    print(f"{found} of the first {NUM_WRONG} suspects are among the {NUM_WRONG} samples with a wrong answer.")
    print(f"Panels: {Path(trainer.log_dir) / 'gradsim' / 'report.html'}")
    return report


if __name__ == "__main__":
    main()
