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


def preconditioned(module, chosen, kronecker, queries, train, criterion, damping):
    """Gradients of the queries, multiplied by the dense inverse of the damped curvature of the training samples.

    ``chosen`` is as above, by layer; for those in ``kronecker`` the curvature is a Kronecker product for each channel
    group, for the others the diagonal of second moments. ``queries`` and ``train`` are pairs of inputs and targets.
    """
    given = one_sample_gradients(module, chosen, *queries, criterion).by_layer
    of_train = one_sample_gradients(module, chosen, *train, criterion).by_layer
    parts = []
    for layer, names in given.items():
        if not any(column.any() for column in names.values()):
            parts += [column.flatten(1) for column in names.values()]
        elif layer in kronecker:
            parts += _by_kronecker(module, layer, names, train, criterion, damping)
        else:
            moments = {name: column.square().mean(0) for name, column in of_train[layer].items()}
            mean = torch.cat([moment.flatten() for moment in moments.values()]).mean()
            parts += [(column / (moments[name] + damping * mean)).flatten(1) for name, column in names.items()]
    return torch.cat(parts, dim=1)


def _by_kronecker(module, name, gradients, train, criterion, damping):
    inputs, grads, number = _rows_of_layer(module, name, train, criterion, bias="bias" in gradients)
    groups, outputs = grads.shape[1:]
    active = (grads != 0).any(2, keepdim=True)
    first = torch.einsum("tgi,tgj->gij", inputs * active, inputs) / number
    second = torch.einsum("tgo,tgp->gop", grads, grads) / active.sum(0)[:, :, None].clamp(min=1)
    first, second = (_damped(moments, damping) for moments in (first, second))
    parts = [column.reshape(len(column), groups, outputs, -1) for column in gradients.values()]
    joined = torch.cat(parts, dim=-1)
    dense = torch.stack([torch.kron(second[g], first[g]) for g in range(groups)])
    solved = torch.linalg.solve(dense, joined.flatten(2).permute(1, 2, 0)).permute(2, 0, 1).reshape(joined.shape)
    return [part.flatten(1) for part in solved.split([part.shape[-1] for part in parts], dim=-1)]


def _damped(moments, damping):
    identity = torch.eye(moments.shape[1], dtype=moments.dtype)
    return moments + damping * torch.linalg.eigvalsh(moments).mean() * identity


def _rows_of_layer(module, name, train, criterion, *, bias):
    """Inputs ``[rows, g, i]`` and output gradients ``[rows, g, o]`` of a Linear or convolution, and the samples."""
    module = _converted(module, torch.float64).eval()
    layer, calls = module.get_submodule(name), []

    def keep(layer, args, kwargs, output):
        calls.append((*args, *kwargs.values(), output))
        return output.clone()  # what comes next may change it in place

    # Before the user's own hooks.
    layer.register_forward_hook(keep, with_kwargs=True, prepend=True)
    inputs, targets = (to_dtype(part, torch.float64) for part in train)
    rows, grads = [], []
    for i in range(len(inputs)):
        calls.clear()
        with torch.enable_grad():
            loss = criterion(module(inputs[i : i + 1]), targets[i : i + 1]).mean()
        found = torch.autograd.grad(loss, [output for _, output in calls], allow_unused=True) if calls else ()
        for x, grad in zip([x for x, _ in calls], found, strict=True):
            if grad is not None:
                rows.append(_patches(layer, x.detach()))
                grads.append(_by_group(layer, grad))
    rows = torch.cat(rows)
    return torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1) if bias else rows, torch.cat(grads), len(inputs)


def _patches(layer, x):
    """What a Linear or convolution multiplies its weight with, ``[t, g, i]``: its outputs where the weight is 1."""
    if isinstance(layer, torch.nn.Linear):
        return x.reshape(-1, 1, x.shape[-1])
    unit = copy.deepcopy(layer)
    unit._forward_hooks.clear()
    size = layer.weight[0].numel()
    weight = (
        torch.eye(size, dtype=x.dtype).reshape(size, *layer.weight.shape[1:]).repeat(layer.groups, *[1] * (x.ndim - 1))
    )
    unit.weight, unit.bias = torch.nn.Parameter(weight), None
    return _by_group(layer, unit(x).detach())


def _by_group(layer, values):
    if isinstance(layer, torch.nn.Linear):
        return values.reshape(-1, 1, values.shape[-1])
    return values[0].flatten(1).T.unflatten(1, (layer.groups, -1))
