"""Whether the package's per-sample gradients and products are those of one-sample autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gradsim.factors import Factors, dot, squared_norms
from lightning_gradsim.rules import split_gradients
from lightning_gradsim.verification.record import Check
from lightning_gradsim.verification.samples import Parameters, Samples, floored, relative_difference
from lightning_gradsim.wrapper import PerSampleGradients

NAME = "exactness"


@dataclass(frozen=True, eq=False)
class Products:
    """What a pass computes of the chosen samples.

    Attributes:
        gradients: Gradients ``[n, P]`` by layer, in float64.
        dots: Dot products ``[n, n]``, in float64.
        squared_norms: Squared norms ``[n]``, in float64.
    """

    gradients: Mapping[str, Tensor]
    dots: Tensor
    squared_norms: Tensor


def chosen_parameters(
    samples: Samples, watcher: PerSampleGradients, factors: Mapping[str, Factors] | None
) -> Parameters:
    """The chosen parameters by their full names, in the order of the layers; all of them if no choice was settled."""
    # Layers that the forward does not use have no factors, and no gradient to compare.
    names = [
        f"{layer}.{own}" if layer else own
        for layer, chosen in watcher.selection.items()
        if factors is None or layer in factors
        for own in chosen
    ]
    found = {name: samples.module.get_parameter(name) for name in names}
    return found or {name: p for name, p in samples.module.named_parameters() if p.requires_grad}


def compute_products(samples: Samples, watcher: PerSampleGradients, factors: Mapping[str, Factors]) -> Products:
    """Contract the factors of a batch as a pass does.

    Args:
        samples: The samples.
        watcher: What computed the factors.
        factors: Factors of the whole batch, by layer.

    Returns:
        Gradients and products of the chosen samples.
    """
    gradients, dots, norms = {}, [], []
    for name, whole in factors.items():
        part = whole.samples(torch.tensor(samples.rows, device=whole.output_grads.device))
        layer = samples.module.get_submodule(name)
        split = split_gradients(layer, part, watcher.selection[name])
        gradients[name] = torch.cat([split[own].flatten(1) for own in watcher.selection[name]], dim=1).double().cpu()
        dots.append(dot(part, part).double().cpu())
        norms.append(squared_norms(part).double().cpu())
    return Products(gradients, torch.stack(dots).sum(0), torch.stack(norms).sum(0))


def check_exactness(samples: Samples, products: Products, reference: Tensor) -> Check:
    """Compare gradients, dots and norms with those of plain autograd.

    Args:
        samples: The samples.
        products: What a pass computes.
        reference: Gradients ``[n, P]`` of batches of one, the layers in the order of ``products``.

    Returns:
        The check; a failure names the layer.
    """
    number = len(samples.rows)
    count = f"{number} samples, {number * (number + 1) // 2} products"
    norms = reference.norm(dim=1)
    allowed = samples.allowed(norms)
    by_layer = dict(
        zip(
            products.gradients,
            reference.split([values.shape[1] for values in products.gradients.values()], dim=1),
            strict=True,
        )
    )
    differences = {
        name: relative_difference(values, by_layer[name], norms) for name, values in products.gradients.items()
    }
    worst = max(differences, key=lambda name: differences[name][0])
    difference, position = differences[worst]
    scale = floored(norms)
    excess = (products.dots - reference @ reference.T).abs() / (scale[:, None] * scale)
    excess = torch.cat([excess.flatten(), (products.squared_norms - norms.square()).abs() / scale.square()])
    in_products = float(excess.nan_to_num(float("inf")).max())
    largest = max(difference, in_products)
    if difference > allowed:
        message = (
            f"The gradient of sample {samples.rows[position]} for layer `{worst}` is {difference:.1e} of its norm away "
            f"from one-sample autograd. Expected at most {allowed:.0e}. {_hint(samples, worst)}"
        )
        return Check(NAME, False, message, largest, count)
    if in_products > allowed:
        message = (
            f"Gradients are right, but their products are off by {in_products:.1e} of the norms. Expected at most "
            f"{allowed:.0e}. Leave the layers with a rule of your own out of `layers`, and report it if it stays."
        )
        return Check(NAME, False, message, largest, count)
    message = f"gradients, dots and norms equal one-sample autograd, to {allowed:.0e} of the norms"
    return Check(NAME, True, message, largest, count)


def _hint(samples: Samples, name: str) -> str:
    kind = type(samples.module.get_submodule(name)).__name__
    hint = f"If `register_rule({kind})` gave it a rule, this rule is wrong; otherwise leave the layer out of `layers`."
    if samples.dtype != torch.float64:
        hint += " Verify a copy in float64 (`copy.deepcopy(module).double()`) to see whether it is rounding."
    return hint
