"""One picture of a validation's mistakes and the training samples behind them, for a TensorBoard card."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lightning_gradsim.report import InfluentialSample, Label, QueryReport, Report
from lightning_gradsim.views.canvas import (
    BACKDROP,
    DOUBT,
    FRAME,
    INK,
    MARK,
    MUTED,
    PAPER,
    RULE,
    Canvas,
    Pixels,
    fit_text,
    is_drawable,
    measure_text,
    to_plain_text,
    wrap_text,
)
from lightning_gradsim.views.images import RgbImage, to_rgb, to_tile

# TensorBoard shows the panel in a card of about 370 px: half this width, so that 18 px letters are 9 px high there.
WIDTH = 740
MARGIN = 16
CONTENT = WIDTH - 2 * MARGIN
TILES_PER_ROW = 4
GAP = 12
TILE = (CONTENT - (TILES_PER_ROW - 1) * GAP) // TILES_PER_ROW
FRAME_ROOM = 7
QUERY_TILE = 196
BODY, ROW_TITLE, TITLE = 18, 20, 24
# The headline is set in the largest of these sizes in which label and prediction stand on one line.
HEADLINES = (44, 36, 30)
HEADLINE_STACKED = 30
LINE = 25
TILE_HEIGHT = TILE + 62
ROW_HEAD = 40
EMPTY_ROW = 50
ROW_SPACE = 16
BLOCK_TOP = 20
BLOCK_BOTTOM = 26
MAX_LAYERS = 3


@dataclass(frozen=True)
class _Row:
    """A titled row of training samples; ``measure`` names their scores, ``full_bar`` is the score of a full bar."""

    title: str
    measure: str
    samples: tuple[InfluentialSample, ...]
    full_bar: float

    @property
    def height(self) -> int:
        return ROW_HEAD + (TILE_HEIGHT if self.samples else EMPTY_ROW)


def mistake_panel(
    report: Report,
    query_images: Sequence[Tensor | None],
    train_images: Mapping[int, Tensor],
    *,
    max_queries: int = 6,
    show_teachers: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Pixels:
    """Compose the panel of a report: each mistake, and under it the training samples behind it.

    Args:
        report: What the validation showed.
        query_images: The input of each of ``report.queries``, in their order, as ``to_rgb`` reads it; None where there
            is no image.
        train_images: Inputs of training samples by sample id; those that lack get a tile that says so.
        max_queries: How many queries to draw.
        show_teachers: Whether to add a row of teachers.
        mean: Mean of the normalisation to undo, as in ``to_rgb``.
        std: Standard deviation of the normalisation to undo, as in ``to_rgb``.

    Returns:
        uint8 ``[H, 740, 3]``; ``H`` grows with the number of queries.

    Raises:
        ValueError: If the number of ``query_images`` is not that of the queries, or ``mean`` or ``std`` do not fit the
            channels.
    """
    if len(query_images) != len(report.queries):
        raise ValueError(
            f"`query_images` has {len(query_images)} entries, but the report has {len(report.queries)} queries. "
            "Expected one for each query. Pass None for a query without an image."
        )
    queries = report.queries[:max_queries]
    if not queries:
        return np.concatenate([_draw_header(report, 0, []), _draw_nothing(report)])
    rows = [_rows(report, query, show_teachers) for query in queries]
    shown_ids = sorted({sample.sample_id for query_rows in rows for row in query_rows for sample in row.samples})
    query_pictures = [to_rgb(image, mean, std) for image in query_images[: len(queries)]]
    train_pictures = {sample_id: to_rgb(train_images.get(sample_id), mean, std) for sample_id in shown_ids}
    blocks = [
        _draw_query(report, query, picture, query_rows, train_pictures)
        for query, picture, query_rows in zip(queries, query_pictures, rows, strict=True)
    ]
    pictures = [*query_pictures, *train_pictures.values()]
    has_mark = any(sample.label_is_prediction for query_rows in rows for row in query_rows for sample in row.samples)
    return np.concatenate([_draw_header(report, len(queries), pictures, has_mark), *blocks])


def _rows(report: Report, query: QueryReport, show_teachers: bool) -> list[_Row]:
    lists = [
        ("harmful: pushed towards this mistake", report.similarity, query.harmful[:TILES_PER_ROW]),
        ("look-alikes", "cosine", query.look_alikes[:TILES_PER_ROW]),
    ]
    if show_teachers:
        lists.append(("teachers: taught this prediction", report.similarity, query.teachers[:TILES_PER_ROW]))
    # A cosine has a natural full length; the other similarities are compared within their row only.
    return [
        _Row(title, measure, samples, 1.0 if measure == "cosine" else _largest_score(samples))
        for title, measure, samples in lists
    ]


def _largest_score(samples: Sequence[InfluentialSample]) -> float:
    return max((abs(sample.score) for sample in samples if math.isfinite(sample.score)), default=0.0)


def _draw_header(report: Report, num_shown: int, pictures: Iterable[RgbImage | None], has_mark: bool = False) -> Pixels:
    caption = wrap_text(_caption(report), BODY, CONTENT, max_lines=4)
    notes = [line for note in _notes(report, pictures) for line in wrap_text(note, BODY, CONTENT, max_lines=2)]
    canvas = Canvas(WIDTH, 54 + LINE * (len(caption) + len(notes)) + (36 if has_mark else 0) + 14)
    title = fit_text(_title(report, num_shown), TITLE, CONTENT, bold=True)
    canvas.text(MARGIN, 40, title, TITLE, bold=True)
    baseline = 46
    for line in [*caption, *notes]:
        baseline += LINE
        canvas.text(MARGIN, baseline, line, BODY, MUTED)
    if has_mark:
        baseline += 36
        canvas.rectangle(MARGIN, baseline - 20, 28, 28, BACKDROP)
        _draw_mark(canvas, MARGIN, baseline - 20, 28, thickness=3, badge=13)
        canvas.text(MARGIN + 40, baseline, "training sample with the wrongly predicted label", BODY)
    return canvas.to_pixels()


def _title(report: Report, num_shown: int) -> str:
    wrong = report.errors_in_words
    return f"{wrong}, {num_shown} shown" if num_shown else wrong


def _caption(report: Report) -> str:
    layers = ", ".join(report.layers[:MAX_LAYERS]) or "none"
    if len(report.layers) > MAX_LAYERS:
        layers += f" and {len(report.layers) - MAX_LAYERS} more"
    when = f"epoch {report.epoch}, step {report.step}"
    return to_plain_text(f"{when} · layer {layers} · {report.similarity} · against {report.reference}")


def _notes(report: Report, pictures: Iterable[RgbImage | None]) -> list[str]:
    """What a reader must know about the pictures, a line each."""
    drawn = [picture for picture in pictures if picture is not None]
    notes = []
    if report.augmented and drawn:
        notes.append("augmented view: each training tile is one random view of its sample")
    num_stretched = sum(picture.value_range == "stretched" for picture in drawn)
    if num_stretched:
        which = "all images" if num_stretched == len(drawn) else f"{num_stretched} of {len(drawn)} images"
        notes.append(f"{which}: values stretched from their own lowest to highest")
    if any(picture.has_non_finite for picture in drawn):
        notes.append("magenta hatching: NaN or infinite pixels")
    return notes


def _draw_nothing(report: Report) -> Pixels:
    words = "no misclassified validation sample"
    if report.num_errors:
        words = "no mistake left to explain under the weights at scoring"
    canvas = Canvas(WIDTH, 112)
    canvas.rectangle(MARGIN, 4, CONTENT, 88, BACKDROP)
    canvas.text((WIDTH - measure_text(words, TITLE)) / 2, 57, words, TITLE, INK)
    return canvas.to_pixels()


def _draw_query(
    report: Report,
    query: QueryReport,
    picture: RgbImage | None,
    rows: Sequence[_Row],
    train_pictures: Mapping[int, RgbImage | None],
) -> Pixels:
    height = BLOCK_TOP + QUERY_TILE + sum(ROW_SPACE + row.height for row in rows) + BLOCK_BOTTOM
    canvas = Canvas(WIDTH, height)
    canvas.rectangle(0, 0, WIDTH, 2, RULE)
    canvas.paste(to_tile(None if picture is None else picture.pixels, QUERY_TILE), MARGIN, BLOCK_TOP)
    _draw_verdict(canvas, report, query)
    top = BLOCK_TOP + QUERY_TILE
    for row in rows:
        top += ROW_SPACE
        _draw_row(canvas, top, report, row, train_pictures)
        top += row.height
    return canvas.to_pixels()


def _draw_verdict(canvas: Canvas, report: Report, query: QueryReport) -> None:
    """The words beside the query's image: label -> prediction, how sure, which sample, is its label doubtful."""
    left = MARGIN + QUERY_TILE + 24
    baseline = _draw_headline(canvas, left, _label_text(report, query.label), _label_text(report, query.prediction))
    facts = [f"loss {query.loss:.3g}", _query_name(report, query)]
    if query.probability is not None:
        facts.insert(0, f"predicted with {query.probability:.0%}")
    room = WIDTH - MARGIN - left
    for line in (" · ".join(facts[:-1]), facts[-1]):
        baseline += LINE + 3
        canvas.text(left, baseline, fit_text(line, BODY, room), BODY, MUTED)
    if query.label_looks_wrong:
        words = "this validation label looks wrong"
        height, half, diamond = 38, 19, 9
        top, middle = BLOCK_TOP + QUERY_TILE - height, left + 20
        canvas.rectangle(left, top, round(measure_text(words, BODY)) + 48, height, DOUBT)
        corners = [
            (middle, half - diamond),
            (middle + diamond, half),
            (middle, half + diamond),
            (middle - diamond, half),
        ]
        canvas.polygon([(x, top + y) for x, y in corners], PAPER)
        canvas.text(left + 38, top + 25, words, BODY, PAPER)


