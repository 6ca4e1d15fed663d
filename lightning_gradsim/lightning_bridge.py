"""Everything that needs Lightning objects, handed down as plain callables and values."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, IterableDataset
from tqdm.auto import tqdm

from lightning_gradsim.datasets import sample_ids
from lightning_gradsim.errors import BatchFormatError
from lightning_gradsim.lightning_twins import is_instance, overrides
from lightning_gradsim.reading import RunContext
from lightning_gradsim.schedule import Moment
from lightning_gradsim.sinks import Sink, TensorBoardSink, WandbSink

T = TypeVar("T")
BAR_DELAY = 1.0
"""Seconds before a progress bar appears."""
_GENERATORS = frozenset({torch.Generator, np.random.Generator, np.random.RandomState, random.Random})


@contextmanager
def isolated_rng(trainer: Trainer | None = None) -> Iterator[None]:
    """Restore the random states afterwards, also on an exception.

    Those are the global ones (torch, CUDA, NumPy, python), and those of the generators that the trainer's module, its
    submodules or the datamodule hold as attributes: a ``forward`` or a transfer hook may draw from them.

    Args:
        trainer: The trainer; without one, only the global states.

    Yields:
        Nothing.
    """
    error: BaseException | None = None
    restore = [] if trainer is None else _own_generators(trainer)
    with isolate_rng(include_cuda=torch.cuda.is_available() and torch.cuda.is_initialized()):
        try:
            yield
        except BaseException as caught:  # Lightning's context manager restores nothing when it is left by one
            error = caught
    for set_state, state in restore:
        set_state(state)
    if error is not None:
        raise error


def _own_generators(trainer: Trainer) -> list[tuple[Callable[[Any], Any], Any]]:
    owners = [*trainer.lightning_module.modules(), getattr(trainer, "datamodule", None)]
    values = [value for owner in owners if owner is not None for value in vars(owner).values()]
    found: list[tuple[Callable[[Any], Any], Any]] = []
    for value in (value for value in values if type(value) in _GENERATORS):  # `isinstance` takes five times as long
        if isinstance(value, np.random.Generator):
            found.append((partial(setattr, value.bit_generator, "state"), value.bit_generator.state))
        elif isinstance(value, random.Random):
            found.append((value.setstate, value.getstate()))
        else:
            found.append((value.set_state, value.get_state()))
    return found


def check_strategy(trainer: Trainer, callback_name: str) -> None:
    """Refuse strategies under which a process does not hold the whole module.

    Args:
        trainer: The trainer.
        callback_name: What to call ourselves in the message.

    Raises:
        MisconfigurationException: If the trainer uses such a strategy; on every rank alike.
    """
    strategy = trainer.strategy
    # Both are a `DDPStrategy` by inheritance only: one cuts the module into shards, the other does not communicate
    # through `torch.distributed`.
    is_whole = any(is_instance(strategy, each) for each in (SingleDeviceStrategy, DDPStrategy))
    if not is_whole or any(is_instance(strategy, each) for each in (DeepSpeedStrategy, XLAStrategy)):
        raise MisconfigurationException(
            f"`{callback_name}` does not support `{type(strategy).__name__}`. Expected one device "
            "(`SingleDeviceStrategy`), or the whole module in every process (`DDPStrategy`). Use "
            '`Trainer(devices=1)` or `Trainer(strategy="ddp")`, or leave the callback out.'
        )


def buffers_to_share(trainer: Trainer, module: LightningModule) -> dict[str, torch.Tensor]:
    """Buffers of rank zero, which may differ between processes: running statistics are those of their own batches.

    Args:
        trainer: The trainer.
        module: The user's module.

    Returns:
        Copies on the CPU by name; none with one process, and on other ranks.
    """
    if trainer.world_size == 1 or not trainer.is_global_zero:
        return {}
    return {name: buffer.detach().cpu().clone() for name, buffer in module.named_buffers()}


def check_forward(module: LightningModule, callback_name: str) -> None:
    """Refuse a module whose outputs nobody but ``training_step`` can compute.

    Args:
        module: The user's module.
        callback_name: What to call ourselves in the message.

    Raises:
        MisconfigurationException: If it defines neither ``forward`` nor ``gradsim_step``.
    """
    if not overrides("forward", module, LightningModule) and not hasattr(module, "gradsim_step"):
        raise MisconfigurationException(
            f"`{type(module).__name__}` defines no `forward`, which `{callback_name}` needs to compute outputs. Define "
            "`forward(inputs)` returning logits, or `gradsim_step(batch)` returning (logits, targets, one loss a "
            "sample)."
        )


@contextmanager
def silenced(module: LightningModule) -> Iterator[None]:
    """Let ``self.log`` and ``self.log_dict`` in the user's ``forward`` do nothing: our forwards are none of theirs.

    Args:
        module: The user's module.

    Yields:
        Nothing.
    """
    own = {name: vars(module)[name] for name in ("log", "log_dict") if name in vars(module)}
    try:
        for name in ("log", "log_dict"):
            object.__setattr__(module, name, lambda *_, **__: None)
        yield
    finally:
        for name in ("log", "log_dict"):
            object.__delattr__(module, name)
        for name, value in own.items():
            object.__setattr__(module, name, value)


def batch_mover(trainer: Trainer, module: LightningModule) -> Callable[[Any], Any]:
    """What training does with a batch between loader and step: precision, the user's transfer hooks, the device.

    Args:
        trainer: The trainer.
        module: The user's module.

    Returns:
        A function from a batch of a loader to the batch that the step sees.
    """
    datamodule = getattr(trainer, "datamodule", None)
    hook_owner: Any = module
    if datamodule is not None and overrides("on_before_batch_transfer", datamodule, LightningDataModule):
        hook_owner = datamodule

    def move(batch: Any) -> Any:
        batch = trainer.precision_plugin.convert_input(batch)
        batch = hook_owner.on_before_batch_transfer(batch, 0)
        return trainer.strategy.batch_to_device(batch, module.device, 0)

    def move_from_one_loader(batch: Any) -> Any:
        try:
            return move(batch)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise BatchFormatError(
                f"The transfer hooks of `{type(hook_owner).__name__}` failed on a batch of `train_data=`, with "
                f"{type(error).__name__}: {str(error).rstrip('.')}. Training gives them batches of several loaders. "
                "Let them return batches of one loader, which are pairs or mappings of tensors, in the form that "
                "`forward` takes."
            ) from error

    return move_from_one_loader if isinstance(trainer.train_dataloader, (Mapping, list, tuple)) else move


def forward_context(trainer: Trainer) -> Callable[[], AbstractContextManager[Any]]:
    """The trainer's precision context."""
    return trainer.precision_plugin.val_step_context


