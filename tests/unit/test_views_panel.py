"""The panel: the mark sits exactly where it belongs, all text fits, nothing in a report makes it fail."""

from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import pytest
import torch

from lightning_gradsim.records import InfluentialSample, QueryReport
from lightning_gradsim.report import Report
from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.views import canvas
from lightning_gradsim.views.canvas import (
    DOUBT,
    FRAME,
    INK,
    MARK,
    MINUS,
    MUTED,
    PAPER,
    TRACK,
    Canvas,
    fit_text,
    measure_text,
    wrap_text,
)
from lightning_gradsim.views.exhibits import Exhibit
from lightning_gradsim.views.images import to_rgb
from lightning_gradsim.views.panel import mistake_panel
from lightning_gradsim.views.tiles import BAR, FRAME_ROOM, GAP, LABEL, MARGIN, STRIP, TILE, WIDTH

LONG = "n02099601 golden retriever, a dog that is described at some length"


def make_samples(flags=(), first_id=0):
    return tuple(
        InfluentialSample(first_id + place, 2 if flag else 1, -3.0 / (place + 1), flag)
        for place, flag in enumerate(flags)
    )


def make_query(harmful=(False,) * 8, look_alikes=(False,) * 8, **changes):
    query = QueryReport(
        sample_id=17,
        dataloader_idx=0,
        label=1,
        prediction=2,
        probability=0.97,
        loss=3.5,
        harmful=harmful if harmful and isinstance(harmful[0], InfluentialSample) else make_samples(harmful),
        teachers=make_samples((True,) * 8, first_id=20),
        look_alikes=make_samples(look_alikes, first_id=10),
    )
    return replace(query, **changes)


def make_report(*queries, **changes):
    report = Report(
        epoch=9,
        step=2300,
        layers=("head.fc",),
        similarity="dot",
        reference="1,437 training samples",
        num_train_samples=1437,
        num_validation_samples=360,
        num_errors=len(queries),
        queries=queries,
        class_names=("cat", "dog", "ship"),
    )
    return replace(report, **changes)


def exhibit(image, **normalisation):
    return Exhibit(picture=to_rgb(image, **normalisation))


def draw(report, images=None, normalisation=None, **options):
    grey = torch.full((1, 8, 8), 0.5)
    train = dict.fromkeys(range(40), exhibit(grey, **(normalisation or {})))
    images = [grey] * len(report.queries) if images is None else images
    return mistake_panel(report, [exhibit(image, **(normalisation or {})) for image in images], train, **options)


class Text(NamedTuple):
    text: str
    size: int
    left: float
    right: float
    baseline: int
    canvas: Canvas


@pytest.fixture
def texts(monkeypatch):
    """All texts that get drawn."""
    drawn = []
    draw_text = Canvas.text

    def record(self, x, baseline, text, size, *args, **kwargs):
        right = draw_text(self, x, baseline, text, size, *args, **kwargs)
        drawn.append(Text(text, size, x, right, baseline, self))
        return right

    monkeypatch.setattr(Canvas, "text", record)
    return drawn


@pytest.fixture
def boxes(monkeypatch):
    """All rectangles, frames and pictures that get drawn, as ``(x, y, width, height, colour)``."""
    drawn = []
    rectangle, frame, paste = Canvas.rectangle, Canvas.frame, Canvas.paste

    def record_rectangle(self, x, y, width, height, colour):
        drawn.append((x, y, width, height, colour))
        rectangle(self, x, y, width, height, colour)

    def record_frame(self, x, y, size, thickness, colour):
        drawn.extend([(x, y, size, size, colour), (x, y, thickness, thickness, colour)])
        frame(self, x, y, size, thickness, colour)

    def record_paste(self, pixels, x, y):
        drawn.append((x, y, pixels.shape[1], pixels.shape[0], None))
        paste(self, pixels, x, y)

    monkeypatch.setattr(Canvas, "rectangle", record_rectangle)
    monkeypatch.setattr(Canvas, "frame", record_frame)
    monkeypatch.setattr(Canvas, "paste", record_paste)
    return drawn


