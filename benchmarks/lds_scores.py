"""What the scores of `lds.py` predict for each half at one checkpoint: sums over the training samples in it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch
import torch.nn.functional as F
from lds_truth import Mnist
from torch import Tensor, nn

from lightning_gradsim import PerSampleGradients
from lightning_gradsim.curvature import Curvature
from lightning_gradsim.factors import OuterFactors, dot, squared_norms
from lightning_gradsim.scores import compute_similarity

DAMPINGS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
EIGEN_DAMPINGS = (0.1, 1.0, 10.0)
MOMENT_SAMPLES = 2000
SOURCES = {"data": (MOMENT_SAMPLES, False), "sampled": (MOMENT_SAMPLES, True), "data, all": (None, False)}
"""Moments: of how many samples, and whether labels are drawn from the model instead of the data's own."""

Variant = tuple[str, str, float]
"""Score, source of the moments, damping."""


def predictions(
    network: nn.Sequential, data: Mnist, members: Tensor, sets: Mapping[str, int]
) -> dict[tuple[Variant, str], Tensor]:
    """Predicted gain of each query from each half, ``[queries, halves]``, by variant and set of layers.

    Args:
        network: The network in eval mode.
        data: Training samples and queries.
        members: Which samples are in a half, bool ``[halves, N]``.
        sets: How many layers, counted from the last, by name of the set.
    """
    train, queries = _factors(network, *data.train), _factors(network, *data.queries)
    names, indicators = list(train), members.float().T
    products = {name: dot(queries[name], train[name]) for name in names}
    norms = {name: (squared_norms(queries[name]), squared_norms(train[name])) for name in names}
    result = {}
    for label, number in sets.items():
        chosen = names[-number:]
        product = sum(products[name] for name in chosen)
        of_queries, of_train = (sum(norms[name][side] for name in chosen) for side in (0, 1))
        for similarity in ("dot", "cosine", "asymmetric"):
            values = compute_similarity(similarity, product, of_queries, of_train)
            result[(similarity, "", 0.0), label] = values @ indicators
    for source, (number, is_sampled) in SOURCES.items():
        moments = _moment_factors(network, data, train, number, is_sampled)
        by_layer: dict[Variant, dict[str, Tensor]] = {}
        curvature = Curvature()
        curvature.update(moments)
        for damping in DAMPINGS:
            solved = curvature.precondition(queries, damping)
            by_layer["influence", source, damping] = {n: dot(solved[n], train[n]) @ indicators for n in names}
        for name in names if number is not None else ():
            for (score, damping), values in _in_eigenbasis(moments[name], queries[name], train[name], members).items():
                by_layer.setdefault((score, source, damping), {})[name] = values
        for variant, parts in by_layer.items():
            for label, number_of_layers in sets.items():
                result[variant, label] = reduce(torch.add, [parts[name] for name in names[-number_of_layers:]])
    return result


def _factors(network: nn.Sequential, inputs: Tensor, labels: Tensor) -> dict[str, OuterFactors]:
    def losses(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(network(batch[0]), batch[1], reduction="none")

    with PerSampleGradients(network, "all") as gradients:
        return gradients.compute(losses, (inputs, labels))  # type: ignore[return-value]


def _moment_factors(
    network: nn.Sequential, data: Mnist, train: Mapping[str, OuterFactors], number: int | None, is_sampled: bool
) -> dict[str, OuterFactors]:
    inputs, _ = data.train
    draw = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(inputs), generator=draw)[:number].sort().values
    if not is_sampled:
        return {name: factors.samples(rows) for name, factors in train.items()}
    with torch.no_grad():
        probabilities = network(inputs[rows]).softmax(1)
    return _factors(network, inputs[rows], torch.multinomial(probabilities, 1, generator=draw)[:, 0])


def _in_eigenbasis(
    moments: OuterFactors, queries: OuterFactors, train: OuterFactors, members: Tensor
) -> dict[tuple[str, float], Tensor]:
    """One damping for the whole product of both factors, and EK-FAC (George et al. 2018, arXiv:1806.03884)."""
    inputs, grads = _rows(moments)
    of_inputs, input_basis = torch.linalg.eigh((inputs.T @ inputs / len(inputs)).double())
    of_grads, grad_basis = torch.linalg.eigh((grads.T @ grads / len(grads)).double())
    bases = input_basis.float(), grad_basis.float()
    moment_rows, query_rows, train_rows = (
        tuple(rows @ basis for rows, basis in zip(_rows(part), bases, strict=True))
        for part in (moments, queries, train)
    )
    sums = torch.stack([(train_rows[1][half].T @ train_rows[0][half]) for half in members])  # [halves, o, i]
    eigenvalues = {
        "one damping": torch.outer(of_grads.clamp(min=0), of_inputs.clamp(min=0)).float(),
        "EK-FAC": moment_rows[1].square().T @ moment_rows[0].square() / len(inputs),
    }
    return {
        (score, damping): torch.stack(
            [((query_rows[1] @ (one / (values + damping * values.mean()))) * query_rows[0]).sum(1) for one in sums], 1
        )
        for score, values in eigenvalues.items()
        for damping in EIGEN_DAMPINGS
    }


def _rows(factors: OuterFactors) -> tuple[Tensor, Tensor]:
    """Inputs, with the ones of the bias, and output gradients of a Linear, a row a sample."""
    assert factors.activations is not None
    inputs = factors.activations[:, 0, 0]
    return torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1), factors.output_grads[:, 0, 0]
