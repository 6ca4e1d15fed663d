"""The table of faults: what breaks in the second of three epochs, and what the user is told."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import lightning_gradsim.presentation
import lightning_gradsim.scorer
from lightning_gradsim.adapter import Adapter, Step
from lightning_gradsim.errors import LossError, NonFiniteError, TrainingDataError
from lightning_gradsim.rules import registry
from lightning_gradsim.sinks import TensorBoardSink
from tests.noninterference.cases import BATCH_SIZE, NUM_TRAIN, Case, Classifier, make_samples, mlp, shuffled


class Broken(Exception):
    """What no code of ours knows."""


class Trap(Callback):
    """Says when things break, in the second epoch, and takes what a folder holds aside meanwhile."""

    def __init__(self) -> None:
        self.is_on = False
        self.error: BaseException = Broken("broken on purpose")
        self.in_pass: Callable[[Tensor], None] | None = None
        self.blocks_folder = False

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.is_on = trainer.current_epoch == 1
        folder = Path(trainer.log_dir) / "gradsim"
        aside = folder.with_name("aside")
        if self.blocks_folder and self.is_on:
            folder.rename(aside)
            folder.write_text("a file is in the way")
        elif aside.exists():
            folder.unlink()
            aside.rename(folder)

    def spring(self) -> None:
        """Break, if it is time."""
        if self.is_on:
            raise self.error

    def __deepcopy__(self, memo: Any) -> Trap:
        return self


TRAP = Trap()
"""The module asks it in every forward; replaced for every test."""


class Trapped(Classifier):
    """Its forward may break in the pass, and nowhere else."""

    def forward(self, x: Tensor) -> Tensor:
        if TRAP.in_pass is not None and TRAP.is_on and torch.is_grad_enabled() and self.trainer.validating:
            torch.rand(1)  # what is drawn meanwhile is given back
            TRAP.in_pass(x)
        return super().forward(x)


CASE = Case(
    "faults",
    lambda: mlp(nn.Dropout(0.3), kind=Trapped),
    shuffled,
    {"max_epochs": 3, "accumulate_grad_batches": 4, "val_check_interval": 3},
)
"""Dropout draws numbers after each fault, and gradients are pending over the last validation of each epoch."""


@dataclass(frozen=True, eq=False)
class Fault:
    """Something that breaks."""

    name: str
    """As in the table of ``docs/promises.md``."""
    plant: Callable[[pytest.MonkeyPatch, Trap], dict[str, Any]]
    """Lays the trap and returns arguments for the callback."""
    says: tuple[str, ...]
    """What the warning holds: where it failed, why, and the way out."""
    arrives: type[BaseException] = Broken
    """The exception that arrives with ``on_error="raise"``, itself or as the cause of ours, which names more."""
    is_original: bool = True
    """Whether it is the very object that was raised."""
    has_report: bool = False
    """Whether the report is there all the same, in ``callback.report``."""


class TrappedAdapter(Adapter):
    """Breaks where it reads batches: in the choice of queries, or in the pass."""

    def __init__(self, trap: Trap, *, in_pass: bool) -> None:
        super().__init__()
        self.trap, self.in_pass, self.calls = trap, in_pass, 0

    def step(self, module: nn.Module, batch: Any) -> Step:
        step = super().step(module, batch)
        if step.losses.requires_grad == self.in_pass:
            self.calls += self.trap.is_on
            if self.calls == 3:
                self.trap.spring()
        return step


class TrappedData(Dataset[Any]):
    """Training samples of the same content, read in a worker process, where one of them may break."""

    def __init__(self, trap: Trap, breaks: Callable[[], Any], index: int = 17) -> None:
        self.samples, self.trap, self.breaks, self.index = make_samples(NUM_TRAIN, seed=1), trap, breaks, index

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if self.trap.is_on and index == self.index:
            assert get_worker_info() is not None
            return self.breaks()
        return self.samples[index]


class ShrinkingData(TrappedData):
    """Loses its second half when its first sample is read."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if self.trap.is_on:
            self.samples = TensorDataset(*(tensor[: NUM_TRAIN // 2] for tensor in self.samples.tensors))
        return self.samples[index]


def in_adapter(_: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    return {"adapter": TrappedAdapter(trap, in_pass=False)}


def in_adapter_of_the_pass(_: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    return {"adapter": TrappedAdapter(trap, in_pass=True)}


def in_loss(_: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    trap.error = RuntimeError("no loss any more.")

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        trap.spring()
        return F.cross_entropy(outputs, targets, reduction="none")

    return {"loss_fn": loss}


def in_forward(_: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    trap.in_pass = lambda _: trap.spring()
    return {"layers": "all"}


def in_rule(monkeypatch: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    rule, parameters = registry._RULES[nn.Linear]

    def broken(*arguments: Any, **options: Any) -> Any:
        trap.spring()
        return rule(*arguments, **options)

    monkeypatch.setitem(registry._RULES, nn.Linear, (broken, parameters))
    return {"layers": "all"}


def _before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, trap: Trap) -> None:
    original = getattr(owner, name)

    def broken(*arguments: Any, **options: Any) -> Any:
        trap.spring()
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, broken)


def in_scoring(monkeypatch: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    _before(monkeypatch, lightning_gradsim.scorer.Scorer, "update", trap)
    return {}


def in_drawing(monkeypatch: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    _before(monkeypatch, lightning_gradsim.presentation, "mistake_panel", trap)
    return {}


def full_disk(monkeypatch: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    trap.error = OSError(errno.ENOSPC, "No space left on device")
    fsync, calls = os.fsync, iter(range(100))

    def full(descriptor: int) -> None:
        if trap.is_on and next(calls) == 2:  # the third file; two are new by then
            trap.spring()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    return {}


def blocked_folder(_: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    trap.blocks_folder = True
    return {}


def in_tensorboard(monkeypatch: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    trap.error = OSError("Writer is closed")
    _before(monkeypatch, TensorBoardSink, "write_pngs", trap)
    return {}


def unreadable_sample(_: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    def breaks() -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "17.png")

    return {"train_data": DataLoader(TrappedData(trap, breaks), BATCH_SIZE)}


def dead_worker(monkeypatch: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    # Lightning takes away the handler by which torch learns of it at once: torch then looks every five seconds.
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
    return {"train_data": DataLoader(TrappedData(trap, lambda: os.kill(os.getpid(), signal.SIGKILL)), BATCH_SIZE)}


def shrinking(_: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    return {"train_data": DataLoader(ShrinkingData(trap, lambda: None), BATCH_SIZE)}


def out_of_memory(_: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    trap.error = RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    )
    trap.in_pass = lambda _: trap.spring()
    return {}


def nan_in_training(_: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    x, y = make_samples(NUM_TRAIN, seed=1)[17]
    return {"train_data": DataLoader(TrappedData(trap, lambda: (x * float("nan"), y)), BATCH_SIZE)}


def nan_in_validation(_: pytest.MonkeyPatch, trap: Trap) -> dict[str, Any]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return torch.where(torch.arange(len(losses)) == 1, float("nan"), losses) if trap.is_on else losses

    return {"loss_fn": loss}


REPAIR = 'Repair what the traceback shows, or pass `on_error="raise"` to stop at such a failure.'
WAY_OUT = "Repair it, or pass other data as `train_data=` to `GradSimCallback`."
WRITING = "The report is in `callback.report`."

FAULTS = (
    Fault("adapter", in_adapter, ("the choice of queries of epoch 1: Broken: broken on purpose.", REPAIR)),
    Fault("adapter_in_pass", in_adapter_of_the_pass, ("the report of epoch 1: Broken: broken on purpose.", REPAIR)),
    Fault(
        "loss",
        in_loss,
        (
            "the choice of queries of epoch 1: LossError: The loss from `loss_fn` failed on outputs of shape (8, 4)",
            ": no loss any more. Pass `loss_fn=`",
        ),
        LossError,
    ),
    Fault("forward", in_forward, ("the report of epoch 1: Broken: broken on purpose.", REPAIR)),
    Fault("gradient_rule", in_rule, ("the report of epoch 1: Broken: broken on purpose.", REPAIR)),
    Fault("scoring", in_scoring, ("the report of epoch 1: Broken: broken on purpose.", REPAIR)),
    Fault("drawing", in_drawing, ("the report of epoch 1: Broken: broken on purpose.", REPAIR), has_report=True),
    Fault(
        "full_disk",
        full_disk,
        (
            "the report of epoch 1: OSError: [Errno 28] No space left on device.",
            "Free space there, or give the logger another folder.",
            WRITING,
        ),
        OSError,
        has_report=True,
    ),
    Fault(
        "unwritable_folder",
        blocked_folder,
        ("the report of epoch 1: FileExistsError: [Errno 17] File exists:", "give the logger another folder.", WRITING),
        FileExistsError,
        is_original=False,
        has_report=True,
    ),
    Fault(
        "closed_writer",
        in_tensorboard,
        ("the report of epoch 1: OSError: Writer is closed.", "give the logger another folder.", WRITING),
        OSError,
        has_report=True,
    ),
    Fault(
        "unreadable_sample",
        unreadable_sample,
        (
            "the report of epoch 1: TrainingDataError: Sample 17 of `TrappedData` cannot be read: "
            "FileNotFoundError: [Errno 2] No such file or directory: '17.png'.",
            WAY_OUT,
        ),
        TrainingDataError,
        is_original=False,
    ),
    Fault(
        "dead_worker",
        dead_worker,
        (
            "the report of epoch 1: TrainingDataError: Sample 17 of `TrappedData` cannot be read: "
            "RuntimeError: DataLoader worker (pid",
            WAY_OUT,
        ),
        TrainingDataError,
        is_original=False,
    ),
    Fault(
        "shrinking_data",
        shrinking,
        (
            "the report of epoch 1: TrainingDataError: Sample ",
            " of `ShrinkingData` cannot be read: IndexError: ",
            WAY_OUT,
        ),
        TrainingDataError,
        is_original=False,
    ),
    Fault(
        "out_of_memory",
        out_of_memory,
        (
            "the report of epoch 1: RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory",
            "Memory does not suffice for one sample. Choose fewer `layers=`, or pass a smaller `num_queries=`",
        ),
        RuntimeError,
    ),
    Fault(
        "nan_in_training",
        nan_in_training,
        (
            "the report of epoch 1: NonFiniteError: Losses or gradients of training samples are not finite (sample ids "
            "[17]). Nothing is scored. Check the loss of these samples in eval mode.",
        ),
        NonFiniteError,
        is_original=False,
    ),
    Fault(
        "nan_in_validation",
        nan_in_validation,
        (
            "the choice of queries of epoch 1: NonFiniteError: Validation losses are not finite for 1 samples of "
            "loader 0 (sample ids [1]). Nothing is scored. Check the loss in eval mode.",
        ),
        NonFiniteError,
        is_original=False,
    ),
)

ELSEWHERE = {
    "changed_length": "tests/trainer/test_faults.py::test_data_of_another_length_are_read_anew",
    "short_memory": "tests/trainer/test_faults.py::test_memory_that_suffices_for_few_samples_only",
    "interrupt": "tests/trainer/test_faults.py::test_an_interrupt_stops_the_run_and_leaves_it_as_it_was",
    "kill": "tests/unit/test_sinks_files.py::test_killed_while_writing",
}
"""Faults with a test of their own."""
