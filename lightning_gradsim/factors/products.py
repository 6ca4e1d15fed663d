"""Products and norms of per-sample gradients, by the way that takes the fewest operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_gradsim.factors.indexed import IndexedFactors, indexed_dot, indexed_squared_norms
from lightning_gradsim.factors.outer import OuterFactors
from lightning_gradsim.factors.patches import PatchFactors

Factors = OuterFactors | PatchFactors | IndexedFactors
"""What a rule may return."""

MAX_INTERMEDIATE = 2**24
"""Elements of one intermediate tensor (64 MiB in float32): larger products are computed in chunks of samples."""
CPU_BLOCK = 2**20
"""Elements of materialised gradients at once on the CPU (4 MiB in float32): they are read back from its caches, and
the allocator hands out the same pages again and again."""


def concatenate_positions(parts: Sequence[Factors]) -> Factors:
    """Factors of a layer that was called several times: the calls side by side along ``t``.

    Contracting over the joined ``t`` sums the calls' gradients, so all cross terms come out right by themselves.

    Args:
        parts: One entry per call, all for the same samples.

    Returns:
        Factors with ``t`` the sum of the parts' positions.
    """
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], IndexedFactors):
        return IndexedFactors.concatenate_positions([part for part in parts if isinstance(part, IndexedFactors)])
    return OuterFactors.concatenate_positions(_all_outer(parts))


def concatenate_samples(parts: Sequence[Factors]) -> Factors:
    """Factors of several batches of one layer, in order; shorter ones are padded with zero positions.

    A position whose output gradient is zero adds nothing to any product, so padding is exact.

    Args:
        parts: One entry per batch, all of the same layer.

    Returns:
        Factors with ``n`` the sum of the parts' samples and ``t`` the longest of theirs.
    """
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], IndexedFactors):
        return IndexedFactors.concatenate_samples([part for part in parts if isinstance(part, IndexedFactors)])
    patches = [part for part in parts if isinstance(part, PatchFactors)]
    if len(patches) == len(parts) and len({part.images.shape[1:] for part in patches}) == 1:
        return PatchFactors.concatenate_samples(patches)
    return OuterFactors.concatenate_samples(_all_outer(parts))


def concatenate_labels(parts: Sequence[Factors]) -> Factors:
    """Factors of one layer for the same samples with several labels, one after the other.

    The inputs of a layer do not depend on labels: those of a pair of factors are kept, and multiplied, once.

    Args:
        parts: One entry per label, all of the same samples.

    Returns:
        Factors with ``n`` the number of samples times that of labels.
    """
    outer = [part for part in parts if isinstance(part, OuterFactors)]
    return OuterFactors.concatenate_labels(outer) if len(outer) == len(parts) > 1 else concatenate_samples(parts)


def concatenate_layers(parts: Sequence[Mapping[str, Factors]]) -> dict[str, Factors]:
    """Factors of several batches by layer, in order.

    Args:
        parts: One entry per batch, none of them empty. A layer that a batch did not use may be missing in it.

    Returns:
        Factors by layer, all of the same samples.
    """
    known = {name: factors for part in parts for name, factors in part.items()}
    sizes = [next(iter(part.values())).num_samples for part in parts]
    return {
        name: concatenate_samples(
            [part[name] if name in part else some.unused(size) for part, size in zip(parts, sizes, strict=True)]
        )
        for name, some in known.items()
    }


def is_flat(factors: Factors) -> bool:
    """Whether gradients have no pair of factors: those of a table, of a bias alone, and what comes materialised."""
    return isinstance(factors, IndexedFactors) or (isinstance(factors, OuterFactors) and factors.activations is None)


def dot(queries: Factors, train: Factors, *, max_intermediate: int = MAX_INTERMEDIATE) -> Tensor:
    """Dot products of the per-sample gradients of two sets of samples.

    By the Gram identity ``<G_m, G_n> = sum_ts (a_mt . a_ns)(b_mt . b_ns)``, or by materialised gradients, whichever
    takes fewer operations: ``O(m n t s g (i + o))`` against ``O(n s g i o + m n g i o)``.

    Args:
        queries: Factors of ``m`` samples. Their materialised gradients are computed once and kept.
        train: Factors of ``n`` samples of the same layer.
        max_intermediate: Elements that one intermediate tensor may have; larger products go in chunks of ``n``.

    Returns:
        Products, shape ``[m, n]``, in the dtype of the factors (loss² per parameter²).

    Source:
        Goodfellow (2015), "Efficient per-example gradient computations", arXiv:1510.01799, for the norms.
    """
    if isinstance(queries, IndexedFactors) or isinstance(train, IndexedFactors):
        assert isinstance(queries, IndexedFactors)  # one layer has one kind of factors
        assert isinstance(train, IndexedFactors)
        return indexed_dot(queries, train, block_elements(train.output_grads.device, max_intermediate))
    if not uses_gram(queries, train):
        return _materialised(queries, train, max_intermediate)[0]
    per_sample = queries.num_samples * queries.num_positions * train.num_positions * train.num_groups
    return _in_chunks(lambda part: _gram(queries.outer, part.outer), train, per_sample, max_intermediate)


def squared_norms(factors: Factors, *, max_intermediate: int = MAX_INTERMEDIATE) -> Tensor:
    """Squared norms of the per-sample gradients.

    Args:
        factors: Factors of ``n`` samples.
        max_intermediate: Elements that one intermediate tensor may have; larger ones go in chunks of ``n``.

    Returns:
        Squared norms, shape ``[n]``, >= 0, in the dtype of the factors (loss² per parameter²).

    Source:
        Goodfellow (2015), arXiv:1510.01799; over positions as in Li et al. (2022), arXiv:2110.05679, section 4.
    """
    if isinstance(factors, IndexedFactors):
        return indexed_squared_norms(factors)
    positions, inputs, outputs = factors.num_positions, factors.num_inputs, factors.num_outputs
    if positions == 1:
        return _one_position_norms(factors.outer)
    if positions * (inputs + outputs) < inputs * outputs:
        per_sample = factors.num_groups * positions**2
        return _in_chunks(lambda part: _gram_norms(part.outer), factors, per_sample, max_intermediate)
    return _materialised(None, factors, max_intermediate)[1]


def dot_and_squared_norms(
    queries: Factors, train: Factors, *, max_intermediate: int = MAX_INTERMEDIATE, keep: bool = True
) -> tuple[Tensor, Tensor]:
    """``dot`` and the ``squared_norms`` of the training samples, whose gradients are materialised at most once.

    Args:
        queries: Factors of ``m`` samples.
        train: Factors of ``n`` samples of the same layer.
        max_intermediate: Elements that one intermediate tensor may have.
        keep: Whether materialised gradients of the queries are computed once and kept; else they are built anew, block
            by block.

    Returns:
        Products ``[m, n]`` and squared norms ``[n]``.
    """
    is_indexed = isinstance(queries, IndexedFactors) or isinstance(train, IndexedFactors)
    if is_indexed or uses_gram(queries, train):  # type: ignore[arg-type]
        products = dot(queries, train, max_intermediate=max_intermediate)
        return products, squared_norms(train, max_intermediate=max_intermediate)
    compute = _materialised if keep or is_flat(queries) else _materialised_anew
    return compute(queries, train, max_intermediate)  # type: ignore[arg-type]


def uses_gram(queries: OuterFactors | PatchFactors, train: OuterFactors | PatchFactors) -> bool:
    """Whether the Gram identity takes fewer operations than materialising for these sizes.

    Args:
        queries: Factors of ``m`` samples.
        train: Factors of ``n`` samples of the same layer.

    Returns:
        ``True`` for ``gram``, ``False`` for ``materialise``; always for queries that are materialised already.
    """
    if is_flat(queries) and not is_flat(train):
        return False
    return _is_gram_cheaper(queries.num_samples, count_inputs(queries), queries.num_positions, train)


def count_inputs(factors: Factors) -> int:
    """How many inputs the samples of a layer have: fewer than there are samples where some share them."""
    if isinstance(factors, OuterFactors) and factors.activations is not None:
        return len(factors.activations)
    return factors.num_samples


def product_cost(train: Factors, num_queries: int, num_inputs: int, query_positions: int | None) -> tuple[str, int]:
    """How ``dot_and_squared_norms`` would work, and what it would take.

    Args:
        train: Factors of ``n`` samples.
        num_queries: Number of queries ``m``.
        num_inputs: Inputs that these have: fewer than queries where some share them.
        query_positions: Their shared positions ``t``; ``None`` where they are materialised already.

    Returns:
        ``gram``, ``materialise`` or ``indexed``; and floating-point operations for all ``n`` samples, two for every
        multiply-add (for ``indexed`` at most as many: where every query touches every row).
    """
    samples, positions = train.num_samples, train.num_positions
    if isinstance(train, IndexedFactors):
        return "indexed", 2 * num_queries * samples * positions * train.output_grads.shape[2]
    groups, inputs, outputs = train.num_groups, train.num_inputs, train.num_outputs
    if isinstance(train, OuterFactors) and train.activations is None:
        return "materialise", 2 * (num_queries + 1) * samples * positions * groups * outputs
    if query_positions is None or not _is_gram_cheaper(num_queries, num_inputs, query_positions, train):
        return "materialise", 2 * samples * (positions + num_queries + 1) * groups * inputs * outputs
    norms = min(positions**2 * (inputs + outputs), (positions + 1) * inputs * outputs)
    if positions == 1:
        norms = inputs + outputs
    products = query_positions * positions * (num_inputs * inputs + num_queries * outputs)
    return "gram", 2 * samples * groups * (products + norms)


def block_elements(device: torch.device, max_intermediate: int = MAX_INTERMEDIATE) -> int:
    """Elements of materialised gradients that are worked on at once.

    Args:
        device: Where the gradients are.
        max_intermediate: Elements that one intermediate tensor may have.

    Returns:
        At most ``max_intermediate``, less where smaller blocks are quicker.
    """
    return min(max_intermediate, CPU_BLOCK) if device.type == "cpu" else max_intermediate


def _is_gram_cheaper(
    num_queries: int, num_inputs: int, query_positions: int, train: OuterFactors | PatchFactors
) -> bool:
    outputs, inputs = train.num_outputs, train.num_inputs
    gram = query_positions * train.num_positions * (num_inputs * inputs + num_queries * outputs)
    materialise = (train.num_positions + num_queries) * inputs * outputs
    return train.num_samples * gram <= train.num_samples * materialise


def _all_outer(parts: Sequence[Factors]) -> list[OuterFactors]:
    return [part.outer for part in parts if not isinstance(part, IndexedFactors)]


def _in_chunks(
    compute: Callable[[OuterFactors | PatchFactors], Tensor],
    factors: OuterFactors | PatchFactors,
    per_sample: int,
    max_intermediate: int,
) -> Tensor:
    """Values whose last dimension is the samples, so many of them at a time that an intermediate stays in bounds."""
    chunk = max(1, max_intermediate // max(1, per_sample))
    if chunk >= factors.num_samples:
        return compute(factors)
    starts = range(0, factors.num_samples, chunk)
    return torch.cat([compute(factors.samples(slice(start, start + chunk))) for start in starts], dim=-1)


def _materialised(
    queries: OuterFactors | PatchFactors | None, train: OuterFactors | PatchFactors, max_intermediate: int
) -> tuple[Tensor, Tensor]:
    """Products ``[m, n]`` (``[0, n]`` without queries) and squared norms ``[n]``, block by block of the gradients."""
    like = train.output_grads
    flat = like.new_empty(0, train.num_parameters) if queries is None else queries.flat
    products, norms = like.new_zeros(len(flat), train.num_samples), like.new_zeros(train.num_samples)
    for block in train.blocks(block_elements(like.device, max_intermediate)):
        products[:, block.rows].addmm_(flat[:, block.columns], block.gradients.T)
        # Quicker than the sum of the squares, which would be written out first.
        norms[block.rows] += torch.linalg.vector_norm(block.gradients, dim=1).square()
    return products, norms


def _materialised_anew(
    queries: OuterFactors | PatchFactors, train: OuterFactors | PatchFactors, max_intermediate: int
) -> tuple[Tensor, Tensor]:
    """The same without ever holding all gradients of the queries."""
    like = train.output_grads
    products = like.new_zeros(queries.num_samples, train.num_samples)
    norms = like.new_zeros(train.num_samples)
    if isinstance(queries, OuterFactors) and isinstance(train, OuterFactors):
        # Blocks of the same parameters, side by side.
        step = max(1, max_intermediate // max(1, queries.num_samples, train.num_samples))
        pairs = zip(queries.blocks(step * queries.num_samples), train.blocks(step * train.num_samples), strict=True)
        for left, right in pairs:
            products.addmm_(left.gradients, right.gradients.T)
            norms += torch.linalg.vector_norm(right.gradients, dim=1).square()
        return products, norms
    rows = max(1, max_intermediate // max(1, train.num_parameters))
    for start in range(0, queries.num_samples, rows):
        part = queries.samples(slice(start, start + rows))
        products[start : start + rows], norms = _materialised(part, train, max_intermediate)
    return products, norms


def _one_position_norms(factors: OuterFactors) -> Tensor:
    # Quicker than the sum of the squares, which would be written out first.
    norms: Tensor = torch.linalg.vector_norm(factors.output_grads[:, 0], dim=2).square()  # [n, g]
    if factors.activations is not None:
        inputs = torch.linalg.vector_norm(factors.activations[:, 0], dim=2).square()
        inputs = inputs if factors.rows is None else inputs[factors.rows]
        norms = torch.addcmul(norms, norms, inputs) if factors.bias else norms * inputs
    return norms.sum(1) if norms.shape[1] > 1 else norms[:, 0]


def _gram(queries: OuterFactors, train: OuterFactors) -> Tensor:
    product = _pairs(queries.output_grads, train.output_grads)  # [g, m t, n s]
    if queries.activations is not None and train.activations is not None:
        inputs = _pairs(queries.activations, train.activations)
        if queries.rows is not None:
            by_row = inputs.unflatten(1, (len(queries.activations), -1))
            inputs = by_row.index_select(1, queries.rows).flatten(1, 2)
        # With a bias, `product * (inputs + 1)` in one step.
        product = product.addcmul_(product, inputs) if queries.bias else product.mul_(inputs)
    shape = (queries.num_samples, queries.num_positions, train.num_samples, train.num_positions)
    if product.shape[0] == shape[1] == shape[3] == 1:
        return product[0]
    return product.sum(0).view(shape).sum((1, 3))


def _pairs(left: Tensor, right: Tensor) -> Tensor:
    if left.shape[1] == left.shape[2] == right.shape[1] == 1:
        return (left[:, 0, 0] @ right[:, 0, 0].T)[None]
    rows = left.permute(2, 0, 1, 3).flatten(1, 2)  # [g, m t, f]
    columns = right.permute(2, 0, 1, 3).flatten(1, 2)  # [g, n s, f]
    return rows @ columns.transpose(1, 2)


def _gram_norms(factors: OuterFactors) -> Tensor:
    grads = factors.output_grads.transpose(1, 2)  # [n, g, t, o]
    product = grads @ grads.transpose(2, 3)
    activations = factors.own_activations
    if activations is not None:
        inputs = activations.transpose(1, 2)
        inputs = inputs @ inputs.transpose(2, 3)
        product = product * (inputs + 1 if factors.bias else inputs)
    return product.sum((1, 2, 3))
