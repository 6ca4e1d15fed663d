"""Exact nearest neighbours of every sample by blocked products, and how many of them carry another label."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_gradsim.arguments import check_choice, check_count
from lightning_gradsim.errors import NonFiniteError

Distance = Literal["cosine", "euclidean"]
DISTANCES: tuple[str, ...] = get_args(Distance)

BLOCK_BYTES = 2**25
"""Bytes of one block of products, and of one of references."""
REFERENCE_ROWS = 2**14
"""References a block at most: products with more are no faster, and leave fewer rows to a block of samples."""
GROUP_SIZE = 16
"""Columns whose largest entry is looked at first: of 4 to 32 the quickest for 5,000 references."""
SELECT_FLOPS = 100
"""What selecting the nearest costs a pair, in operations of a product: measured, 2 ns beside 48 GFLOP/s."""
MAX_NAMED = 10


@dataclass(frozen=True, eq=False)
class NeighbourVotes:
    """How a sample's nearest neighbours vote on its label.

    Attributes:
        disagreement: Share of the neighbours with another label, in [0, 1], float32 ``[N]``, or ``[N, L]`` for labels
            ``[N, L]``; for floating-point labels, distance between the label and the neighbours' mean.
        margin: Share of the most frequent other label minus that of the own one, in [-1, 1], float32, likewise; for
            floating-point labels zero.
        num_references: Samples among which neighbours were looked for; fewer than ``N`` where ``max_flops`` asked for
            it, and then a seeded subset.
    """

    disagreement: Tensor
    margin: Tensor
    num_references: int


def neighbour_votes(
    features: Tensor,
    labels: Tensor,
    *,
    k: int = 25,
    distance: Distance = "cosine",
    max_flops: float | None = None,
    seed: int = 0,
) -> NeighbourVotes:
    """How many of each sample's ``k`` nearest neighbours carry another label, and which of them lead.

    A sample is not its own neighbour; ties go to the smaller row. ``O(N R (d + 50))`` time for ``R`` references, and
    about 64 MiB beside the answer, whatever ``N`` is.

    Args:
        features: One row a sample in order of the sample ids, ``[N, d]``, any floating dtype; products are float32,
            or float64 for float64 features.
        labels: Given labels: class indices ``[N]``, active labels ``[N, L]`` of an integer dtype or bool, or
            floating-point targets ``[N]`` (experimental).
        k: Neighbours a sample.
        distance: ``cosine`` of the features about their mean, or ``euclidean``.
        max_flops: Operations to spend; with more samples than they allow for, neighbours are looked for in a seeded
            subset of them.
        seed: Of the subset.

    Returns:
        Votes in the order of the rows, on the device of the features.

    Raises:
        ValueError: If there are too few samples for ``k``, or ``distance`` is not known.
        NonFiniteError: If a feature is NaN or infinite.

    Source:
        Wilson (1972), "Asymptotic properties of nearest neighbor rules using edited data", IEEE Trans. SMC 2(3); on
        features of a network as in Bahri et al. (2020), arXiv:2004.12289.

    Example:
        >>> features = torch.tensor([[0.0], [1.0], [2.0], [9.0], [10.0], [11.0]])
        >>> labels = torch.tensor([0, 0, 1, 1, 1, 1])
        >>> votes = neighbour_votes(features, labels, k=2, distance="euclidean")
        >>> votes.disagreement.tolist(), votes.margin.tolist()
        ([0.5, 0.5, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0, -1.0, -1.0])
    """
    check_choice("distance", distance, DISTANCES)
    check_count("k", k, optional=False)
    number, width = features.shape
    if number <= k:
        raise ValueError(f"`k={k}` neighbours among {number} samples. Expected at least {k + 1} samples.")
    _check_finite(features)
    num_references = count_references(number, width, k, max_flops)
    references = torch.arange(number)
    if num_references < number:
        generator = torch.Generator().manual_seed(seed)
        references = torch.randperm(number, generator=generator)[:num_references].sort().values
    parts = [
        _vote(labels[rows], labels[neighbours])
        for rows, neighbours in _nearest(features, references.to(features.device), k, distance)
    ]
    disagreement, margin = (torch.cat(column) for column in zip(*parts, strict=True))
    return NeighbourVotes(disagreement, margin, num_references)


def count_references(number: int, width: int, k: int, max_flops: float | None) -> int:
    """References that a number of operations allows for.

    Args:
        number: Samples ``N``.
        width: Features a sample ``d``.
        k: Neighbours a sample.
        max_flops: Operations to spend; ``None``: no limit.

    Returns:
        A number from ``k + 1`` to ``N``.
    """
    if max_flops is None:
        return number
    return int(min(number, max(k + 1, max_flops // estimate_flops(number, 1, width))))


def estimate_flops(number: int, num_references: int, width: int) -> int:
    """What looking for neighbours costs, in operations of a matrix product.

    Args:
        number: Samples ``N``.
        num_references: References ``R``.
        width: Features a sample ``d``.

    Returns:
        ``N R (2 d + 100)``.
    """
    return number * num_references * (2 * width + SELECT_FLOPS)


def _vote(own: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Disagreement and margin of a block, from its labels ``[b]`` and those of the neighbours ``[b, k]``."""
    if own.is_floating_point():
        distance = (others.mean(1) - own).abs().float()
        return distance, torch.zeros_like(distance)
    differs = others != own.unsqueeze(1)
    disagreement = differs.float().mean(1)
    if own.ndim == 2:  # of two values the other one leads with all that differ
        return disagreement, 2 * disagreement - 1
    votes = (others[:, :, None] == others[:, None, :]).float().mean(2)  # [b, k], of each neighbour's label
    return disagreement, torch.where(differs, votes, 0).amax(1) - (1 - disagreement)


