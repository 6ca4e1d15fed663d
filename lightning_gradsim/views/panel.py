"""One picture of a validation's mistakes and the training samples behind them, for a TensorBoard card."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_gradsim.records import InfluentialSample, QueryReport
from lightning_gradsim.report import Report
from lightning_gradsim.views.canvas import (
    BACKDROP,
    FRAME,
    INK,
    MARK,
    MUTED,
    RULE,
    Canvas,
    Pixels,
    fit_text,
    measure_text,
    to_plain_text,
    wrap_text,
)
from lightning_gradsim.views.exhibits import Exhibit
from lightning_gradsim.views.images import RgbImage, picture_notes, to_tile
from lightning_gradsim.views.tiles import (
    BAR,
    BODY,
    CAPTION_LINE,
    CONTENT,
    FRAME_ROOM,
    GAP,
    LABEL,
    LINE,
    MARGIN,
    PICTURE,
    STRIP,
    TILE,
    TITLE,
    WIDTH,
    doubt_of,
    doubt_words,
    draw_arrow,
    draw_bar,
    draw_label,
    draw_name,
    draw_strip,
    label_fits,
    label_text,
    origin,
    query_name,
    rows_of,
    score_text,
    strip_width,
)

# The headline is set in the largest of these sizes in which label and prediction stand side by side.
HEADLINES = (44, 36, 28)
HEADLINE_STACKED = 28
LEAD = "labelled"
QUERIES_PER_PAGE = 6
ROW_HEAD = 30
EMPTY_ROW = 48
ROW_SPACE = 12
BLOCK_TOP = 16
BLOCK_BOTTOM = 14


@dataclass(frozen=True)
class _Row:
    """A titled row of training samples; ``measure`` names their scores, the strongest of which gets a full bar.

    ``accuses`` where being in it speaks against a label, too: a flag is then the second witness. Look-alikes lie where
    classes meet, and so do many that are flagged wrongly.
    """

    title: str
    measure: str
    samples: tuple[InfluentialSample, ...]
    accuses: bool = True

    @property
    def full_bar(self) -> float:
        return max((abs(sample.score) for sample in self.samples if math.isfinite(sample.score)), default=0.0)


@dataclass(frozen=True)
class _Tiles:
    """What all rows of a panel share: the report, pictures and doubts by sample id, the word before labels."""

    report: Report
    pictures: Mapping[int, RgbImage | None]
    doubts: Mapping[int, str]
    lead: str

    def strip(self, row: _Row) -> int:
        """Room for the strips of a row: none where no label of it is in doubt."""
        return STRIP + 2 if any(self.doubt(row, sample) for sample in row.samples) else 0

    def doubt(self, row: _Row, sample: InfluentialSample) -> str | None:
        """What the strip under a tile says."""
        return self.doubts.get(sample.sample_id) if row.accuses else None

    def height(self, row: _Row) -> int:
        below = LABEL + self.strip(row) + BAR + 6 + CAPTION_LINE
        return ROW_HEAD + (TILE + below if row.samples else EMPTY_ROW)


def mistake_panel(
    report: Report,
    query_exhibits: Sequence[Exhibit | None],
    train_exhibits: Mapping[int, Exhibit],
    *,
    max_queries: int = QUERIES_PER_PAGE,
    show_teachers: bool = False,
    page: int = 1,
) -> Pixels:
    """Compose the panel of a report: each mistake, and under it the training samples behind it.

    Args:
        report: What the validation showed.
        query_exhibits: What is shown of each of ``report.queries``, in their order; None where there is nothing.
        train_exhibits: What is shown of training samples, by sample id; those without a picture get a tile that says
            so.
        max_queries: How many queries to draw.
        show_teachers: Whether to add a row of teachers.
        page: Which so many: 1 for the first ones.

    Returns:
        uint8 ``[H, 700, 3]``; ``H`` grows with the number of queries.

    Raises:
        ValueError: If the number of ``query_exhibits`` is not that of the queries.
    """
    if len(query_exhibits) != len(report.queries):
        raise ValueError(
            f"`query_exhibits` has {len(query_exhibits)} entries, but the report has {len(report.queries)} queries. "
            "Expected one for each query. Pass None for a query of which nothing is shown."
        )
    drawn = slice((page - 1) * max_queries, page * max_queries)
    queries = report.queries[drawn]
    if not queries:
        return np.concatenate([_draw_header(report, range(0), [], [], None), _draw_nothing(report)])
    rows = [_rows(report, query, show_teachers) for query in queries]
    samples = [sample for query_rows in rows for row in query_rows for sample in row.samples]
    shown_ids = sorted({sample.sample_id for sample in samples})
    query_pictures = [None if exhibit is None else exhibit.picture for exhibit in query_exhibits[drawn]]
    train_pictures = {
        sample_id: train_exhibits[sample_id].picture if sample_id in train_exhibits else None for sample_id in shown_ids
    }
    accused = [sample.sample_id for query_rows in rows for row in query_rows if row.accuses for sample in row.samples]
    doubts = doubt_words(report, report.flagged_among(accused))
    lead = LEAD if all(label_fits(LEAD, label_text(report, sample.label)) for sample in samples) else ""
    tiles = _Tiles(report, train_pictures, doubts, lead)
    blocks = [
        _draw_query(tiles, query, picture, query_rows)
        for query, picture, query_rows in zip(queries, query_pictures, rows, strict=True)
    ]
    pictures = [*query_pictures, *train_pictures.values()]
    header = _draw_header(report, range(len(report.queries))[drawn], pictures, samples, tiles)
    return np.concatenate([header, *blocks])


def _rows(report: Report, query: QueryReport, show_teachers: bool) -> list[_Row]:
    return [
        _Row(title, measure, samples, accuses=name != "look-alike")
        for title, name, measure, samples in rows_of(query, report.similarity, show_teachers=show_teachers)
    ]


def _draw_header(
    report: Report,
    shown: range,
    pictures: Sequence[RgbImage | None],
    samples: Sequence[InfluentialSample],
    tiles: _Tiles | None,
) -> Pixels:
    caption = wrap_text(to_plain_text(f"{origin(report)} · against {report.reference}"), BODY, CONTENT, max_lines=4)
    notes = [line for note in _notes(report, pictures) for line in wrap_text(note, BODY, CONTENT, max_lines=2)]
    has_mark, has_bar = any(sample.label_is_prediction for sample in samples), bool(samples)
    has_doubts = tiles is not None and bool(tiles.doubts)
    has_names = has_bar and tiles is not None and not tiles.lead
    num_lines = has_names + has_mark + has_doubts + has_bar
    canvas = Canvas(WIDTH, 44 + LINE * (len(caption) + len(notes)) + 34 * num_lines + 12)
    title = fit_text(_title(report, shown), TITLE, CONTENT, bold=True)
    baseline = 34
    canvas.text(MARGIN, baseline, title, TITLE, bold=True)
    baseline += 4
    for line in [*caption, *notes]:
        baseline += LINE
        canvas.text(MARGIN, baseline, line, BODY, MUTED)
    if has_names:
        baseline += 34
        canvas.rectangle(MARGIN, baseline - 20, 28, 28, BACKDROP)
        canvas.text(MARGIN + 40, baseline, "below each picture: its given label", BODY)
    if has_mark:
        baseline += 34
        canvas.rectangle(MARGIN, baseline - 20, 28, 28, BACKDROP)
        canvas.frame(MARGIN, baseline - 20, 28, 4, MARK)
        canvas.rectangle(MARGIN, baseline, 28, 8, MARK)
        canvas.text(MARGIN + 40, baseline, "training sample with the wrongly predicted label", BODY)
    if has_doubts:
        baseline += 34
        draw_strip(canvas, MARGIN, baseline - 20, 28, "")
        canvas.text(MARGIN + 40, baseline, "its own label looks wrong, and the suggested one", BODY)
    if has_bar:
        baseline += 34
        draw_bar(canvas, MARGIN, baseline - 10, 28, 0.65)
        canvas.text(MARGIN + 40, baseline, "share of the row's strongest score; below: #sample, score", BODY)
    return canvas.to_pixels()


def _title(report: Report, shown: range) -> str:
    wrong = report.errors_in_words
    if not shown:
        return wrong
    return f"{wrong}, {shown.start + 1} to {shown.stop}" if shown.start else f"{wrong}, {len(shown)} shown"


def _notes(report: Report, pictures: Sequence[RgbImage | None]) -> list[str]:
    """What a reader must know about the pictures, a line each."""
    augmented = "augmented view: each training tile is one random view of its sample"
    has_views = report.augmented and any(picture is not None for picture in pictures)
    unseen = "inputs are no images: see `report.html`; `feature_names=` or `describe=` say more"
    has_none = pictures and all(picture is None for picture in pictures)
    return [*([augmented] if has_views else []), *([unseen] if has_none else []), *picture_notes(pictures)]


def _draw_nothing(report: Report) -> Pixels:
    words = "no misclassified validation sample"
    if report.num_errors:
        words = "no mistake left to explain under the weights at scoring"
    canvas = Canvas(WIDTH, 108)
    canvas.rectangle(MARGIN, 4, CONTENT, 88, BACKDROP)
    size = 24
    canvas.text((WIDTH - measure_text(words, size)) / 2, 56, words, size)
    return canvas.to_pixels()


def _draw_query(tiles: _Tiles, query: QueryReport, picture: RgbImage | None, rows: Sequence[_Row]) -> Pixels:
    heights = [tiles.height(row) for row in rows]
    canvas = Canvas(WIDTH, BLOCK_TOP + PICTURE + sum(ROW_SPACE + height for height in heights) + BLOCK_BOTTOM)
    canvas.rectangle(0, 0, WIDTH, 2, RULE)
    canvas.paste(to_tile(None if picture is None else picture.pixels, PICTURE), MARGIN, BLOCK_TOP)
    _draw_verdict(canvas, tiles.report, query)
    top = BLOCK_TOP + PICTURE
    for row, height in zip(rows, heights, strict=True):
        top += ROW_SPACE
        _draw_row(canvas, top, tiles, row)
        top += height
    return canvas.to_pixels()


def _draw_verdict(canvas: Canvas, report: Report, query: QueryReport) -> None:
    """The words beside the query's image: label and prediction, how sure, which sample, is its label doubtful."""
    left = MARGIN + PICTURE + 22
    probability = None if query.probability is None else f"{query.probability:.0%}"
    _draw_headline(canvas, left, label_text(report, query.label), label_text(report, query.prediction), probability)
    facts = f"loss {score_text(query.loss)} · {_query_name(report, query)}"
    if query.wrong_since is not None and query.wrong_since < report.epoch:
        facts = f"{facts.replace('validation sample', 'validation')} · wrong since epoch {query.wrong_since}"
    canvas.text(left, BLOCK_TOP + 92, fit_text(facts, BODY, WIDTH - MARGIN - left), BODY, MUTED)
    if query.label_looks_wrong:
        words = doubt_of(report)
        height = 36
        draw_strip(canvas, left, BLOCK_TOP + PICTURE - height, strip_width(words, height), words, height)


