"""Markdown tables of a report, for viewers that render Markdown."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

from lightning_gradsim.records import InfluentialSample, QueryReport
from lightning_gradsim.report import Report
from lightning_gradsim.suspects import Suspect
from lightning_gradsim.views.exhibits import Exhibit
from lightning_gradsim.views.pairs import find_pairs
from lightning_gradsim.views.sortable import cut, percent, suggested_label
from lightning_gradsim.views.tiles import doubted_label, score_text, times_flagged
from lightning_gradsim.views.values import ValueScale, make_scale

# As HTML entities these stay text in every Markdown dialect; backslash escapes differ between dialects inside tables.
_MARKUP = {ord(character): f"&#{ord(character)};" for character in "\\`*_[]{}<>&|~!#$^:@"}
# A paragraph that begins like this is a list.
_LIST_MARK = re.compile(r"^(\d*)([-+.)])(?=\s)")
# Control characters, lone surrogates (TensorBoard's UTF-8 refuses them), line and paragraph separators.
_INVISIBLE = frozenset({"Cc", "Cs", "Zl", "Zp"})
SAMPLES_PER_CELL = 4
MAX_VALUES = 8
# TensorBoard breaks words anywhere as soon as a table is wider than its card of 930 px. So columns are few, and long
# texts are broken here.
LINE_LENGTH = 40
SUSPECT_HEADS = ("rank", "sample", "label", "suggested", "score", "flagged")
MISTAKE_HEADS = ("sample", "label", "prediction", "loss", "harmful", "look-alikes")
PAIR_HEADS = ("label", "prediction", "mistakes", "typical harmful samples (given label)")
DETAIL_HEADS = ("", "sample", "label", "", "score")

Lines = tuple[str, ...]
"""A cell: its lines, not escaped."""


def suspects_markdown(report: Report, exhibits: Mapping[int, Exhibit] | None = None, *, limit: int = 20) -> str:
    """Table of the training samples whose labels are most likely wrong.

    Args:
        report: What the validation showed.
        exhibits: What is shown of training samples, by sample id: texts get a column.
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
    if not suspects.num_flagged:
        intro += " None is flagged: every ranking has first samples, one of clean labels, too."
    confusion = report.confusion_in_words()
    if confusion:
        intro += f" Flagged labels, and those suggested instead: {_escape(confusion)}."
    rows = [_suspect_cells(report, rank, suspect) for rank, suspect in enumerate(shown, start=1)]
    texts = [() if exhibits is None else _lines_of(exhibits.get(suspect.sample_id)) for suspect in shown]
    if not any(texts):
        return _to_table(intro, SUSPECT_HEADS, rows)
    rows = [[*cells, text] for cells, text in zip(rows, texts, strict=True)]
    return _to_table(intro, (*SUSPECT_HEADS, "text"), rows)


def mistakes_markdown(
    report: Report,
    query_exhibits: Sequence[Exhibit | None] = (),
    train_exhibits: Mapping[int, Exhibit] | None = None,
    *,
    limit: int = 20,
) -> str:
    """Table of the misclassified validation samples and the training samples behind them.

    Args:
        report: What the validation showed.
        query_exhibits: What is shown of the first queries, in their order.
        train_exhibits: What is shown of training samples, by sample id.
        limit: Most rows.

    Returns:
        A line that says what the table is, then the table in Markdown; the line alone where there is no query. Where
        samples have texts or named values, a table of these follows for each query that is shown; then what limits the
        report. Names and texts are escaped.
    """
    if not report.queries:
        return "No misclassified validation sample.\n"
    shown = report.queries[:limit]
    intro = (
        f"Mistakes on the validation data, {len(shown):,} shown, each with the training samples that pushed towards it "
        f"(harmful, by {_escape(report.similarity)}) and those most alike to the model (look-alikes, by cosine); "
        "in brackets, their given labels."
    )
    overview = _to_table(intro, MISTAKE_HEADS, [_mistake_cells(report, query) for query in shown])
    notes = ["What limits this report:\n", *(f"- {_escape(note)}" for note in report.notes), ""] if report.notes else []
    return "\n".join([overview, *_details(report, query_exhibits, train_exhibits or {}), *notes])


def class_pairs_markdown(report: Report, limit: int = 20) -> str:
    """Table of the labels that are taken for one another, and the training samples that push towards it.

    Args:
        report: What the validation showed.
        limit: Most rows.

    Returns:
        A line that says what the table is, then the table in Markdown; the line alone without mistakes.
    """
    if not report.error_pairs:
        return "No misclassified validation sample.\n"
    intro = (
        "Misclassified validation samples by label and prediction, the most frequent first; with the training samples "
        "that are harmful for most of those that were studied, or, with `class_pairs=`, for the mean of all of them."
    )
    rows = [
        [
            (report.name_of(each.pair.label),),
            (report.name_of(each.pair.prediction),),
            (f"{each.pair.count:,}",),
            (", ".join(f"{sample_id} ({report.name_of(label)})" for sample_id, label in each.culprits),),
        ]
        for each in find_pairs(report, limit)
    ]
    return _to_table(intro, PAIR_HEADS, rows)