def words(texts):
    return [each.text for each in texts]


def is_marked(panel):
    return (panel == MARK).all(axis=-1)


@pytest.mark.parametrize("list_name", ["harmful", "look_alikes"])
@pytest.mark.parametrize("flags", [(True, False, False, True), (False, False, True, False), (True,) * 4])
def test_the_mark_is_drawn_exactly_where_the_label_is_the_prediction(list_name, flags):
    plain, marked = draw(make_report(make_query())), draw(make_report(make_query(**{list_name: flags})))
    height = min(len(plain), len(marked)) - 170  # below both headers, the legend being in one of them
    added = is_marked(marked[-height:]) & ~is_marked(plain[-height:])
    places = np.zeros(WIDTH, dtype=bool)
    for place, flag in enumerate(flags):
        left = MARGIN + place * (TILE + GAP)
        places[left : left + TILE] = flag
    np.testing.assert_array_equal(added.any(axis=0), places)
    rows = np.flatnonzero(added.any(axis=1))
    assert rows[-1] - rows[0] + 1 == TILE + LABEL


def test_the_mark_differs_by_shape_too():
    plain, marked = (draw(make_report(make_query(harmful=(flag, True)))) for flag in (False, True))
    tile = (plain != marked).any(axis=-1)
    top, left = (int(np.flatnonzero(tile.any(axis=axis))[0]) for axis in (1, 0))
    mark = is_marked(marked)[top : top + TILE + LABEL, left : left + TILE]
    assert mark[:FRAME_ROOM].all(), "thick frame above"
    assert mark[:, :FRAME_ROOM].all(), "thick frame at the left"
    assert mark[TILE : TILE + 2].all(), "filled label"
    assert mark[TILE:, -2:].all(), "filled label"
    assert not mark[FRAME_ROOM : TILE - FRAME_ROOM, FRAME_ROOM : TILE - FRAME_ROOM].any(), "the picture is whole"


@pytest.mark.parametrize(
    ("flags", "has_mark", "has_bar"), [((False,) * 4, False, True), ((False, True), True, True), ((), False, False)]
)
def test_the_legend_explains_what_there_is(texts, flags, has_mark, has_bar):
    draw(make_report(make_query(harmful=flags, look_alikes=())))
    assert ("training sample with the wrongly predicted label" in words(texts)) is has_mark
    assert ("share of the row's strongest score; below: #sample, score" in words(texts)) is has_bar


@pytest.mark.parametrize("num_queries", [0, 1, 3, 6, 9])
def test_shape(num_queries):
    heights = [draw(make_report(*[make_query()] * number)).shape for number in (1, 2)]
    block = heights[1][0] - heights[0][0]
    panel = draw(make_report(*[make_query()] * num_queries))
    assert panel.dtype == np.uint8
    assert panel.shape[1:] == (WIDTH, 3)
    if num_queries:
        assert panel.shape[0] == heights[0][0] + (min(num_queries, 6) - 1) * block


@pytest.mark.parametrize("class_names", [None, ("cat", "dog " * 9, "ship")])
def test_six_queries_are_no_endless_scroll(class_names):
    assert len(draw(make_report(*[make_query()] * 6, class_names=class_names))) <= 4400