def _draw_headline(canvas: Canvas, left: int, label: str, prediction: str, probability: str | None) -> None:
    """Draw label -> prediction, side by side where a readable size allows it, else one above the other."""
    right = WIDTH - MARGIN
    words = ("labelled", "predicted" if probability is None else f"predicted, {probability}")
    word_widths = [measure_text(word, BODY) for word in words]
    answer = MARK if label != prediction else INK
    for size in HEADLINES:
        widths = [measure_text(name, size, bold=True) for name in (label, prediction)]
        second, arrow = left + max(word_widths[0], widths[0]) + 76, 44
        if second + max(word_widths[1], widths[1]) <= right:
            for x, word, name, colour in ((left, words[0], label, INK), (second, words[1], prediction, answer)):
                canvas.text(x, BLOCK_TOP + 16, word, BODY, MUTED)
                canvas.text(x, BLOCK_TOP + 60, name, size, colour, bold=True)
            draw_arrow(canvas, second - 16 - arrow, BLOCK_TOP + 46, arrow)
            return
    size, start = HEADLINE_STACKED, left + 108
    for word, name, colour, after, baseline in (
        ("labelled", label, INK, "", BLOCK_TOP + 22),
        ("predicted", prediction, answer, probability or "", BLOCK_TOP + 58),
    ):
        canvas.text(left, baseline, word, BODY, MUTED)
        room = right - start - measure_text(after, BODY) - 14
        end = canvas.text(start, baseline, fit_text(name, size, room, bold=True), size, colour, bold=True)
        canvas.text(end + 14, baseline, after, BODY, MUTED)