def run_context(trainer: Trainer, module: LightningModule) -> RunContext:
    """How this run treats batches, as plain callables.

    Args:
        trainer: The trainer.
        module: The user's module.

    Returns:
        The callables.
    """
    return RunContext(
        move=batch_mover(trainer, module),
        to_device=lambda batch: move_data_to_device(batch, module.device),
        forward_context=forward_context(trainer),
        show_progress=lambda items, total, description: show_progress(trainer, items, total, description),
    )


def show_progress(trainer: Trainer, items: Iterable[T], total: int, description: str) -> Iterable[T]:
    """The items, with a progress bar of the trainer's kind once they take more than a moment, if it shows bars.

    Args:
        trainer: The trainer.
        items: What is iterated.
        total: How many.
        description: What is done.

    Returns:
        The items.
    """
    bar = trainer.progress_bar_callback
    if bar is None or not getattr(bar, "is_enabled", True) or not trainer.is_global_zero:
        return items
    if is_instance(bar, RichProgressBar):
        return items if bar.progress is None else _with_rich_task(bar.progress, items, total, description)
    shown: Iterable[T] = tqdm(items, total=total, desc=description, leave=False, delay=BAR_DELAY, dynamic_ncols=True)
    return shown


def _with_rich_task(progress: Any, items: Iterable[T], total: int, description: str) -> Iterator[T]:
    """One more line in the display that is there already: a terminal has room for one."""
    # Hidden afterwards, and taken again: Lightning finds its own tasks by their place, so that none may go.
    found = [task.id for task in progress.tasks if task.description == description]
    task = found[0] if found else progress.add_task(description, visible=False)
    progress.reset(task, total=total, visible=False)
    begin = time.monotonic()
    try:
        for item in items:
            yield item
            progress.update(task, advance=1, visible=time.monotonic() - begin > BAR_DELAY)
    finally:
        progress.update(task, visible=False)


def gather(trainer: Trainer, value: T) -> list[T]:
    """The values of all processes, in the order of their ranks; every process must ask.

    Args:
        trainer: The trainer.
        value: What this process has; picklable.

    Returns:
        The values.
    """
    if trainer.world_size == 1:
        return [value]
    values: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(values, value)
    return values


def sinks_of(trainer: Trainer) -> list[Sink]:
    """A sink for every logger of the trainer that takes pictures."""
    sinks: list[Sink] = []
    for logger in trainer.loggers:
        if is_instance(logger, TensorBoardLogger):
            sinks.append(TensorBoardSink(logger.experiment))
        elif is_instance(logger, WandbLogger):
            sinks.append(WandbSink(logger.experiment))
    return sinks


def is_trial_run(trainer: Trainer) -> bool:
    """Whether this is a ``fast_dev_run``: the whole path on a few batches, nothing written, errors raised."""
    return bool(getattr(trainer, "fast_dev_run", False))


def num_trial_batches(trainer: Trainer) -> int | None:
    """How many batches a ``fast_dev_run`` reads; ``None`` for other runs."""
    return int(getattr(trainer, "fast_dev_run", 0)) or None


