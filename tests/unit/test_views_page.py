"""The page: self-contained, escaped, complete without script."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from lightning_gradsim.history import FollowedQuery, TrendPoint
from lightning_gradsim.records import ErrorPair, Histogram, InfluentialSample
from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.views import Exhibit, report_page, to_rgb
from lightning_gradsim.views.canvas import DOUBT, FRAME, INK, MARK, MUTED
from lightning_gradsim.views.page import review_hints
from tests.unit.test_views_gallery import make_suspects
from tests.unit.test_views_panel import make_query, make_report

NASTY = (
    "<script>alert(1)</script></td></table><style>*{display:none}",
    "a|b\n\"c\" & 'd'",
    "שלום 日本語 🚀 e\u0301",
)
VOID = {"meta", "link", "br", "img"}


class Reader(HTMLParser):
    """Collects tags, texts and what refers elsewhere; fails on tags that are not closed in order."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self.references, self._open = [], [], [], []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.references += [value for name, value in attributes if name in {"src", "href", "data", "action"}]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] not in {"style", "script"}:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    def all(self, tag, **attributes):
        return [found for name, found in self.tags if name == tag and attributes.items() <= found.items()]


def picture(level=0.5, size=8):
    return Exhibit(picture=to_rgb(torch.full((1, size, size), level)))


def make_page(report, exhibit=None, **options):
    exhibit = picture() if exhibit is None else exhibit
    return report_page(report, [exhibit] * len(report.queries), dict.fromkeys(range(200), exhibit), **options)


def test_nothing_refers_elsewhere():
    page = make_page(make_report(make_query(), suspects=make_suspects()))
    reader = Reader(page)
    assert all(reference.startswith(("data:", "#")) for reference in reader.references)
    assert re.findall(r"https?://|//[a-z]|@import|url\(", page) == []
    (policy,) = reader.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'")


def test_what_a_reader_sees_without_script():
    query = make_query(harmful=(True, False), label_looks_wrong=True)
    report = make_report(
        query, suspects=make_suspects(sample_ids=torch.arange(9)), notes=("a note",), settings={"layers": "'last'"}
    )
    text = Reader(make_page(replace(report, versions={"torch": "2.9"}))).text
    for expected in (
        "1 of 360 validation samples wrong",
        "epoch 9, step 2300 · layer head.fc · dot",
        "a note",
        "labelled dog, predicted ship with 97%",
        "this validation label may be wrong",
        "harmful: pushed towards this mistake (dot)",
        "look-alikes: alike in the model's eyes (cosine)",
        "#0 −3.00",
        "rather dog",
        "cat → dog",
        "layers 'last'",
        "torch 2.9",
    ):
        assert expected in text, expected
    assert "teachers" not in text


def test_in_how_many_reports_suspects_were_flagged():
    judged, flagged = torch.full((9,), 6, dtype=torch.int16), torch.arange(9).short().clamp(max=6)
    table = make_suspects(sample_ids=torch.arange(9), reports_flagged=flagged, reports_judged=judged)
    text = Reader(make_page(make_report(make_query(), suspects=table))).text
    assert "flagged in 4 of 6 reports" in text
    assert "flagged in reports" in text
    assert "reports" not in Reader(make_page(make_report(make_query(), suspects=make_suspects()))).text


def test_colours_are_those_of_the_pictures():
    page = make_page(make_report(make_query()))
    for name, colour in {"mark": MARK, "doubt": DOUBT, "ink": INK, "muted": MUTED, "frame": FRAME}.items():
        assert f"--{name}: #{bytes(colour).hex()}" in page


def test_marks_of_tiles():
    page = Reader(make_page(make_report(make_query(harmful=(True, False, True)), suspects=SuspectTable.empty())))
    assert len(page.all("figure", **{"class": "marked"})) == 2
    assert len(page.all("figure")) == 3 + 4


def test_teachers_on_demand():
    assert "teachers: taught this prediction" in Reader(make_page(make_report(make_query()), show_teachers=True)).text


@pytest.mark.parametrize("kind", ["names", "texts", "notes", "settings"])
def test_anything_a_user_wrote_is_shown_as_text(kind):
    report = make_report(make_query(), suspects=make_suspects(sample_ids=torch.arange(9)))
    exhibit = None
    if kind == "names":
        report = replace(report, class_names=NASTY)
    elif kind == "texts":
        exhibit = Exhibit(text=" ".join(NASTY))
    elif kind == "notes":
        report = replace(report, notes=NASTY)
    else:
        report = replace(report, settings=dict(zip("abc", NASTY, strict=True)))
    page = make_page(report, exhibit)
    assert page.count("<script") == 1, "our own"
    text = Reader(page).text
    for each in NASTY:
        assert " ".join(each.split()) in text


def test_texts_become_tables():
    long = "word " * 200
    page = make_page(make_report(make_query(harmful=(True, False))), Exhibit(text=long))
    reader = Reader(page)
    assert not reader.all("figure")
    assert len(reader.all("tr", **{"class": "marked"})) == 1
    assert long.strip() not in reader.text
    assert "word word …" in reader.text or "word …" in reader.text


