"""Callbacks that each do one forbidden thing after a validation; the harness must catch every one."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn


class Harmless(Callback):
    """Does nothing: the runs themselves must be repeatable."""


class Offender(Callback):
    """Commits its offence at the end of every validation of the fit."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Offend, except in the sanity check."""
        if not trainer.sanity_checking:
            self.offend(trainer, pl_module)

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        """Do the forbidden thing."""
        raise NotImplementedError


class PeeksIntoTrainLoader(Offender):
    """Takes one batch from the live training loader."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        next(iter(_train_loader(trainer)))


class RereadsTrainLoader(Offender):
    """Reads the live training loader to its end, with all global random states restored."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        with isolate_rng():
            for _ in _train_loader(trainer):
                pass


class RereadsDataset(Offender):
    """Reads the training dataset in the training process, with all global random states restored."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        with isolate_rng():
            dataset = _train_loader(trainer).dataset
            for index in range(len(dataset)):
                dataset[index]


class RereadsValDataset(Offender):
    """Reads a validation sample again in the training process."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.val_dataloaders.dataset[0]  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


class CallsBackward(Offender):
    """Differentiates a loss into ``.grad`` of the live module."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        _loss(trainer, module).backward()


class ClearsGradients(Offender):
    """Throws pending gradients away."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        module.zero_grad()


class DrawsTorch(Offender):
    """Draws from the global generator of torch."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        torch.rand(1)


class DrawsNumpy(Offender):
    """Draws from the global generator of NumPy."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        np.random.rand()


class DrawsPython(Offender):
    """Draws from the global generator of python."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        random.random()


class LeavesForwardHook(Offender):
    """Leaves a forward hook on a layer."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        _head(module).register_forward_hook(lambda *_: None)


class LeavesTensorHook(Offender):
    """Leaves a gradient hook on a weight."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        _head(module).weight.register_hook(lambda _: None)


class FlipsMode(Offender):
    """Leaves a frozen submodule in train mode at validation end; Lightning undoes this before the next step."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        _batchnorm(module).train()


class FlipsModeAfterRestore(Callback):
    """Leaves a frozen submodule in train mode where nobody undoes it: its statistics move from then on."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Offend after Lightning has restored the modes of this epoch's validations."""
        _batchnorm(pl_module).train()


class ForwardsInTrainMode(Offender):
    """Runs the model in train mode, then restores every mode: running statistics have moved."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        with isolate_rng():
            module.train()
            _loss(trainer, module)
            module.eval()


class LeavesParameterAttribute(Offender):
    """Leaves an attribute on a weight."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        _head(module).weight.grad_sample = None  # pyright: ignore[reportAttributeAccessIssue]


class LeavesModuleAttribute(Offender):
    """Leaves an attribute on a layer."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        _head(module).activations = []  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


class RegistersBuffer(Offender):
    """Adds a key to the state dict."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        module.register_buffer("norms", torch.zeros(1))


class FlipsRequiresGrad(Offender):
    """Freezes a weight."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        _head(module).weight.requires_grad_(False)


class NudgesWeight(Offender):
    """Changes one weight by one unit in the last place."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        weight = _head(module).weight.data
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))


class ChangesLearningRate(Offender):
    """Changes a setting of the optimizer."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] *= 0.9


class LogsUnderUsersName(Offender):
    """Writes one of the user's metrics to the logger."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({"val_loss": 0.0}, step=trainer.global_step)


class LeavesGradModeOn(Offender):
    """Leaves gradients on where Lightning had turned them off."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        torch.set_grad_enabled(True)


class LeavesEnvironment(Offender):
    """Leaves an environment variable."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        os.environ["GRADSIM_OFFENDER"] = "1"

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Clean up for the tests that follow."""
        os.environ.pop("GRADSIM_OFFENDER", None)


class LeavesGlobalHook(Offender):
    """Leaves a hook on all modules there are."""

    def __init__(self) -> None:
        self.handles: list[Any] = []

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        self.handles.append(nn.modules.module.register_module_forward_hook(lambda *_: None))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Clean up for the tests that follow."""
        while self.handles:
            self.handles.pop().remove()


class LeavesAccumulationHook(Offender):
    """Leaves a hook on a weight that runs once its gradient is complete."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        _head(module).weight.register_post_accumulate_grad_hook(lambda _: None)


class LeavesOptimizerHook(Offender):
    """Leaves a hook on the optimizer."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.optimizers[0].register_step_post_hook(lambda *_: None)


class ReplacesForward(Offender):
    """Wraps the forward of a layer."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        forward = _head(module).forward
        _head(module).forward = lambda x: forward(x)  # pyright: ignore[reportAttributeAccessIssue]


class ChangesModuleAttribute(Offender):
    """Changes a number on a layer."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        _head(module).in_features += 1


