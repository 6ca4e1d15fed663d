"""Which samples to read again, so that the best of every list are among them, and how many are likely to be missed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gradsim.scores import Similarity, compute_similarity
from lightning_gradsim.tapped_samples import TappedBlock

BLOCK_ROWS = 8192
"""Samples whose features are mapped and scored together."""
DEPTH_FACTOR = 64
"""Places of a list of which samples may be chosen, as a multiple of its length."""
NUM_ROUNDS = 4
"""Readings after the probe: each one corrects the map for the next."""
TARGET_RECALL = 0.95
PENALTIES = tuple(10.0**power for power in range(-4, 4))
"""Ridge penalties tried, as multiples of the inputs' mean square."""
MAX_FITTED = 2048
"""Samples that a map is fitted to at most."""
MAX_WIDTH = 256
"""Features of which maps are made; of wider heads, that many directions in which features differ most."""
PRIOR_WIDTH = 3.0
"""Places over which a list's end is blurred before anything is known."""
PRIOR_COUNT = 4.0
"""Weight of that prior in observations."""

GradFunction = Callable[[Tensor, Tensor], Tensor]
"""From logits ``[B, o]`` and targets to gradients by the logits ``[B, o]``."""


@dataclass(frozen=True, eq=False)
class HeadQueries:
    """``M`` queries, as the factors of their gradients for the head.

    Attributes:
        features: Inputs of the head ``[M, i]``.
        grads: Gradients by its output for the given labels, ``[M, o]``.
        predicted_grads: The same for the predicted labels; ``None`` where predictions have no loss.
    """

    features: Tensor
    grads: Tensor
    predicted_grads: Tensor | None


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """The head as it is now.

    Attributes:
        weight: ``[o, i]``.
        bias: ``[o]``, or ``None``.
        trains_bias: Whether gradients have a column for the bias.
    """

    weight: Tensor
    bias: Tensor | None
    trains_bias: bool

    def logits(self, features: Tensor) -> Tensor:
        """Logits of features ``[B, i]``."""
        return torch.nn.functional.linear(features, self.weight, self.bias)


