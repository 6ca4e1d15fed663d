"""Curvature of the training loss by layer, as second moments of factors (K-FAC), and gradients preconditioned by it.

Index key as in ``factors``: ``n`` / ``m`` sample (training / query), ``t`` shared position, ``g`` channel group, ``i``
input feature, here with the one of the bias as the last, ``o`` output feature.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gradsim.errors import GradSimError, UnsupportedLayerError
from lightning_gradsim.factors import (
    MAX_INTERMEDIATE,
    Factors,
    IndexedFactors,
    OuterFactors,
    PatchFactors,
    block_elements,
    is_flat,
)

NUM_STRIPS = 4
"""Strips that a symmetric matrix is computed in, each up to the diagonal: five eighths of the operations."""
MIN_STRIP = 64
"""Rows of a strip below which a smaller one saves nothing."""


class Curvature:
    """Second moments of the per-sample gradients of some training samples, by layer.

    With ``A = sum_nt a aᵀ / N`` over the inputs ``a`` of a layer and ``B = sum_nt b bᵀ / R`` over the gradients ``b``
    by its output, ``A ⊗ B`` stands for the mean of the outer products of per-sample gradients (the empirical Fisher
    matrix), one pair a channel group. Only positions with a gradient count, ``R`` is their number: padding adds nothing
    to a gradient, so it must not change its curvature. Layers whose gradients have no such pair (norms, embeddings,
    frozen weights, what is served without factors) have the diagonal of that matrix instead.

    Args:
        max_intermediate: Elements that one intermediate tensor may have.
        max_bytes: Bytes that the moments of one layer may take.

    Source:
        Martens and Grosse (2015), arXiv:1503.05671; over shared positions Grosse and Martens (2016), arXiv:1602.01407.
        The diagonal: as in Adam, Kingma and Ba (2015), arXiv:1412.6980.
    """

    def __init__(self, max_intermediate: int = MAX_INTERMEDIATE, max_bytes: float = float("inf")) -> None:
        self.num_samples = 0
        self._max_intermediate = max_intermediate
        self._max_bytes = max_bytes
        self._layers: dict[str, _Kronecker | _Diagonal] = {}

    def update(self, train: Mapping[str, Factors]) -> None:
        """Take in a batch.

        Args:
            train: Factors by layer of its samples; every layer that it used.

        Raises:
            UnsupportedLayerError: If the moments of a layer would take too much memory; it is named.
        """
        for name, factors in train.items():
            if name not in self._layers:
                self._layers[name] = _Diagonal(factors) if is_flat(factors) else self._new(name, factors)
            self._layers[name].update(factors, self._max_intermediate)
        self.num_samples += next(iter(train.values())).num_samples

    def precondition(self, queries: Mapping[str, Factors], damping: float) -> dict[str, Factors]:
        """Gradients multiplied by the inverse of the damped curvature.

        ``A`` and ``B`` are damped by ``damping`` times their mean eigenvalues: ``(A + λI)⁻¹ ⊗ (B + μI)⁻¹``; the
        diagonal by ``damping`` times its mean.

        Args:
            queries: Factors by layer of ``m`` samples.
            damping: Share of the mean eigenvalue, above 0.

        Returns:
            Factors by layer, in the dtype of the queries. Where factors would take more memory than gradients, the
            gradients themselves, as ``OuterFactors.from_gradients``.

        Raises:
            GradSimError: If no sample taken in has a gradient in a layer, or its damped moments are singular.
        """
        result = {}
        for name, factors in queries.items():
            moments = self._layers.get(name)
            if not bool((factors.output_grads != 0).any()):  # zeros stay zeros, whatever the curvature
                result[name] = factors
                continue
            try:
                if moments is None:
                    raise GradSimError("no training sample that the curvature is taken from uses it")
                result[name] = moments.solve(factors, self.num_samples, damping).to(dtype=factors.output_grads.dtype)
            except GradSimError as error:
                raise GradSimError(
                    f"Layer `{name}` has no curvature to precondition by: {error}. Leave it out of `layers`, pass a "
                    'larger `damping`, or another `similarity` than "influence".'
                ) from error
        return result

    def _new(self, name: str, factors: Factors) -> _Kronecker:
        assert not isinstance(factors, IndexedFactors)  # they are flat
        # In float64, with the factorisation beside the sum.
        num_bytes = 16 * factors.num_groups * (factors.num_inputs**2 + factors.num_outputs**2)
        if num_bytes > self._max_bytes:
            raise UnsupportedLayerError(
                f"Layer `{name}` has {factors.num_inputs:,} inputs and {factors.num_outputs:,} outputs a channel "
                f"group: second moments of them take {num_bytes:,} bytes, more than the {int(self._max_bytes):,} that "
                "there are for it. Pass a larger `memory_budget`, leave it out of `layers`, or use another "
                '`similarity` than "influence".'
            )
        return _Kronecker(factors)


class _Kronecker:
    """Sums of outer products, of inputs ``[g, i, i]`` and of output gradients ``[g, o, o]``: their lower triangles."""

    def __init__(self, like: OuterFactors | PatchFactors) -> None:
        groups, inputs, outputs, self._dtype = like.num_groups, like.num_inputs, like.num_outputs, _wide(like)
        self._bias = like.bias
        new = like.output_grads.new_zeros
        self._inputs = new(groups, inputs, inputs, dtype=self._dtype)
        self._grads = new(groups, outputs, outputs, dtype=self._dtype)
        self._num_positions = new(groups, 1, 1, dtype=self._dtype)

    def update(self, factors: Factors, max_intermediate: int) -> None:
        assert not isinstance(factors, IndexedFactors)  # a layer has one kind of factors
        for part in _in_parts(factors, block_elements(factors.output_grads.device, max_intermediate)):
            grads, inputs = part.output_grads, part.activations
            assert inputs is not None  # otherwise the factors are flat
            active = (grads != 0).any(-1, keepdim=True)  # [n, t, g, 1]
            number = active.sum((0, 1))[..., None]  # [g, 1, 1]
            if int(number.sum()) < active.numel():
                inputs = inputs * active
            weights = slice(0, inputs.shape[-1])
            _add_outer_products(self._inputs[:, weights, weights], inputs)
            if part.bias:  # without a column of ones, which would copy the inputs
                self._inputs[:, -1, weights] += inputs.sum((0, 1))
                self._inputs[:, -1:, -1:] += number
            _add_outer_products(self._grads, grads)
            self._num_positions += number

    def solve(self, factors: Factors, num_samples: int, damping: float) -> OuterFactors:
        assert not isinstance(factors, IndexedFactors)
        inputs = _damped_root(self._inputs / num_samples, damping)
        grads = _damped_root(self._grads / self._num_positions.clamp(min=1), damping)
        groups, i, o = len(inputs), inputs.shape[-1], grads.shape[-1]
        if is_flat(factors) or factors.num_positions * (i + o) >= i * o:
            parts = factors.flat.to(self._dtype).split(groups * o * (i - self._bias), dim=1)
            gradients = torch.cat([part.unflatten(1, (groups, o, -1)) for part in parts], dim=-1)
            gradients = torch.cholesky_solve(torch.cholesky_solve(gradients, grads).mT, inputs).mT  # [m, g, o, i]
            return OuterFactors.from_gradients(gradients.split(i - self._bias, dim=-1))
        samples, rows = (-1, factors.num_positions), None if isinstance(factors, PatchFactors) else factors.rows
        solved_inputs = torch.cholesky_solve(_inputs(factors).mT.to(self._dtype), inputs).mT.unflatten(1, samples)
        solved_grads = torch.cholesky_solve(_rows(factors.output_grads).mT.to(self._dtype), grads).mT
        solved_grads = solved_grads.unflatten(1, samples)
        if factors.bias:
            solved_inputs, sizes = _with_bias_of_one(solved_inputs)
            solved_grads *= sizes if rows is None else sizes[:, rows]
        return OuterFactors(solved_inputs.permute(1, 2, 0, 3), solved_grads.permute(1, 2, 0, 3), factors.bias, rows)


class _Diagonal:
    """Sums of squared gradients, by output ``[g, o]``, or by row of a table and output."""

    def __init__(self, like: Factors) -> None:
        shape = (like.num_rows,) if isinstance(like, IndexedFactors) else (like.output_grads.shape[2],)
        self._squares = like.output_grads.new_zeros(*shape, like.output_grads.shape[-1], dtype=_wide(like))

    def update(self, factors: Factors, max_intermediate: int) -> None:
        if isinstance(factors, IndexedFactors):
            entries = factors.entries
            self._squares.index_add_(0, entries.rows, entries.grads.square().to(self._squares.dtype))
        else:
            self._squares += factors.output_grads.sum(1).square().sum(0)

    def solve(self, factors: Factors, num_samples: int, damping: float) -> Factors:
        mean = self._squares / num_samples
        damped = mean + damping * _positive(mean.mean())
        if isinstance(factors, IndexedFactors):
            return IndexedFactors(factors.indices, factors.output_grads / damped[factors.indices], factors.num_rows)
        assert isinstance(factors, OuterFactors)  # patches have activations
        return OuterFactors(None, factors.output_grads / damped, factors.bias)


def is_finite(factors: Factors) -> Tensor:
    """Whether all numbers of a sample's factors are finite, bool ``[n]``."""
    if isinstance(factors, PatchFactors):
        parts = [factors.images, factors.maps]
    elif isinstance(factors, OuterFactors) and factors.activations is not None:
        parts = [factors.activations, factors.output_grads]
    else:
        parts = [factors.output_grads]
    return torch.stack([part.flatten(1).isfinite().all(1) for part in parts]).all(0)


