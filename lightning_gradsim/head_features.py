"""What the head sees of training samples: the features that they are told apart by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.batch_runner import BatchRunner, ForwardContext
from lightning_gradsim.errors import LayerSelectionError
from lightning_gradsim.factors import OuterFactors
from lightning_gradsim.guard import evaluating
from lightning_gradsim.wrapper import PerSampleGradients


def head_features(
    module: nn.Module,
    adapter: Adapter,
    batches: Iterable[tuple[Tensor, Any]],
    forward_context: ForwardContext,
    memory_budget: int | None,
) -> tuple[Tensor, Tensor]:
    """Inputs of the head, and labels.

    Args:
        module: The user's module; it is left as found.
        adapter: Reads batches; bound to the module.
        batches: Sample ids ``[B]`` and batch, on the module's device.
        forward_context: The precision context.
        memory_budget: Bytes that it may take.

    Returns:
        Features float32 ``[N, d]``, averaged over shared positions, and labels ``[N]`` or ``[N, L]``, on the CPU.

    Raises:
        LayerSelectionError: If the head has no inputs that are compared.
    """
    features, labels = [], []
    with evaluating(module), PerSampleGradients(module, "last") as gradients:
        runner = BatchRunner(module, adapter, gradients, forward_context, memory_budget)
        for _, step, factors in runner.run_all(batches):
            own = next(iter(factors.values()))
            if not isinstance(own, OuterFactors) or own.activations is None:
                name = next(iter(factors))
                raise LayerSelectionError(
                    f"The head (`{name}`) gives no features to choose training samples by. Expected a linear or "
                    'convolutional one with a trainable weight. Pass `reference="stratified"` or sample ids.'
                )
            features.append(own.activations.float().mean(1).flatten(1).cpu())
            labels.append(step.outcome.labels.cpu())
    return torch.cat(features), torch.cat(labels)
