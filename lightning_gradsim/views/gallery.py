"""One picture of the training samples whose labels look wrong, for a TensorBoard card."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from lightning_gradsim.report import Report
from lightning_gradsim.suspects import Suspect
from lightning_gradsim.views.canvas import (
    BACKDROP,
    DOUBT,
    FRAME,
    INK,
    MUTED,
    Canvas,
    Pixels,
    fit_size,
    fit_text,
    measure_text,
    to_plain_text,
    wrap_text,
)
from lightning_gradsim.views.exhibits import Exhibit
from lightning_gradsim.views.images import picture_notes, to_tile
from lightning_gradsim.views.tiles import (
    BAR,
    BODY,
    CAPTION_LINE,
    CONTENT,
    FRAME_ROOM,
    GAP,
    LINE,
    MARGIN,
    PICTURE,
    TILE,
    TILES_PER_ROW,
    TITLE,
    WIDTH,
    draw_arrow,
    draw_bar,
    draw_name,
    label_text,
    shown_suggestion,
    suspects_title,
    times_flagged,
)

HEADLINES = (24, 22, 20)
HEADLINE = HEADLINES[0]
ARROW, ARROW_ROOM = 26, 40


def suspects_gallery(report: Report, train_exhibits: Mapping[int, Exhibit], *, max_suspects: int = 24) -> Pixels:
    """Compose the gallery of a report: the most suspect training samples, each with its given and suggested label.

    Args:
        report: What the validation showed.
        train_exhibits: What is shown of training samples, by sample id; those without a picture get a tile that says
            so.
        max_suspects: How many to draw.

    Returns:
        uint8 ``[H, 700, 3]``.
    """
    shown = report.suspects[:max_suspects]
    pictures = {
        each.sample_id: train_exhibits[each.sample_id].picture if each.sample_id in train_exhibits else None
        for each in shown
    }
    is_short = all(_fits_one_line(report, suspect) for suspect in shown)
    rows = [shown[start : start + TILES_PER_ROW] for start in range(0, len(shown), TILES_PER_ROW)]
    num_lines = 2 if any(times_flagged(suspect) for suspect in shown) else 1
    height = TILE + 10 + (30 if is_short else 60) + BAR + CAPTION_LINE * num_lines + 22
    canvas = Canvas(WIDTH, max(1, len(rows)) * height + 4)
    full_bar = max((abs(suspect.score) for suspect in shown if math.isfinite(suspect.score)), default=0.0)
    for number, row in enumerate(rows):
        for place, suspect in enumerate(row):
            left, top = MARGIN + place * (TILE + GAP), number * height
            picture = pictures[suspect.sample_id]
            canvas.paste(
                to_tile(None if picture is None else picture.pixels, PICTURE), left + FRAME_ROOM, top + FRAME_ROOM
            )
            canvas.frame(left, top, TILE, 2, FRAME)
            _draw_caption(canvas, left, top + TILE, report, suspect, full_bar, is_short=is_short)
    if not rows:
        canvas.rectangle(MARGIN, 4, CONTENT, 88, BACKDROP)
        words = "no training sample was scored"
        canvas.text((WIDTH - measure_text(words, HEADLINE)) / 2, 56, words, HEADLINE)
    header = _draw_header(report, shown, picture_notes(list(pictures.values())))
    return np.concatenate([header, canvas.to_pixels()])


def _draw_header(report: Report, shown: Sequence[Suspect], notes: Sequence[str]) -> Pixels:
    caption = wrap_text(to_plain_text(_caption(report, shown)), BODY, CONTENT, max_lines=3)
    lines = [*caption, *(line for note in notes for line in wrap_text(note, BODY, CONTENT, max_lines=2))]
    canvas = Canvas(WIDTH, 44 + LINE * len(lines) + (34 + LINE * any(map(times_flagged, shown))) * bool(shown) + 16)
    canvas.text(MARGIN, 34, fit_text(suspects_title(report), TITLE, CONTENT, bold=True), TITLE, bold=True)
    baseline = 38
    for line in lines:
        baseline += LINE
        canvas.text(MARGIN, baseline, line, BODY, MUTED)
    if shown:
        baseline += 34
        end = canvas.text(MARGIN, baseline, "given label", BODY)
        if any(shown_suggestion(suspect) is not None for suspect in shown):
            draw_arrow(canvas, end + 8, baseline - 7, ARROW)
            end = canvas.text(end + ARROW + 16, baseline, "suggested label, if flagged", BODY)
        more = ", in how many reports flagged" if any(times_flagged(suspect) for suspect in shown) else ""
        if end + measure_text(f"; below: #sample, score{more}", BODY) > WIDTH - MARGIN:
            baseline, end = baseline + LINE, MARGIN
        canvas.text(end, baseline, f"{'; ' if end > MARGIN else ''}below: #sample, score{more}", BODY)
    return canvas.to_pixels()


def _caption(report: Report, shown: Sequence[Suspect]) -> str:
    suspects = report.suspects
    parts = [report.when_in_words, f"the first {len(shown)} by {suspects.score_name}"]
    parts.append(f"{suspects.num_flagged:,} of {len(suspects):,} flagged")
    visits = {suspect.visits for suspect in shown if suspect.visits is not None}
    if visits:
        number = f"{min(visits)}" if len(visits) == 1 else f"{min(visits)} to {max(visits)}"
        parts.append(f"seen {number} times")
    return " · ".join(parts)


def _names(report: Report, suspect: Suspect) -> tuple[str, str]:
    suggestion = shown_suggestion(suspect)
    return label_text(report, suspect.label), "" if suggestion is None else label_text(report, suggestion)


def _fits_one_line(report: Report, suspect: Suspect) -> bool:
    names = _names(report, suspect)
    return sum(measure_text(name, HEADLINE, bold=True) for name in names) + ARROW_ROOM <= TILE


def _draw_caption(
    canvas: Canvas, left: int, top: int, report: Report, suspect: Suspect, full_bar: float, *, is_short: bool
) -> None:
    label, suggested = _names(report, suspect)
    baseline = top + 30
    label, size = fit_size(label, HEADLINES, TILE, bold=True)
    end = canvas.text(left, baseline, label, size, INK, bold=True)
    if suggested:
        start = end + 6 if is_short else left
        baseline += 0 if is_short else 26
        draw_arrow(canvas, start, baseline - 8, ARROW)
        suggested, size = fit_size(suggested, HEADLINES, left + TILE - start - ARROW - 8, bold=True)
        canvas.text(start + ARROW + 8, baseline, suggested, size, DOUBT, bold=True)
    bottom = top + (40 if is_short else 70)
    share = min(abs(suspect.score) / full_bar, 1.0) if full_bar and math.isfinite(suspect.score) else 0.0
    draw_bar(canvas, left, bottom, TILE, share)
    draw_name(canvas, left, bottom + BAR + 22, suspect.sample_id, suspect.score)
    if times_flagged(suspect):
        words = f"flagged {times_flagged(suspect)}"
        canvas.text(left, bottom + BAR + 22 + CAPTION_LINE, fit_text(words, BODY, TILE), BODY, MUTED)