def test_what_a_block_says(texts):
    draw(make_report(make_query(label_looks_wrong=True)))
    said = words(texts)
    for expected in (
        "1 of 360 validation samples wrong, 1 shown",
        "epoch 9, step 2300 · layer head.fc · dot · against 1,437 training samples",
        "dog",
        "ship",
        "labelled",
        "predicted, 97%",
        "loss 3.50 · validation sample #17",
        "this validation label may be wrong",
        "harmful: pushed towards this mistake",
        "look-alikes: alike in the model's eyes",
        "dot",
        "cosine",
        "#0",
        "−3.00",
    ):
        assert expected in said, expected
    assert not any("teachers" in text for text in said)
    assert said.count("dog") == 1 + 8, "the headline and four tiles in each of two rows"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"label": 1, "prediction": 2}, ["labelled", "dog", "predicted, 97%", "ship"]),
        ({"label": 1, "prediction": 2, "probability": None}, ["labelled", "dog", "predicted", "ship"]),
        ({"label": 3.25, "prediction": -1.5, "probability": None}, ["labelled", "3.25", "predicted", "−1.5"]),
        (
            {"label": 0, "prediction": 3},
            ["labelled", "a cat that sits", "predicted", "a cat that lies down now", "97%"],
        ),
    ],
)
def test_the_headline_says_what_was_labelled_and_what_predicted(texts, changes, expected):
    names = ("a cat that sits", "dog", "ship", "a cat that lies down now")
    draw(make_report(make_query(**changes), class_names=names))
    start = words(texts).index("labelled")
    assert [word for word in words(texts)[start:] if word][: len(expected)] == expected


@pytest.mark.parametrize("class_names", [None, ("cat", "dog, a barking friend", "ship")])
def test_the_given_label_of_a_tile_is_larger_than_its_id_and_has_a_line_of_its_own(texts, class_names):
    draw(make_report(make_query(harmful=(True, False)), class_names=class_names))
    assert ("labelled" in words(texts)[words(texts).index("dot") :]) is (class_names is None), "where it fits"
    (label,) = (each for each in texts if each.text == (class_names[2] if class_names else "2") and each.size < 28)
    for text in ("#0", "−3.00"):
        other = next(each for each in texts if each.text == text)
        assert other.baseline - label.baseline > 20
        assert other.size < label.size


@pytest.mark.parametrize(("name", "is_said"), [("5", False), ("automobile", True)])
def test_what_stands_below_a_tile_is_said_there_or_in_the_legend(texts, name, is_said):
    draw(make_report(make_query(), class_names=("cat", name, name)))
    said = words(texts)
    assert ("below each picture: its given label" in said) is is_said
    assert said.count("labelled") == 1 + (0 if is_said else 8)
    assert said.count(name) == 2 + 8, "whole, though it is long"


def test_a_sample_that_is_right_has_no_mistake_and_no_marks(texts):
    samples = make_samples((True, False))
    query = make_query(harmful=samples, look_alikes=samples, prediction=1)
    panel = draw(make_report(query, occasion="Net, its present weights", num_errors=0))
    said = words(texts)
    assert not is_marked(panel).any()
    assert "harmful: pushed away from this label" in said
    assert any("· sample #17" in text for text in said)
    assert not any("validation" in text or "mistake" in text for text in said)


