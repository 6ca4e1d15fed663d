"""Small data and modules for runs of a second, and what a report must say, by plain autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_gradsim import GradSimCallback, GradSimWarning, Report

NUM_CLASSES, NUM_FEATURES, WIDTH = 4, 8, 12
NUM_TRAIN, NUM_VAL, BATCH_SIZE = 60, 40, 10
NOISE = 0.25
TOLERANCE = 1e-5
"""Largest error of a float32 similarity, as a share of the product of both norms."""


def make_data(num_samples: int, seed: int) -> TensorDataset:
    """Four overlapping clouds with a quarter of random labels: no model gets all of it right."""
    generator = torch.Generator().manual_seed(seed)
    centres = 1.2 * torch.randn(NUM_CLASSES, NUM_FEATURES, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    x = centres[labels] + torch.randn(num_samples, NUM_FEATURES, generator=generator)
    noisy = torch.rand(num_samples, generator=generator) < NOISE
    random_labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    return TensorDataset(x, torch.where(noisy, random_labels, labels))


def train_data(num_samples: int = NUM_TRAIN) -> TensorDataset:
    return make_data(num_samples, seed=1)


def val_data(num_samples: int = NUM_VAL) -> TensorDataset:
    return make_data(num_samples, seed=2)


def loader(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": BATCH_SIZE, **options})


class Classifier(LightningModule):
    """Two linear layers and a criterion; subclasses change what a test is about."""

    def __init__(self, criterion: nn.Module | None = None, num_outputs: int = NUM_CLASSES) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.body = nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.ReLU())
            self.head = nn.Linear(WIDTH, num_outputs)
        self.criterion = nn.CrossEntropyLoss() if criterion is None else criterion

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return self.criterion(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log("val_loss", self.criterion(self(x), y), batch_size=len(x))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Still(Classifier):
    """Training leaves it as it is, in any number of processes."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def strict(**options: Any) -> GradSimCallback:
    """A callback whose failures arrive, on no budget; with eight queries, since writing takes longer than making."""
    defaults = {"on_error": "raise", "num_queries": 8, "time_budget": None, "mislabel_score": None}
    return GradSimCallback(**{**defaults, **options})


class Recorder(Callback):
    """Keeps every report of the callback, with the epoch and step at which it appeared."""

    def __init__(self, gradsim: GradSimCallback) -> None:
        self.gradsim, self._last = gradsim, gradsim.report
        self.reports: list[Report] = []

    @property
    def moments(self) -> list[tuple[int, int]]:
        """Epoch and step of each report."""
        return [(report.epoch, report.step) for report in self.reports]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        report = self.gradsim.report
        if report is not None and report is not self._last:
            assert (report.epoch, report.step) == (trainer.current_epoch, trainer.global_step)
            self._last = report
            self.reports.append(report)


def make_trainer(root: Path, callbacks: Sequence[Callback], **options: Any) -> Trainer:
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": TensorBoardLogger(root, name="run", version=0),
            "default_root_dir": root,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "callbacks": list(callbacks),
            **options,
        }
    )


def fit(
    root: Path,
    gradsim: GradSimCallback | None = None,
    module: LightningModule | None = None,
    train: Any = None,
    val: Any = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> tuple[GradSimCallback, LightningModule, Recorder]:
    """Train for an epoch, by default on the small data; everything is released to the test."""
    gradsim = strict() if gradsim is None else gradsim
    module = Classifier() if module is None else module
    recorder = Recorder(gradsim)
    trainer = make_trainer(root, [gradsim, recorder, *callbacks], **options)
    if hasattr(train, "prepare_data"):
        trainer.fit(module, datamodule=train)
    else:
        train = loader(train_data(), shuffle=True) if train is None else train
        trainer.fit(module, train, loader(val_data()) if val is None else val)
    return gradsim, module, recorder


NOTHING = (
    "`GradSimCallback`: no validation of this run was one to look at, so nothing was explained. Check that `fit` has "
    "validation data, and that the schedule (`every_n_epochs=`, `every_n_steps=`, `warmup_epochs=`) meets one."
)


class Untouched(Callback):
    """Fails if a training step is reached."""

    def on_train_batch_start(self, *_: Any) -> None:
        raise AssertionError("training has started")


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """The texts of our own warnings; all others stay errors.

    ``pytest.warns`` would also let through, and later raise, what the configuration ignores by module.

    Yields:
        The texts, filled on leaving.
    """
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=GradSimWarning)
        yield texts
    texts += [str(each.message) for each in caught]


