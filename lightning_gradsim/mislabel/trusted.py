"""The trusted-validation score F: what training margins become when a copy of the model learns right labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradsim.errors import LossError, NonFiniteError
from lightning_gradsim.guard import copy_uncompiled
from lightning_gradsim.mislabel.scores import standardise
from lightning_gradsim.mislabel.visits import measure_visits
from lightning_gradsim.tasks import Task

EPOCHS = 4
LEARNING_RATE = 0.01
MOMENTUM = 0.9
TRUSTED_WEIGHT = 2.0
"""Weight of z(F) beside a score whose two parts have 1 each."""

Run = Callable[[nn.Module, Any], tuple[Tensor, Tensor, Tensor]]
"""From a module and a batch to logits, targets and losses ``[b]``."""


def trusted_scores(
    module: nn.Module,
    run: Run,
    validation_batches: Callable[[], Iterable[Any]],
    train_batches: Callable[[], Iterable[tuple[Tensor, Any]]],
    num_samples: int,
    task: Task = Task.CLASSIFICATION,
    *,
    epochs: int = EPOCHS,
    learning_rate: float = LEARNING_RATE,
) -> Tensor:
    """Fine-tune a copy of the model on validation samples whose labels are right, and average the training margins.

    The module itself is left alone. The copy stays in eval mode, so that running statistics keep to the training data
    and nothing is drawn at random. Costs ``epochs`` passes over both sets, the one over the training set forward only.

    Args:
        module: The model after training.
        run: From a module and a batch to logits, targets and losses.
        validation_batches: Gives the validation batches anew for each epoch, about 32 samples each.
        train_batches: Gives sample ids and training batches anew for each epoch.
        num_samples: Size of the training dataset ``N``.
        task: Kind of task.
        epochs: How many.
        learning_rate: Of SGD with momentum 0.9.

    Returns:
        F: minus the margin of every training sample, averaged over the epochs, float32 ``[N]``, of the label that is
        worst off in multi-label tasks; NaN for samples that were not among the batches.

    Raises:
        NonFiniteError: If the loss of a validation batch is not finite.
        LossError: If the copy does not compute with its own weights.
        ValueError: If the task is a regression.

    Source:
        After Maini et al. (2022), "Characterizing datapoints via second-split forgetting", arXiv:2210.15031: margins
        instead of the epoch in which a sample is forgotten.
    """
    check_classes(task)
    student = copy_uncompiled(module).eval()
    parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=learning_rate, momentum=MOMENTUM)
    sums, visits = torch.zeros(num_samples), torch.zeros(num_samples)
    for _ in range(epochs):
        with torch.enable_grad():
            _fit(student, run, validation_batches(), optimizer)
        with torch.no_grad():
            for ids, batch in train_batches():
                logits, targets, _ = run(student, batch)
                seen = measure_visits(task, logits, targets, ("margin",))
                margins = seen.values["margin"].cpu()
                margins = margins.amin(1) if margins.ndim == 2 else margins
                sums.index_add_(0, ids.cpu(), margins.float())
                visits.index_add_(0, ids.cpu(), seen.usable.cpu().float())
    return torch.where(visits > 0, -sums / visits, torch.nan)


def check_classes(task: Task) -> None:
    """Refuse a task without classes.

    Args:
        task: Kind of task.

    Raises:
        ValueError: If it is a regression.
    """
    if task is Task.REGRESSION:
        raise ValueError("`trusted_val=True` needs classes, and the task is a regression. Leave it out.")


def add_trusted(scores: Tensor, trusted: Tensor) -> Tensor:
    """A score that takes a trusted validation set into account.

    Args:
        scores: Mislabel scores of some samples ``[n]``, such as the default.
        trusted: F of the same samples ``[n]``.

    Returns:
        ``scores + 2 z(F)``, ``[n]``.
    """
    return scores + TRUSTED_WEIGHT * standardise(trusted)


def _fit(student: nn.Module, run: Run, batches: Iterable[Any], optimizer: torch.optim.Optimizer) -> None:
    for batch in batches:
        loss = run(student, batch)[2].mean()
        if not bool(loss.isfinite()):
            raise NonFiniteError(
                "The loss of a validation batch became NaN or infinite while a copy of the model was fine-tuned on it. "
                "Lower the learning rate, or leave out `trusted_val`."
            )
        parameters = optimizer.param_groups[0]["params"]
        # Not `backward`: where a copy calls parts of the original, it would leave gradients there.
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        if all(gradient is None for gradient in gradients):
            raise LossError(
                "The loss of a copy of the model does not depend on the copy's weights. Does the module hold functions "
                "that are bound to it, such as a `forward` set on the instance? Leave out `trusted_val`, or define "
                "them in its class."
            )
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
