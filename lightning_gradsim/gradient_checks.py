"""What keeps hooks from serving a layer exactly: found on the first batch, as errors that say why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_gradsim.errors import GradSimError, SampleMixingError, UnsupportedLayerError
from lightning_gradsim.factors import Factors, squared_norms
from lightning_gradsim.layer_selection import Selection, own_parameters
from lightning_gradsim.precision import SUM_TOLERANCE
from lightning_gradsim.recorder import Call, Recorder
from lightning_gradsim.rules import split_gradients

Problems = dict[str, GradSimError]
"""Errors by name of the layer."""


def find_sharing(name: str, layers: Mapping[str, nn.Module]) -> GradSimError | None:
    """Whether a layer shares a parameter with another one.

    Args:
        name: The layer.
        layers: All trainable layers.

    Returns:
        The error, or ``None``.
    """
    own = {id(parameter) for parameter in layers[name].parameters(recurse=False)}
    for other, layer in layers.items():
        if other != name and own & {id(parameter) for parameter in layer.parameters(recurse=False)}:
            return UnsupportedLayerError(
                f"Layers `{name}` and `{other}` share a parameter (tied weights), so neither alone has its gradient. "
                "Use `PerSampleGradients.compute`, which sees both uses, or leave both out of `layers`."
            )
    return None


def find_used_uncalled(losses: Tensor, uncalled: Mapping[str, nn.Module]) -> Problems:
    """Layers whose weights the losses depend on although the forward did not call them.

    Args:
        losses: Losses ``[B]``; their graph is kept.
        uncalled: The layers that were not called.

    Returns:
        An error for each.
    """
    parameters = [(name, p) for name, layer in uncalled.items() for p in own_parameters(layer).values()]
    if not parameters:
        return {}
    # The stubs of autograd know nothing of `allow_unused`.
    grads: Sequence[Tensor | None] = torch.autograd.grad(
        losses, [p for _, p in parameters], torch.ones_like(losses), retain_graph=True, allow_unused=True
    )
    used = {name for (name, _), grad in zip(parameters, grads, strict=True) if grad is not None}
    return {
        name: UnsupportedLayerError(
            f"Layer `{name}` was not called in the forward pass, so it has no activations. Its parent uses the weight "
            "directly (as `nn.MultiheadAttention` does). Use `PerSampleGradients.compute`, or choose another layer."
        )
        for name in uncalled
        if name in used
    }


def find_call_problem(name: str, call: Call, num_samples: int) -> GradSimError | None:
    """Whether a call cannot be read by sample.

    Args:
        name: The layer.
        call: The call.
        num_samples: Number of samples ``B``.

    Returns:
        The error, or ``None``.
    """
    rows = call.output_shape[0] if call.output_shape else 0
    if rows != num_samples or call.activations.shape[:1] != (num_samples,):
        return SampleMixingError(
            f"Layer `{name}` ran on {rows} rows for {num_samples} samples, so its rows cannot be told apart by sample. "
            "Expected the batch as the first dimension. Leave the layer out of `layers`, or keep samples and positions "
            "in separate dimensions."
        )
    if call.activations._version != call.version:
        return GradSimError(
            f"The input of layer `{name}` was changed in place after the layer ran, so its gradient cannot be "
            "computed. Make the operation that follows out of place, or leave the layer out of `layers`."
        )
    return None


def find_mixed_rows(recorder: Recorder, calls: Sequence[tuple[str, Call]], losses: Tensor) -> tuple[Problems, bool]:
    """Layers of which other rows than a sample's own take part in its loss.

    Args:
        recorder: Has recorded the forward.
        calls: The calls to look at, with the names of their layers.
        losses: Losses ``[B]``, more than one; their graph is kept.

    Returns:
        An error for each such layer, and whether there was any gradient to look at.
    """
    # The sample of highest loss: an ignored one has no gradient, by which mixing would show.
    row = int(losses.detach().nan_to_num(0.0, 0.0, 0.0).argmax())
    others = torch.arange(len(losses), device=losses.device) != row
    only_one = (~others).to(losses.dtype)
    problems: Problems = {}
    has_looked = False
    all_grads = recorder.output_grads([call for _, call in calls], losses, only_one, retain=True)
    for (name, _), grads in zip(calls, all_grads, strict=True):
        if grads is None:
            continue
        has_looked = has_looked or bool(grads[row].any())
        # Not-a-number passes: the engine names the samples that caused it.
        if bool((grads[others].abs() > 0).any()):
            problems[name] = SampleMixingError(
                f"The loss of one sample depends on other rows of the output of layer `{name}`. 1. The batch is not "
                "the first dimension there. 2. A layer above mixes samples (BatchNorm without running statistics, a "
                "contrastive loss). Such a sample has no gradient of its own. Choose a layer above it."
            )
    return problems, has_looked


def find_wrong_sums(
    losses: Tensor,
    weights: Tensor,
    factors: Mapping[str, Factors],
    layers: Mapping[str, nn.Module],
    selection: Selection,
    dtypes: Mapping[str, torch.dtype],
    *,
    retain: bool,
) -> Problems:
    """Layers whose per-sample gradients do not sum to autograd's gradient.

    Args:
        losses: Losses ``[B]``.
        weights: Weights of the losses, ``[B]``.
        factors: Factors of the weighted losses by layer.
        layers: The layers.
        selection: Their chosen parameters.
        dtypes: The dtype of the computation by layer.
        retain: Whether the graph is kept.

    Returns:
        An error for each such layer.
    """
    ours = {
        name: split_gradients(layers[name], its_factors.summed(), selection[name])
        for name, its_factors in factors.items()
    }
    parameters = [layers[name].get_parameter(own) for name, grads in ours.items() for own in grads]
    if not parameters:
        return {}
    found: Sequence[Tensor | None] = torch.autograd.grad(
        losses, parameters, weights, retain_graph=retain, allow_unused=True
    )
    expected = iter(found)
    problems: Problems = {}
    for name, grads in ours.items():
        differences = [_dense(next(expected), grad[0]) - grad[0] for grad in grads.values()]
        difference = torch.stack([part.norm() for part in differences]).norm()
        # Not-a-number passes: the engine names the samples that caused it.
        if bool(difference > SUM_TOLERANCE[dtypes[name]] * squared_norms(factors[name]).sqrt().sum()):
            problems[name] = GradSimError(
                f"The per-sample gradients of layer `{name}` do not sum to autograd's gradient: its weight is also "
                "used outside the layer, or its gradient rule is wrong. Leave the layer out of `layers`."
            )
    return problems


def check_batch_statistics(module: nn.Module) -> None:
    """Refuse batch normalisation by the statistics of the batch, wherever it is.

    Args:
        module: The user's module.

    Raises:
        SampleMixingError: If a layer normalises so.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None):
            raise SampleMixingError(
                f"Layer `{name}` (`{type(layer).__name__}`) normalises by the statistics of the batch, so a sample has "
                "no gradient of its own. Put the module into eval mode, and keep `track_running_stats=True`."
            )


def _dense(grad: Tensor | None, like: Tensor) -> Tensor:
    if grad is None:
        return torch.zeros_like(like)
    return grad.to_dense() if grad.is_sparse else grad