def assert_equal_states(one: Any, other: Any) -> None:
    """Nested states are equal, tensors in them too."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal_states(value, other[key])
    else:
        assert one == other


def read(gradsim: GradSimCallback) -> Report:
    assert gradsim.report is not None
    return gradsim.report


Losses = Callable[[Tensor, Tensor], Tensor]


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


class Truth:
    """One sample at a time: its logits, and the gradient of its loss by the given parameters."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter] | None = None,
        loss: Losses = mean_cross_entropy,
        inputs: Callable[[Any], Tensor] = lambda sample: sample[0],
    ) -> None:
        self.module, self.loss, self.inputs = module, loss, inputs
        self.parameters = list(module.head.parameters()) if parameters is None else parameters  # type: ignore[union-attr]

    @torch.no_grad()
    def logits(self, sample: Any) -> Tensor:
        return self.module(self.inputs(sample)[None])[0]

    def gradient(self, sample: Any, target: Tensor) -> Tensor:
        loss = self.loss(self.module(self.inputs(sample)[None]), target[None])
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, self.parameters)])

    def mistakes(self, dataset: Any) -> dict[int, tuple[int, int]]:
        """Label and prediction of every misclassified sample, by index."""
        samples = ((i, int(dataset[i][1]), int(self.logits(dataset[i]).argmax())) for i in range(len(dataset)))
        return {i: (label, prediction) for i, label, prediction in samples if label != prediction}


def similarities(similarity: str, query: Tensor, train: Tensor) -> Tensor:
    """By the definitions of the design, in float64."""
    dots = train.double() @ query.double()
    norms = train.double().norm(dim=1)
    return {"dot": dots, "cosine": dots / (norms * query.double().norm()), "asymmetric": dots / norms**2}[similarity]


def tolerances(similarity: str, query: Tensor, train: Tensor) -> Tensor:
    norms, own = train.double().norm(dim=1), query.double().norm()
    return TOLERANCE * {"dot": norms * own, "cosine": torch.ones_like(norms), "asymmetric": own / norms}[similarity]


def assert_list(samples: Any, expected: Tensor, tolerance: Tensor, ids: Sequence[int], top_k: int, sign: int) -> None:
    """``samples`` are the ``top_k`` of highest ``sign * expected``, in order, each with its score."""
    place = {sample_id: i for i, sample_id in enumerate(ids)}
    rows = torch.tensor([place[sample.sample_id] for sample in samples], dtype=torch.long)
    scores = torch.tensor([sample.score for sample in samples], dtype=torch.float64)
    assert len(set(rows.tolist())) == len(rows)
    assert ((scores - expected[rows]).abs() <= tolerance[rows]).all()
    assert (sign * scores).diff().le(0).all()
    best = (sign * expected).sort(descending=True).values[:top_k]
    best = best[best > tolerance.max()]  # a score of the wrong sign is no opponent, or no proponent
    assert len(samples) >= len(best)
    assert ((sign * scores)[: len(best)] - best).abs().le(tolerance.max()).all()


def assert_exact(
    report: Report,
    truth: Truth,
    train: Any,
    val: Any,
    *,
    ids: Sequence[int] | None = None,
    top_k: int = 8,
    has_classes: bool = True,
) -> None:
    """Every number about gradients in the report is that of one-sample autograd; ``ids`` name the rows of ``train``."""
    ids = range(len(train)) if ids is None else ids
    gradients = torch.stack([truth.gradient(train[i], train[i][1]) for i in range(len(train))])
    labels = {sample_id: train[i][1] for i, sample_id in enumerate(ids)}
    assert sorted(report.suspects.sample_ids.tolist()) == sorted(ids)
    order = [list(ids).index(sample_id) for sample_id in report.suspects.sample_ids.tolist()]
    torch.testing.assert_close(report.suspects.scores, gradients[order].square().sum(1), rtol=1e-4, atol=1e-7)
    assert report.queries
    for query in report.queries:
        assert query.sample_id is not None
        sample = val[query.sample_id]
        own = truth.gradient(sample, sample[1])
        expected, tolerance = (
            similarities(report.similarity, own, gradients),
            tolerances(report.similarity, own, gradients),
        )
        assert_list(query.harmful, expected, tolerance, ids, top_k, -1)
        expected, tolerance = similarities("cosine", own, gradients), tolerances("cosine", own, gradients)
        assert_list(query.look_alikes, expected, tolerance, ids, top_k, +1)
        if not has_classes:
            continue
        predicted = truth.gradient(sample, torch.tensor(query.prediction).to(sample[1].dtype))
        expected = similarities(report.similarity, predicted, gradients)
        assert_list(query.teachers, expected, tolerances(report.similarity, predicted, gradients), ids, top_k, +1)
        for each in (*query.harmful, *query.look_alikes, *query.teachers):
            assert each.label == int(labels[each.sample_id])
            assert each.label_is_prediction == (each.label == query.prediction)