class LeavesDatasetAttribute(Offender):
    """Leaves an attribute on the dataset."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        _train_loader(trainer).dataset.positions = []


class LeavesOptimizerAttribute(Offender):
    """Leaves an attribute on the optimizer."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.optimizers[0].norms = []  # pyright: ignore[reportAttributeAccessIssue]


class LeavesTrainerAttribute(Offender):
    """Leaves an attribute on the trainer."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.norms = []  # pyright: ignore[reportAttributeAccessIssue]


class ReplacesCollate(Offender):
    """Wraps a part of the user's loader."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        loader = _train_loader(trainer)
        collate = loader.collate_fn
        loader.collate_fn = lambda samples: collate(samples)


class AdvancesScheduler(Offender):
    """Moves the learning rate's schedule on."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.lr_scheduler_configs[0].scheduler.last_epoch += 1


class ChangesMetric(Offender):
    """Changes what other callbacks monitor."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        trainer._logger_connector._callback_metrics["train_loss_step"] = torch.zeros(())


class StopsTraining(Offender):
    """Ends the run after an epoch."""

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.should_stop = True


class LeavesGlobal(Offender):
    """Leaves a global setting changed for as long as this process can bear it: to the end of the epoch."""

    def __init__(self) -> None:
        self.changed = ExitStack()

    def offend(self, trainer: Trainer, module: LightningModule) -> None:
        self.changed.enter_context(self.change())

    def change(self) -> AbstractContextManager[Any]:
        """The changed setting."""
        raise NotImplementedError

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Clean up."""
        self.changed.close()


class LeavesInferenceMode(LeavesGlobal):
    """Leaves inference mode on."""

    def change(self) -> AbstractContextManager[Any]:
        stack = _undo(lambda: torch.set_grad_enabled(True))  # by then Lightning has left its own context
        stack.enter_context(torch.inference_mode())
        return stack


class LeavesAutocast(LeavesGlobal):
    """Leaves autocast on."""

    def change(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu")


class LeavesAttentionUnfused(LeavesGlobal):
    """Leaves the fused path of attention layers switched off."""

    def change(self) -> AbstractContextManager[Any]:
        torch.backends.mha.set_fastpath_enabled(False)
        return _undo(lambda: torch.backends.mha.set_fastpath_enabled(True))


class LeavesDefaultDtype(LeavesGlobal):
    """Leaves another default type."""

    def change(self) -> AbstractContextManager[Any]:
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return _undo(lambda: torch.set_default_dtype(dtype))


class LeavesDeterminism(LeavesGlobal):
    """Leaves deterministic algorithms on."""

    def change(self) -> AbstractContextManager[Any]:
        torch.use_deterministic_algorithms(True)
        return _undo(lambda: torch.use_deterministic_algorithms(False))


class LeavesThreads(LeavesGlobal):
    """Leaves another number of threads."""

    def change(self) -> AbstractContextManager[Any]:
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        return _undo(lambda: torch.set_num_threads(threads))


class LeavesLogHandler(LeavesGlobal):
    """Leaves a handler on the root logger."""

    def change(self) -> AbstractContextManager[Any]:
        handler = logging.NullHandler()
        logging.getLogger().addHandler(handler)
        return _undo(lambda: logging.getLogger().removeHandler(handler))


class PollutesCheckpoint(Callback):
    """Writes outside its own entry of the checkpoint."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Offend in the file only."""
        checkpoint["gradsim"] = 1


class LeavesStrategyWrapped(Callback):
    """Wraps a method of the strategy and never undoes it."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Offend before the loaders exist."""
        process = trainer.strategy.process_dataloader
        trainer.strategy.process_dataloader = lambda dataloader: process(dataloader)  # pyright: ignore[reportAttributeAccessIssue]


def _undo(function: Callable[[], Any]) -> ExitStack:
    stack = ExitStack()
    stack.callback(function)
    return stack


def _train_loader(trainer: Trainer) -> Any:
    return trainer.train_dataloader


def _loss(trainer: Trainer, module: LightningModule) -> Tensor:
    """The loss of the first few training samples, with a graph."""
    dataset = _train_loader(trainer).dataset
    samples = [dataset[index] for index in range(4)]
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    with torch.enable_grad():
        return nn.functional.cross_entropy(module(x), y)


def _batchnorm(module: nn.Module) -> nn.Module:
    return next(layer for layer in module.modules() if isinstance(layer, nn.BatchNorm1d))


def _head(module: nn.Module) -> nn.Linear:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1]
