"""Markdown tables of a report, for viewers that render Markdown."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from lightning_gradsim.report import InfluentialSample, QueryReport, Report
from lightning_gradsim.suspects import Suspect

# As HTML entities these stay text in every Markdown dialect; backslash escapes differ between dialects inside tables.
_MARKUP = {ord(character): f"&#{ord(character)};" for character in "\\`*_[]{}<>&|~!#$^:@"}
# Control characters, lone surrogates (TensorBoard's UTF-8 refuses them), line and paragraph separators.
_INVISIBLE = frozenset({"Cc", "Cs", "Zl", "Zp"})
SAMPLES_PER_CELL = 4
SUSPECT_HEADS = ("rank", "training sample", "label", "suggested label", "probability", "score", "flagged")
MISTAKE_HEADS = (
    "validation sample",
    "label",
    "prediction",
    "probability",
    "loss",
    "label looks wrong",
    "harmful",
    "look-alikes",
)


def suspects_markdown(report: Report, limit: int = 20) -> str:
    """Table of the training samples whose labels are most likely wrong.

    Args:
        report: What the validation showed.
        limit: Most rows.

    Returns:
        A line that says what the table is, then the table in Markdown; the line alone where no training sample was
        scored. Class names are escaped.
    """
    suspects = report.suspects
    if not len(suspects):
        return "No training sample was scored.\n"
    shown = suspects[:limit]
    intro = (
        f"Training samples by how wrong their label looks: the first {len(shown):,} of {len(suspects):,}. "
        f"For {suspects.num_flagged:,} of all, the model predicts another label than the given one (flagged)."
    )
    confusion = report.confusion_in_words()
    if confusion:
        intro += f" Flagged labels, and those suggested instead: {_escape(confusion)}."
    rows = [_suspect_cells(report, rank, suspect) for rank, suspect in enumerate(shown, start=1)]
    return _to_table(intro, SUSPECT_HEADS, rows)


def mistakes_markdown(report: Report, limit: int = 20) -> str:
    """Table of the misclassified validation samples and the training samples behind them.

    Args:
        report: What the validation showed.
        limit: Most rows.

    Returns:
        A line that says what the table is, then the table in Markdown; the line alone where there is no query. Class
        names are escaped.
    """
    if not report.queries:
        return "No misclassified validation sample.\n"
    shown = report.queries[:limit]
    intro = (
        f"Mistakes on the validation data, {len(shown):,} shown, each with the training samples that pushed towards it "
        f"(harmful, by {_escape(report.similarity)}) and those most alike to the model (look-alikes, by cosine)."
    )
    return _to_table(intro, MISTAKE_HEADS, [_mistake_cells(report, query) for query in shown])


def _suspect_cells(report: Report, rank: int, suspect: Suspect) -> tuple[str, ...]:
    return (
        str(rank),
        str(suspect.sample_id),
        report.name_of(suspect.label),
        "" if suspect.suggested_label is None else report.name_of(suspect.suggested_label),
        _to_percentage(suspect.probability),
        f"{suspect.score:.3g}",
        "yes" if suspect.flagged else "",
    )


def _mistake_cells(report: Report, query: QueryReport) -> tuple[str, ...]:
    return (
        "" if query.sample_id is None else str(query.sample_id),
        report.name_of(query.label),
        report.name_of(query.prediction),
        _to_percentage(query.probability),
        f"{query.loss:.3g}",
        "yes" if query.label_looks_wrong else "",
        _to_list(report, query.harmful),
        _to_list(report, query.look_alikes),
    )


def _to_list(report: Report, samples: Sequence[InfluentialSample]) -> str:
    return ", ".join(f"{sample.sample_id} ({report.name_of(sample.label)})" for sample in samples[:SAMPLES_PER_CELL])


def _to_percentage(probability: float | None) -> str:
    return "" if probability is None else f"{probability:.0%}"


def _to_table(intro: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ("---",) * len(columns), *([_escape(cell) for cell in row] for row in rows)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{intro}\n\n{table}\n"


def _escape(text: str) -> str:
    """One line that Markdown shows as it is; what no viewer can show becomes a space."""
    visible = [" " if unicodedata.category(character) in _INVISIBLE else character for character in text]
    return " ".join("".join(visible).split()).translate(_MARKUP)
