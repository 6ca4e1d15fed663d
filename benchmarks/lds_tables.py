"""How well predictions of `lds.py` rank what retraining does, by variant, and the tables of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Split = tuple[slice, slice]
"""Queries and halves."""
CHOICE: Split = (slice(0, 250), slice(0, 50))
REPORT: Split = (slice(250, 500), slice(50, 100))

EPOCHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 40, 50)
SUMS = {
    "1-4": (1, 2, 3, 4),
    "1-6": (1, 2, 3, 4, 5, 6),
    "1, 2, 4, 8": (1, 2, 4, 8),
    "1-4, 6, 8, 10": (1, 2, 3, 4, 6, 8, 10),
    "2-10": (2, 3, 4, 5, 6, 8, 10),
    "1, 2, 4, 8, 15, 30, 50": (1, 2, 4, 8, 15, 30, 50),
    "10, 20, 30, 40, 50": (10, 20, 30, 40, 50),
    "all 14": EPOCHS,
}


def lds(predicted: Tensor, losses: Tensor, split: Split = (slice(None), slice(None))) -> float:
    """Mean over queries of the rank correlation over halves.

    Args:
        predicted: Predicted gain of each query from each half, ``[queries, halves]``.
        losses: Loss of each query after training on each half, ``[halves, queries]``.
        split: Which of them count.
    """
    one, other = _ranks(predicted[split]), _ranks(-losses.T[split])
    correlations = (one * other).sum(1) / (one.norm(dim=1) * other.norm(dim=1)).clamp(min=1e-12)
    return float(correlations.mean())


def _ranks(values: Tensor) -> Tensor:
    """Centred ranks along the last dimension, ties averaged."""
    ordered = values.sort(1).values.contiguous()
    first, last = (torch.searchsorted(ordered, values.contiguous(), right=right) for right in (False, True))
    ranks = (first + last - 1).double() / 2
    return ranks - ranks.mean(1, keepdim=True)


def normalised(values: Tensor) -> Tensor:
    """Predictions of each query with a spread of 1 over halves."""
    return values / values.std(1, keepdim=True).clamp(min=1e-30)


def ways(
    epochs: Sequence[int], sums: Mapping[str, Sequence[int]]
) -> dict[str, Callable[[Mapping[int, Tensor]], Tensor]]:
    """From predictions by epoch to one: a single checkpoint, sums along the run, sums of equal weights."""

    def single(epoch: int) -> Callable[[Mapping[int, Tensor]], Tensor]:
        return lambda by_epoch: by_epoch[epoch]

    def total(chosen: Sequence[int], form: Callable[[Tensor], Tensor]) -> Callable[[Mapping[int, Tensor]], Tensor]:
        return lambda by_epoch: torch.stack([form(by_epoch[epoch]) for epoch in chosen]).sum(0)

    result = {f"epoch {epoch}": single(epoch) for epoch in epochs}
    result |= {f"sum {name}": total(chosen, lambda values: values) for name, chosen in sums.items()}
    return result | {f"equal {name}": total(chosen, normalised) for name, chosen in sums.items()}


def tables(result: Mapping[str, Any], last_epoch: int) -> str:
    """Markdown: by score, by damping, by layers, by epochs; each with the rest chosen on the choice split."""
    rows = result["rows"]
    parts = [f"Truth against itself, trained again: {result['ceiling']:.3f}", *summary(rows, last_epoch)]
    best = max((row for row in rows if row["score"] == "influence"), key=lambda row: row["choice"])
    for column in ("damping", "layers", "way", "moments"):
        fixed = {key: best[key] for key in ("score", "moments", "damping", "layers", "way") if key != column}
        alike = [row for row in rows if all(row[key] == value for key, value in fixed.items())]
        parts += ["", ", ".join(f"{key} {value}" for key, value in fixed.items()), "", _row([column, "score"])]
        parts += [_row(["---", "---"]), *(_row([str(row[column]), figure(row)]) for row in alike)]
    return "\n".join(parts)


def summary(rows: Sequence[Mapping[str, Any]], last_epoch: int) -> list[str]:
    """Lines of a Markdown table: by score, at the last checkpoint, the best one, and the best sums along the run."""
    final = f"epoch {last_epoch}"
    names = list(dict.fromkeys((row["score"], row["moments"]) for row in rows))
    forms = {
        "last checkpoint": lambda way: way == final,
        "one checkpoint": lambda way: way.startswith("epoch"),
        "sum": lambda way: way.startswith("sum"),
        "sum of equal weights": lambda way: way.startswith("equal"),
    }
    lines = [_row(["score", "moments", *forms]), _row(["---"] * (2 + len(forms)))]
    for name in names:
        of_score = [row for row in rows if (row["score"], row["moments"]) == name]
        cells = [_best([row for row in of_score if fits(row["way"])]) for fits in forms.values()]
        lines.append(_row([name[0], name[1] or "-", *cells]))
    return lines


def figure(row: Mapping[str, Any]) -> str:
    """Mean over runs and their standard deviation on the report split."""
    spread = statistics.stdev(row["report"]) if len(row["report"]) > 1 else 0.0
    return f"{statistics.mean(row['report']):.3f} ± {spread:.3f}"


def _best(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "-"
    best = max(rows, key=lambda row: row["choice"])
    damping = f", damping {best['damping']:g}" if best["damping"] else ""
    return f"{figure(best)} ({best['way']}, layers {best['layers']}{damping})"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
