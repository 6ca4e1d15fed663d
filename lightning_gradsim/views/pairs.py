"""Which classes are taken for which: a matrix, its most frequent pairs, and the training samples behind them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_gradsim.plain_values import Label
from lightning_gradsim.records import ErrorPair, QueryReport
from lightning_gradsim.report import Report
from lightning_gradsim.views.canvas import (
    BACKDROP,
    DOUBT,
    INK,
    MUTED,
    PAPER,
    RULE,
    Canvas,
    Colour,
    Pixels,
    fit_text,
    measure_text,
    to_plain_text,
    wrap_text,
)
from lightning_gradsim.views.tiles import BODY, CONTENT, LINE, MARGIN, TITLE, WIDTH, draw_arrow, label_text

MAX_CLASSES = 10
MAX_PAIRS = 6
MAX_CULPRITS = 3
CULPRITS_PER_QUERY = 4
ROW = 44
LEAST_NAME = 150
NARROW, WIDE = 48, 96
"""Widths of a column: where names of rows need the room beside it, and where nothing needs more."""
ARROW = 26
DARK = 0.84
"""Share of the highest count from which white letters have more contrast than black ones."""
PAIR_ROW = 2 * LINE + 10


@dataclass(frozen=True)
class ClassPair:
    """A pair of classes, and the training samples that push towards mistaking the one for the other.

    Attributes:
        pair: The classes and how many samples are concerned.
        culprits: Id and label of those that are harmful for their mean gradient; where that was not asked for, for most
            of the studied samples among them, most often first.
    """

    pair: ErrorPair
    culprits: tuple[tuple[int, Label], ...]


@dataclass(frozen=True)
class PairMatrix:
    """Counts of mistakes by given and predicted label.

    Attributes:
        classes: The classes with most mistakes, in their own order.
        counts: A row for each given, a column for each predicted label.
        num_left_out: Mistakes that concern other classes.
    """

    classes: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    num_left_out: int


def make_matrix(report: Report, max_classes: int = MAX_CLASSES) -> PairMatrix:
    """The matrix of a report.

    Args:
        report: What the validation showed.
        max_classes: Most classes.

    Returns:
        The matrix; without mistakes it has no rows.
    """
    involved: Counter[int] = Counter()
    for pair in report.error_pairs:
        involved[pair.label] += pair.count
        involved[pair.prediction] += pair.count
    classes = tuple(sorted(sorted(involved, key=lambda each: (-involved[each], each))[:max_classes]))
    counts = {(pair.label, pair.prediction): pair.count for pair in report.error_pairs}
    rows = tuple(tuple(counts.get((label, prediction), 0) for prediction in classes) for label in classes)
    return PairMatrix(classes, rows, sum(counts.values()) - sum(map(sum, rows)))


def find_pairs(report: Report, max_pairs: int = MAX_PAIRS) -> list[ClassPair]:
    """The most frequent pairs of a report, as far as there are queries among them.

    Args:
        report: What the validation showed.
        max_pairs: Most pairs.

    Returns:
        The pairs of which samples were studied, the most frequent first; then others, if there is room.
    """
    studied: dict[tuple[Label, Label], list[QueryReport]] = {}
    for query in report.queries:
        studied.setdefault((query.label, query.prediction), []).append(query)
    pairs = [
        ClassPair(
            pair,
            tuple((sample.sample_id, sample.label) for sample in pair.harmful[:MAX_CULPRITS])
            or _culprits(studied.get((pair.label, pair.prediction), ())),
        )
        for pair in report.error_pairs
    ]
    return sorted(pairs, key=lambda each: not each.culprits)[:max_pairs]


def class_pairs_picture(report: Report) -> Pixels:
    """Draw the matrix, and under it the most frequent pairs.

    Args:
        report: What the validation showed, with ``error_pairs``.

    Returns:
        uint8 ``[H, 700, 3]``.
    """
    matrix, pairs = make_matrix(report), find_pairs(report)
    caption = wrap_text(to_plain_text(_caption(report, matrix)), BODY, CONTENT, max_lines=3)
    top = 44 + LINE * len(caption) + 12
    canvas = Canvas(WIDTH, top + ROW * (1 + len(matrix.classes)) + 24 + PAIR_ROW * len(pairs) + 20)
    canvas.text(MARGIN, 34, "which labels are taken for which", TITLE, bold=True)
    for number, line in enumerate(caption, start=1):
        canvas.text(MARGIN, 38 + LINE * number, line, BODY, MUTED)
    _draw_matrix(canvas, top, report, matrix)
    _draw_pairs(canvas, top + ROW * (1 + len(matrix.classes)) + 24, report, pairs)
    return canvas.to_pixels()


def _caption(report: Report, matrix: PairMatrix) -> str:
    left_out = f" · {matrix.num_left_out:,} mistakes among other classes" if matrix.num_left_out else ""
    told = f"{report.when_in_words} · {report.errors_in_words}{left_out}"
    return f"{told} · rows: given label, columns: predicted label"


def _culprits(queries: Iterable[QueryReport]) -> tuple[tuple[int, Label], ...]:
    found: Counter[tuple[int, Label]] = Counter()
    for query in queries:
        found.update((sample.sample_id, sample.label) for sample in query.harmful[:CULPRITS_PER_QUERY])
    return tuple(sorted(found, key=lambda each: -found[each])[:MAX_CULPRITS])


def _draw_matrix(canvas: Canvas, top: int, report: Report, matrix: PairMatrix) -> None:
    names, shorts, head, cell = _columns(report, matrix)
    left, highest = MARGIN + head, max(map(max, matrix.counts))
    for place, name in enumerate(names):
        short = fit_text(shorts[place], BODY, cell - 4, bold=True)
        x = left + place * cell + (cell - measure_text(short, BODY, bold=True)) / 2
        canvas.text(x, top + 30, short, BODY, bold=True)
        y = top + ROW * (place + 1)
        canvas.text(MARGIN, y + 29, fit_text(name, BODY, head - 8, bold=True), BODY, bold=True)
        for other, count in enumerate(matrix.counts[place]):
            background = BACKDROP if place == other else _shade(count / highest)
            canvas.rectangle(left + other * cell, y, cell - 2, ROW - 2, background)
            if count:
                text, ink = f"{count:,}", PAPER if count / highest > DARK else INK
                start = left + other * cell + (cell - 2 - measure_text(text, BODY)) / 2
                canvas.text(start, y + 29, text, BODY, ink)


def _columns(report: Report, matrix: PairMatrix) -> tuple[list[str], list[str], int, int]:
    """Names of rows and of columns, room for the names of rows, width of a column: names as long as they fit."""
    names = [label_text(report, index) for index in matrix.classes]
    widest = _widest(names) + 16
    if widest + len(names) * widest <= CONTENT:
        head = 2 * math.ceil(widest / 2)
        return names, names, head, _even(min(max(WIDE, head), (CONTENT - head) / len(names)))
    shorts = [str(index) for index in matrix.classes]
    names = [f"{short} {name}" for short, name in zip(shorts, names, strict=True)]
    narrow = max(NARROW, _widest([*shorts, *(f"{count:,}" for row in matrix.counts for count in row)]) + 8)
    head = _even(max(LEAST_NAME, min(_widest(names) + 18, CONTENT - narrow * len(names))))
    return names, shorts, head, _even(min(WIDE, (CONTENT - head) / len(names)))


def _widest(names: Iterable[str]) -> float:
    return max(measure_text(name, BODY, bold=True) for name in names)


def _even(width: float) -> int:
    return int(width) // 2 * 2


def _draw_pairs(canvas: Canvas, top: int, report: Report, pairs: list[ClassPair]) -> None:
    canvas.rectangle(0, top - 14, WIDTH, 2, RULE)
    for number, each in enumerate(pairs):
        pair, baseline = each.pair, top + 22 + PAIR_ROW * number
        number_of = f"{pair.count:,} mistake{'s' if pair.count > 1 else ''}"
        room = CONTENT - ARROW - 16 - 14 - measure_text(number_of, BODY)
        prediction = label_text(report, pair.prediction)
        taken = min(room / 2, measure_text(prediction, BODY, bold=True))
        label = fit_text(label_text(report, pair.label), BODY, room - taken, bold=True)
        end = canvas.text(MARGIN, baseline, label, BODY, bold=True)
        draw_arrow(canvas, end + 8, baseline - 7, ARROW)
        prediction = fit_text(prediction, BODY, room - measure_text(label, BODY, bold=True), bold=True)
        end = canvas.text(end + ARROW + 16, baseline, prediction, BODY, bold=True)
        canvas.text(end + 14, baseline, number_of, BODY)
        canvas.text(MARGIN, baseline + LINE, _culprits_in_words(report, each.culprits), BODY, MUTED)


def _culprits_in_words(report: Report, culprits: Sequence[tuple[int, Label]]) -> str:
    """Training samples behind their given labels, as many as fit: one that is cut could not be looked up."""
    if not culprits:
        return "none of them was studied"
    ids: dict[str, list[str]] = {}
    for sample_id, label in culprits:
        ids.setdefault(fit_text(label_text(report, label), BODY, CONTENT / 3), []).append(f"#{sample_id}")
    words = "harmful, labelled " + "; ".join(f"{label}: {' '.join(names)}" for label, names in ids.items())
    if len(culprits) > 1 and measure_text(words, BODY) > CONTENT:
        return _culprits_in_words(report, culprits[:-1])
    return words


def _shade(share: float) -> Colour:
    """Blue, the darker the more mistakes; the first one is seen."""
    if not share:
        return PAPER
    depth = 0.12 + 0.88 * share
    red, green, blue = (round(255 - (255 - channel) * depth) for channel in DOUBT)
    return red, green, blue
