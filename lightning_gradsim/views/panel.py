"""One picture of a validation's mistakes and the training samples behind them, for a TensorBoard card."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lightning_gradsim.plain_values import Label
from lightning_gradsim.report import InfluentialSample, QueryReport, Report
from lightning_gradsim.views.canvas import (
    BACKDROP,
    DOUBT,
    FRAME,
    INK,
    MARK,
    MINUS,
    MUTED,
    PAPER,
    RULE,
    TRACK,
    Canvas,
    Pixels,
    fit_text,
    is_drawable,
    measure_text,
    to_plain_text,
    wrap_text,
)
from lightning_gradsim.views.images import RgbImage, to_rgb, to_tile

# TensorBoard shows the panel in a card of 350 px, at a window of 1400 px, by leaving out every second row and column.
# So everything lies on even coordinates, no line is thinner than 2 px, and 20 px letters are 10 px high there.
WIDTH = 700
MARGIN = 14
CONTENT = WIDTH - 2 * MARGIN
TILES_PER_ROW = 4
GAP = 16
TILE = (CONTENT - (TILES_PER_ROW - 1) * GAP) // TILES_PER_ROW
FRAME_ROOM = 8
PICTURE = TILE - 2 * FRAME_ROOM
BODY, TITLE = 20, 26
# The headline is set in the largest of these sizes in which label and prediction stand side by side.
HEADLINES = (44, 36, 28)
HEADLINE_STACKED = 28
LINE, CAPTION_LINE = 26, 24
ROW_HEAD = 30
BAR = 8
EMPTY_ROW = 48
ROW_SPACE = 12
BLOCK_TOP = 16
BLOCK_BOTTOM = 14
MAX_LAYERS = 3


@dataclass(frozen=True)
class _Row:
    """A titled row of training samples; ``measure`` names their scores, the strongest of which gets a full bar."""

    title: str
    measure: str
    samples: tuple[InfluentialSample, ...]

    @property
    def full_bar(self) -> float:
        return max((abs(sample.score) for sample in self.samples if math.isfinite(sample.score)), default=0.0)

    def height(self, caption_lines: int) -> int:
        return ROW_HEAD + (TILE + BAR + 6 + CAPTION_LINE * caption_lines if self.samples else EMPTY_ROW)


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
        uint8 ``[H, 700, 3]``; ``H`` grows with the number of queries.

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
        return np.concatenate([_draw_header(report, 0, [], []), _draw_nothing(report)])
    rows = [_rows(report, query, show_teachers) for query in queries]
    shown_ids = sorted({sample.sample_id for query_rows in rows for row in query_rows for sample in row.samples})
    query_pictures = [to_rgb(image, mean, std) for image in query_images[: len(queries)]]
    train_pictures = {sample_id: to_rgb(train_images.get(sample_id), mean, std) for sample_id in shown_ids}
    samples = [sample for query_rows in rows for row in query_rows for sample in row.samples]
    caption_lines = 1 if all(_fits_one_line(report, sample) for sample in samples) else 2
    blocks = [
        _draw_query(report, query, picture, query_rows, train_pictures, caption_lines)
        for query, picture, query_rows in zip(queries, query_pictures, rows, strict=True)
    ]
    return np.concatenate(
        [_draw_header(report, len(queries), [*query_pictures, *train_pictures.values()], samples), *blocks]
    )


def _rows(report: Report, query: QueryReport, show_teachers: bool) -> list[_Row]:
    rows = [
        _Row("harmful: pushed towards this mistake", report.similarity, query.harmful[:TILES_PER_ROW]),
        _Row("look-alikes: alike in the model's eyes", "cosine", query.look_alikes[:TILES_PER_ROW]),
    ]
    if show_teachers:
        rows.append(_Row("teachers: taught this prediction", report.similarity, query.teachers[:TILES_PER_ROW]))
    return rows


def _fits_one_line(report: Report, sample: InfluentialSample) -> bool:
    label, *others = _caption_parts(report, sample)
    gaps = 2 * 10
    return measure_text(label, BODY, bold=True) + sum(measure_text(other, BODY) for other in others) + gaps <= TILE


def _caption_parts(report: Report, sample: InfluentialSample) -> tuple[str, str, str]:
    return _label_text(report, sample.label), f"#{sample.sample_id}", _score_text(sample.score)


def _draw_header(
    report: Report, num_shown: int, pictures: Iterable[RgbImage | None], samples: Sequence[InfluentialSample]
) -> Pixels:
    caption = wrap_text(_caption(report), BODY, CONTENT, max_lines=4)
    notes = [line for note in _notes(report, pictures) for line in wrap_text(note, BODY, CONTENT, max_lines=2)]
    has_mark, has_bar = any(sample.label_is_prediction for sample in samples), bool(samples)
    canvas = Canvas(WIDTH, 44 + LINE * (len(caption) + len(notes)) + 34 * (has_mark + has_bar) + 12)
    title = fit_text(_title(report, num_shown), TITLE, CONTENT, bold=True)
    baseline = 34
    canvas.text(MARGIN, baseline, title, TITLE, bold=True)
    baseline += 4
    for line in [*caption, *notes]:
        baseline += LINE
        canvas.text(MARGIN, baseline, line, BODY, MUTED)
    if has_mark:
        baseline += 34
        canvas.rectangle(MARGIN, baseline - 20, 28, 28, BACKDROP)
        _draw_mark(canvas, MARGIN, baseline - 20, 28, thickness=4, badge=14)
        canvas.text(MARGIN + 40, baseline, "training sample with the wrongly predicted label", BODY)
    if has_bar:
        baseline += 34
        _draw_bar(canvas, MARGIN, baseline - 10, 28, 0.65)
        canvas.text(MARGIN + 40, baseline, "share of the row's strongest score; below: label, #sample, score", BODY)
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
    canvas = Canvas(WIDTH, 108)
    canvas.rectangle(MARGIN, 4, CONTENT, 88, BACKDROP)
    size = 24
    canvas.text((WIDTH - measure_text(words, size)) / 2, 56, words, size)
    return canvas.to_pixels()


def _draw_query(
    report: Report,
    query: QueryReport,
    picture: RgbImage | None,
    rows: Sequence[_Row],
    train_pictures: Mapping[int, RgbImage | None],
    caption_lines: int,
) -> Pixels:
    heights = [row.height(caption_lines) for row in rows]
    canvas = Canvas(WIDTH, BLOCK_TOP + PICTURE + sum(ROW_SPACE + height for height in heights) + BLOCK_BOTTOM)
    canvas.rectangle(0, 0, WIDTH, 2, RULE)
    canvas.paste(to_tile(None if picture is None else picture.pixels, PICTURE), MARGIN, BLOCK_TOP)
    _draw_verdict(canvas, report, query)
    top = BLOCK_TOP + PICTURE
    for row, height in zip(rows, heights, strict=True):
        top += ROW_SPACE
        _draw_row(canvas, top, report, row, train_pictures, caption_lines)
        top += height
    return canvas.to_pixels()


def _draw_verdict(canvas: Canvas, report: Report, query: QueryReport) -> None:
    """The words beside the query's image: label and prediction, how sure, which sample, is its label doubtful."""
    left = MARGIN + PICTURE + 22
    probability = None if query.probability is None else f"{query.probability:.0%}"
    _draw_headline(canvas, left, _label_text(report, query.label), _label_text(report, query.prediction), probability)
    facts = f"loss {query.loss:.3g} · {_query_name(report, query)}"
    canvas.text(left, BLOCK_TOP + 92, fit_text(facts, BODY, WIDTH - MARGIN - left), BODY, MUTED)
    if query.label_looks_wrong:
        words = "this validation label looks wrong"
        height, half, diamond = 36, 18, 10
        top, middle = BLOCK_TOP + PICTURE - height, left + 20
        canvas.rectangle(left, top, 2 * round(measure_text(words, BODY) / 2) + 52, height, DOUBT)
        corners = [
            (middle, half - diamond),
            (middle + diamond, half),
            (middle, half + diamond),
            (middle - diamond, half),
        ]
        canvas.polygon([(x, top + y) for x, y in corners], PAPER)
        canvas.text(left + 38, top + 25, words, BODY, PAPER)


