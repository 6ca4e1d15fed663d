"""Reading again what training steps point at: samples are chosen round by round, and scored exactly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.engine import EngineSettings
from lightning_gradsim.factors import Factors, OuterFactors
from lightning_gradsim.head_gradients import output_grads
from lightning_gradsim.query_side import QuerySide
from lightning_gradsim.shortlist import HeadQueries, HeadWeights, Shortlist
from lightning_gradsim.tapped_samples import TappedBlock
from lightning_gradsim.train_pass import SampleReader

LISTS = ("harmful", "look_alikes", "teachers")
PROBE_SHARE, MIN_PROBE, MAX_PROBE = 0.03, 64, 1024
"""Samples that are read before anything is chosen."""
MAX_SHARE = 1.0
"""Share of the samples shown by training steps that is read at most: none is a limit but the time."""
UNSEEN_SHARE = 0.125
"""Share of the samples that no training step has shown which is read, drawn at random."""
MAX_UNSEEN = 0.5
"""Share of the training samples that no step has shown beyond which all are read."""
SIMILARITIES = ("dot", "cosine", "asymmetric")
"""Similarities that shortlists are known to be good for."""

ReadFunction = Callable[[SampleReader, float | None], Iterable[tuple[Tensor, Any]]]
"""From samples, and seconds for them, to sample ids ``[B]`` and batch, on the module's device."""


@dataclass(frozen=True, eq=False)
class Tapped:
    """What training steps have shown.

    Attributes:
        head: Name of the head.
        samples: The newest visit of each sample.
    """

    head: str
    samples: TappedBlock


@dataclass(frozen=True)
class Finding:
    """What became of reading again, beside the scores.

    Attributes:
        reason: Why samples were read as without training steps; ``None`` where they were chosen.
        recall: Estimated share of the exact lists that is among the samples read, by list; empty without queries.
        num_unseen: Samples that no training step has shown.
    """

    reason: str | None = None
    recall: Mapping[str, float] | None = None
    num_unseen: int = 0

    def notes(self, total: int) -> Iterator[str]:
        """What limits a report for which samples were chosen.

        Args:
            total: Number of training samples.

        Yields:
            Sentences.
        """
        if self.recall:
            each = ", ".join(f"{name.replace('_', '-')} {share:.0%}" for name, share in self.recall.items())
            yield (
                "scores are exact, of the samples read; of the lists that a pass over all samples would give, an "
                f"estimated share is among them: {each}"
            )
        if self.num_unseen:
            yield (
                f"no training step has shown {self.num_unseen:,} of {total:,} training samples (not drawn yet, or "
                "beyond `max_state_mb`): a part of them was read, drawn at random"
            )


NOTHING_CHOSEN = Finding()


