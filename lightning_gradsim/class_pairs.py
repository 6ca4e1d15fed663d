"""All mistakes of a class pair as one query: their mean gradient, and the training samples that oppose it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lightning_gradsim.batch_runner import BatchRunner
from lightning_gradsim.curvature import Curvature
from lightning_gradsim.errors import GradSimError
from lightning_gradsim.factors import (
    MAX_INTERMEDIATE,
    Factors,
    IndexedFactors,
    OuterFactors,
    concatenate_positions,
    concatenate_samples,
    dot,
    squared_norms,
)
from lightning_gradsim.scores import Similarity, compute_similarity
from lightning_gradsim.tasks import Task
from lightning_gradsim.topk import ScoreSums, TopK

PAIR_SHARE = 0.25
"""Share of the memory budget for the gradients of all pairs."""
PRODUCT_SHARE = 0.125
"""Share of the memory budget for one intermediate of a product."""

Pair = tuple[int, int]
"""Given and predicted label."""


@dataclass(frozen=True, eq=False)
class Mistakes:
    """Where the mistakes of some class pairs are to be found.

    Attributes:
        pairs: The pairs.
        batches: Number of samples, batch on the module's device, and targets that count as predicted (``None`` for what
            the module predicts). Samples that belong to none of the pairs do no harm.
        top: Takes the scores; by default one that keeps the best.
    """

    pairs: Sequence[Pair]
    batches: Iterable[tuple[int, Any, Tensor | None]]
    top: TopK | ScoreSums | None = None


@dataclass(frozen=True, eq=False)
class PairScores:
    """What a pass found for class pairs, on the CPU.

    Attributes:
        pairs: The pairs.
        counts: How many mistakes the mean of each was taken over.
        best_scores: Similarities with their sign turned, falling, ``[pairs, k]``.
        best_ids: The sample ids that they belong to.
    """

    pairs: tuple[Pair, ...]
    counts: tuple[int, ...]
    best_scores: Tensor
    best_ids: Tensor


class _Sum:
    """The sum of gradients of one layer for each of the pairs: as factors while they are few, then materialised."""

    def __init__(self, num_pairs: int) -> None:
        self.dense: Tensor | None = None
        self._parts: list[list[IndexedFactors | OuterFactors]] = [[] for _ in range(num_pairs)]

    def add(self, place: int, part: IndexedFactors | OuterFactors) -> None:
        """Add one gradient."""
        own = self._parts[place]
        own.append(part)
        if isinstance(part, OuterFactors):
            positions = sum(each.num_positions for each in own)
            inputs, outputs = part.num_inputs, part.num_outputs
            if self.dense is not None or positions * (inputs + outputs) >= inputs * outputs:
                self._materialise(part)

    def mean(self, counts: Sequence[int]) -> Factors:
        """Divided by the number of mistakes of each pair."""
        divisors = [max(1, count) for count in counts]
        if self.dense is not None:
            return OuterFactors.from_gradients([self.dense / self.dense.new_tensor(divisors)[:, None]])
        some = next(part for own in self._parts for part in own)
        means = []
        for own, divisor in zip(self._parts, divisors, strict=True):
            joined = concatenate_positions(own or [some.unused(1)])
            assert isinstance(joined, (IndexedFactors, OuterFactors))
            means.append(replace(joined, output_grads=joined.output_grads / divisor))
        return concatenate_samples(means)

    def _materialise(self, like: OuterFactors) -> None:
        if self.dense is None:
            self.dense = like.output_grads.new_zeros(len(self._parts), like.num_parameters)
        for total, own in zip(self.dense, self._parts, strict=True):
            for part in own:
                assert isinstance(part, OuterFactors)  # all of a layer are of one kind
                total += part.flat[0]
            own.clear()


class PairScorer:
    """Scores training samples against the mean gradient of each pair.

    Args:
        runner: Runs batches.
        mistakes: The mistakes.
        similarity: The similarity.
        top_k: Length of each list.

    Raises:
        GradSimError: If the gradients would take too much memory.
    """

    def __init__(self, runner: BatchRunner, mistakes: Mistakes, similarity: Similarity, top_k: int) -> None:
        self._pairs = tuple(mistakes.pairs)
        self._similarity = similarity
        self._top = TopK(top_k) if mistakes.top is None else mistakes.top
        self._budget = runner.memory_budget
        self._max_intermediate = max(1, min(MAX_INTERMEDIATE, int(PRODUCT_SHARE * runner.memory_budget / 4)))
        self._counts = [0] * len(self._pairs)
        self._sums: dict[str, _Sum] = {}
        for number, batch, predicted in mistakes.batches:
            for portion in runner.run(batch, number):
                if portion.step.task in (Task.CLASSIFICATION, Task.BINARY):
                    outcome = portion.step.outcome
                    given = None if predicted is None else predicted[portion.rows].reshape(len(outcome.labels), -1)
                    predictions = outcome.predictions if given is None else given[:, 0].long()
                    self._add(portion.factors, outcome.labels, predictions)
        self._factors = {name: each.mean(self._counts) for name, each in self._sums.items()}
        self._sums = {}
        self._norms = reduce(torch.add, [squared_norms(each) for each in self._factors.values()], torch.zeros(()))

    @property
    def has_any(self) -> bool:
        """Whether there are any mistakes among the pairs."""
        return any(self._counts)

    def precondition(self, curvature: Curvature, damping: float) -> None:
        """Multiply the gradients by the inverse of the damped curvature.

        Args:
            curvature: Of all layers.
            damping: Share of the mean eigenvalue, above 0.
        """
        self._factors = curvature.precondition(self._factors, damping)

    def update(self, ids: Tensor, train: Mapping[str, Factors]) -> None:
        """Take in the gradients of a batch.

        Args:
            ids: Sample ids ``[B]``.
            train: Factors by layer.
        """
        names = [name for name in self._factors if name in train]
        if not self.has_any or not names:
            return
        products = reduce(
            torch.add,
            [dot(self._factors[name], train[name], max_intermediate=self._max_intermediate) for name in names],
        )
        norms = products.new_ones(products.shape[1])
        if self._similarity in {"cosine", "asymmetric"}:
            parts = [squared_norms(each, max_intermediate=self._max_intermediate) for each in train.values()]
            norms = reduce(torch.add, parts)
        scores = -compute_similarity(self._similarity, products, self._norms, norms)
        self._top.update(scores, ids.to(scores.device))

    def compute(self) -> PairScores:
        """What was found."""
        scores, ids = (values.cpu() for values in self._top.compute())
        if not len(scores):
            scores, ids = torch.empty(len(self._pairs), 0), torch.empty(len(self._pairs), 0, dtype=torch.long)
        return PairScores(self._pairs, tuple(self._counts), scores, ids)

    def _add(self, factors: Mapping[str, Factors], labels: Tensor, predictions: Tensor) -> None:
        for place, (label, prediction) in enumerate(self._pairs):
            rows = ((labels == label) & (predictions == prediction)).nonzero().flatten()
            if not len(rows):
                continue
            self._counts[place] += len(rows)
            for name, each in factors.items():
                self._sums.setdefault(name, _Sum(len(self._pairs))).add(place, each.samples(rows).summed())
            self._check_memory()

    def _check_memory(self) -> None:
        num_bytes = sum(each.dense.nbytes for each in self._sums.values() if each.dense is not None)
        if num_bytes > PAIR_SHARE * self._budget:
            raise GradSimError(
                f"The mean gradients of {len(self._pairs)} class pairs take more than "
                f"{int(PAIR_SHARE * self._budget):,} bytes, the share of `memory_budget` that there is for them. Pass "
                "a smaller `class_pairs`, fewer `layers`, or a larger `memory_budget`."
            )