def _nearest(features: Tensor, references: Tensor, k: int, distance: Distance) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows with the rows of their neighbours, ``[b, k]`` in no order."""
    dtype = torch.float64 if features.dtype == torch.float64 else torch.float32
    mean = features.mean(0, dtype=dtype)

    def prepared(rows: Tensor | slice) -> Tensor:
        # Distances, too, keep more digits about the mean.
        centred = features[rows].to(dtype) - mean
        if distance == "euclidean":
            return centred
        norms = centred.norm(dim=1, keepdim=True)
        return centred * torch.where(norms > 0, norms.reciprocal(), 0)

    columns = max(1, min(len(references), REFERENCE_ROWS, BLOCK_BYTES // (4 * features.shape[1])))
    height = max(1, BLOCK_BYTES // (4 * columns))
    for start in range(0, len(features), height):
        rows = slice(start, min(start + height, len(features)))
        left = prepared(rows)
        found: tuple[Tensor, Tensor] | None = None
        for part in references.split(columns):
            right = prepared(part)
            closeness = left @ right.T
            if distance == "euclidean":
                closeness -= right.square().sum(1) / 2  # the row's own norm changes no order
            _hide_self(closeness, start, part)
            found = _join(found, _largest(closeness, part, k), k)
        assert found is not None
        yield rows, found[1]


def _hide_self(closeness: Tensor, start: int, part: Tensor) -> None:
    inside = (part >= start) & (part < start + len(closeness))
    closeness[part[inside] - start, inside.nonzero()[:, 0]] = -torch.inf


def _largest(closeness: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of every row, ties by the smaller id; all where there are no more."""
    if closeness.shape[1] <= k:
        return closeness, ids.expand_as(closeness)
    values, columns = _top(closeness, k + 1)
    tied = (values[:, k - 1] == values[:, k]).nonzero()[:, 0]
    if len(tied):  # topk picks any of equal values; a stable sort picks the first
        ordered = closeness[tied].sort(dim=1, descending=True, stable=True)
        values[tied, :k], columns[tied, :k] = ordered.values[:, :k], ordered.indices[:, :k]
    return values[:, :k], ids[columns[:, :k]]


def _top(closeness: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of every row, falling, and their columns; any of equal ones."""
    rows, columns = closeness.shape
    width = columns // GROUP_SIZE
    if width < 2 * k:
        values, places = closeness.topk(k, dim=1)
        return values, places
    # The largest entries lie in the groups of columns with the largest maxima: those are found with one look at every
    # entry, and only their members are sorted. A group is every ``width``-th column, so that
    # maxima are taken of whole stretches of memory.
    groups = closeness[:, : GROUP_SIZE * width].view(rows, GROUP_SIZE, width)
    best = groups.amax(1).topk(k, dim=1, sorted=False).indices
    members = best[:, None, :] + width * torch.arange(GROUP_SIZE, device=best.device)[:, None]  # [rows, group, k]
    rest = torch.arange(GROUP_SIZE * width, columns, device=best.device).expand(rows, -1)
    candidates = torch.cat([members.flatten(1), rest], dim=1)
    values, places = closeness.gather(1, candidates).topk(k, dim=1)
    return values, candidates.gather(1, places)


def _join(found: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
    if found is None:
        return new
    values, ids = torch.cat([found[0], new[0]], dim=1), torch.cat([found[1], new[1]], dim=1)
    by_id = ids.argsort(dim=1)
    best = values.gather(1, by_id).argsort(dim=1, descending=True, stable=True)[:, :k]
    order = by_id.gather(1, best)
    return values.gather(1, order), ids.gather(1, order)


def _check_finite(features: Tensor) -> None:
    # A sum is quick, and finite only if all of it is, but for overflow: then each row is looked at.
    if bool(features.sum(dtype=torch.float64).isfinite()):
        return
    rows = (~features.isfinite().all(1)).nonzero()[:, 0].tolist()
    if rows:
        more = f" and {len(rows) - MAX_NAMED} more" if len(rows) > MAX_NAMED else ""
        raise NonFiniteError(
            f"Features of training samples are not finite (rows {rows[:MAX_NAMED]}{more}), so they have no neighbours. "
            "Check the input of the head for these samples."
        )
