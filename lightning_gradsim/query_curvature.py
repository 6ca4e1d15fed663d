"""The queries of a pass with their gradients multiplied by the inverse curvature."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lightning_gradsim.batch_runner import BatchRunner
from lightning_gradsim.curvature import Curvature, is_finite
from lightning_gradsim.factors import (
    MAX_INTERMEDIATE,
    Factors,
    IndexedFactors,
    OuterFactors,
    concatenate_samples,
    is_flat,
)
from lightning_gradsim.query_side import QUERY_SHARE, QuerySide, fitting_layers
from lightning_gradsim.sample_statistics import check_finite

CURVATURE_SHARE = 0.25
"""Share of the memory budget for the second moments of a layer."""


def gather_curvature(runner: BatchRunner, batches: Iterable[tuple[Tensor, Any]]) -> Curvature:
    """The curvature of the loss at some training samples.

    Args:
        runner: Runs batches.
        batches: Sample ids ``[B]`` and batch, on the module's device.

    Returns:
        The curvature.

    Raises:
        NonFiniteError: If a loss or gradient is not finite; the samples are named.
        UnsupportedLayerError: If the moments of a layer would take too much memory; it is named.
    """
    elements = max(1, min(MAX_INTERMEDIATE, int(CURVATURE_SHARE * runner.memory_budget / 8)))
    curvature = Curvature(elements, CURVATURE_SHARE * runner.memory_budget)
    all_ids, all_finite = [], []
    for ids, step, factors in runner.run_all(batches):
        finite = reduce(torch.logical_and, [is_finite(part) for part in factors.values()], step.losses.isfinite())
        if bool(finite.all()):
            curvature.update(factors)
        all_ids.append(ids)
        all_finite.append(finite.cpu())
    if all_ids:
        check_finite(torch.cat(all_ids), torch.cat(all_finite))
    return curvature


def precondition(
    queries: QuerySide, curvature: Curvature, damping: float, memory_budget: int, *, doubt_all: bool = False
) -> QuerySide:
    """Queries with their gradients multiplied by the inverse of the damped curvature, too.

    Plain gradients serve look-alikes: those for predicted labels only the doubts about a query's own label.

    Args:
        queries: The queries.
        curvature: Of all their layers.
        damping: Share of the mean eigenvalue, above 0.
        memory_budget: Bytes that the pass may take.
        doubt_all: Whether any label may turn out doubtful, however probable it is now.

    Returns:
        The queries; of training samples nothing else has to be computed.

    Raises:
        GradSimError: If a layer has no curvature, or its inverse is not finite.
    """
    solved = curvature.precondition(queries.factors, damping)
    number, records = len(queries.records), queries.records
    compared = [*range(number)]
    if records.has_teachers:
        compared += [number + row for row in range(number) if doubt_all or records.is_improbable(row)]
    rows = torch.tensor(compared, device=queries.squared_norms.device)
    factors = {name: _side_by_side(part.samples(rows), solved[name]) for name, part in queries.factors.items()}
    return replace(queries, factors=factors, kept=fitting_layers(factors, QUERY_SHARE * memory_budget), compared=rows)


def _side_by_side(given: Factors, solved: Factors) -> Factors:
    if isinstance(given, IndexedFactors) or is_flat(given) == is_flat(solved):
        return concatenate_samples([given, solved])
    return OuterFactors.from_gradients([torch.cat([given.flat, solved.output_grads.flatten(1)])])
