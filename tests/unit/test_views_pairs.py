"""Class pairs: who is taken for whom, and because of whom."""

from dataclasses import replace

import pytest

from lightning_gradsim.records import ErrorPair, InfluentialSample
from lightning_gradsim.views import class_pairs_markdown, class_pairs_picture
from lightning_gradsim.views.canvas import DOUBT, INK, PAPER
from lightning_gradsim.views.pairs import DARK, _shade, find_pairs, make_matrix
from lightning_gradsim.views.tiles import WIDTH
from tests.unit.test_views_panel import LONG, luminance, make_query, make_report, texts, words  # noqa: F401

PAIRS = (ErrorPair(2, 0, 7), ErrorPair(0, 1, 2), ErrorPair(1, 2, 1))


def harmful(*ids):
    return tuple(InfluentialSample(sample_id, sample_id % 3, -1.0, False) for sample_id in ids)


def make_pairs_report(**changes):
    queries = [
        make_query(label=2, prediction=0, harmful=harmful(4, 5, 6)),
        make_query(label=2, prediction=0, harmful=harmful(5, 7, 6)),
        make_query(label=0, prediction=1, harmful=harmful(9)),
    ]
    return make_report(*queries, **{"error_pairs": PAIRS, **changes})


def test_the_matrix_counts_given_by_predicted():
    matrix = make_matrix(make_pairs_report())
    assert matrix.classes == (0, 1, 2)
    assert matrix.counts == ((0, 2, 0), (0, 0, 1), (7, 0, 0))
    assert matrix.num_left_out == 0


def test_of_many_classes_those_with_most_mistakes_are_shown():
    matrix = make_matrix(make_pairs_report(), max_classes=2)
    assert matrix.classes == (0, 2)
    assert matrix.counts == ((0, 0), (7, 0))
    assert matrix.num_left_out == 3


def test_culprits_are_harmful_for_most_of_a_pair():
    first, second, third = find_pairs(make_pairs_report())
    assert first.culprits == ((5, 2), (6, 0), (4, 1))
    assert second.culprits == ((9, 0),)
    assert third.culprits == ()


def test_culprits_of_the_mean_gradient_come_before_counts():
    pairs = (replace(PAIRS[0], harmful=harmful(8, 7, 6, 5)), *PAIRS[1:])
    first, second, _ = find_pairs(make_pairs_report(error_pairs=pairs))
    assert first.culprits == ((8, 2), (7, 1), (6, 0))
    assert second.culprits == ((9, 0),)


def test_pairs_that_were_studied_come_first():
    report = make_pairs_report(error_pairs=(ErrorPair(1, 2, 30), *PAIRS))
    assert [each.pair.count for each in find_pairs(report)] == [7, 2, 30, 1]
    assert len(find_pairs(report, 2)) == 2


@pytest.mark.parametrize(("names", "heads"), [(("cat", "dog", "ape"), "cat"), ((LONG, "dog", "ape"), "0")])
def test_columns_are_numbered_where_names_do_not_fit(texts, names, heads):  # noqa: F811
    class_pairs_picture(make_pairs_report(class_names=names))
    said = words(texts)
    assert heads in said
    assert any(text.startswith("0 n020") for text in said) is (heads == "0")


@pytest.mark.parametrize(
    ("names", "num_classes"),
    [
        (("barbera", "grignolino", "barolo"), 3),
        (("Iris versicolor, Gaspe", "Iris virginica, Gaspe", "Iris setosa, Gaspe"), 3),
        (("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"), 10),
    ],
)
def test_names_are_whole_as_long_as_there_is_room(texts, names, num_classes):  # noqa: F811
    pairs = tuple(ErrorPair(i, (i + 1) % num_classes, 1234) for i in range(num_classes))
    class_pairs_picture(make_pairs_report(error_pairs=pairs, class_names=names))
    assert [text for text in words(texts) if "…" in text] == []


def test_the_markdown():
    table = class_pairs_markdown(make_pairs_report(class_names=("a|b", "dog", "ship"))).splitlines()
    assert table[4] == "| ship | a&#124;b | 7 | 5 (ship), 6 (a&#124;b), 4 (dog) |"
    assert class_pairs_markdown(make_report()) == "No misclassified validation sample.\n"


def test_what_the_picture_says(texts):  # noqa: F811
    class_pairs_picture(make_pairs_report())
    said = words(texts)
    for expected in ("7", "2", "1", "7 mistakes", "1 mistake", "harmful, labelled ship: #5; cat: #6; dog: #4"):
        assert expected in said, expected
    assert "none of them was studied" in said


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("automobile", "harmful, labelled automobile: #1000000 #2000000 #3000000"),
        (LONG, "harmful, labelled n02099601 golden ret…: #1000000 #2000000"),
    ],
)
def test_samples_of_one_label_stand_together_with_all_of_their_ids(texts, name, expected):  # noqa: F811
    samples = tuple(InfluentialSample(number * 10**6, 0, -1.0, False) for number in (1, 2, 3))
    class_pairs_picture(
        make_pairs_report(class_names=(name, "dog", "ship"), error_pairs=(replace(PAIRS[0], harmful=samples),))
    )
    assert expected in words(texts)


def test_samples_that_do_not_fit_are_left_out_not_cut(texts):  # noqa: F811
    report = make_pairs_report(class_names=[f"{name} {LONG}" for name in "abc"])
    class_pairs_picture(report)
    (said,) = (text for text in words(texts) if "#5" in text)
    assert said.startswith("harmful, labelled c n020")
    assert said.endswith(": #5")
    assert find_pairs(report)[0].culprits == ((5, 2), (6, 0), (4, 1)), "of others there is no room for the labels"


def test_the_largest_count_is_darkest():
    pixels = class_pairs_picture(make_pairs_report())
    assert (pixels == DOUBT).all(axis=-1).sum() > 1000
    few = make_pairs_report(error_pairs=PAIRS[1:])
    assert (class_pairs_picture(few) == _shade(0.5)).all(axis=-1).sum() > 1000


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, DARK, DARK + 0.01, 1.0])
def test_counts_can_be_read_on_every_shade(share):
    ink = PAPER if share > DARK else INK
    light, dark = sorted((luminance(ink), luminance(_shade(share))), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 3.8


@pytest.mark.parametrize(
    ("names", "num_classes"), [(None, 2), (None, 10), ((LONG,) * 200, 200), (("日本", "кот", "🚀") * 9, 27)]
)
def test_all_text_is_large_enough_and_inside(texts, names, num_classes):  # noqa: F811
    pairs = tuple(ErrorPair(i, (i + 1) % num_classes, 10**5 + i) for i in range(num_classes))
    pixels = class_pairs_picture(make_pairs_report(error_pairs=pairs, class_names=names))
    assert pixels.shape[1:] == (WIDTH, 3)
    assert len(pixels) % 2 == 0
    assert min(each.size for each in texts) >= 20
    assert min(each.left for each in texts) >= 0
    assert max(each.right for each in texts) <= WIDTH


def test_labels_of_one_class_only():
    report = replace(make_pairs_report(), error_pairs=(ErrorPair(0, 1, 1),))
    assert class_pairs_picture(report).shape[1] == WIDTH
