"""Samples that stand for all others of their class: a greedy set cover by balls around them."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_CELLS = 2**28
"""Pairs of a candidate and a sample (256 MiB): of more samples a seeded part are candidates."""
BLOCK_ROWS = 1024
SCALE_SAMPLES = 1000
"""Samples that the radius is taken from at most."""


def select_prototypes(features: Tensor, labels: Tensor, number: int, eps: float | None = None, seed: int = 0) -> Tensor:
    """Choose prototypes by features and labels.

    Args:
        features: ``[N, d]``; distances are Euclidean.
        labels: Class indices ``[N]``.
        number: Most prototypes.
        eps: Radius of the balls; by default that within which half of the samples have ``N / number`` of their class.
        seed: Seed of the choice of candidates, where not all samples can be.

    Returns:
        Places of the prototypes, the best first, int64; fewer than ``number`` where no further one would help.

    Source:
        Bien and Tibshirani (2011), "Prototype selection for interpretable classification", arXiv:1202.5933: ProtoSelect
        by its greedy algorithm, with a penalty of 1/N for a prototype.
    """
    eps = find_radius(features, labels, number, seed) if eps is None else eps
    candidates = torch.arange(len(features))
    if len(features) ** 2 > MAX_CELLS:
        order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
        candidates = order[: max(number, MAX_CELLS // len(features))].sort().values
    covers = torch.cat([torch.cdist(features[rows], features) < eps for rows in candidates.split(BLOCK_ROWS)])
    chosen = candidates[cover_greedily(covers, labels, number)]
    # A sample may stand for several classes: here it counts once.
    first = dict.fromkeys(chosen.tolist())
    return torch.tensor(list(first), dtype=torch.long)


def find_radius(features: Tensor, labels: Tensor, number: int, seed: int = 0) -> float:
    """The radius within which half of the samples have ``N / number`` others of their class, at least one.

    Args:
        features: ``[N, d]``.
        labels: Class indices ``[N]``.
        number: Number of prototypes.
        seed: Seed of the samples that are looked at.

    Returns:
        The radius.
    """
    some = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))[:SCALE_SAMPLES]
    distances = torch.cdist(features[some], features).masked_fill(labels[some][:, None] != labels, torch.inf)
    rank = min(max(1, len(features) // number), len(features) - 1)
    radii = distances.kthvalue(rank + 1, dim=1).values  # the closest one is the sample itself
    known = radii[radii.isfinite()]
    return float((known if len(known) else distances[distances.isfinite()]).median())


def cover_greedily(covers: Tensor, labels: Tensor, number: int) -> Tensor:
    """Candidates whose balls cover many samples of one class, and few of others.

    Args:
        covers: Whether a candidate's ball holds a sample, bool ``[z, N]``.
        labels: Class indices ``[N]``.
        number: Most candidates.

    Returns:
        Their rows, the best first, int64; a row may stand for several classes.
    """
    classes = labels.unique()
    inside = torch.stack([covers[:, labels == each].sum(1) for each in classes], dim=1)  # [z, classes]
    # Newly covered samples of the class, less those of others, less the penalty. Which of several equal gains comes
    # first is left to rounding: alibi's prototypes are then the same ones, in the same order.
    gains = (2 * inside - inside.sum(1, keepdim=True)).double() - 1 / covers.shape[1]
    uncovered = torch.ones(covers.shape[1], dtype=torch.bool)
    rows: list[int] = []
    while len(rows) < number:
        best = int(gains.argmax())
        row, place = divmod(best, len(classes))
        if gains[row, place] <= 0:
            break
        rows.append(row)
        new = (covers[row] & uncovered & (labels == classes[place])).nonzero().flatten()
        uncovered[new] = False
        gains[:, place] -= covers[:, new].sum(1)
    return torch.tensor(rows, dtype=torch.long)