def _query_name(report: Report, query: QueryReport) -> str:
    name = query_name(report, query)
    has_several_loaders = any(other.dataloader_idx for other in report.queries)
    return f"{name} · loader {query.dataloader_idx}" if has_several_loaders else name


def _draw_row(canvas: Canvas, top: int, tiles: _Tiles, row: _Row) -> None:
    report = tiles.report
    canvas.text(MARGIN, top + 20, row.title, BODY, bold=True)
    measure = f"{row.measure} · augmented view" if report.augmented else row.measure
    canvas.text_right(WIDTH - MARGIN, top + 20, measure, BODY, MUTED)
    top += ROW_HEAD
    if not row.samples:
        canvas.rectangle(MARGIN, top, CONTENT, EMPTY_ROW, BACKDROP)
        canvas.text(MARGIN + 16, top + 31, "none", BODY, MUTED)
    below = top + TILE + LABEL + tiles.strip(row) + 4
    for place, sample in enumerate(row.samples):
        left, picture = MARGIN + place * (TILE + GAP), tiles.pictures[sample.sample_id]
        canvas.paste(to_tile(None if picture is None else picture.pixels, PICTURE), left + FRAME_ROOM, top + FRAME_ROOM)
        thickness, colour = (FRAME_ROOM, MARK) if sample.label_is_prediction else (2, FRAME)
        canvas.frame(left, top, TILE, thickness, colour)
        name = label_text(report, sample.label)
        draw_label(canvas, left, top + TILE, tiles.lead, name, marked=sample.label_is_prediction)
        doubt = tiles.doubt(row, sample)
        if doubt is not None:
            draw_strip(canvas, left, top + TILE + LABEL + 2, TILE, doubt)
        share = min(abs(sample.score) / row.full_bar, 1.0) if row.full_bar and math.isfinite(sample.score) else 0.0
        draw_bar(canvas, left, below, TILE, share)
        draw_name(canvas, left, below + BAR + 22, sample.sample_id, sample.score)