def _details(
    report: Report, query_exhibits: Sequence[Exhibit | None], train_exhibits: Mapping[int, Exhibit]
) -> Iterator[str]:
    """A table for each query of which there is a text or named values."""
    scale = make_scale([e.values for e in (*query_exhibits, *train_exhibits.values()) if e is not None and e.values])
    for query, exhibit in zip(report.queries, query_exhibits, strict=False):
        if exhibit is None or (exhibit.text is None and exhibit.values is None):
            continue
        samples = [
            (title, sample)
            for title, samples in (("harmful", query.harmful), ("look-alike", query.look_alikes))
            for sample in samples[:SAMPLES_PER_CELL]
        ]
        doubts = report.flagged_among([sample.sample_id for sample in query.harmful])
        rows = [
            [
                (title,),
                (str(sample.sample_id),),
                (report.name_of(sample.label),),
                _marks(report, sample, doubts.get(sample.sample_id)),
                (score_text(sample.score),),
                _lines_of(train_exhibits.get(sample.sample_id), exhibit, scale),
            ]
            for title, sample in samples
        ]
        heads = (*DETAIL_HEADS, "differs in" if exhibit.text is None else "text")
        probability = "" if query.probability is None else f" ({query.probability:.0%})"
        name = "" if query.sample_id is None else f", validation sample {query.sample_id}"
        doubt = "; **this validation label may be wrong**" if query.label_looks_wrong else ""
        title = f"**{_escape(report.name_of(query.label))} -> {_escape(report.name_of(query.prediction))}**"
        content = cut(exhibit.text) if exhibit.text is not None else ", ".join(_lines_of(exhibit))
        yield _to_table(f"{title}{probability}{name}{doubt}\n\n{_escape(content)}", heads, rows)


def _marks(report: Report, sample: InfluentialSample, suspect: Suspect | None) -> Lines:
    marks = ["wrong prediction"] if sample.label_is_prediction else []
    if suspect is not None:
        marks.append(doubted_label(report, suspect))
    return tuple(marks)


def _lines_of(exhibit: Exhibit | None, query: Exhibit | None = None, scale: ValueScale | None = None) -> Lines:
    """A sample in lines: its text, its first values, or those that differ from the query's."""
    if exhibit is None:
        return ()
    if exhibit.text is not None:
        text = cut(exhibit.text)
        is_wide = any(unicodedata.east_asian_width(character) in "WF" for character in text)
        return tuple(textwrap.wrap(text, LINE_LENGTH // 2 if is_wide else LINE_LENGTH))
    if exhibit.values is None:
        return ()
    if query is None or query.values is None or scale is None:
        shown = [f"{name} {value:.4g}" for name, value in exhibit.values[:MAX_VALUES]]
        return (*shown, *_rest(len(exhibit.values)))
    flags = scale.differing(exhibit.values, query.values)
    differing = [
        (abs(value - own) / (width or 1.0), f"{name} {value:.4g} (not {own:.4g})")
        for (name, value), (_, own), width, differs in zip(
            exhibit.values, query.values, scale.ranges, flags, strict=True
        )
        if differs
    ]
    differing.sort(key=lambda each: -each[0])
    return (*(words for _, words in differing[:MAX_VALUES]), *_rest(len(differing))) or ("nothing much",)


def _rest(number: int) -> list[str]:
    return [f"and {number - MAX_VALUES} more"] if number > MAX_VALUES else []


def _suspect_cells(report: Report, rank: int, suspect: Suspect) -> list[Lines]:
    times, suggested = times_flagged(suspect), suggested_label(report, suspect)
    return [
        (str(rank),),
        (str(suspect.sample_id),),
        (report.name_of(suspect.label),),
        (f"{suggested} ({percent(suspect.probability)})" if suggested and suspect.probability else suggested,),
        (score_text(suspect.score),),
        (("yes" if suspect.flagged else "") + (f" ({times})" if times else ""),),
    ]


def _mistake_cells(report: Report, query: QueryReport) -> list[Lines]:
    return [
        () if query.sample_id is None else (str(query.sample_id),),
        (report.name_of(query.label), *(["may be wrong"] if query.label_looks_wrong else [])),
        (report.name_of(query.prediction), *([] if query.probability is None else [percent(query.probability)])),
        (score_text(query.loss),),
        _to_list(report, query.harmful),
        _to_list(report, query.look_alikes),
    ]


def _to_list(report: Report, samples: Sequence[InfluentialSample]) -> Lines:
    return tuple(f"{sample.sample_id} ({report.name_of(sample.label)})" for sample in samples[:SAMPLES_PER_CELL])


def _to_table(intro: str, columns: Sequence[str], rows: Sequence[Sequence[Lines]]) -> str:
    lines = [columns, ("---",) * len(columns), *(["<br>".join(map(_escape, cell)) for cell in row] for row in rows)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{intro}\n\n{table}\n"


def _escape(text: str) -> str:
    """One line that Markdown shows as it is; what no viewer can show becomes a space."""
    visible = [" " if unicodedata.category(character) in _INVISIBLE else character for character in text]
    line = " ".join("".join(visible).split()).translate(_MARKUP)
    return _LIST_MARK.sub(lambda mark: f"{mark[1]}&#{ord(mark[2])};", line)