def _draw_headline(canvas: Canvas, left: int, label: str, prediction: str) -> int:
    """Draw label -> prediction, on one line where a readable size allows it; return the last baseline."""
    room = WIDTH - MARGIN - left
    for size in HEADLINES:
        arrow = round(size * 1.5)
        if measure_text(label, size, bold=True) + arrow + measure_text(prediction, size, bold=True) <= room:
            baseline = BLOCK_TOP + 52
            end = canvas.text(left, baseline, label, size, bold=True)
            _draw_arrow(canvas, end + size * 0.3, baseline - size * 0.32, size * 0.9)
            canvas.text(end + arrow, baseline, prediction, size, MARK, bold=True)
            return baseline + 4
    size, indent = HEADLINE_STACKED, round(HEADLINE_STACKED * 1.35)
    baseline = BLOCK_TOP + 28
    canvas.text(left, baseline, fit_text(label, size, room, bold=True), size, bold=True)
    baseline += 42
    _draw_arrow(canvas, left, baseline - size * 0.32, size)
    canvas.text(left + indent, baseline, fit_text(prediction, size, room - indent, bold=True), size, MARK, bold=True)
    return baseline + 6


def _draw_arrow(canvas: Canvas, left: float, middle: float, length: float) -> None:
    half, head, tip = length * 0.045, length * 0.24, left + length
    neck = tip - length * 0.36
    canvas.polygon([(left, middle - half), (neck, middle - half), (neck, middle + half), (left, middle + half)], MUTED)
    canvas.polygon([(neck, middle - head), (tip, middle), (neck, middle + head)], MUTED)