def test_named_values_stand_side_by_side():
    report = make_report(make_query(harmful=(True,), look_alikes=(False,)))
    own = Exhibit(values=(("age", 20.0), ("height", 1.5)))
    other = Exhibit(values=(("age", 60.0), ("height", 1.5)))
    reader = Reader(report_page(report, [own], dict.fromkeys(range(40), other)))
    assert "this mistake harmful #0 look-alike #10 label dog ship dog age 20 60 60 height 1.5 1.5 1.5" in reader.text
    assert len(reader.all("td", **{"class": "n differs"})) == 2, "the age of both samples"


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (make_report(num_errors=0), "no validation sample is misclassified"),
        (make_report(num_dropped_queries=2), "what validation met as wrong is right under the weights"),
        (make_report(make_query(label=(0, 2), prediction=())), "cat + ship → none"),
        (make_report(make_query(label=1.25, prediction=-2.0, probability=None), task="regression"), "1.25 → -2"),
        (make_report(make_query(sample_id=None, dataloader_idx=3)), "validation sample of loader 3"),
        (make_report(make_query(harmful=(), look_alikes=())), "none"),
    ],
    ids=["nothing wrong", "all dropped", "multi-label", "regression", "no id", "no samples"],
)
def test_reports_of_all_kinds(report, expected):
    assert expected in Reader(make_page(report)).text


def test_samples_that_were_explained_after_the_run():
    samples = (InfluentialSample(3, 1, -3.0, True), InfluentialSample(4, 0, -1.5, False))
    right = make_query(harmful=samples, look_alikes=samples, prediction=1, label_looks_wrong=True)
    report = make_report(right, make_query(), occasion="Net, 2 checkpoints", num_errors=1, num_validation_samples=2)
    page = report_page(report)
    reader = Reader(page)
    for expected in (
        "1 of 2 samples wrong",
        "mistakes 1 of 2 samples",
        "doubtful labels 1 of 2 explained samples",
        "labelled dog, predicted dog with 97%",
        "this label may be wrong",
        "sample #17",
        "harmful: pushed away from this label (dot) dog #3 −3.00 cat #4 −1.50",
        "harmful: pushed towards this mistake (dot) dog #0",
        "All 2 explained samples",
    ):
        assert expected in reader.text, expected
    assert "validation" not in reader.text
    assert reader.all("tr", **{"class": "marked"}) == []
    assert [item for item in page.split("<h2")[1:] if "</p>" not in item] == [], "no section without words"


def test_a_report_alone_has_its_first_mistakes():
    reader = Reader(report_page(make_report(*(make_query(sample_id=i) for i in range(9)))))
    assert [f"sample #{i}" in reader.text for i in range(9)] == [True] * 6 + [False] * 3


def test_anything_else_has_ids_and_labels():
    reader = Reader(make_page(make_report(make_query()), Exhibit()))
    assert "#10" in reader.text
    assert not reader.all("img")


def test_tables_carry_what_sorts_them():
    reader = Reader(make_page(make_report(*[make_query(), make_query(loss=12.0)], suspects=make_suspects())))
    heads = [found for found in reader.all("th") if "data-sort" in found]
    assert len(heads) >= 6 + 7
    assert {"12.0", "3.5"} <= {found["data-value"] for found in reader.all("td") if "data-value" in found}


def test_pairs_trends_and_followed_mistakes():
    points = tuple(TrendPoint(i, 10 * i, 40 - i, 9, 0.5 if i else None, None) for i in range(3))
    report = make_report(
        make_query(wrong_since=4),
        error_pairs=(ErrorPair(0, 1, 7), ErrorPair(2, 1, 3)),
        trends=points,
        followed=(FollowedQuery(17, 0, 1, 2, 4, None), FollowedQuery(5, 1, 0, 2, 1, 3)),
        self_influence=Histogram((0.0, 1.0, 2.0), (3, 6), 2),
    )
    reader = Reader(make_page(report))
    for expected in (
        "wrong since epoch 4",
        "38 mistakes epochs 0 to 2, up to 40",
        "50% of the first suspects were there last time",
        "10^0.0 to 10^2.0; 2 are zero",
        "17 dog ship 4",
        "5 of loader 1 cat ship 1 3",
        "given \\ predicted cat dog ship cat 7 dog ship 3",
    ):
        assert expected in reader.text, expected
    assert len(reader.all("polyline")) == 3, "no line for what is not known"
    assert len(reader.all("rect")) == 2


def test_near_duplicates_are_hinted_at():
    page = make_page(make_report(make_query(), make_query()), near_duplicates=[(1, 12)])
    assert Reader(page).text.count("training sample #12 is a near-duplicate of this validation sample") == 1


def test_review_hints():
    table = make_suspects(9, upper_estimate=5)
    first, second = review_hints(make_report(suspects=table))
    assert "Review the first 1 (1 %)" in first
    assert "4 are flagged" in first
    assert "5 samples: take it as an upper estimate" in second
    assert review_hints(make_report()) == []
    assert len(review_hints(make_report(suspects=make_suspects()))) == 1


def test_where_none_is_flagged_nothing_looks_wrong():
    table = make_suspects(sample_ids=torch.arange(9), flagged=torch.zeros(9, dtype=torch.bool), upper_estimate=5)
    text = Reader(make_page(make_report(make_query(), suspects=table))).text
    assert "Suspects: none is flagged; the first of the ranking" in text
    assert "None is flagged: every ranking" in text
    assert "labels that look wrong" not in text
    assert "cat → dog" not in text


def test_small_pictures_keep_hard_edges():
    small, large = (Reader(make_page(make_report(make_query()), picture(size=size))) for size in (8, 224))
    assert all(found.get("class") == "small" for found in small.all("img"))
    assert not any(found.get("class") for found in large.all("img"))