def _draw_headline(canvas: Canvas, left: int, label: str, prediction: str, probability: str | None) -> None:
    """Draw label -> prediction, side by side where a readable size allows it, else one above the other."""
    right = WIDTH - MARGIN
    words = ("labelled", "predicted" if probability is None else f"predicted, {probability}")
    word_widths = [measure_text(word, BODY) for word in words]
    for size in HEADLINES:
        widths = [measure_text(name, size, bold=True) for name in (label, prediction)]
        second, arrow = left + max(word_widths[0], widths[0]) + 76, 44
        if second + max(word_widths[1], widths[1]) <= right:
            for x, word, name, colour in ((left, words[0], label, INK), (second, words[1], prediction, MARK)):
                canvas.text(x, BLOCK_TOP + 16, word, BODY, MUTED)
                canvas.text(x, BLOCK_TOP + 60, name, size, colour, bold=True)
            _draw_arrow(canvas, second - 16 - arrow, BLOCK_TOP + 46, arrow)
            return
    size, start = HEADLINE_STACKED, left + 108
    for word, name, colour, after, baseline in (
        ("labelled", label, INK, "", BLOCK_TOP + 22),
        ("predicted", prediction, MARK, probability or "", BLOCK_TOP + 58),
    ):
        canvas.text(left, baseline, word, BODY, MUTED)
        room = right - start - measure_text(after, BODY) - 14
        end = canvas.text(start, baseline, fit_text(name, size, room, bold=True), size, colour, bold=True)
        canvas.text(end + 14, baseline, after, BODY, MUTED)


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
    canvas: Canvas,
    top: int,
    report: Report,
    row: _Row,
    train_pictures: Mapping[int, RgbImage | None],
    caption_lines: int,
) -> None:
    canvas.text(MARGIN, top + 20, row.title, BODY, bold=True)
    measure = f"{row.measure} · augmented view" if report.augmented else row.measure
    canvas.text_right(WIDTH - MARGIN, top + 20, measure, BODY, MUTED)
    top += ROW_HEAD
    if not row.samples:
        canvas.rectangle(MARGIN, top, CONTENT, EMPTY_ROW, BACKDROP)
        canvas.text(MARGIN + 16, top + 31, "none", BODY, MUTED)
    for place, sample in enumerate(row.samples):
        left, picture = MARGIN + place * (TILE + GAP), train_pictures[sample.sample_id]
        canvas.paste(to_tile(None if picture is None else picture.pixels, PICTURE), left + FRAME_ROOM, top + FRAME_ROOM)
        if sample.label_is_prediction:
            _draw_mark(canvas, left, top, TILE, thickness=FRAME_ROOM, badge=40)
        else:
            canvas.frame(left, top, TILE, 2, FRAME)
        share = min(abs(sample.score) / row.full_bar, 1.0) if row.full_bar and math.isfinite(sample.score) else 0.0
        _draw_bar(canvas, left, top + TILE + 4, TILE, share)
        _draw_caption(canvas, left, top + TILE + 4 + BAR, _caption_parts(report, sample), caption_lines)


