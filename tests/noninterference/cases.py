"""The table of training configurations in which a callback must change nothing: one row each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, WeightedRandomSampler

NUM_CLASSES, NUM_FEATURES, WIDTH = 4, 8, 12
NUM_TRAIN, NUM_VAL, BATCH_SIZE = 84, 24, 8
"""11 training batches, the last one short: with a validation every 3 or every 5 batches the last validation of an epoch
comes before its end (and under ``accumulate_grad_batches=4`` with pending gradients)."""


def fit(trainer: Trainer, module: LightningModule, data: dict[str, Any]) -> None:
    """Train."""
    trainer.fit(module, **data)


@dataclass(frozen=True, eq=False)
class Case:
    """One configuration; every call of its factories gives fresh objects."""

    name: str
    module: Callable[[], LightningModule]
    data: Callable[[], dict[str, Any]]
    """The data arguments of ``Trainer.fit``; the first number of each sample is its id."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    companions: Callable[[], Sequence[Callback]] = tuple
    companions_first: bool = False
    options: Callable[[], dict[str, Any]] = dict
    """What the callback itself must be told in this configuration."""
    run: Callable[[Trainer, LightningModule, dict[str, Any]], Trainer | None] = fit
    """What is done with the trainer; returns the trainer that came last, if it is another one."""
    num_batches: int = 22
    """How many training batches are seen: two epochs of eleven."""
    is_slow: bool = False


class Classifier(LightningModule):
    """A plain classifier with ``(x, y)`` batches, logging in both stages."""

    def __init__(self, *layers: nn.Module) -> None:
        """Chain these layers."""
        super().__init__()
        self.net = nn.Sequential(*layers)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch."""
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean loss, logged by step and by epoch."""
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(y))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log loss and accuracy."""
        x, y = batch
        logits = self(x)
        accuracy = (logits.argmax(1) == y).float().mean()
        self.log_dict({"val_loss": self.criterion(logits, y), "val_accuracy": accuracy}, batch_size=len(y))

    def configure_optimizers(self) -> Any:
        """Adam, with a scheduler that acts after each epoch."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class FrozenBatchNormClassifier(Classifier):
    """Its BatchNorm is put into eval once, when training starts: nobody but the user knows that it belongs there."""

    def on_train_start(self) -> None:
        """Freeze the running statistics."""
        for layer in self.net:
            if isinstance(layer, nn.BatchNorm1d):
                layer.eval()


class TransferHookClassifier(Classifier):
    """Normalises every batch, and augments training batches, after they have reached the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Touch everything but the id."""
        x, y = batch
        ids, features = x[:, :1], (x[:, 1:] - 0.1) / 1.5
        if self.trainer.training:
            features = features + 0.1 * torch.randn_like(features)
        return torch.cat([ids, features], dim=1), y


class CompilableClassifier(Classifier):
    """Logs outside its step: where that is compiled as a whole, the compiler fails in Lightning's ``log``."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean loss."""
        x, y = batch
        return self.criterion(self(x), y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the loss as the others do."""
        self.log("train_loss", outputs["loss"], on_step=True, on_epoch=True, batch_size=len(batch[1]))


class BeforeTransferHookClassifier(Classifier):
    """Augments training batches before they are moved, from the global generator of NumPy."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Scale everything but the id."""
        x, y = batch
        scale = float(np.random.uniform(0.9, 1.1)) if self.trainer.training else 1.0
        return torch.cat([x[:, :1], scale * x[:, 1:]], dim=1), y


class ConfiguredClassifier(Classifier):
    """Its layers exist only once the trainer has asked for them."""

    def configure_model(self) -> None:
        """Build the layers, once."""
        if not len(self.net):
            self.net = mlp().net


class TwoOptimizersClassifier(Classifier):
    """Steps two optimizers by hand, the second every other batch."""

    def __init__(self, *layers: nn.Module) -> None:
        """Chain these layers."""
        super().__init__(*layers)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        """Step one or both."""
        loss = super().training_step(batch, batch_idx)
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        if batch_idx % 2:  # its gradients are pending over a validation
            second.step()
            second.zero_grad()

    def on_train_epoch_end(self) -> None:
        """Step the scheduler."""
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]

    def configure_optimizers(self) -> Any:
        """One for each Linear layer, the first with a scheduler."""
        first, second = (layer for layer in self.net if isinstance(layer, nn.Linear))
        adam = torch.optim.Adam(first.parameters(), lr=0.01)
        sgd = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
        return [adam, sgd], [torch.optim.lr_scheduler.StepLR(adam, step_size=1, gamma=0.5)]


