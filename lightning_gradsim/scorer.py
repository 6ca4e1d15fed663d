"""From factors of training samples to the best of each list, and to statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from lightning_gradsim.adapter import Step
from lightning_gradsim.factors import (
    MAX_INTERMEDIATE,
    Factors,
    concatenate_layers,
    dot_and_squared_norms,
    squared_norms,
)
from lightning_gradsim.guard import is_out_of_memory
from lightning_gradsim.memory import release_memory
from lightning_gradsim.query_side import QuerySide
from lightning_gradsim.sample_statistics import SampleStatistics
from lightning_gradsim.scores import Similarity, compute_similarity
from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.tasks import Task
from lightning_gradsim.topk import ScoreRows, ScoreSums, TopK

GROUP_SAMPLES = 4096
"""Training samples that are scored together."""
SMALL_LAYER_ELEMENTS = 2**15
"""Elements of a layer's factors for one batch beyond which they are not kept for a group: joining copies them."""
GROUP_ELEMENTS = 2**23
"""Elements of factors (32 MiB in float32) beyond which a group is scored although it is smaller."""
PRODUCT_SHARE = 0.125
"""Share of the memory budget for one intermediate of a product, and for what waits to be scored."""
MIN_INTERMEDIATE = 2**12
"""Elements of an intermediate below which smaller ones would not help against a lack of memory."""


@dataclass(frozen=True, eq=False)
class _Scored:
    """A batch, or several joined, of which some layers are scored and some wait for others like them."""

    ids: Tensor
    step: Step
    waiting: Mapping[str, Factors]
    products: Tensor | None  # [M to 4 M, B], the sum over the layers scored
    squared_norms: Tensor | None  # [B]


class Scorer:
    """Scores training samples; small layers in groups of batches, as their calls cost more than what they compute.

    Args:
        queries: The queries, or ``None`` if there are none.
        similarity: Similarity of harmful samples and teachers.
        top: Takes the scores: harmful, look-alikes, teachers, look-alikes for the predicted label.
        memory_budget: Bytes that the pass may take.
        rows: Takes all scores of some queries, too.

    Attributes:
        top: The same.
        ran_short: Whether memory has not sufficed for products as large as planned.
    """

    def __init__(
        self,
        queries: QuerySide | None,
        similarity: Similarity,
        top: TopK | ScoreSums,
        memory_budget: int | None = None,
        rows: ScoreRows | None = None,
    ) -> None:
        self.top = top
        self._rows = rows
        self.ran_short = False
        elements = GROUP_ELEMENTS if memory_budget is None else int(PRODUCT_SHARE * memory_budget / 4)
        self._max_waiting = min(GROUP_ELEMENTS, elements)
        self._max_intermediate = max(MIN_INTERMEDIATE, min(MAX_INTERMEDIATE, elements))
        self._queries = queries
        self._similarity = similarity
        self._statistics = SampleStatistics()
        self._waiting: list[_Scored] = []
        self._num_waiting = self._num_elements = 0
        self._form: object = None

    def update(self, ids: Tensor, step: Step, train: dict[str, Factors]) -> None:
        """Take in a batch."""
        small = {name: factors for name, factors in train.items() if factors.num_elements <= SMALL_LAYER_ELEMENTS}
        positions = [(name, type(factors), factors.num_positions) for name, factors in small.items()]
        form = (step.logits.shape[1:], step.targets.shape[1:], positions, len(small) < len(train))
        if form != self._form:
            self._flush()
        self._form = form
        large = {name: factors for name, factors in train.items() if name not in small}
        self._waiting.append(_Scored(ids, step.detached(), small, *self._score(large)))
        self._num_waiting += len(ids)
        self._num_elements += sum(factors.num_elements for factors in small.values()) + step.logits.numel()
        if self._num_waiting >= GROUP_SAMPLES or self._num_elements >= self._max_waiting:
            self._flush()

    def compute_suspects(self) -> SuspectTable:
        """The table of all samples taken in."""
        self._flush()
        return self._statistics.compute()

    def _score(self, train: Mapping[str, Factors]) -> tuple[Tensor | None, Tensor | None]:
        """Products with all queries and squared norms, summed over layers; smaller ones where memory is short."""
        while True:
            try:
                return self._products_and_norms(train)
            except Exception as error:
                if not is_out_of_memory(error) or self._max_intermediate <= MIN_INTERMEDIATE:
                    raise
            # Beyond the `except` block, which keeps the failed attempt's tensors alive.
            self.ran_short = True
            self._max_intermediate //= 2
            if self._queries is not None:
                self._queries = self._queries.without_kept()
            release_memory()

    def _products_and_norms(self, train: Mapping[str, Factors]) -> tuple[Tensor | None, Tensor | None]:
        queries = {} if self._queries is None else self._queries.factors
        kept = frozenset() if self._queries is None else self._queries.kept
        products, norms = [], []
        for name, factors in train.items():
            if name in queries:
                layer_products, layer_norms = dot_and_squared_norms(
                    queries[name], factors, max_intermediate=self._max_intermediate, keep=name in kept
                )
                products.append(layer_products)
                norms.append(layer_norms)
            else:
                norms.append(squared_norms(factors, max_intermediate=self._max_intermediate))
        return _sum(products), _sum(norms)

    def _flush(self) -> None:
        if not self._waiting:
            return
        group, self._waiting = self._waiting, []
        self._num_waiting = self._num_elements = 0
        products, norms = self._score(concatenate_layers([part.waiting for part in group]) if group[0].waiting else {})
        products = _sum([products, _cat([part.products for part in group])])
        norms = _sum([norms, _cat([part.squared_norms for part in group])])
        assert norms is not None  # there is at least one layer
        ids, step = torch.cat([part.ids for part in group]), _joined([part.step for part in group])
        if self._queries is not None and products is not None:
            scores = _scores(self._queries, products, norms, self._similarity)
            self.top.update(scores, ids.to(norms.device))
            if self._rows is not None:
                self._rows.update(scores, ids)
        has_classes = step.task is not Task.REGRESSION
        self._statistics.update(ids, norms, step.losses, step.outcome, has_classes=has_classes)


