"""Training samples whose labels may be wrong, in one table of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from lightning_gradsim.arguments import check_count
from lightning_gradsim.plain_values import Label, to_frame, to_label, write_csv

TRUSTED = "trusted"
SUSPECT_PARTS = ("log_margin", "knn", TRUSTED)
"""Scores that stand beside the one that ranks, where they are known."""
SHOWN = 10
SECOND_WITNESS = 1.0
"""Votes of the neighbours against a label, from -1 to 2, beyond which they contradict it, too."""
SUSPECT_COLUMNS = (
    "rank",
    "sample_id",
    "label",
    "suggested_label",
    "probability",
    "score",
    "flagged",
    *SUSPECT_PARTS,
    "visits",
    "reports_flagged",
    "reports_judged",
)


@dataclass(frozen=True)
class Suspect:
    """A training sample whose label may be wrong.

    Attributes:
        sample_id: Index into the training dataset.
        label: Its given label.
        suggested_label: The most probable other class; ``None`` where there are no classes.
        probability: Probability of the suggested label, in [0, 1]; ``None`` where there are no classes.
        score: Mislabel score, higher is more suspect.
        flagged: Whether the model's prediction differs from the given label.
        parts: Other scores of it, by name.
        visits: In how many training steps it was seen; ``None`` where training steps were not watched.
        reports_flagged: In how many reports of the run it was flagged, with this one; ``None`` outside a run.
        reports_judged: In how many reports of the run it was among the suspects, flagged or not; ``None`` likewise.
    """

    sample_id: int
    label: Label
    suggested_label: int | None
    probability: float | None
    score: float
    flagged: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    visits: int | None = None
    reports_flagged: int | None = None
    reports_judged: int | None = None


@dataclass(frozen=True, eq=False)
class SuspectTable(Sequence[Suspect]):
    """Training samples, the most suspect first; a sequence of ``Suspect`` built on access.

    Attributes:
        sample_ids: Indices into the training dataset, int64 ``[N]``, by falling score, ties by the smaller id.
        scores: Mislabel scores, float32 ``[N]``.
        labels: Given labels, int32 or float32 ``[N]``, or int8 ``[N, L]`` for multi-label tasks.
        suggested_labels: Most probable other class, int32 ``[N]``, or ``None``.
        probabilities: Probability of the suggested label, ``[N]``, or ``None``.
        flagged: Whether the prediction differs from the label, bool ``[N]``.
        score_name: What the score is: ``self_influence`` of one pass, or a score of all training steps.
        parts: Other scores, by name, float32 ``[N]``.
        visits: In how many training steps each was seen, int64 ``[N]``, or ``None``.
        upper_estimate: An upper estimate of the number of wrong labels, or ``None``.
        reports_flagged: In how many reports of the run each was flagged, int16 ``[N]``, or ``None``.
        reports_judged: In how many reports of the run each was among the suspects, int16 ``[N]``, or ``None``.
    """

    sample_ids: Tensor
    scores: Tensor
    labels: Tensor
    suggested_labels: Tensor | None
    probabilities: Tensor | None
    flagged: Tensor
    score_name: str = "self_influence"
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    visits: Tensor | None = None
    upper_estimate: int | None = None
    reports_flagged: Tensor | None = None
    reports_judged: Tensor | None = None

    def __len__(self) -> int:
        """Number of scored training samples."""
        return len(self.sample_ids)

    def __repr__(self) -> str:
        """The first ten."""
        lines = [f"{len(self):,} training samples by `{self.score_name}`, {self.num_flagged:,} flagged"]
        for suspect in self[:SHOWN]:
            other = "" if suspect.suggested_label is None else f", rather {suspect.suggested_label}"
            lines.append(f"  #{suspect.sample_id}: labelled {suspect.label}{other}, score {suspect.score:.3g}")
        return "\n".join([*lines, *(["  ..."] if len(self) > SHOWN else [])])

    @property
    def num_flagged(self) -> int:
        """How many training samples the model predicts otherwise than labelled."""
        return int(self.flagged.sum())

    @overload
    def __getitem__(self, index: int) -> Suspect: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Suspect, ...]: ...

    def __getitem__(self, index: int | slice) -> Suspect | tuple[Suspect, ...]:
        """One suspect, or a tuple of them for a slice."""
        if isinstance(index, slice):
            return tuple(self._suspect(i) for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"`suspects[{index}]` does not exist; there are {len(self)} scored training samples.")
        return self._suspect(index % len(self))

    def _suspect(self, index: int) -> Suspect:
        return Suspect(
            sample_id=int(self.sample_ids[index]),
            label=to_label(self.labels[index]),
            suggested_label=None if self.suggested_labels is None else int(self.suggested_labels[index]),
            probability=None if self.probabilities is None else float(self.probabilities[index]),
            score=float(self.scores[index]),
            flagged=bool(self.flagged[index]),
            parts={name: float(values[index]) for name, values in self.parts.items()},
            visits=None if self.visits is None else int(self.visits[index]),
            reports_flagged=None if self.reports_flagged is None else int(self.reports_flagged[index]),
            reports_judged=None if self.reports_judged is None else int(self.reports_judged[index]),
        )

    @property
    def confirmed(self) -> Tensor:
        """Which of the flagged samples have a second witness, bool ``[N]``.

        That is where the strongest other label has more than twice as many votes among the nearest samples as the given
        one (``knn`` above 1). Where neighbours are not known, all that are flagged.
        """
        votes = self.scores if self.score_name == "knn" else self.parts.get("knn")
        return self.flagged if votes is None else self.flagged & (votes > SECOND_WITNESS)

    def rows_to_mend(self, limit: int | None = None, *, all_flagged: bool = False) -> Tensor:
        """Rows of the samples whose labels are to be changed, the most suspect first.

        Args:
            limit: At most that many.
            all_flagged: Whether those without a second witness are among them.

        Returns:
            Rows, int64.

        Raises:
            TypeError: If the limit is no whole number.
            ValueError: If it is below 0.
        """
        check_count("limit", limit, optional=True, at_least=0)
        return (self.flagged if all_flagged else self.confirmed).nonzero().flatten()[:limit]

    def confusion(self) -> dict[tuple[int, int], int]:
        """Which labels are taken for which.

        Returns:
            Number of flagged samples by given and suggested label, the most frequent pair first, ties by the labels;
            empty where there are no suggested labels.
        """
        if self.suggested_labels is None or self.labels.ndim > 1:
            return {}
        pairs = torch.stack([self.labels, self.suggested_labels], dim=1)[self.flagged].long()
        found, counts = pairs.unique(dim=0, return_counts=True)
        order = counts.argsort(descending=True, stable=True)
        return {
            (given, other): count
            for (given, other), count in zip(found[order].tolist(), counts[order].tolist(), strict=True)
        }

    def to_rows(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Rows with the columns of ``suspects.csv``, at most ``limit`` of them."""
        number = len(self) if limit is None else min(limit, len(self))
        none = [None] * number
        columns = (
            range(1, number + 1),
            self.sample_ids[:number].tolist(),
            [to_label(label) for label in self.labels[:number]]
            if self.labels.ndim > 1
            else self.labels[:number].tolist(),
            none if self.suggested_labels is None else self.suggested_labels[:number].tolist(),
            none if self.probabilities is None else self.probabilities[:number].tolist(),
            self.scores[:number].tolist(),
            self.flagged[:number].tolist(),
            *(self.parts[name][:number].tolist() if name in self.parts else none for name in SUSPECT_PARTS),
            *(
                none if values is None else values[:number].tolist()
                for values in (self.visits, self.reports_flagged, self.reports_judged)
            ),
        )
        return [dict(zip(SUSPECT_COLUMNS, row, strict=True)) for row in zip(*columns, strict=True)]

    def to_frame(self) -> Any:
        """``to_rows`` as a data frame of pandas, or of polars where only that is installed."""
        return to_frame(self.to_rows(), SUSPECT_COLUMNS)

    def to_csv(self, path: str | Path | None = None, limit: int | None = None) -> str:
        """CSV text of ``to_rows``; also written to ``path`` if one is given."""
        return write_csv(self.to_rows(limit), SUSPECT_COLUMNS, path)

    @staticmethod
    def empty() -> SuspectTable:
        """A table without samples."""
        none = torch.empty(0)
        return SuspectTable(none.long(), none, none.int(), None, None, none.bool())