def test_bars_are_shares_of_the_strongest_of_their_row(boxes):
    scores = (-8.0, 4.0, float("nan"), -2.0)
    samples = tuple(InfluentialSample(place, 1, score, False) for place, score in enumerate(scores))
    draw(make_report(make_query(harmful=samples, look_alikes=())), [None])
    bars = [(x, y, width) for x, y, width, height, colour in boxes if height == BAR and colour == MUTED][:-1]
    assert [width for *_, width in bars] == [TILE, TILE // 2, 0, 2 * round(TILE / 8)]
    tracks = [(x, y) for x, y, width, height, colour in boxes if height == BAR and colour == TRACK][:-1]
    assert [(x, y) for x, y, _ in bars] == tracks


@pytest.mark.parametrize(
    ("sample_id", "score", "said"),
    [
        (39012, -1925.4, ["#39012", f"{MINUS}1925"]),
        (7, 0.5, ["#7", "0.500"]),
        (912, -2.5e9, ["#912", f"{MINUS}2.5e+09"]),
        (12_345_678, -2.5e9, ["#12345678"]),
    ],
)
def test_the_id_of_a_tile_is_whole_and_the_score_stands_beside_it_where_both_fit(texts, sample_id, score, said):
    draw(make_report(make_query(harmful=(InfluentialSample(sample_id, 1, score, False),), look_alikes=())))
    start = words(texts).index(said[0])
    assert words(texts)[start : start + len(said)] == said


def test_teachers_on_demand(texts):
    draw(make_report(make_query()), show_teachers=True)
    assert "teachers: taught this prediction" in words(texts)
    assert "#20" in words(texts)


def make_suspects(flagged, suggested=0):
    """Samples 0 to 39, some of which are flagged."""
    ids = torch.arange(40)
    flags = torch.zeros(40, dtype=torch.bool)
    flags[list(flagged)] = True
    none = None if suggested is None else torch.full((40,), suggested, dtype=torch.int32)
    return SuspectTable(ids, -ids.float(), ids.int(), none, None if none is None else torch.ones(40), flags)


@pytest.mark.parametrize(("suggested", "words_there"), [(0, "rather cat"), (None, "wrong label?")])
def test_a_harmful_sample_that_is_flagged_has_two_witnesses(texts, suggested, words_there):
    """Samples 1 and 3 are harmful; look-alikes such as 10 and 11 are flagged where classes meet, and say nothing."""
    plain = draw(make_report(make_query(), suspects=make_suspects([])))
    assert not (plain == DOUBT).all(axis=-1).any()
    assert "its own label looks wrong, and the suggested one" not in words(texts)
    texts.clear()
    panel = draw(make_report(make_query(), suspects=make_suspects([1, 3, 10, 11, 39], suggested)))
    assert words(texts).count(words_there) == 2
    assert "its own label looks wrong, and the suggested one" in words(texts)
    blue = (panel == DOUBT).all(axis=-1)
    legend = 300  # px; the legend has a strip of its own above
    columns = np.flatnonzero(blue[legend:].any(axis=0))
    assert columns[0] == MARGIN + TILE + GAP
    assert columns[-1] == MARGIN + 3 * (TILE + GAP) + TILE - 1
    rows = np.flatnonzero(blue[legend:].any(axis=1))
    assert rows[-1] - rows[0] + 1 == STRIP
    assert len(panel) == len(plain) + 34 + STRIP + 2, "room in one row only"


@pytest.mark.parametrize(("name", "said"), [("cat", "rather cat"), ("automobile", "automobile?")])
def test_suggested_labels_are_said_as_long_as_they_fit(texts, name, said):
    report = make_report(make_query(), suspects=make_suspects([1]), class_names=(name, "dog", "ship"))
    draw(report)
    assert said in words(texts)


def test_since_when_a_query_is_wrong(texts):
    draw(make_report(make_query(wrong_since=4), make_query(wrong_since=9)))
    assert "loss 3.50 · validation #17 · wrong since epoch 4" in words(texts)
    assert "loss 3.50 · validation sample #17" in words(texts), "for the first time"


def test_no_doubt_no_badge():
    assert not (draw(make_report(make_query())) == DOUBT).all(axis=-1).any()


@pytest.mark.parametrize(
    ("num_errors", "expected"),
    [(0, "no misclassified validation sample"), (4, "no mistake left to explain under the weights at scoring")],
)
def test_no_queries(texts, num_errors, expected):
    panel = mistake_panel(make_report(num_errors=num_errors), [], {})
    assert expected in words(texts)
    assert panel.shape[0] < 300


def test_a_further_page_shows_the_next_queries(texts):
    queries = [make_query(sample_id=place) for place in range(8)]
    levels = [torch.full((1, 8, 8), place / 8) for place in range(8)]
    second = draw(make_report(*queries), levels, page=2)
    assert "8 of 360 validation samples wrong, 7 to 8" in words(texts)
    alone = draw(make_report(*queries[6:]), levels[6:])
    assert len(second) == len(alone)
    header = len(draw(make_report())) - 108  # less the words that stand where there are no queries
    assert header > 0
    np.testing.assert_array_equal(second[header + 96 :], alone[header + 96 :])
    assert not np.array_equal(second, draw(make_report(*queries))[: len(second)])


def test_augmented_views_are_named_in_the_legend_and_at_each_row(texts):
    draw(make_report(make_query(), augmented=True))
    assert "augmented view: each training tile is one random view of its sample" in words(texts)
    assert "dot · augmented view" in words(texts)


@pytest.mark.parametrize(
    ("image", "options", "expected"),
    [
        (
            torch.tensor([[-1.0, 2.0], [0.0, 1.0]]),
            {},
            "1 of 9 images: values stretched from their own lowest to highest",
        ),
        (torch.tensor([[0.0, float("nan")], [0.0, 1.0]]), {}, "magenta hatching: NaN or infinite pixels"),
        (None, {"mean": [-9.0]}, "all images: values stretched from their own lowest to highest"),
        (torch.rand(2, 8, 8), {}, "channel 1 of 2 shown"),
        (torch.rand(7, 9, 9), {}, "channels 1 to 3 of 7 shown"),
    ],
)
def test_how_pictures_were_read_is_said(texts, image, options, expected):
    draw(make_report(make_query()), [image], options)
    assert expected in words(texts)


def test_images_as_they_are_need_no_words(texts):
    draw(make_report(make_query()))
    assert not any("stretched" in text or "hatching" in text for text in words(texts))


REPORTS = {
    "plain": make_report(make_query()),
    "long names": make_report(make_query(label_looks_wrong=True), class_names=(LONG, LONG, LONG[::-1]), augmented=True),
    "many layers": make_report(make_query(), layers=tuple(f"encoder.layers.{i}.output.dense" * 3 for i in range(9))),
    "long words": make_report(
        make_query(sample_id=10**12, loss=1.23e-9), reference="a reference of very many words " * 30
    ),
    "no samples": make_report(make_query(harmful=(), look_alikes=())),
    "multi-label": make_report(make_query(label=(0, 1, 2) * 9, prediction=())),
    "regression": make_report(
        make_query(label=-1.25e-7, prediction=3e9, probability=None, dataloader_idx=3, sample_id=None)
    ),
    "large id": make_report(
        make_query(harmful=(), look_alikes=()),
        make_query(harmful=(), teachers=(InfluentialSample(10**12, 2, -1.234e-17, True),)),
        similarity="influence",
    ),
    "nan score": make_report(make_query(look_alikes=(), teachers=(InfluentialSample(5, 1, float("nan"), False),))),
    "augmented": make_report(make_query(), augmented=True, similarity="asymmetric"),
    "suspects": make_report(make_query(), class_names=(LONG, "dog", "ship"), suspects=make_suspects(range(40))),
}


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_all_text_is_large_enough_and_inside_and_apart(texts, report):
    draw(report, show_teachers=True)
    assert min(each.size for each in texts) >= 20
    assert min(each.left for each in texts) >= 0
    assert max(each.right for each in texts) <= WIDTH
    for one, other in combinations([each for each in texts if each.text], 2):
        if one.canvas is other.canvas and abs(one.baseline - other.baseline) < 20:
            assert one.right <= other.left or other.right <= one.left, (one.text, other.text)


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 31, 77), (1, 300, 211)])
def test_boxes_and_pictures_lie_on_even_coordinates(boxes, report, shape):
    picture = torch.rand(shape)
    exhibits = [exhibit(picture)] * len(report.queries)
    panel = mistake_panel(report, exhibits, dict.fromkeys(range(40), exhibit(picture)), show_teachers=True)
    assert len(panel) % 2 == 0
    assert [box for box in boxes if any(number % 2 for number in box[:4])] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("crème brûlée", "creme brulee"),
        ("T-shirt\n/ top", "T-shirt / top"),
        ("日本語", "class 1"),
        ("кот 2", "class 1"),
        ("🚀", "class 1"),
        ("\udc80", "class 1"),
        ("  ", "class 1"),
        ("3\u20135 years", "3-5 years"),
        ("שלום", "class 1"),
        ("a|b", "a|b"),
        ("<b>&amp;", "<b>&amp;"),
    ],
)
def test_names_that_the_font_lacks(texts, name, expected):
    draw(make_report(make_query(), class_names=("cat", name, "ship")))
    assert expected in words(texts)