def _scores(queries: QuerySide, products: Tensor, norms: Tensor, similarity: Similarity) -> Tensor:
    """Rows to be maximised: harmful, look-alikes, teachers, look-alikes for the predicted label; up to ``[4 M, B]``."""
    num_queries, compared = len(queries.records), queries.compared
    solved = products if compared is None else products[len(compared) :]
    scores = products.new_empty(2 * len(queries.squared_norms), products.shape[1])
    for start, sign in ((0, -1), (num_queries, 1))[: 2 if queries.records.has_teachers else 1]:
        rows = slice(start, start + num_queries)
        both, query_norms = scores[2 * start :], queries.squared_norms[rows]
        torch.mul(compute_similarity(similarity, solved[rows], query_norms, norms), sign, out=both[:num_queries])
        cosines = both[num_queries : 2 * num_queries]
        if start == 0 or compared is None:
            compute_similarity("cosine", products[rows], query_norms, norms, out=cosines)
        else:  # the others are not asked for, and no list takes them
            some = compared[num_queries:] - num_queries
            values = products[num_queries : len(compared)]
            cosines.fill_(-torch.inf)[some] = compute_similarity("cosine", values, query_norms[some], norms)
    return scores


def _joined(steps: Sequence[Step]) -> Step:
    if len(steps) == 1:
        return steps[0]
    logits, targets, losses = (
        torch.cat([getattr(step, name) for step in steps]) for name in ("logits", "targets", "losses")
    )
    return Step(logits, targets, losses, steps[0].task, steps[0].are_probabilities)


def _sum(values: Sequence[Tensor | None]) -> Tensor | None:
    present = [value for value in values if value is not None]
    return reduce(torch.add, present) if present else None


def _cat(values: Sequence[Tensor | None]) -> Tensor | None:
    present = [value for value in values if value is not None]
    return torch.cat(present, dim=-1) if len(present) > 1 else next(iter(present), None)
