"""Gradients of a head from its features and logits, in closed form through the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.precision import raise_half


def output_grads(adapter: Adapter, logits: Tensor, targets: Tensor) -> Tensor:
    """Gradients of per-sample losses by the logits, without a forward.

    Args:
        adapter: The adapter, bound to the module.
        logits: Logits ``[B, o]``.
        targets: Targets, first dimension ``B``.

    Returns:
        Gradients ``[B, o]``.

    Raises:
        LabelRangeError: If a label lies outside the classes.
        LossError: If there is no loss of one value a sample.
    """
    with torch.enable_grad():
        leaf = raise_half(logits.detach()).requires_grad_()
        losses = adapter.step_from_logits(leaf.view_as(leaf), targets).losses
        return torch.autograd.grad(losses, leaf, torch.ones_like(losses))[0]


def class_gradients(features: Tensor, grads: Tensor, labels: Tensor, num_classes: int, *, bias: bool) -> Tensor:
    """Mean gradient of the head over the samples of each class.

    Args:
        features: Inputs of the head ``[N, i]``.
        grads: Gradients by its output ``[N, o]``.
        labels: Class indices ``[N]``; others than ``0 .. C - 1`` are passed over.
        num_classes: Number of classes ``C``.
        bias: Whether the head has a trainable bias, which is one more column.

    Returns:
        Means ``[C, o, i]`` or ``[C, o, i + 1]``; zero for classes without a sample.
    """
    features = raise_half(features).to(grads.dtype)
    if bias:
        features = torch.cat([features, features.new_ones(len(features), 1)], dim=1)
    result = grads.new_zeros(num_classes, grads.shape[1], features.shape[1])
    for label in labels.unique().tolist():
        rows = labels == label
        if 0 <= label < num_classes:
            result[label] = grads[rows].T @ features[rows] / rows.sum()
    return result