def _wide(like: Factors) -> torch.dtype:
    return torch.float32 if like.output_grads.device.type == "mps" else torch.float64  # there is none on that device


def _rows(values: Tensor) -> Tensor:
    """``[n, t, g, f]`` as ``[g, n t, f]``."""
    return values.permute(2, 0, 1, 3).flatten(1, 2)


def _add_outer_products(total: Tensor, values: Tensor) -> None:
    """Add those of ``[n, t, g, f]``, summed over ``n`` and ``t``, to the lower triangle of ``[g, f, f]``."""
    if values.stride(1) == 1 < values.shape[1]:  # patches have their positions innermost: copied in runs, not singly
        columns = values.permute(2, 3, 0, 1).flatten(2)  # [g, f, n t]
        rows = columns.mT
    else:
        rows = _rows(values)
        columns = rows.mT
    size = total.shape[-1]
    step = max(MIN_STRIP, -(-size // NUM_STRIPS))
    for start in range(0, size, step):
        strip = slice(start, min(start + step, size))
        total[:, strip, : strip.stop] += columns[:, strip] @ rows[:, :, : strip.stop]


def _inputs(factors: OuterFactors | PatchFactors) -> Tensor:
    """Inputs ``[g, n t, i]``, with the ones of the bias."""
    activations = factors.activations
    assert activations is not None  # otherwise the factors are flat
    return F.pad(_rows(activations), (0, 1), value=1.0) if factors.bias else _rows(activations)


def _in_parts(factors: OuterFactors | PatchFactors, max_elements: int) -> Iterator[OuterFactors | PatchFactors]:
    """Some samples at a time, so that patches and copies stay in bounds."""
    per_sample = factors.num_positions * factors.num_groups * (factors.num_inputs + factors.num_outputs)
    step = max(1, max_elements // max(1, per_sample))
    for start in range(0, factors.num_samples, step):
        yield factors.samples(slice(start, start + step))


def _damped_root(moments: Tensor, damping: float) -> Tensor:
    """Cholesky factors of lower triangles ``[g, f, f]``, overwritten: damped by a share of all diagonals' mean."""
    diagonal = moments.diagonal(dim1=1, dim2=2)
    diagonal += damping * _positive(diagonal.mean())
    root: Tensor
    root, info = torch.linalg.cholesky_ex(moments)
    if bool((info != 0).any()):
        raise GradSimError(f"its moments are singular under `damping={damping}`")
    return root


def _positive(mean: Tensor) -> Tensor:
    if not bool(mean > 0):
        raise GradSimError("its gradients are zero for all training samples that the curvature is taken from")
    return mean


def _with_bias_of_one(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs divided by the last one, without it, as factors with a bias have them; and what they were divided by."""
    # An input of zero cannot be made 1: it counts as rounding of the others.
    sizes = inputs[..., -1:]
    info = torch.finfo(inputs.dtype)
    least = (info.eps * inputs.abs().amax(-1, keepdim=True)).clamp(min=info.tiny)
    sizes = torch.where(sizes.abs() < least, least, sizes)
    return inputs[..., :-1] / sizes, sizes