def _query_name(report: Report, query: QueryReport) -> str:
    name = "validation sample" if query.sample_id is None else f"validation sample #{query.sample_id}"
    has_several_loaders = any(other.dataloader_idx for other in report.queries)
    return f"{name} · loader {query.dataloader_idx}" if has_several_loaders else name


def _draw_row(
    canvas: Canvas, top: int, report: Report, row: _Row, train_pictures: Mapping[int, RgbImage | None]
) -> None:
    canvas.text(MARGIN, top + 20, row.title, ROW_TITLE, bold=True)
    measure = f"{row.measure} · augmented view" if report.augmented else row.measure
    canvas.text_right(WIDTH - MARGIN, top + 20, measure, BODY, MUTED)
    if not row.samples:
        canvas.rectangle(MARGIN, top + ROW_HEAD, CONTENT, EMPTY_ROW, BACKDROP)
        canvas.text(MARGIN + 16, top + ROW_HEAD + 31, "none", BODY, MUTED)
    for place, sample in enumerate(row.samples):
        left, picture = MARGIN + place * (TILE + GAP), train_pictures[sample.sample_id]
        _draw_training_tile(canvas, left, top + ROW_HEAD, report, sample, picture, row.full_bar)


def _draw_training_tile(
    canvas: Canvas, x: int, y: int, report: Report, sample: InfluentialSample, picture: RgbImage | None, full_bar: float
) -> None:
    inner = TILE - 2 * FRAME_ROOM
    canvas.paste(to_tile(None if picture is None else picture.pixels, inner), x + FRAME_ROOM, y + FRAME_ROOM)
    if sample.label_is_prediction:
        _draw_mark(canvas, x, y, TILE, thickness=FRAME_ROOM, badge=40)
    else:
        canvas.frame(x, y, TILE, 2, FRAME)
    label = fit_text(_label_text(report, sample.label), ROW_TITLE, TILE, bold=True)
    canvas.text(x, y + TILE + 23, label, ROW_TITLE, bold=True)
    score = _score_text(sample.score)
    baseline = y + TILE + 46
    canvas.text_right(x + TILE, baseline, score, BODY)
    room = TILE - measure_text(score, BODY) - 6
    canvas.text(x, baseline, fit_text(f"#{sample.sample_id}", BODY, room), BODY, MUTED)
    share = min(abs(sample.score) / full_bar, 1.0) if full_bar and math.isfinite(sample.score) else 0.0
    canvas.rectangle(x, y + TILE + 54, TILE, 6, BACKDROP)
    canvas.rectangle(x, y + TILE + 54, round(TILE * share), 6, MUTED)


def _draw_mark(canvas: Canvas, x: int, y: int, size: int, thickness: int, badge: int) -> None:
    """A thick frame and a filled corner: told apart by shape where the colour is not seen."""
    right, top = x + size - thickness, y + thickness
    for leg, colour in ((badge + 4, PAPER), (badge, MARK)):
        canvas.polygon([(right - leg, top), (right, top), (right, top + leg)], colour)
    canvas.frame(x, y, size, thickness, MARK)


def _label_text(report: Report, label: Label) -> str:
    """The name of a label in letters that the font has; the class number where the name has others."""
    if isinstance(label, tuple) and label:
        return " + ".join(_label_text(report, index) for index in label)
    text = to_plain_text(report.name_of(label))
    return text if is_drawable(text) else f"class {label}"


def _score_text(score: float) -> str:
    text = f"{score:#.3g}".rstrip(".")
    return f"{score:.1e}" if "e" in text else text
