"""Sentence embeddings with a trained head: which library does a docstring come from?

The texts are the docstrings that NumPy, SciPy, scikit-learn and PyTorch ship; TF-IDF and an SVD make vectors of them,
as any frozen encoder would. The head alone is trained. A sample carries its text beside its vector: the tables show the
text, where the vector would say nothing. Run it with `python examples/text_embeddings.py` (half a minute).
"""

import argparse
import inspect
import re
import warnings
from pathlib import Path

import numpy
import scipy.special
import sklearn.datasets
import sklearn.metrics
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_gradsim import GradSimCallback, Report

MODULES = {
    "numpy": [numpy, numpy.linalg, numpy.fft, numpy.random],
    "scipy": [scipy.special],
    "sklearn": [sklearn.metrics, sklearn.datasets],
    "torch": [torch, torch.nn, torch.nn.functional, torch.linalg],
}
NAMES = re.compile(r"numpy|scipy|sklearn|scikit-learn|torch|tensor|ndarray", re.IGNORECASE)


def first_sentences() -> tuple[list[str], list[int]]:
    """What each public function and class says of itself, without the names that give its library away."""
    texts: dict[str, int] = {}
    for label, modules in enumerate(MODULES.values()):
        for thing in (getattr(module, name) for module in modules for name in dir(module) if not name.startswith("_")):
            words = (inspect.getdoc(thing) or "").split("\n\n")
            prose = [" ".join(each.split()) for each in words if "(" not in each[:40] and len(each) > 30]
            if callable(thing) and prose:
                texts.setdefault(NAMES.sub("~", prose[0])[:200], label)
    return list(texts), list(texts.values())


class Sentences(Dataset):
    """Embedding, label, and the text itself for whoever asks."""

    classes = tuple(MODULES)

    def __init__(self, texts: list[str], labels: list[int], size: int = 64) -> None:
        counts = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), min_df=2).fit_transform(texts)
        vectors = TruncatedSVD(size, random_state=0).fit_transform(counts)
        self.texts, self.labels = texts, labels
        self.vectors = torch.tensor(vectors, dtype=torch.float32) * size**0.5

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"text": self.texts[index], "vector": self.vectors[index], "label": self.labels[index]}


class Head(LightningModule):
    """A head on vectors that come from elsewhere."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(size, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, len(MODULES)))

    def forward(self, vector: Tensor) -> Tensor:  # the callback passes the entries of a batch that `forward` names
        return self.net(vector)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch["vector"]), batch["label"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        accuracy = (self(batch["vector"]).argmax(1) == batch["label"]).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True, batch_size=len(batch["label"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(arguments: list[str] | None = None) -> Report:
    """Train and print mistakes with the sentences behind them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two epochs")
    parser.add_argument("--log-dir", type=Path, default=Path("text_logs"))
    options = parser.parse_args(arguments)
    seed_everything(0, verbose=False)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    data = Sentences(*first_sentences())
    order = torch.randperm(len(data)).tolist()
    train_set, validation_set = Subset(data, order[300:]), Subset(data, order[:300])
    gradsim = GradSimCallback(class_names=data.classes)  # a text is found by its key; else there is `describe=`
    trainer = Trainer(
        max_epochs=2 if options.smoke else 15, accelerator="cpu", callbacks=[gradsim], default_root_dir=options.log_dir
    )
    trainer.fit(Head(), DataLoader(train_set, batch_size=32, shuffle=True), DataLoader(validation_set, batch_size=100))

    report = gradsim.report
    print(f"\n{report.errors_in_words}")
    for query in report.queries[:4]:
        label, taken = report.name_of(query.label), report.name_of(query.prediction)
        print(f"\n{label} taken for {taken}: {data.texts[query.sample_id]}")
        for sample in query.harmful[:2]:  # ids are those of the whole dataset, whatever subset was trained on
            print(f"    pushed by {report.name_of(sample.label)}: {data.texts[sample.sample_id]}")
    print(f"\nTables: {Path(trainer.log_dir) / 'gradsim' / 'report.html'}")
    return report


if __name__ == "__main__":
    main()
