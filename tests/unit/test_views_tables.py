"""Markdown tables: class names come out of TensorBoard's own renderer as they went in."""

import warnings
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from lightning_gradsim.records import InfluentialSample, QueryReport
from lightning_gradsim.report import Report
from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.views.exhibits import Exhibit
from lightning_gradsim.views.tables import (
    LINE_LENGTH,
    MISTAKE_HEADS,
    SUSPECT_HEADS,
    mistakes_markdown,
    suspects_markdown,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of the html5lib inside TensorBoard
    from tensorboard.plugin_util import markdown_to_safe_html

NASTY = [
    "a|b",
    "<b>bold</b>",
    "<script>alert(1)</script>",
    "*star* **two**",
    "snake_case_name",
    "`code`",
    "back\\slash \\| end\\",
    "[text](http://x.y)",
    "![img](x)",
    "&amp; &lt;",
    "# head",
    "~~gone~~",
    "- item",
    "1. item",
    "日本語 é",
    "שלום עולם, abc",
    "🚀 👩‍🔬",
    "</td></tr></table>",
    "<!-- -->",
    "$x^2$",
    "http://x.y/z",
    "me@x.org",
]


class Cells(HTMLParser):
    """The rows of the tables of a page, each a list of cell texts."""

    def __init__(self):
        super().__init__()
        self.rows, self.tags, self.inside = [], [], False

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")
            self.inside = True
        if tag == "br":
            self.rows[-1][-1] += "\n"

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in {"td", "th"}

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data


def render(markdown):
    parser = Cells()
    parser.feed(markdown_to_safe_html(markdown))
    assert set(parser.tags) <= {"p", "table", "thead", "tbody", "tr", "th", "td", "br", "strong"}
    return parser.rows


def make_report(names=("cat", "dog"), num_suspects=3, classes=True):
    ids = torch.arange(num_suspects)
    classed = {"suggested_labels": ids.int() * 0 + 1, "probabilities": ids * 0 + 0.875} if classes else {}
    suspects = replace(
        SuspectTable.empty(), sample_ids=ids + 40, scores=3.0 - ids, labels=ids.int() * 0, flagged=ids < 2
    )
    query = QueryReport(
        sample_id=7,
        dataloader_idx=0,
        label=0,
        prediction=1,
        probability=0.5,
        loss=2.25,
        harmful=tuple(InfluentialSample(i, 1, -1.0, True) for i in range(8)),
        label_looks_wrong=True,
    )
    return Report(
        epoch=1,
        step=10,
        layers=("head",),
        similarity="dot",
        reference="3 training samples",
        num_train_samples=3,
        num_validation_samples=5,
        num_errors=1,
        queries=(query,),
        suspects=replace(suspects, **classed),
        class_names=names,
    )


@pytest.mark.parametrize("name", NASTY)
def test_names_survive_the_renderer(name):
    report = make_report(names=(name, "dog"))
    assert render(suspects_markdown(report))[1][2] == name
    assert render(mistakes_markdown(report))[1][1] == f"{name}\nmay be wrong"


@pytest.mark.parametrize("text", NASTY)
def test_texts_survive_the_renderer(text):
    exhibit = Exhibit(text=text)
    markdown = mistakes_markdown(make_report(), [exhibit], {0: exhibit})
    assert render(markdown)[3][-1].split() == text.split()
    assert render(suspects_markdown(make_report(), {40: exhibit}))[1][-1].split() == text.split()


@pytest.mark.parametrize(
    ("name", "shown"),
    [("two\nlines", "two lines"), ("\r\n\tx \u2028y", "x y"), ("nul\x00", "nul"), ("a\udc80b", "a b")],
)
def test_what_cannot_be_shown_becomes_a_space(name, shown):
    assert render(suspects_markdown(make_report(names=(name, "dog"))))[1][2] == shown


def test_suspects():
    markdown = suspects_markdown(make_report(), limit=2)
    assert markdown.splitlines()[0] == (
        "Training samples by how wrong their label looks: the first 2 of 3. "
        "For 2 of all, the model predicts another label than the given one (flagged). "
        "Flagged labels, and those suggested instead: cat -&#62; dog (2)."
    )
    assert render(markdown) == [
        list(SUSPECT_HEADS),
        ["1", "40", "cat", "dog (88%)", "3.00", "yes"],
        ["2", "41", "cat", "dog (88%)", "2.00", "yes"],
    ]


def test_where_none_is_flagged_the_table_says_so():
    report = make_report()
    suspects = replace(report.suspects, flagged=torch.zeros(3, dtype=torch.bool))
    assert "None is flagged: every ranking" in suspects_markdown(replace(report, suspects=suspects))


def test_suspects_without_classes():
    assert render(suspects_markdown(make_report(names=None, classes=False)))[3] == ["3", "42", "0", "", "1.00", ""]


def test_mistakes():
    markdown = mistakes_markdown(make_report())
    assert markdown.startswith("Mistakes on the validation data, 1 shown")
    harmful = "0 (dog)\n1 (dog)\n2 (dog)\n3 (dog)"
    assert render(markdown) == [list(MISTAKE_HEADS), ["7", "cat\nmay be wrong", "dog\n50%", "2.25", harmful, ""]]


def test_mistakes_limit_and_unknown_values():
    report = make_report()
    query = replace(report.queries[0], sample_id=None, probability=None, label=0.25, prediction=1.5)
    rows = render(mistakes_markdown(replace(report, queries=(query,) * 5), limit=2))
    assert len(rows) == 3
    assert rows[1][:3] == ["", "0.25\nmay be wrong", "1.5"]


@pytest.mark.parametrize(
    ("text", "longest"),
    [
        ("a word after another " * 9, LINE_LENGTH),
        ("https://example.com/" + "x" * 200, LINE_LENGTH),
        ("\u65e5\u672c\u8a9e" * 40, LINE_LENGTH // 2),
        ("\u05e9\u05dc\u05d5\u05dd " * 30, LINE_LENGTH),
    ],
    ids=["words", "no spaces", "wide letters", "right to left"],
)
def test_texts_are_broken_so_that_short_columns_are_not(text, longest):
    report, exhibit = make_report(), Exhibit(text=text)
    exhibits = dict.fromkeys(range(50), exhibit)
    suspect = render(suspects_markdown(report, exhibits))[1][-1]
    mistake = render(mistakes_markdown(report, [exhibit], exhibits))[3][-1]
    for said in (suspect, mistake):
        assert "".join(said.split()) == "".join(text.split())
        assert LINE_LENGTH // 4 < max(map(len, said.splitlines())) <= longest


def test_numbers_that_differ_have_a_line_each():
    own = Exhibit(values=(("age", 20.0), ("height", 1.5), ("weight", 60.0)))
    other = Exhibit(values=(("age", 60.0), ("height", 1.5), ("weight", 80.0)))
    markdown = mistakes_markdown(make_report(), [own], dict.fromkeys(range(8), other))
    assert "age 20, height 1.5, weight 60" in markdown
    assert render(markdown)[3][3:] == [
        "wrong prediction",
        "\u22121.00",
        "age 60 (not 20)\nweight 80 (not 60)",
    ]


def test_nothing_to_show():
    report = replace(make_report(num_suspects=0), queries=())
    assert suspects_markdown(report) == "No training sample was scored.\n"
    assert mistakes_markdown(report) == "No misclassified validation sample.\n"
