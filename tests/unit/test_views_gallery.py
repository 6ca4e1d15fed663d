"""The gallery of suspects: given and suggested label under the right picture."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.views import Exhibit, suspects_gallery, to_rgb
from lightning_gradsim.views.canvas import MUTED
from lightning_gradsim.views.tiles import BAR, FRAME_ROOM, GAP, MARGIN, PICTURE, TILE, WIDTH
from tests.unit.test_views_panel import LONG, boxes, make_report, texts, words  # noqa: F401

NUMBER = 9


def make_suspects(number=NUMBER, **changes):
    ids = torch.arange(number) + 100
    table = SuspectTable(
        ids,
        8.0 / (torch.arange(number) + 1),
        torch.arange(number).int() % 3,
        (torch.arange(number).int() + 1) % 3,
        torch.full((number,), 0.5),
        torch.arange(number) < 4,
        score_name="margin_knn",
        visits=torch.full((number,), 7),
    )
    return replace(table, **changes)


def draw(table, names=("cat", "dog", "ape"), **options):
    exhibits = {
        int(sample_id): Exhibit(picture=to_rgb(torch.full((1, 4, 4), (10 + 20 * place) / 255)))
        for place, sample_id in enumerate(table.sample_ids)
    }
    return suspects_gallery(make_report(suspects=table, class_names=names), exhibits, **options)


def test_what_is_said(texts):  # noqa: F811
    draw(make_suspects())
    said = words(texts)
    assert "suspects: training labels that look wrong" in said
    caption = "epoch 9, step 2300 · the first 9 by margin_knn · 4 of 9 flagged · seen 7 times"
    assert caption in " ".join(said)
    start = said.index("cat")
    assert said[start : start + 4] == ["cat", "dog", "#100", "8.00"]
    assert said.count("cat") == 3 + 1, "three samples are labelled so; one of the four that are flagged is rather so"
    assert "suggested label, if flagged" in said


def test_where_none_is_flagged_nothing_looks_wrong(texts):  # noqa: F811
    draw(make_suspects(flagged=torch.zeros(NUMBER, dtype=torch.bool)))
    said = words(texts)
    assert "suspects: none is flagged; the first of the ranking" in said
    assert "suggested label, if flagged" not in said
    assert said.count("cat") == 3, "no arrow to another label"


def test_in_how_many_reports_a_sample_was_flagged(texts):  # noqa: F811
    judged = torch.full((NUMBER,), 6, dtype=torch.int16)
    draw(make_suspects(reports_flagged=torch.arange(NUMBER).short().clamp(max=6), reports_judged=judged))
    said = words(texts)
    assert [each for each in said if each.startswith("flagged ")] == [
        f"flagged {min(place, 6)} of 6" for place in range(NUMBER)
    ]
    assert "below: #sample, score, in how many reports flagged" in " ".join(said)
    texts.clear()
    draw(make_suspects())
    assert not [each for each in words(texts) if each.startswith("flagged ") or "reports" in each]


def test_each_picture_stands_in_its_place():
    gallery = draw(make_suspects(4))
    for place in range(4):
        left = MARGIN + place * (TILE + GAP) + FRAME_ROOM
        column = gallery[:, left + PICTURE // 2, 0]
        assert (column == 10 + 20 * place).sum() >= PICTURE


def test_bars_are_shares_of_the_strongest_score(boxes):  # noqa: F811
    draw(make_suspects(4))
    widths = [width for _, _, width, height, colour in boxes if height == BAR and colour == MUTED]
    assert widths == [TILE, TILE // 2, 2 * round(TILE / 6), 2 * round(TILE / 8)]


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (make_suspects(), (LONG, "dog", LONG[::-1])),
        (make_suspects(sample_ids=torch.arange(NUMBER) + 10**12, scores=torch.full((NUMBER,), float("nan"))), None),
        (make_suspects(suggested_labels=None, probabilities=None, visits=None), ("кот", "dog", "🚀")),
        (make_suspects(visits=torch.arange(NUMBER)), None),
        (make_suspects(reports_flagged=torch.arange(NUMBER), reports_judged=torch.full((NUMBER,), 32767)), (LONG,) * 3),
        (SuspectTable.empty(), None),
    ],
    ids=["long names", "large ids", "no suggestions", "visits", "reports", "nothing"],
)
def test_all_text_is_large_enough_and_inside(texts, boxes, table, names):  # noqa: F811
    gallery = draw(table, names)
    assert gallery.shape[1:] == (WIDTH, 3)
    assert len(gallery) % 2 == 0
    assert min(each.size for each in texts) >= 20
    assert min(each.left for each in texts) >= 0
    assert max(each.right for each in texts) <= WIDTH
    assert [box for box in boxes if any(number % 2 for number in box[:4])] == []


def test_the_names_of_cifar_are_whole(texts):  # noqa: F811
    draw(make_suspects(3), ("airplane", "automobile", "truck"))
    said = words(texts)
    assert {"airplane", "automobile", "truck"} <= set(said)
    assert not any("…" in text for text in said)


def test_long_names_stand_one_above_the_other(texts):  # noqa: F811
    draw(make_suspects(1), (LONG, "dog", "ape"))
    (suggested,) = (each for each in texts if each.text == "dog")
    (label,) = (each for each in texts if each.text.startswith(LONG[:5]))
    assert suggested.baseline > label.baseline
    assert label.right <= MARGIN + TILE


def test_only_so_many():
    assert len(draw(make_suspects(9), max_suspects=4)) < len(draw(make_suspects(9)))
    np.testing.assert_array_equal(draw(make_suspects(9)), draw(make_suspects(9)))