class OwnGeneratorClassifier(Classifier):
    """Adds noise in every forward and every transfer, each from a generator of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        """Chain these layers."""
        super().__init__(*layers)
        self.generator = torch.Generator().manual_seed(8)
        self.scales = np.random.default_rng(8)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch with noise."""
        return self.net(x + 0.1 * torch.randn(x.shape, generator=self.generator))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Scale everything but the id."""
        x, y = batch
        return torch.cat([x[:, :1], float(self.scales.uniform(0.9, 1.1)) * x[:, 1:]], dim=1), y


class SelfDistillingClassifier(Classifier):
    """Copies itself in the middle of its first step, and learns from the copy too."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean loss, and the distance to the copy."""
        logits = self(batch[0])
        if not hasattr(self, "teacher"):
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        return super().training_step(batch, batch_idx) + (logits - self.teacher(batch[0])).square().mean()


class CombinedClassifier(Classifier):
    """Trains on batches of two loaders at once."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean loss over both."""
        both = list(batch.values()) if isinstance(batch, dict) else batch
        x, y = (torch.cat(parts) for parts in zip(*both, strict=True))
        return super().training_step((x, y), batch_idx)


class DropId(nn.Module):
    """Hides the first slice along ``dim``, which holds the sample id, from the layers that follow."""

    def __init__(self, dim: int = 1) -> None:
        """Choose the dimension."""
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """All but the first slice."""
        return x.narrow(self.dim, 1, x.shape[self.dim] - 1)


