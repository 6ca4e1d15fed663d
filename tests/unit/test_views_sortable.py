"""Tables with named columns: numbers are numbers, texts and named values have columns of their own."""

import pytest
import torch

from lightning_gradsim.views import Exhibit, influences_table, notes_table, queries_table, suspects_table
from lightning_gradsim.views.sortable import Cell, Column, Table
from tests.unit.test_views_gallery import make_suspects
from tests.unit.test_views_panel import make_query, make_report

TRAIN = (0, 10, 11)
"""Shown training samples: one that is harmful, two look-alikes, of eight each."""


def names(table):
    return [column.name for column in table.columns]


def test_plain_rows_hold_numbers_where_columns_do():
    table = Table(
        (Column("name"), Column("number", is_number=True)),
        ((Cell("12"), Cell("12")), (Cell(""), Cell("")), (Cell("x"), Cell("95%", 0.954))),
    )
    assert table.plain_rows() == [["12", 12.0], ["", None], ["x", 0.954]]


def test_queries():
    table = queries_table(make_report(make_query(label_looks_wrong=True), make_query(sample_id=None, probability=None)))
    assert table.plain_rows() == [
        [17.0, "dog", "ship", 0.97, 3.5, "yes"],
        [None, "dog", "ship", None, 3.5, ""],
    ]


@pytest.mark.parametrize(
    ("exhibit", "columns", "content"),
    [
        (Exhibit(text="x" * 400), ["text"], ["x" * 300 + "…"]),
        (Exhibit(values=(("age", 2.5), ("score", -1.0))), ["age", "score (input)"], [2.5, -1.0]),
        (Exhibit(), [], []),
    ],
    ids=["texts", "values", "neither"],
)
def test_influences(exhibit, columns, content):
    report = make_report(make_query(), make_query(sample_id=3), make_query())
    table = influences_table(report, [exhibit, exhibit, None], dict.fromkeys(TRAIN, exhibit))
    assert names(table) == ["mistake", "list", "sample", "label", "prediction", "score", *columns]
    rows = table.plain_rows()
    assert rows[0] == [1.0, "the mistake", 17.0, "dog", "ship", None, *content]
    assert rows[1] == [1.0, "harmful", 0.0, "dog", "", -3.0, *content]
    assert sorted(row[1:3] for row in rows if row[0] == 2) == [
        ["harmful", 0.0],
        ["look_alikes", 10.0],
        ["look_alikes", 11.0],
        ["the mistake", 3.0],
    ]
    assert {row[0] for row in rows} == {1.0, 2.0}, "the third mistake is not shown"


def test_what_is_known_of_suspects_has_columns():
    table = make_suspects(2, visits=None)
    report = make_report(suspects=table)
    always = ["rank", "sample", "label", "suggested label", "probability", "score", "flagged"]
    assert names(suspects_table(report, {})) == always
    counts = {"reports_flagged": torch.tensor([4, 0]), "reports_judged": torch.tensor([6, 6])}
    report = make_report(suspects=make_suspects(2, **counts))
    found = suspects_table(report, {100: Exhibit(text="a")})
    assert names(found) == [*always, "flagged in reports", "visits", "text"]
    assert found.plain_rows()[0] == [1.0, 100.0, "cat", "dog", 0.5, 8.0, "yes", 4, 7.0, "a"]
    assert found.rows[0][7].text == "4 of 6"


def test_notes():
    assert notes_table(make_report(notes=("a", "b"))).plain_rows() == [["a"], ["b"]]
