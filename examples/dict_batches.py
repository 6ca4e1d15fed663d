"""A module in the style of Hugging Face: batches are mappings, the model returns an object with `.logits` and `.loss`.

The callback needs no adapter: it finds the labels by their key, hands the other entries to `forward` by name, reads
`.logits`, and compares its own cross-entropy with the loss that `training_step` returned. Models of the transformers
library have this form. Run it with `python examples/dict_batches.py` (20 seconds).
"""

import argparse
import warnings
from dataclasses import dataclass
from pathlib import Path

import sklearn.datasets
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_gradsim import GradSimCallback, Report

Batch = dict[str, Tensor]
TOPICS = ["breast_cancer", "diabetes", "digits", "iris", "linnerud", "wine"]


@dataclass
class Output:
    """What such models return."""

    logits: Tensor
    loss: Tensor | None = None


class TinyClassifier(nn.Module):
    """Word vectors, their mean over what is no padding, two layers."""

    def __init__(self, num_words: int, num_labels: int, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, width, padding_idx=0)
        self.hidden, self.classifier = nn.Linear(width, width), nn.Linear(width, num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        mask = attention_mask.unsqueeze(2)
        pooled = (self.words(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.classifier(self.hidden(pooled).relu())
        return Output(logits, None if labels is None else nn.functional.cross_entropy(logits, labels))


class Sentences(Dataset):
    """Lines of the descriptions that scikit-learn ships with its data sets, as ids of their words."""

    def __init__(self) -> None:
        descriptions = [getattr(sklearn.datasets, f"load_{topic}")().DESCR for topic in TOPICS]
        lines = [(line.split(), label) for label, text in enumerate(descriptions) for line in text.splitlines()]
        self.lines = [(words, label) for words, label in lines if len(words) > 4]
        self.words = ["[PAD]", *sorted({word for words, _ in self.lines for word in words})]
        self.ids = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, object]:
        words, label = self.lines[index]
        return {"input_ids": [self.ids[word] for word in words], "label": label, "text": " ".join(words)}


def collate(samples: list[dict[str, object]]) -> Batch:
    """Pad to the longest, as tokenizers do."""
    ids = pad_sequence([torch.tensor(sample["input_ids"]) for sample in samples], batch_first=True)
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


class Wrapped(LightningModule):
    """The usual few lines around such a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Output:
        return self.model(**inputs)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(**batch).loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self(**batch).loss, prog_bar=True, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(arguments: list[str] | None = None) -> Report:
    """Train and print mistakes with the lines behind them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two epochs")
    parser.add_argument("--log-dir", type=Path, default=Path("dict_logs"))
    options = parser.parse_args(arguments)
    seed_everything(0, verbose=False)
    warnings.filterwarnings("ignore", ".*(does not have many workers|is smaller than the logging interval).*")
    data = Sentences()
    order = torch.randperm(len(data)).tolist()
    train_set, validation_set = Subset(data, order[60:]), Subset(data, order[:60])
    gradsim = GradSimCallback(class_names=TOPICS)
    epochs = 2 if options.smoke else 20
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[gradsim], default_root_dir=options.log_dir)
    loader = DataLoader(train_set, batch_size=16, shuffle=True, collate_fn=collate)
    model = Wrapped(TinyClassifier(len(data.words), len(TOPICS)))
    trainer.fit(model, loader, DataLoader(validation_set, batch_size=60, collate_fn=collate))
    print(f"\n{gradsim.report}\n\nTexts: {Path(trainer.log_dir) / 'gradsim' / 'report.html'}")
    return gradsim.report


if __name__ == "__main__":
    main()
