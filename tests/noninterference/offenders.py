"""Callbacks that each do one forbidden thing after a validation; the harness must catch every one."""

from __future__ import annotations

import os
import random
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
