"""A folder of pictures, a small ResNet, random augmentation: which files lie in the wrong folder?

Writes scikit-learn's digits as `<folder>/<class>/<number>.png`, one in twenty into a wrong class, and trains on them
with random shifts and noise. `train_data=` gives the callback the same files without augmentation: gradients are those
of the pictures as they are, and panels show them so. Run it with `python examples/image_folder.py` (half a minute).
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_gradsim import GradSimCallback, Report


class ImageFolder(Dataset):
    """Pictures in folders named after their classes; a transform is applied at every reading."""

    def __init__(self, root: Path, transform: Callable[[Tensor], Tensor] | None = None) -> None:
        self.classes = sorted(path.name for path in root.iterdir())
        self.files, self.transform = sorted(root.glob("*/*.png")), transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = self.files[index]
        image = torch.from_numpy(np.asarray(Image.open(file), dtype=np.float32))[None] / 255
        return (image if self.transform is None else self.transform(image)), self.classes.index(file.parent.name)


def shift_and_add_noise(image: Tensor) -> Tensor:
    """Moves a picture by up to two pixels and adds noise."""
    shift = torch.randint(-2, 3, (2,)).tolist()
    return (image.roll(shift, (1, 2)) + 0.1 * torch.randn_like(image)).clamp(0, 1)


class Block(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.short_cut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip

    def forward(self, maps: Tensor) -> Tensor:
        return (self.convolutions(maps) + self.short_cut(maps)).relu()


class ResNet(LightningModule):
    """Three residual blocks on pictures of any size."""

    def __init__(self, num_classes: int, width: int = 12) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(1, width), Block(width, 2 * width), Block(2 * width, 4 * width))
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(images).mean((2, 3)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def write_digits(root: Path, numbers: range, wrong_share: float) -> None:
    """Pictures of 16x16 pixels, named by true digit and number."""
    digits, draw = load_digits(), random.Random(0)
    for number in numbers:
        truth = digits.target[number]
        folder = root / str((truth + draw.randrange(1, 10)) % 10 if draw.random() < wrong_share else truth)
        folder.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray((digits.images[number] * 15.9).astype(np.uint8)).resize((16, 16))
        picture.save(folder / f"{truth}_{number:04}.png")


def main(arguments: list[str] | None = None) -> Report:
    """Write the pictures, train, print the files that look misplaced."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two epochs on a few hundred pictures")
    parser.add_argument("--log-dir", type=Path, default=Path("image_logs"))
    options = parser.parse_args(arguments)
    seed_everything(0, verbose=False)
    folder = options.log_dir / "digits"
    write_digits(folder / "train", range(400 if options.smoke else 1400), wrong_share=0.05)
    write_digits(folder / "val", range(1400, 1500 if options.smoke else 1797), wrong_share=0)
    as_they_are, validation = ImageFolder(folder / "train"), ImageFolder(folder / "val")
    augmented = ImageFolder(folder / "train", shift_and_add_noise)
    gradsim = GradSimCallback(train_data=as_they_are)
    epochs = 2 if options.smoke else 12
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[gradsim], default_root_dir=options.log_dir)
    trainer.fit(ResNet(num_classes=10), DataLoader(augmented, 32, shuffle=True), DataLoader(validation, 128))

    report = gradsim.report
    print(f"\n{report.errors_in_words}. Files that may lie in a wrong folder (their names begin with the truth):")
    for suspect in report.suspects[:10]:
        file = as_they_are.files[suspect.sample_id]  # sample ids are indices into the dataset
        print(f"  {file} -> {report.name_of(suspect.suggested_label)}/  ({suspect.probability:.0%})")
    print(f"Panels: {Path(trainer.log_dir) / 'gradsim' / 'report.html'}")
    return report


if __name__ == "__main__":
    main()
