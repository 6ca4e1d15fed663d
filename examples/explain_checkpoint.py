"""A training that is over: explain predictions from its checkpoints, without the callback and without a Trainer.

Trains a network on digits and keeps a checkpoint of its first epochs; `explain` then asks which training samples are
behind its predictions for some test pictures, right or wrong, by the last weights and by the sum over checkpoints,
which predicts better what retraining would do. Run it with `python examples/explain_checkpoint.py` (20 seconds).
"""

import argparse
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradsim import Report, explain


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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(train_set: TensorDataset, folder: Path, epochs: int) -> list[Path]:
    """A training that knows nothing of this package; the files of its checkpoints, in order."""
    keep = ModelCheckpoint(folder / "checkpoints", "{epoch:02}", save_top_k=-1, save_weights_only=True)
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=[keep], default_root_dir=folder, enable_model_summary=False
    )
    trainer.fit(DigitsNet(), DataLoader(train_set, batch_size=32, shuffle=True))
    return sorted(Path(keep.dirpath).glob("*.ckpt"))[-epochs:]


def print_findings(title: str, report: Report) -> None:
    """What stands behind the first predictions."""
    print(f"\n{title}")
    for query in report.queries[:4]:
        verdict = "right" if query.label == query.prediction else f"taken for {query.prediction}"
        for name, samples in (("taught by", query.teachers), ("against it", query.harmful)):
            found = ", ".join(f"#{each.sample_id} ({each.label})" for each in samples[:4])
            print(f"  test picture {query.sample_id}, a {query.label}, {verdict}: {name} {found}")


def main(arguments: list[str] | None = None) -> Report:
    """Train, load, explain."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two epochs on a part of the digits")
    parser.add_argument("--log-dir", type=Path, default=Path("explain_logs"))
    options = parser.parse_args(arguments)
    seed_everything(0, verbose=False)
    warnings.filterwarnings("ignore", ".*(does not have many workers|is smaller than the logging interval).*")
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    last = 300 if options.smoke else 1400
    train_set, test_set = (
        TensorDataset(images[:last], labels[:last]),
        TensorDataset(images[1400:1420], labels[1400:1420]),
    )
    files = train(train_set, options.log_dir, epochs=2 if options.smoke else 5)

    model = DigitsNet()
    model.load_state_dict(torch.load(files[-1], weights_only=True)["state_dict"])
    at_the_end = explain(model, test_set, train_set, layers="all")
    print_findings("By the last weights, all layers, dot products:", at_the_end)

    report = explain(model, test_set, train_set, files, layers="all", similarity="influence")
    print_findings(f"Influence, summed over {len(files)} checkpoints:", report)
    print(f"\n{'; '.join(report.notes)}; {report.seconds:.1f} s for {len(report.queries)} pictures")
    return report


if __name__ == "__main__":
    main()
