"""A small transformer from scratch, and all of its layers: which library does the name of a function come from?

Characters go in, one of four libraries comes out. `layers="all"` compares gradients of attention, normalisation and
embedding as well as of the head; the printed plan says how each is computed and what it costs. Many names belong to two
libraries, which no model can know: see what pushes towards these mistakes. Run it with
`python examples/transformer.py` (about a minute).
"""

import argparse
import warnings
from pathlib import Path

import numpy
import scipy.linalg
import scipy.special
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradsim import GradSimCallback, Report

LIBRARIES = {
    "numpy": [numpy, numpy.linalg],
    "special": [scipy.special],
    "linalg": [scipy.linalg],
    "torch": [torch, torch.nn.functional],
}
LETTERS = " abcdefghijklmnopqrstuvwxyz0123456789_"
LENGTH = 16


def encode(name: str) -> list[int]:
    """Numbers of the letters, filled up with zeros."""
    return [LETTERS.index(letter) for letter in name.lower()[:LENGTH].ljust(LENGTH)]


def decode(sample: tuple[Tensor, Tensor]) -> str:
    """The name again, for panels and tables."""
    return "".join(LETTERS[index] for index in sample[0]).strip()


def make_data() -> tuple[TensorDataset, TensorDataset]:
    """Names of public functions with the number of their library, shuffled and parted."""
    names = [
        (name, label)
        for label, modules in enumerate(LIBRARIES.values())
        for name in sorted({name for module in modules for name in dir(module)})
        if name[0] != "_" and name.islower() and any(callable(getattr(module, name, None)) for module in modules)
    ]
    codes, labels = torch.tensor([encode(name) for name, _ in names]), torch.tensor([label for _, label in names])
    order = torch.randperm(len(names))
    train, validation = order[300:], order[:300]
    return TensorDataset(codes[train], labels[train]), TensorDataset(codes[validation], labels[validation])


class Transformer(LightningModule):
    """Two encoder layers and a head on the mean over letters."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width, padding_idx=0)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(LIBRARIES))

    def forward(self, codes: Tensor) -> Tensor:
        padding = codes == 0
        states = self.encoder(self.letters(codes) + self.places, src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(2)
        return self.head((states * kept).sum(1) / kept.sum(1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main(arguments: list[str] | None = None) -> Report:
    """Train, print the plan, and mistakes with the names behind them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one epoch, against a part of the names")
    parser.add_argument("--log-dir", type=Path, default=Path("text_logs"))
    options = parser.parse_args(arguments)
    seed_everything(0, verbose=False)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    train_set, validation_set = make_data()
    gradsim = GradSimCallback(
        layers="all",
        class_names=list(LIBRARIES),
        describe=decode,
        last_epoch_only=True,
        time_budget=None,
        max_train_samples=200 if options.smoke else None,
    )
    trainer = Trainer(
        max_epochs=1 if options.smoke else 20, accelerator="cpu", callbacks=[gradsim], default_root_dir=options.log_dir
    )
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    trainer.fit(Transformer(), loader, DataLoader(validation_set, batch_size=100))

    report = gradsim.report
    print(f"\n{report.plan}\n\n{report.errors_in_words}")
    for query in report.queries[:8]:
        pushing = (f"{decode(train_set[each.sample_id])} ({report.name_of(each.label)})" for each in query.harmful[:3])
        name, truth, taken = decode(validation_set[query.sample_id]), query.label, query.prediction
        print(f"  {name} of {report.name_of(truth)}, taken for {report.name_of(taken)}; pushed by {', '.join(pushing)}")
    print(f"Tables: {Path(trainer.log_dir) / 'gradsim' / 'report.html'}")
    return report


if __name__ == "__main__":
    main()
