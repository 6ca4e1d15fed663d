"""Parts that several pictures are made of: marks, bars, arrows, labels and scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_gradsim.plain_values import Label
from lightning_gradsim.records import InfluentialSample, QueryReport
from lightning_gradsim.report import Report
from lightning_gradsim.suspects import Suspect
from lightning_gradsim.views.canvas import (
    BACKDROP,
    DOUBT,
    INK,
    MARK,
    MINUS,
    MUTED,
    PAPER,
    TRACK,
    Canvas,
    fit_size,
    fit_text,
    is_drawable,
    measure_text,
    to_plain_text,
)

# TensorBoard shows a picture in a card of 350 px, at a window of 1400 px, by leaving out every second row and column.
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
LINE, CAPTION_LINE = 26, 24
BAR = 8
STRIP = 28
LABEL = 32
LABEL_SIZES = (26, 24, 22)
MAX_LAYERS = 3
LONG_NUMBER = 1e5


def draw_bar(canvas: Canvas, x: int, y: int, width: int, share: float) -> None:
    """A bar that is filled to a share of its width."""
    canvas.rectangle(x, y, width, BAR, TRACK)
    canvas.rectangle(x, y, 2 * round(width * share / 2), BAR, MUTED)


def draw_label(canvas: Canvas, x: int, y: int, lead: str, name: str, *, marked: bool) -> None:
    """The given label of a tile, below its frame: on orange, in white, where it is the wrong prediction."""
    ink = PAPER if marked else INK
    canvas.rectangle(x, y, TILE, LABEL, MARK if marked else BACKDROP)
    left = x + FRAME_ROOM
    if lead:
        left = int(canvas.text(left, y + 24, lead, BODY, ink, bold=marked)) + 8
    name, size = fit_size(name, LABEL_SIZES, x + TILE - 4 - left, bold=True)
    canvas.text(left, y + 24, name, size, ink, bold=True)


def label_fits(lead: str, name: str) -> bool:
    """Whether both stand in the label of a tile."""
    widths = measure_text(lead, BODY, bold=True) + 8 + measure_text(name, LABEL_SIZES[0], bold=True)
    return FRAME_ROOM + widths <= TILE - 4


def draw_strip(canvas: Canvas, x: int, y: int, width: int, words: str, height: int = STRIP) -> None:
    """A blue strip with a white diamond and words: a label looks wrong."""
    canvas.rectangle(x, y, width, height, DOUBT)
    diamond, half = height * 0.28, height / 2
    middle = x + half
    corners = [(middle, half - diamond), (middle + diamond, half), (middle, half + diamond), (middle - diamond, half)]
    canvas.polygon([(left, y + top) for left, top in corners], PAPER)
    start = x + height + 2
    canvas.text(start, y + height // 2 + 7, fit_text(words, BODY, x + width - 4 - start), BODY, PAPER)


def strip_width(words: str, height: int = STRIP) -> int:
    """Width of a strip that holds these words, an even number."""
    return 2 * round(measure_text(words, BODY) / 2) + height + 16


def draw_name(canvas: Canvas, x: int, baseline: int, sample_id: int, score: float) -> None:
    """Sample id and score under a tile; where both do not fit, the id, which is what a reader looks up."""
    name, words = fit_text(f"#{sample_id}", BODY, TILE), score_text(score)
    canvas.text(x, baseline, name, BODY)
    if measure_text(name, BODY) + 8 + measure_text(words, BODY) <= TILE:
        canvas.text_right(x + TILE, baseline, words, BODY)


def draw_arrow(canvas: Canvas, left: float, middle: float, length: float) -> None:
    """An arrow to the right."""
    half, head, tip = length * 0.045, length * 0.24, left + length
    neck = tip - length * 0.36
    canvas.polygon([(left, middle - half), (neck, middle - half), (neck, middle + half), (left, middle + half)], MUTED)
    canvas.polygon([(neck, middle - head), (tip, middle), (neck, middle + head)], MUTED)


def doubt_words(report: Report, suspects: Mapping[int, Suspect]) -> dict[int, str]:
    """What strips say of training samples whose labels look wrong, in letters that the font has.

    Args:
        report: What the validation showed.
        suspects: The suspects by sample id.

    Returns:
        ``"rather cat"`` for each, or ``"cat?"`` for all where that does not fit under a tile for one of them.
    """
    names = {
        sample_id: None if suspect.suggested_label is None else label_text(report, suspect.suggested_label)
        for sample_id, suspect in suspects.items()
    }
    room = TILE - STRIP - 6
    is_short = all(measure_text(f"rather {name}", BODY) <= room for name in names.values())
    return {
        sample_id: "wrong label?" if name is None else f"rather {name}" if is_short else f"{name}?"
        for sample_id, name in names.items()
    }


def doubted_label(report: Report, suspect: Suspect) -> str:
    """What is said of a training sample whose label looks wrong, in any letters."""
    return "wrong label?" if suspect.suggested_label is None else f"rather {report.name_of(suspect.suggested_label)}"


def suspects_title(report: Report) -> str:
    """What the first suspects are: every ranking has first ones, flagged or not."""
    if len(report.suspects) and not report.suspects.num_flagged:
        return "suspects: none is flagged; the first of the ranking"
    return "suspects: training labels that look wrong"


def shown_suggestion(suspect: Suspect) -> Label | None:
    """The label that is shown beside the given one: none where the model does not contradict it."""
    return suspect.suggested_label if suspect.flagged else None


def times_flagged(suspect: Suspect) -> str:
    """In how many reports of the run a training sample was flagged, such as "4 of 6"; empty where it is not known."""
    return "" if suspect.reports_flagged is None else f"{suspect.reports_flagged} of {suspect.reports_judged}"


def query_name(report: Report, query: QueryReport) -> str:
    """What a query is: a validation sample, or one that was to be explained, and which."""
    kind = "sample" if report.occasion else "validation sample"
    return kind if query.sample_id is None else f"{kind} #{query.sample_id}"


def doubt_of(report: Report) -> str:
    """What is said of a query whose own label is in doubt."""
    return "this label may be wrong" if report.occasion else "this validation label may be wrong"


def is_mistake(query: QueryReport) -> bool:
    """Whether a query is wrong: `explain` takes any samples."""
    return query.label != query.prediction


def rows_of(
    query: QueryReport, similarity: str, *, show_teachers: bool
) -> list[tuple[str, str, str, tuple[InfluentialSample, ...]]]:
    """The rows beneath a query.

    Args:
        query: The query. If it is right, no sample has the mark of the wrong prediction.
        similarity: The chosen similarity.
        show_teachers: Whether there is a row of teachers.

    Returns:
        Of each row its title, what one of its samples is, what is compared, and the samples.
    """
    harmful = "pushed towards this mistake" if is_mistake(query) else "pushed away from this label"
    rows = [
        (f"harmful: {harmful}", "harmful", similarity, query.harmful),
        ("look-alikes: alike in the model's eyes", "look-alike", "cosine", query.look_alikes),
    ]
    if show_teachers:
        rows.append(("teachers: taught this prediction", "teacher", similarity, query.teachers))
    return [(title, name, measure, _shown(query, samples)) for title, name, measure, samples in rows]


def _shown(query: QueryReport, samples: tuple[InfluentialSample, ...]) -> tuple[InfluentialSample, ...]:
    shown = samples[:TILES_PER_ROW]
    return shown if is_mistake(query) else tuple(replace(each, label_is_prediction=False) for each in shown)


def label_text(report: Report, label: Label) -> str:
    """The name of a label in letters that the font has; the class number where the name has others."""
    if isinstance(label, tuple) and label:
        return " + ".join(label_text(report, index) for index in label)
    if isinstance(label, float):
        return report.name_of(label).replace("-", MINUS)
    text = to_plain_text(report.name_of(label))
    return text if is_drawable(text) else f"class {label}"


def score_text(score: float) -> str:
    """A score or a loss in three digits, the same ones in every view."""
    text = f"{score:#.3g}".rstrip(".")
    if "e" in text:  # thousands have room beside a sample id as whole numbers only
        text = f"{score:.0f}" if 1 <= abs(score) < LONG_NUMBER else f"{score:.1e}"
    return text.replace("-", MINUS)


def origin(report: Report) -> str:
    """When and from what a report was made, on one line."""
    layers = ", ".join(report.layers[:MAX_LAYERS]) or "none"
    if len(report.layers) > MAX_LAYERS:
        layers += f" and {len(report.layers) - MAX_LAYERS} more"
    return f"{report.when_in_words} · layer {layers} · {report.similarity}"