class Rereading:
    """Rounds of samples for ``engine.score_shard``: a probe, then what is most likely to be in a list.

    Args:
        module: The user's module.
        adapter: Reads batches; bound to the module.
        tapped: What training steps have shown.
        everything: The training samples that are to be compared with.
        settings: Similarity, length of the lists.
        read: Reads samples.
        read_all: What is read instead where nothing can be chosen.
        seconds: Time for all rounds; ``None`` for no end. One batch is read in any case.
        seed: Seed of the probe.
        is_reader: Whether this process reads; another one does otherwise.

    Attributes:
        finding: What became of it; settled once the rounds are over.
    """

    def __init__(
        self,
        module: nn.Module,
        adapter: Adapter,
        tapped: Tapped,
        everything: SampleReader,
        settings: EngineSettings,
        read: ReadFunction,
        read_all: Callable[[], Iterable[tuple[Tensor, Any]]],
        *,
        seconds: float | None,
        seed: int,
        is_reader: bool,
    ) -> None:
        self.finding = Finding()
        self._module, self._adapter, self._settings = module, adapter, settings
        self._head, self._everything = tapped.head, everything
        self._read, self._read_all = read, read_all
        self._seconds, self._seed, self._is_reader = seconds, seed, is_reader
        sorted_ids, order = everything.ids.sort()
        places = torch.searchsorted(sorted_ids, tapped.samples.ids).clamp(max=len(order) - 1)
        is_there = sorted_ids[places] == tapped.samples.ids
        self._tapped = tapped.samples.rows(is_there)
        self._indices = order[places[is_there]]  # of its rows, in everything
        is_unseen = torch.ones(len(everything), dtype=torch.bool)
        is_unseen[self._indices] = False
        self._unseen = is_unseen.nonzero().flatten()
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def batches(self, queries: QuerySide | None) -> Iterator[Iterable[tuple[Tensor, Any]]]:
        """Rounds of batches; ``see`` must have taken in one before the next is asked for."""
        reason = self._find_problem(queries)
        self.finding = Finding(reason, num_unseen=len(self._unseen))
        if reason is not None:
            yield self._read_all()
        elif self._is_reader:
            begin = time.perf_counter()
            yield from self._rounds(queries, lambda: self._left(begin))

    def see(self, ids: Tensor, factors: Mapping[str, Factors]) -> None:
        """Keep the features and gradients of a round."""
        own = factors.get(self._head)
        if self.finding.reason is None and isinstance(own, OuterFactors):
            self._seen.append((ids.cpu(), _features(own), own.output_grads[:, 0, 0].float().cpu()))

    def _find_problem(self, queries: QuerySide | None) -> str | None:
        if self._settings.similarity not in SIMILARITIES:
            return f"training steps do not tell of `similarity={self._settings.similarity!r}`"
        share = len(self._unseen) / max(1, len(self._everything))
        if share > MAX_UNSEEN:
            return f"training steps have shown only {1 - share:.0%} of the training samples"
        if queries is None:
            return None
        if set(queries.factors) != {self._head}:
            names = ", ".join(f"`{name}`" for name in list(queries.factors)[:3])
            return f"training steps tell of the head alone (`{self._head}`), not of {names}"
        factors = queries.factors[self._head]
        if not isinstance(factors, OuterFactors) or factors.activations is None:
            return f"of the head (`{self._head}`) only the bias is compared"
        return None

    def _left(self, begin: float) -> float | None:
        return None if self._seconds is None else self._seconds - (time.perf_counter() - begin)

    def _rounds(
        self, queries: QuerySide | None, left: Callable[[], float | None]
    ) -> Iterator[Iterable[tuple[Tensor, Any]]]:
        shortlist = None if queries is None else self._make_shortlist(queries)
        rows = self._probe() if shortlist is None else shortlist.next_rows()
        while rows is not None:
            self._seen = []
            yield self._read(self._everything.choose(self._indices[rows]), left())
            if shortlist is None or not self._take_in(shortlist, rows):
                break
            rows = None if _is_over(left()) else shortlist.next_rows()
        self._seen = []
        num_read = 0
        if len(self._unseen) and not _is_over(left()):
            order = torch.randperm(len(self._unseen), generator=torch.Generator().manual_seed(self._seed))
            chosen = self._unseen[order[: -(-len(order) // round(1 / UNSEEN_SHARE))]]
            yield self._read(self._everything.choose(chosen), left())
            num_read = sum(len(ids) for ids, _, _ in self._seen)
            self._seen = []
        if shortlist is not None:
            share = len(self._unseen) / len(self._everything)
            known = num_read / len(self._everything)
            recall = {name: (1 - share) * each + known for name, each in zip(LISTS, shortlist.recalls, strict=False)}
            self.finding = Finding(None, recall, len(self._unseen))

    def _take_in(self, shortlist: Shortlist, rows: Tensor) -> bool:
        """Hand on what a round has shown; whether that is of any use."""
        if not self._seen:
            return False
        ids, features, grads = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        if not bool(features.isfinite().all() and grads.isfinite().all()):
            return False  # the report fails, and names the samples
        by_id, order = self._tapped.ids[rows].sort()
        shortlist.update(features, grads, rows[order[torch.searchsorted(by_id, ids)]])
        return True

    def _make_shortlist(self, queries: QuerySide) -> Shortlist:
        factors, layer = queries.factors[self._head], self._module.get_submodule(self._head)
        assert isinstance(factors, OuterFactors)
        assert isinstance(layer, nn.Linear)
        number = len(queries.records)
        grads = factors.output_grads[:, 0, 0].float().cpu()
        bias: Tensor | None = layer.bias
        return Shortlist(
            self._tapped,
            HeadWeights(
                layer.weight.detach().float().cpu(), None if bias is None else bias.detach().float().cpu(), factors.bias
            ),
            HeadQueries(
                _features(factors)[:number], grads[:number], grads[number:] if queries.records.has_teachers else None
            ),
            lambda logits, targets: output_grads(self._adapter, logits, targets),
            top_k=self._settings.top_k,
            max_rows=int(MAX_SHARE * len(self._tapped)),
            num_probe=len(self._probe()),
            seed=self._seed,
            similarity=self._settings.similarity,
        )

    def _probe(self) -> Tensor:
        number = min(MAX_PROBE, max(MIN_PROBE, int(PROBE_SHARE * len(self._tapped))))
        order = torch.randperm(len(self._tapped), generator=torch.Generator().manual_seed(self._seed))
        return order[:number]


def _features(factors: OuterFactors) -> Tensor:
    assert factors.activations is not None
    return factors.activations[:, 0, 0].float().cpu()


def _is_over(left: float | None) -> bool:
    return left is not None and left <= 0