def output_directory(trainer: Trainer, name: str) -> Path:
    """Where files go; asks every rank alike, since ``log_dir`` broadcasts."""
    return Path(trainer.log_dir or trainer.default_root_dir) / name


def checkpoint_directory(trainer: Trainer, name: str) -> Path:
    """Where the trainer's checkpoints go; without any, where our files do. Every rank must ask."""
    own = output_directory(trainer, name)
    found = getattr(trainer.checkpoint_callback, "dirpath", None)
    return own if found is None else Path(found)


def resumed_from(trainer: Trainer) -> Path | None:
    """Folder of the checkpoint that this run goes on from, if it goes on from one."""
    return None if trainer.ckpt_path is None else Path(trainer.ckpt_path).parent


def moment_of(trainer: Trainer, batch_idx: int) -> Moment:
    """Where in the run a validation of ``fit`` stands.

    Args:
        trainer: The trainer, in the validation that follows the training batch.
        batch_idx: Index of that training batch in its epoch.

    Returns:
        The moment.
    """
    num_batches, every_n = trainer.num_training_batches, trainer.check_val_every_n_epoch or 1
    interval = getattr(trainer, "val_check_batch", None) or math.inf
    left_in_epoch = num_batches - (batch_idx + 1)
    max_epochs = math.inf if trainer.max_epochs in {None, -1} else trainer.max_epochs
    left_in_run = left_in_epoch + (max_epochs - trainer.current_epoch - 1) * num_batches
    if trainer.max_steps >= 0:  # the run may end before the epoch does
        steps = trainer.max_steps - trainer.global_step
        left_in_run = min(left_in_run, steps * trainer.accumulate_grad_batches)
    left_in_epoch = min(left_in_epoch, left_in_run)
    ends_epoch = bool(trainer.is_last_batch)
    if not ends_epoch and math.isfinite(left_in_epoch) and math.isfinite(interval):
        ends_epoch = left_in_epoch < interval
    if math.isfinite(num_batches) and math.isfinite(interval):
        across_epochs = trainer.check_val_every_n_epoch is None
        skipped = left_in_epoch + (every_n - 1) * num_batches if ends_epoch and not across_epochs else 0
        ends_run = left_in_run < skipped + interval
    else:  # epochs without a length, or validations by time
        ends_run = ends_epoch and trainer.current_epoch + every_n >= max_epochs
    return Moment(trainer.current_epoch, trainer.global_step, ends_epoch, ends_run)


def unseen_note(trainer: Trainer) -> str | None:
    """What to say of a run that trains on some batches of its loader only.

    Args:
        trainer: The trainer.

    Returns:
        The note, or ``None`` where training reads the whole loader, or that cannot be told.
    """
    loader = trainer.train_dataloader
    if trainer.state.fn != "fit" or is_trial_run(trainer) or not isinstance(loader, DataLoader):
        return None
    total = sized_len(loader)
    if total is None or trainer.num_training_batches >= total:
        return None
    which = "overfit_batches" if getattr(trainer, "overfit_batches", 0) else "limit_train_batches"
    return (
        f"`{which}` lets training see {trainer.num_training_batches} of {total} batches an epoch: samples that it does "
        "not see are compared with all the same; pass `train_data=` with those that it sees"
    )


def loss_of_outputs(outputs: Any, accumulate_grad_batches: int) -> torch.Tensor | None:
    """The loss that ``training_step`` returned, without Lightning's division for accumulation.

    Args:
        outputs: What ``on_train_batch_end`` gets.
        accumulate_grad_batches: The trainer's factor.

    Returns:
        The loss, or ``None`` if there is none (manual optimisation).
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss * accumulate_grad_batches if isinstance(loss, torch.Tensor) else None


def flatten_loaders(loaders: Any) -> list[Any]:
    """All loaders of a nested collection, in Lightning's order."""
    if hasattr(loaders, "flattened"):
        return list(loaders.flattened)
    if isinstance(loaders, Mapping):
        return [loader for part in loaders.values() for loader in flatten_loaders(part)]
    if isinstance(loaders, (list, tuple)):
        return [loader for part in loaders for loader in flatten_loaders(part)]
    return [] if loaders is None else [loaders]


def num_sample_ids(trainer: Trainer) -> int:
    """One more than the largest id of a training sample; 0 where that is not known.

    Args:
        trainer: The trainer, with its training loader.

    Returns:
        The number.
    """
    loaders = flatten_loaders(trainer.train_dataloader)
    dataset = getattr(loaders[0], "dataset", None) if len(loaders) == 1 else None
    if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return 0
    ids = sample_ids(dataset)
    return int(ids.max()) + 1 if len(ids) else 0


def learning_rate(trainer: Trainer) -> float:
    """That of the first parameters of the first optimizer; 1 without any."""
    groups = trainer.optimizers[0].param_groups if trainer.optimizers else []
    return float(groups[0]["lr"]) if groups else 1.0