def test_tiles_without_an_image_say_so(texts):
    mistake_panel(make_report(make_query()), [None], {0: exhibit(torch.zeros(5))})
    assert words(texts).count("no image") == 1 + 8


def test_the_number_of_query_images_must_fit():
    with pytest.raises(ValueError, match=r"`query_exhibits` has 1 entries, but the report has 2 queries.*one for each"):
        mistake_panel(make_report(make_query(), make_query()), [None], {})


def test_the_same_report_gives_the_same_pixels():
    report = make_report(make_query(harmful=(True, False)))
    np.testing.assert_array_equal(draw(report), draw(report))


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (value / 255 for value in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("colour", "contrast"), [(MARK, 3.0), (FRAME, 3.0), (DOUBT, 4.5), (INK, 4.5), (MUTED, 4.5)])
def test_contrast_with_the_paper(colour, contrast):
    assert (luminance(PAPER) + 0.05) / (luminance(colour) + 0.05) >= contrast


COLOURS = (MARK, DOUBT, FRAME, INK, PAPER)


def test_marks_stay_apart_without_green_receptors():
    # Machado, Oliveira and Fernandes (2009), table 1, deuteranomaly of severity 1.0: of linear light.
    deuteranopia = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
    seen = [255 * (deuteranopia @ (np.array(colour) / 255) ** 2.2).clip(0, 1) ** (1 / 2.2) for colour in COLOURS]
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) > 60


