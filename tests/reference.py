"""One-sample-at-a-time gradients by plain autograd: slow, obvious, and knowing nothing of the package."""

import copy
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Reference:
    """Per-sample gradients of the chosen layers: ``[n, P]`` joined, and ``[n, *shape]`` by layer and parameter."""

    joined: torch.Tensor
    by_layer: dict

    @property
    def norms(self):
        return self.joined.norm(dim=1)


def one_sample_gradients(module, chosen, inputs, targets, criterion, dtype=torch.float64):
    """Gradients of every sample's own loss, in eval mode, each from a batch of one.

    ``chosen`` names layers, or maps them to the names of parameters in them. ``criterion`` must not reduce; what is
    left of a sample's loss beyond its first dimension is averaged.
    """
    if not isinstance(chosen, dict):
        chosen = {layer: own_names(module.get_submodule(layer)) for layer in chosen}
    module = _converted(module, dtype).eval()
    criterion, inputs, targets = copy.deepcopy(criterion).to(dtype), to_dtype(inputs, dtype), to_dtype(targets, dtype)
    parameters = {
        (layer, name): dict(module.get_submodule(layer).named_parameters())[name]
        for layer, names in chosen.items()
        for name in names
    }
    rows = []
    for i in range(len(inputs)):
        with torch.enable_grad():
            loss = criterion(module(inputs[i : i + 1]), targets[i : i + 1]).mean()
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        rows.append([_dense(grad, parameter) for grad, parameter in zip(grads, parameters.values(), strict=True)])
    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    by_layer = {layer: {} for layer in chosen}
    for (layer, name), column in zip(parameters, columns, strict=True):
        by_layer[layer][name] = column
    return Reference(torch.cat([column.flatten(1) for column in columns], dim=1), by_layer)


def own_names(layer):
    return [name for name, parameter in layer.named_parameters(recurse=False) if parameter.requires_grad]


def _dense(grad, parameter):
    if grad is None:
        return torch.zeros_like(parameter)
    return grad.to_dense() if grad.is_sparse else grad


def outputs_of(module, inputs, dtype=torch.float64):
    """What the module predicts in eval mode, each sample on its own."""
    module, inputs = _converted(module, dtype).eval(), to_dtype(inputs, dtype)
    with torch.no_grad():
        return torch.cat([module(inputs[i : i + 1]) for i in range(len(inputs))])


def to_dtype(values, dtype):
    return values.to(dtype) if values.is_floating_point() else values


def _converted(module, dtype):
    return copy.deepcopy(module).to(dtype)