class NoisyDataset(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise from a generator of its own: every read changes all later ones."""

    def __init__(self, samples: TensorDataset) -> None:
        """Add noise to these samples."""
        self.samples = samples
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The sample with noise on everything but the id."""
        x, y = self.samples[index]
        noise = 0.3 * torch.randn(x.shape, generator=self.generator)
        noise[0] = 0.0
        return x + noise, y


class TransformedDataset(Dataset[tuple[Tensor, Tensor]]):
    """Its transform draws from a NumPy generator of its own."""

    def __init__(self, samples: TensorDataset) -> None:
        """Transform these samples."""
        self.samples = samples
        self.transform = RandomScale()

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The sample, transformed but for its id."""
        x, y = self.samples[index]
        return torch.cat([x[:1], self.transform(x[1:])]), y


class RandomScale:
    """Scales a sample at random."""

    def __init__(self) -> None:
        """Seed the generator."""
        self.generator = np.random.default_rng(6)

    def __call__(self, x: Tensor) -> Tensor:
        """The scaled sample."""
        return x * float(self.generator.uniform(0.8, 1.2))


class EveryOtherFirst(Sampler[list[int]]):
    """Batches of even ids, then of odd ones, in a random order of batches."""

    def __iter__(self) -> Any:
        """The batches of an epoch."""
        ids = [*range(0, NUM_TRAIN, 2), *range(1, NUM_TRAIN, 2)]
        batches = [ids[start : start + BATCH_SIZE] for start in range(0, NUM_TRAIN, BATCH_SIZE)]
        return iter([batches[place] for place in torch.randperm(len(batches)).tolist()])

    def __len__(self) -> int:
        """Number of batches."""
        return -(-NUM_TRAIN // BATCH_SIZE)


class DataModule(LightningDataModule):
    """Makes new loaders whenever it is asked, and scales batches on their way to the device."""

    def __init__(self) -> None:
        """Choose the size of batches, which a batch size finder may change."""
        super().__init__()
        self.batch_size = BATCH_SIZE

    def setup(self, stage: str) -> None:
        """Make the samples."""
        self.train_set, self.val_set = make_samples(NUM_TRAIN, seed=1), make_samples(NUM_VAL, seed=2)

    def train_dataloader(self) -> DataLoader[Any]:
        """A shuffling loader."""
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """A plain loader."""
        return DataLoader(self.val_set, batch_size=self.batch_size)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Touch everything but the id."""
        x, y = batch
        return torch.cat([x[:, :1], x[:, 1:] / 1.5], dim=1), y


def make_samples(count: int, seed: int, image: bool = False) -> TensorDataset:
    """Samples ``(x, y)`` with their id as first number, and a third of the labels random: some are always wrong."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, NUM_FEATURES, generator=generator)
    labels = (features @ torch.randn(NUM_FEATURES, NUM_CLASSES, generator=torch.Generator().manual_seed(9))).argmax(1)
    noisy = torch.rand(count, generator=generator) < 1 / 3
    labels[noisy] = torch.randint(NUM_CLASSES, (count,), generator=generator)[noisy]
    ids = torch.arange(count, dtype=torch.float32)
    if image:  # one channel of 4 x 4 with the id in the row above
        pixels = torch.cat([ids[:, None].expand(-1, 4), features, features.flip(1)], dim=1)
        return TensorDataset(pixels.view(count, 1, 5, 4), labels)
    return TensorDataset(torch.cat([ids[:, None], features], dim=1), labels)


def mlp(*middle: nn.Module, kind: type[Classifier] = Classifier) -> Classifier:
    """Two Linear layers with ``middle`` between the first one and its activation."""
    return kind(DropId(), nn.Linear(NUM_FEATURES, WIDTH), *middle, nn.ReLU(), nn.Linear(WIDTH, NUM_CLASSES))


def cnn() -> Classifier:
    """A convolution with BatchNorm over images of one channel."""
    return Classifier(
        DropId(dim=2),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(6 * 16, NUM_CLASSES),
    )


def loaders(
    wrap: Callable[[TensorDataset], Dataset[Any]] = lambda samples: samples, image: bool = False, **train: Any
) -> dict[str, Any]:
    """A training loader with these arguments and a plain validation loader."""
    train_set = wrap(make_samples(NUM_TRAIN, seed=1, image=image))
    val_set = make_samples(NUM_VAL, seed=2, image=image)
    return {
        "train_dataloaders": DataLoader(train_set, batch_size=BATCH_SIZE, **train),
        "val_dataloaders": DataLoader(val_set, batch_size=BATCH_SIZE),
    }


def shuffled() -> dict[str, Any]:
    """Loaders whose training order comes from the global generator."""
    return loaders(shuffle=True)


def noisy_validation() -> dict[str, Any]:
    """A validation loader whose dataset has a generator of its own."""
    noisy = NoisyDataset(make_samples(NUM_VAL, seed=2))
    return shuffled() | {"val_dataloaders": DataLoader(noisy, batch_size=BATCH_SIZE)}


def several_val_loaders() -> dict[str, Any]:
    """Three validation loaders, one of them shuffled."""
    data = shuffled()
    others = [
        DataLoader(make_samples(count, seed=7 + count), batch_size=BATCH_SIZE, shuffle=shuffle)
        for count, shuffle in ((10, False), (NUM_VAL, True))
    ]
    return data | {"val_dataloaders": [data["val_dataloaders"], *others]}


def two_loaders() -> list[DataLoader[Any]]:
    """Training loaders of two sizes."""
    return [
        DataLoader(make_samples(count, seed=1), batch_size=BATCH_SIZE, shuffle=True) for count in (NUM_TRAIN, NUM_VAL)
    ]


def in_combined_loader() -> dict[str, Any]:
    """Two training loaders by name, the shorter one started again."""
    combined = CombinedLoader(dict(zip("ab", two_loaders(), strict=True)), "max_size_cycle")
    return loaders() | {"train_dataloaders": combined}


def in_list() -> dict[str, Any]:
    """Two training loaders in a list."""
    return loaders() | {"train_dataloaders": two_loaders()}


def own_train_data() -> dict[str, Any]:
    """Batches of several loaders have no samples of one dataset: the callback must be told which to compare with."""
    return {"train_data": make_samples(NUM_TRAIN, seed=1)}


def fit_then_validate(trainer: Trainer, module: LightningModule, data: dict[str, Any]) -> None:
    """Train, then validate the weights of the first checkpoint."""
    trainer.fit(module, **data)
    trainer.validate(module, data["val_dataloaders"], ckpt_path=_first_checkpoint(trainer), verbose=False)


def fit_then_resume(trainer: Trainer, module: LightningModule, data: dict[str, Any]) -> Trainer:
    """Train, then go back to the first checkpoint and train from there, with another trainer, an epoch longer."""
    trainer.fit(module, **data)
    another = Trainer(
        accelerator="cpu",
        devices=1,
        logger=trainer.logger,
        default_root_dir=trainer.default_root_dir,
        callbacks=trainer.callbacks,  # type: ignore[attr-defined]
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        max_epochs=3,
    )
    another.fit(module, **data, ckpt_path=_first_checkpoint(trainer))
    return another


def fit_compiled(trainer: Trainer, module: LightningModule, data: dict[str, Any]) -> None:
    """Train what ``torch.compile`` returns."""
    torch.compiler.reset()
    trainer.fit(torch.compile(module, backend=BACKEND), **data)  # type: ignore[arg-type]


def compiled_in_place() -> Classifier:
    """A module that was compiled by its own method."""
    torch.compiler.reset()
    module = mlp()
    module.compile(backend=BACKEND)
    return module


def compiled_part() -> Classifier:
    """A module with a compiled layer."""
    torch.compiler.reset()
    module = mlp()
    module.net[1] = torch.compile(module.net[1], backend=BACKEND)  # type: ignore[assignment]
    return module


def _first_checkpoint(trainer: Trainer) -> str:
    return str(min(Path(trainer.default_root_dir).glob("saved/*.ckpt")))


def _beside(
    name: str,
    companions: Callable[[], Sequence[Callback]],
    module: Callable[[], LightningModule] = mlp,
    data: Callable[[], dict[str, Any]] = shuffled,
    num_batches: int = 22,
    **trainer: Any,
) -> tuple[Case, Case]:
    """Another callback before and behind the one under test."""
    return tuple(  # type: ignore[return-value]
        Case(f"{name}_{place}", module, data, trainer, companions, place == "first", num_batches=num_batches)
        for place in ("first", "last")
    )


def batchnorm_mlp() -> Classifier:
    """An MLP with BatchNorm."""
    return mlp(nn.BatchNorm1d(WIDTH))


BACKEND = "aot_eager"
"""Traces forward and backward as the default does, and needs no C++ compiler."""

CASES = (
    # how samples are drawn and read
    Case("plain", mlp, loaders),
    Case("shuffle", mlp, shuffled),
    Case("shuffle_own_generator", mlp, lambda: loaders(shuffle=True, generator=torch.Generator().manual_seed(3))),
    Case(
        "weighted_sampler",
        mlp,
        lambda: loaders(sampler=WeightedRandomSampler(torch.linspace(0.1, 1.0, NUM_TRAIN).tolist(), NUM_TRAIN)),
    ),
    Case(
        "custom_batch_sampler",
        mlp,
        lambda: {
            **loaders(),
            "train_dataloaders": DataLoader(make_samples(NUM_TRAIN, seed=1), batch_sampler=EveryOtherFirst()),
        },
    ),
    Case("workers", mlp, lambda: loaders(shuffle=True, num_workers=2), {"val_check_interval": 0.5}),
    Case(
        "persistent_workers",
        mlp,
        lambda: loaders(shuffle=True, num_workers=2, persistent_workers=True),
        {"val_check_interval": 0.5},
    ),
    Case("dataset_generator", mlp, lambda: loaders(NoisyDataset)),
    Case("val_dataset_generator", mlp, noisy_validation),
    Case("transform_generator", mlp, lambda: loaders(TransformedDataset, shuffle=True)),
    Case("combined_loader", lambda: mlp(kind=CombinedClassifier), in_combined_loader, options=own_train_data),
    Case("list_of_loaders", lambda: mlp(kind=CombinedClassifier), in_list, options=own_train_data),
    Case("several_val_loaders", mlp, several_val_loaders),
    Case("datamodule", mlp, lambda: {"datamodule": DataModule()}),
    Case("reload_dataloaders", mlp, lambda: {"datamodule": DataModule()}, {"reload_dataloaders_every_n_epochs": 1}),
    Case("before_transfer_hook", lambda: mlp(kind=BeforeTransferHookClassifier), loaders),
    Case("transfer_hooks", lambda: mlp(kind=TransferHookClassifier), loaders),
    # how long and when
    Case("val_check_fraction", mlp, shuffled, {"val_check_interval": 0.25}),
    Case("val_check_across_epochs", mlp, shuffled, {"val_check_interval": 7, "check_val_every_n_epoch": None}),
    Case("overfit_batches", mlp, loaders, {"overfit_batches": 3}, num_batches=6),
    Case("limited_batches", mlp, shuffled, {"limit_train_batches": 6, "limit_val_batches": 2}, num_batches=12),
    # how the model is trained
    Case("accumulate", mlp, shuffled, {"accumulate_grad_batches": 4, "val_check_interval": 3}),
    Case("gradient_clipping", mlp, shuffled, {"gradient_clip_val": 0.1}),
    Case("manual_optimization", lambda: mlp(kind=TwoOptimizersClassifier), shuffled, {"val_check_interval": 3}),
    Case("bf16_autocast", mlp, shuffled, {"precision": "bf16-mixed"}),
    Case("dropout", lambda: mlp(nn.Dropout(0.3)), loaders),
    Case("batchnorm", cnn, lambda: loaders(image=True, shuffle=True)),
    Case(
        "frozen_batchnorm",
        lambda: mlp(nn.BatchNorm1d(WIDTH), kind=FrozenBatchNormClassifier),
        shuffled,
        {"val_check_interval": 0.5},
    ),
    Case("module_generator", lambda: mlp(kind=OwnGeneratorClassifier), shuffled),
    Case("copied_in_step", lambda: mlp(kind=SelfDistillingClassifier), shuffled),
    Case("configure_model", ConfiguredClassifier, shuffled),
    Case("validate_checkpoint", mlp, shuffled, run=fit_then_validate),
    Case("resume", mlp, shuffled, run=fit_then_resume, num_batches=33),
    Case("compiled_in_place", compiled_in_place, shuffled),
    Case("compiled_outside", lambda: mlp(kind=CompilableClassifier), shuffled, run=fit_compiled, is_slow=True),
    Case("compiled_part", compiled_part, shuffled),
    # who else is there
    *_beside("checkpoint", lambda: [ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)]),
    *_beside(
        "early_stopping",
        lambda: [EarlyStopping("val_loss", min_delta=10.0, patience=2)],
        num_batches=33,
        max_epochs=9,
    ),
    *_beside(
        "swa",
        lambda: [StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)],
        module=batchnorm_mlp,
        num_batches=33,  # one more epoch for the running statistics
    ),
    *_beside("ema", lambda: [averaging(0.9)], module=batchnorm_mlp),
    *_beside("lr_monitor", lambda: [LearningRateMonitor("step")]),
    *_beside(
        "batch_size_finder",
        lambda: [BatchSizeFinder(steps_per_trial=2, init_val=4, max_trials=2)],
        data=lambda: {"datamodule": DataModule()},
    ),
    *_beside("accumulation_scheduler", lambda: [GradientAccumulationScheduler({0: 3, 1: 2})], val_check_interval=4),
)


def averaging(decay: float) -> Callback:
    """Lightning's moving average of the weights; the test skips with a release that has none."""
    found = getattr(callbacks, "EMAWeightAveraging", None)
    if found is None:
        pytest.skip("this release of Lightning has no EMAWeightAveraging")
    return found(decay=decay)


def rows(names: Sequence[str] = ()) -> list[Any]:
    """Parameters of a test: the cases of these names, or all."""
    chosen = [CASE_BY_NAME[name] for name in names] or CASES
    return [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.is_slow else []) for case in chosen]


CASE_BY_NAME = {case.name: case for case in CASES}