@pytest.mark.parametrize("bold", [False, True])
@pytest.mark.parametrize("colour", [INK, MUTED])
def test_text_survives_a_viewer_that_leaves_out_every_second_row_and_column(colour, bold):
    for character in f"0123456789#%.|l1-{MINUS}":
        paper = Canvas(60, 60)
        paper.text(21, 40, character, 20, colour, bold)
        ink = 255.0 - paper.to_pixels().mean(axis=-1)
        assert ink.sum() > 0
        for row, column in product((0, 1), (0, 1)):
            assert ink[row::2, column::2].sum() == pytest.approx(ink.sum() / 4, rel=0.01), character


def test_the_minus_is_as_wide_as_the_plus_and_drawn():
    assert measure_text(f"{MINUS}1", 20) == measure_text("+1", 20) > measure_text("-1", 20)
    minus, plus, hyphen = (Canvas(60, 60) for _ in range(3))
    for paper, text in ((minus, MINUS), (plus, "+"), (hyphen, "-")):
        paper.text(20, 40, text, 40)
    dark = [(paper.to_pixels() < 160).all(axis=-1) for paper in (minus, plus, hyphen)]
    assert dark[0].any(axis=0).sum() == pytest.approx(dark[1].any(axis=0).sum(), abs=1)
    assert (dark[0] & ~dark[1]).sum() <= 0.1 * dark[0].sum(), "the bar of the plus"
    assert dark[0].any(axis=0).sum() > 1.5 * dark[2].any(axis=0).sum()


@pytest.mark.parametrize("width", [5, 40, 90, 1000])
@pytest.mark.parametrize("bold", [False, True])
def test_fitted_text_fits_and_is_a_beginning(width, bold):
    fitted = fit_text(LONG, 20, width, bold)
    assert measure_text(fitted, 20, bold) <= width
    assert LONG.startswith(fitted.removesuffix("…"))


def test_wrapped_lines_lose_no_word():
    lines = wrap_text("a · few words · and more", 20, 90, max_lines=9)
    assert " ".join(lines).replace("· ", "").split() == ["a", "few", "words", "and", "more"]
    assert all(measure_text(line, 20) <= 90 for line in lines)


def test_the_list_of_drawable_characters_is_true():
    font = canvas._font(20)
    missing = bytes(font.getmask("\ue000"))
    assert all(bytes(font.getmask(character)) != missing for character in canvas._DRAWABLE - {" "})