def _draw_bar(canvas: Canvas, x: int, y: int, width: int, share: float) -> None:
    canvas.rectangle(x, y, width, BAR, TRACK)
    canvas.rectangle(x, y, 2 * round(width * share / 2), BAR, MUTED)


def _draw_caption(canvas: Canvas, x: int, y: int, parts: tuple[str, str, str], lines: int) -> None:
    """Write label, sample id and score under a tile, on one line or with the label on its own."""
    label, name, score = parts
    first, last = y + 22, y + 22 + CAPTION_LINE * (lines - 1)
    score_left = canvas.text_right(x + TILE, last, score, BODY)
    end = canvas.text(x, first, fit_text(label, BODY, TILE, bold=True), BODY, bold=True)
    start = x if lines > 1 else end + 10
    canvas.text(start, last, fit_text(name, BODY, score_left - 8 - start), BODY)


def _draw_mark(canvas: Canvas, x: int, y: int, size: int, thickness: int, badge: int) -> None:
    """A thick frame and a filled corner: told apart by shape where the colour is not seen."""
    right, top = x + size - thickness, y + thickness
    for leg, colour in ((badge + 6, PAPER), (badge, MARK)):
        # Over the frame's inner edge, which is drawn on top: the soft edges of the corner stay below it.
        canvas.polygon([(right - leg - 2, top - 2), (right + 2, top - 2), (right + 2, top + leg + 2)], colour)
    canvas.frame(x, y, size, thickness, MARK)


def _label_text(report: Report, label: Label) -> str:
    """The name of a label in letters that the font has; the class number where the name has others."""
    if isinstance(label, tuple) and label:
        return " + ".join(_label_text(report, index) for index in label)
    if isinstance(label, float):
        return report.name_of(label).replace("-", MINUS)
    text = to_plain_text(report.name_of(label))
    return text if is_drawable(text) else f"class {label}"


def _score_text(score: float) -> str:
    text = f"{score:#.3g}".rstrip(".")
    return (f"{score:.1e}" if "e" in text else text).replace("-", MINUS)