class Shortlist:
    """Chooses what is read, a probe first, then in rounds what is most likely to be among the best of some list.

    A list holds the ``top_k`` samples of highest score for one query: harmful (most negative similarity), look-alikes
    (cosine), and teachers (similarity with the gradient for the predicted label), in this order, ``[L]`` in all. Scores
    come from the tapped features, taken to what they would be now by a ridge map that is fitted to all samples read so
    far, with its penalty chosen by their leave-one-out errors. A sample's chance to belong to a list is learned from
    the places that samples had before they were read.

    Life cycle: read the rows that ``next_rows`` gives and hand their features to ``update``, until there are none.

    Args:
        tapped: What was tapped of ``N`` samples.
        head: The head.
        queries: The queries.
        grad_fn: Gradients by the logits, in closed form.
        top_k: Length of each list.
        max_rows: How many samples may be read in all.
        num_probe: How many of them are the probe.
        seed: Seed of the probe.
        similarity: Similarity of harmful samples and teachers.
        weights: How much a sample of each kind of list counts, harmful, look-alikes and teachers.

    Attributes:
        recalls: Estimated share of the true lists that is among the rows read, for each kind of list; empty before the
            first estimate.
        recall: The same for all of them, by their weights; ``None`` before.
    """

    def __init__(
        self,
        tapped: TappedBlock,
        head: HeadWeights,
        queries: HeadQueries,
        grad_fn: GradFunction,
        *,
        top_k: int,
        max_rows: int,
        num_probe: int,
        seed: int = 0,
        similarity: Similarity = "dot",
        weights: Sequence[float] = (1.0, 1.0, 1.0),
    ) -> None:
        self.recall: float | None = None
        self.recalls: tuple[float, ...] = ()
        self._weights, self._similarity = weights, similarity
        self._tapped, self._head, self._queries, self._grad_fn, self._top_k = tapped, head, queries, grad_fn, top_k
        self._max_rows = min(max_rows, len(tapped))
        order = torch.randperm(len(tapped), generator=torch.Generator().manual_seed(seed))
        self._next: Tensor | None = order[: min(num_probe, self._max_rows)]
        self._depth = min(len(tapped), DEPTH_FACTOR * top_k)
        self._rows = order[:0]
        self._features = head.weight.new_zeros(0, head.weight.shape[1])
        self._map = head.weight.new_zeros(0)
        num_queries = len(queries.features)
        num_lists = num_queries * (2 if queries.predicted_grads is None else 3)
        self._kinds = [slice(start, start + num_queries) for start in range(0, num_lists, num_queries)]
        self._scores = self._features.new_zeros(num_lists, 0)  # of what was read, [L, read]
        self._places = order[:0].expand(num_lists, 0)  # that it would have if it were not, [L, read]
        self._num_rounds = 0
        self._scale = _scale(tapped)
        self._basis = _basis(tapped, seed)
        self._is_positive = bool((tapped.features >= 0).all())

    def next_rows(self) -> Tensor | None:
        """The rows of ``tapped`` to read next, int64; ``None`` once enough has been read."""
        return self._next

    def update(self, features: Tensor, grads: Tensor | None = None, rows: Tensor | None = None) -> None:
        """Take in what samples are now.

        Args:
            features: Current features, ``[rows, i]``.
            grads: Current gradients by the logits, ``[rows, o]``; by default those of the features.
            rows: Which rows were read; by default those of ``next_rows``. Where some of these were not, the rounds end.
        """
        assert self._next is not None
        is_probe, is_cut = not len(self._rows), rows is not None and len(rows) < len(self._next)
        rows, features = self._next if rows is None else rows, features.to(self._features)
        if grads is None:
            grads = self._grads(features, rows)
        scores = self._scores_of(features, grads.to(features))
        self._rows, self._features = torch.cat([self._rows, rows]), torch.cat([self._features, features])
        self._scores = torch.cat([self._scores, scores], dim=1)
        self._num_rounds += not is_probe
        self._map, left_out = self._fit()
        candidates, best = self._rank()
        # Where the samples that were read would stand had they not been: what the map makes of them without them.
        expected = self._compute_scores(left_out, self._rows[-MAX_FITTED:])
        self._places = torch.searchsorted(-best, -expected.contiguous())
        self._choose(candidates)
        if is_cut:
            self._next = None

    def _choose(self, candidates: Tensor) -> None:
        """The next rows, from the candidates ``[L, depth]`` of each list in order."""
        is_read = torch.zeros(len(self._tapped), dtype=torch.bool)
        is_read[self._rows] = True
        gains = torch.zeros(len(self._tapped), dtype=torch.float64)
        missed, total, recalls = 0.0, 0.0, []
        for lists, weight in zip(self._kinds, self._weights, strict=False):
            own = candidates[lists]
            unread = ~is_read[own]
            recall, chances = self._estimate(lists, unread)
            recalls.append(recall)
            gains.index_add_(0, own[unread], weight * chances.expand(own.shape)[unread])
            total += weight * len(own) * self._top_k
            missed += weight * len(own) * self._top_k * (1 - recall)
        self.recalls, self.recall = tuple(recalls), 1 - missed / total
        room = self._max_rows - len(self._rows)
        if room <= 0 or self.recall >= TARGET_RECALL or self._num_rounds >= NUM_ROUNDS:
            self._next = None
            return
        gains, order = gains.sort(descending=True, stable=True)
        number = int((missed - gains.cumsum(0) > (1 - TARGET_RECALL) * total).sum()) + 1
        number = min(number, -(-room // (NUM_ROUNDS - self._num_rounds)), int((gains > 0).sum()))
        self._next = order[:number] if number else None

    def _estimate(self, lists: slice, unread: Tensor) -> tuple[float, Tensor]:
        """Share of some lists' true members that was read, and the chances of their places ``[depth]``."""
        if len(self._rows) == len(self._tapped):
            return 1.0, torch.zeros(unread.shape[1], dtype=torch.float64)
        total = len(unread) * self._top_k
        edges = _edges(self._depth)
        widths = edges.diff()
        num_unread = torch.zeros(len(edges), dtype=torch.float64)
        of_place = torch.arange(len(widths)).repeat_interleave(widths)[: unread.shape[1]]
        num_unread.index_add_(0, of_place, unread.sum(0).double())
        num_unread[-1] = len(unread) * (len(self._tapped) - len(self._rows)) - int(unread.sum())
        hits, counts = self._count(lists, edges)
        prior = PRIOR_COUNT * _prior(edges, self._top_k)
        low, high = 0.0, 1.0
        for _ in range(12):  # what is missed shifts the end of the lists that are known, and with it what is missed
            recall = (low + high) / 2
            # Members among what was read, by its own order: the last ones are none if others are missed.
            weights = (recall * self._top_k - torch.arange(len(hits), dtype=torch.float64)).clamp(0, 1)
            chances = (weights @ hits + prior) / (counts + PRIOR_COUNT)
            missed = float(chances @ num_unread)
            low, high = (recall, high) if recall < 1 - missed / total else (low, recall)
        return recall, chances[of_place]

    def _count(self, lists: slice, edges: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the samples read stood in each bin of places, and of them the first, second, ... of a list.

        Returns:
            The latter ``[top_k, bins]``, the former ``[bins]``; the last bin is for places beyond all edges.
        """
        scores, places = self._scores[lists], self._places[lists]
        bins = torch.bucketize(places, edges[1:], right=True)
        counts = torch.bincount(bins.flatten(), minlength=len(edges)).double()
        best = scores.topk(min(self._top_k, scores.shape[1]), dim=1).indices - (scores.shape[1] - bins.shape[1])
        is_fitted = best >= 0
        hits = torch.zeros(best.shape[1], len(edges), dtype=torch.float64)
        where = torch.arange(best.shape[1]) * len(edges) + bins.gather(1, best.clamp(min=0))
        hits.view(-1).index_add_(0, where[is_fitted], torch.ones(int(is_fitted.sum()), dtype=torch.float64))
        return hits, counts

    def _rank(self) -> tuple[Tensor, Tensor]:
        """Rows in the first places of each list, by what is known now, and their scores, both ``[L, depth]``."""
        best: Tensor | None = None
        rows: Tensor | None = None
        for start in range(0, len(self._tapped), BLOCK_ROWS):
            block = torch.arange(start, min(start + BLOCK_ROWS, len(self._tapped)))
            scores = self._compute_scores(self._mapped(block), block)
            where = (self._rows >= start) & (self._rows < start + len(block))
            scores[:, self._rows[where] - start] = self._scores[:, where]
            ids = block.expand(len(scores), -1)
            if best is not None and rows is not None:
                scores, ids = torch.cat([best, scores], dim=1), torch.cat([rows, ids], dim=1)
            best, columns = scores.topk(min(self._depth, scores.shape[1]), dim=1)
            rows = ids.gather(1, columns)
        assert best is not None
        assert rows is not None
        return rows, best

    def _compute_scores(self, features: Tensor, rows: Tensor) -> Tensor:
        """Scores of samples with these features in every list, ``[L, rows]``."""
        return self._scores_of(features, self._grads(features, rows))

    def _grads(self, features: Tensor, rows: Tensor) -> Tensor:
        """Gradients by the logits of samples with these features, ``[rows, o]``."""
        return self._grad_fn(self._head.logits(features), self._tapped.targets[rows]).to(features)

    def _scores_of(self, features: Tensor, grads: Tensor) -> Tensor:
        queries, bias = self._queries, float(self._head.trains_bias)
        products = queries.features @ features.T + bias
        squares = _squares(features, grads, bias)
        parts = []
        for number, query_grads in enumerate((queries.grads, queries.predicted_grads)):
            if query_grads is None:
                continue
            dots = (query_grads @ grads.T) * products
            own = _squares(queries.features, query_grads, bias)
            scores = compute_similarity(self._similarity, dots, own, squares)
            parts += [-scores, compute_similarity("cosine", dots, own, squares)] if number == 0 else [scores]
        return torch.cat(parts)

    def _inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the map ``[rows, r]``, and what it corrects, ``[rows, i]``, both float32."""
        tapped = self._tapped
        averages = tapped.averages[rows].float()
        logits = tapped.logits[rows].float()
        logits = self._scale * (logits - logits.mean(1, keepdim=True) if logits.shape[1] > 1 else logits)
        ones = averages.new_ones(len(rows), 1)
        own = (self._narrowed(each) for each in (tapped.features[rows].float(), averages))
        return torch.cat([*own, logits, ones], dim=1), averages

    def _narrowed(self, features: Tensor) -> Tensor:
        return features if self._basis is None else features @ self._basis

    def _widened(self, averages: Tensor, change: Tensor) -> Tensor:
        """Features after a change from the averages."""
        change = change.to(averages.dtype)
        return self._clipped(averages + (change if self._basis is None else change @ self._basis.T))

    def _fit(self) -> tuple[Tensor, Tensor]:
        """The map ``[r, i]``, and what maps without each sample make of those read, ``[read, i]``."""
        inputs, averages = self._inputs(self._rows[-MAX_FITTED:])
        inputs = inputs.double()
        squares, right = torch.linalg.eigh(inputs.T @ inputs)  # rather than singular values, which take longer
        turned, squares = inputs @ right, squares.clamp(min=0)
        wanted = self._narrowed(self._features[-MAX_FITTED:].float() - averages).double()
        projected = turned.T @ wanted
        best = float("inf")
        for penalty in PENALTIES:
            weights = 1 / (squares + penalty * squares.mean()).clamp(min=1e-30)
            coefficients = weights[:, None] * projected
            errors = (wanted - turned @ coefficients) / (1 - turned.square() @ weights).clamp(min=1e-3)[:, None]
            if float(errors.square().mean()) < best:
                best = float(errors.square().mean())
                solution, left_out = right @ coefficients, self._widened(averages, wanted - errors)
        return solution, left_out

    def _mapped(self, rows: Tensor) -> Tensor:
        inputs, averages = self._inputs(rows)
        return self._widened(averages, inputs @ self._map.to(inputs.dtype))

    def _clipped(self, features: Tensor) -> Tensor:
        # After a ReLU there is nothing below zero, and the map does not know.
        return (features.clamp(min=0) if self._is_positive else features).to(self._features.dtype)


def _squares(features: Tensor, grads: Tensor, bias: float) -> Tensor:
    """Squared norms of gradients."""
    squares: Tensor = (features.square().sum(1) + bias) * grads.square().sum(1)
    return squares


def _scale(tapped: TappedBlock) -> float:
    """A factor that makes logits as large as features, so that one penalty suits both."""
    features, logits = (values[:BLOCK_ROWS].float() for values in (tapped.features, tapped.logits))
    return float(features.square().mean().sqrt() / logits.square().mean().sqrt().clamp(min=1e-6))


def _basis(tapped: TappedBlock, seed: int) -> Tensor | None:
    """Directions in which features of a wide head differ most, ``[i, MAX_WIDTH]``, by a randomised range finder."""
    width = tapped.features.shape[1]
    if width <= MAX_WIDTH:
        return None
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(tapped), generator=generator)[:MAX_FITTED]
    features = tapped.averages[rows].float()
    features = features - features.mean(0)
    basis = torch.randn(width, MAX_WIDTH, generator=generator)
    for _ in range(2):
        basis = torch.linalg.qr(features.T @ (features @ basis)).Q
    return basis


def _prior(edges: Tensor, top_k: int) -> Tensor:
    """Chance of each bin to hold members before anything is known; none beyond all edges."""
    chances = torch.sigmoid((top_k - edges[:-1].double() - 0.5) / PRIOR_WIDTH)
    return torch.cat([chances, chances.new_zeros(1)])


def _edges(depth: int) -> Tensor:
    """Edges of bins of places, wider and wider."""
    edges: Sequence[int] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32]
    edges = [edge for edge in edges if edge < depth]
    while edges[-1] < depth:
        edges.append(min(depth, max(edges[-1] + 1, edges[-1] * 3 // 2)))
    return torch.tensor(edges)
