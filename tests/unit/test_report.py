"""Records, their tables and their words."""

import csv
import io
import json
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_gradsim import plain_values
from lightning_gradsim.datasets import sample_ids
from lightning_gradsim.plain_values import to_label
from lightning_gradsim.records import INFLUENCE_COLUMNS, InfluentialSample, QueryReport
from lightning_gradsim.report import Report
from lightning_gradsim.suspects import SUSPECT_COLUMNS, Suspect, SuspectTable
from tests.unit.test_golden_files import make_report as golden_report


def table(number=5):
    return SuspectTable(
        sample_ids=torch.arange(10, 10 + number),
        scores=torch.linspace(2, 1, number),
        labels=torch.arange(number, dtype=torch.int32) % 3,
        suggested_labels=torch.arange(1, number + 1, dtype=torch.int32) % 3,
        probabilities=torch.linspace(0.25, 0.75, number).half(),
        flagged=torch.arange(number) % 2 == 0,
    )


def query(**changes):
    return replace(
        QueryReport(
            sample_id=7,
            dataloader_idx=1,
            label=0,
            prediction=2,
            probability=0.875,
            loss=1.5,
            harmful=(InfluentialSample(41, 2, -3.5, True), InfluentialSample(42, 1, -2.5, False)),
            teachers=(InfluentialSample(43, 2, 9.5, True),),
            look_alikes=(InfluentialSample(44, 0, 0.75, False),),
        ),
        **changes,
    )


def report(**changes):
    return replace(
        Report(
            epoch=2,
            step=300,
            layers=("head",),
            similarity="dot",
            reference="all 1,000 training samples",
            num_train_samples=1000,
            num_validation_samples=200,
            num_errors=12,
            errors_per_class={0: 5, 2: 7},
            queries=(query(), query(sample_id=None, label_looks_wrong=True)),
            suspects=table(),
            class_names=("cat", "dog", "ape"),
            notes=("something limits this",),
            seconds=1.25,
            time_share=0.05,
        ),
        **changes,
    )


def read_csv(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_suspects_are_a_sequence():
    suspects = table()
    assert len(suspects) == 5
    assert suspects[0] == Suspect(10, 0, 1, 0.25, 2.0, True)
    assert suspects[-1] == suspects[4] == list(suspects)[4]
    assert suspects[1:3] == (suspects[1], suspects[2])
    assert suspects[::-2] == (suspects[4], suspects[2], suspects[0])
    assert suspects[20:] == ()
    assert len(suspects[:20]) == 5
    assert suspects[2] in suspects
    assert suspects.num_flagged == 3


@pytest.mark.parametrize("index", [5, -6, 100])
def test_suspects_beyond_the_end(index):
    with pytest.raises(IndexError, match=rf"`suspects\[{index}\]` does not exist; there are 5"):
        table()[index]


def test_an_empty_table():
    empty = SuspectTable.empty()
    assert len(empty) == empty.num_flagged == 0
    assert list(empty) == empty.to_rows() == []
    assert read_csv(empty.to_csv()) == []
    assert empty.to_csv().strip() == ",".join(SUSPECT_COLUMNS)


@pytest.mark.parametrize(("limit", "number"), [(None, 5), (2, 2), (0, 0), (50, 5)])
def test_suspect_rows(limit, number):
    rows = table().to_rows(limit)
    assert len(rows) == number
    for rank, (row, suspect) in enumerate(zip(rows, table(), strict=False), start=1):
        assert tuple(row) == SUSPECT_COLUMNS
        values = {name: value for name, value in vars(suspect).items() if name != "parts"}
        assert row == {"rank": rank, **values, "log_margin": None, "knn": None, "trusted": None}


def test_rows_of_suspects_from_training_steps():
    parts = {"knn": torch.tensor([0.5, 1.0, 0.0, 0.25, 0.125])}
    judged = replace(table(), score_name="margin_knn", parts=parts, visits=torch.arange(5))
    rows = judged.to_rows()
    assert [row["knn"] for row in rows] == [0.5, 1.0, 0.0, 0.25, 0.125]
    assert [row["visits"] for row in rows] == [0, 1, 2, 3, 4]
    assert {row["log_margin"] for row in rows} == {None}
    assert (judged[1].parts, judged[1].visits) == ({"knn": 1.0}, 1)


def test_suspect_csv(tmp_path):
    text = table().to_csv(tmp_path / "suspects.csv")
    assert (tmp_path / "suspects.csv").read_text() == text
    rows = read_csv(text)
    assert [int(row["sample_id"]) for row in rows] == [10, 11, 12, 13, 14]
    assert rows[1] == {
        "rank": "2",
        "sample_id": "11",
        "label": "1",
        "suggested_label": "2",
        "probability": "0.375",
        "score": "1.75",
        "log_margin": "",
        "knn": "",
        "trusted": "",
        "visits": "",
        "reports_flagged": "",
        "reports_judged": "",
        "flagged": "False",
    }


def test_suspects_without_classes():
    suspects = replace(table(2), suggested_labels=None, probabilities=None, labels=torch.tensor([0.5, 1.5]))
    assert suspects[0] == Suspect(10, 0.5, None, None, 2.0, True)
    assert suspects.to_rows()[1]["suggested_label"] is None
    assert read_csv(suspects.to_csv())[1]["suggested_label"] == ""


def test_suspects_with_several_labels():
    suspects = replace(table(2), labels=torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.int8))
    assert suspects[0].label == (0, 2)
    assert suspects.to_rows()[1]["label"] == ()


def test_influence_rows():
    rows = report().to_rows()
    assert all(tuple(row) == INFLUENCE_COLUMNS for row in rows)
    assert [(row["query"], row["list"], row["rank"], row["sample_id"]) for row in rows[:4]] == [
        (0, "harmful", 1, 41),
        (0, "harmful", 2, 42),
        (0, "teachers", 1, 43),
        (0, "look_alikes", 1, 44),
    ]
    assert len(rows) == 8
    assert rows[0]["score"] == -3.5
    assert rows[0]["query_id"] == 7
    assert rows[4]["query_id"] is None
    assert rows[4]["label_looks_wrong"] is True


def test_influence_csv(tmp_path):
    text = report().to_csv(tmp_path / "influences.csv")
    assert (tmp_path / "influences.csv").read_text() == text
    rows = read_csv(text)
    assert tuple(rows[0]) == INFLUENCE_COLUMNS
    assert rows[0]["label_is_prediction"] == "True"
    assert report(queries=()).to_csv().strip() == ",".join(INFLUENCE_COLUMNS)


def test_suspect_queries():
    assert report().suspect_queries == (report().queries[1],)


@pytest.mark.parametrize(
    ("label", "name"),
    [(1, "dog"), (3, "3"), (-100, "-100"), (0.123456, "0.1235"), ((0, 2), "cat + ape"), ((), "none"), ((1,), "dog")],
)
def test_names(label, name):
    assert report().name_of(label) == name


def test_names_without_class_names():
    assert report(class_names=None).name_of(1) == "1"
    assert report(class_names=None).name_of((0, 2)) == "0 + 2"


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (torch.tensor(3), 3),
        (torch.tensor(3, dtype=torch.int32), 3),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([0, 1, 1]), (1, 2)),
        (torch.tensor([0, 0]), ()),
    ],
)
def test_plain_labels(value, label):
    assert to_label(value) == label
    assert type(to_label(value)) is type(label)


def test_summary():
    text = report().summary()
    for words in (
        "epoch 2, step 300: 12 of 200 validation samples wrong",
        "2 queries against all 1,000 training samples (head; dot)",
        "cost: 1.25 s; so far 5.0% of the time that training took without it",
        "validation sample 7 of loader 1: cat -> ape (88%)",
        "validation sample ? of loader 1: cat -> ape (88%); this validation label may be wrong",
        "#41 ape -3.5  #42 dog -2.5",
        "#44 cat +0.75",
        "3 flagged",
        "#10      cat -> dog (25%)  score 2",
        "note: something limits this",
    ):
        assert words in text


def test_summary_lengths():
    text = report().summary(num_queries=1, num_suspects=2)
    assert "sample ?" not in text
    assert "#11 " in text
    assert "#12 " not in text


def test_summary_of_nothing():
    nothing = report(queries=(), suspects=SuspectTable.empty(), num_errors=0, time_share=None)
    text = nothing.summary()
    assert "no validation sample is misclassified" in text
    assert "suspects (" not in text
    assert "that training took" not in text


def test_summary_where_all_queries_were_dropped():
    text = report(queries=(), num_dropped_queries=12).summary()
    assert "12 of 200 validation samples wrong" in text
    assert "no validation sample is misclassified" not in text
    assert "right under the weights present at scoring" in text


def test_summary_of_regression():
    values = query(label=0.5, prediction=2.25, probability=None)
    text = report(task="regression", queries=(values,)).summary()
    assert "200 validation samples, studied by loss" in text
    assert "validation sample 7 of loader 1: 0.5 -> 2.25\n" in text


def test_summary_of_a_query_without_lists():
    assert "harmful     none" in report(queries=(query(harmful=(), look_alikes=()),)).summary()


def test_plain_values():
    values = report().to_dict(max_suspects=2)
    again = json.loads(json.dumps(values))
    assert again["version"] == 1
    assert again["queries"][0]["harmful"][0] == {
        "sample_id": 41,
        "label": 2,
        "score": -3.5,
        "label_is_prediction": True,
        "is_suspect": False,
    }
    assert len(again["suspects"]) == 2
    assert again["num_flagged"] == 3
    assert again["errors_per_class"] == {"0": 5, "2": 7}


@pytest.mark.parametrize("record", [report(), report().queries[0], report().queries[0].harmful[0], table()[0], table()])
def test_records_are_frozen(record):
    with pytest.raises(FrozenInstanceError):
        record.layers = record.label = record.sample_id = record.sample_ids = 0


class TestActing:
    """On the suspects of `table`: ids 10 to 14, of a dataset of which they are the last."""

    data = TensorDataset(torch.arange(15.0), torch.full((15,), 9))

    def labels(self, view):
        return [int(y) for _, y in view]

    def expected(self, limit=None):
        flagged = [suspect for suspect in table() if suspect.flagged][:limit]
        return {suspect.sample_id: suspect.suggested_label for suspect in flagged}

    @pytest.mark.parametrize("limit", [None, 1])
    def test_relabel(self, limit):
        suggested = self.expected(limit)
        assert suggested
        found = self.labels(report(suspects=table()).relabel(self.data, limit))
        assert found == [suggested.get(i, 9) for i in range(15)]

    @pytest.mark.parametrize("limit", [None, 1])
    def test_drop(self, limit):
        dropped = self.expected(limit)
        view = report(suspects=table()).drop(self.data, limit)
        assert sample_ids(view).tolist() == [i for i in range(15) if i not in dropped]

    def test_ids_of_a_subset_are_those_beneath(self):
        subset = Subset(self.data, [14, 0, 13, 12, 11, 10])
        suggested = self.expected()
        assert self.labels(report(suspects=table()).relabel(subset)) == [suggested.get(i, 9) for i in subset.indices]
        assert sample_ids(report(suspects=table()).drop(subset)).tolist() == [
            i for i in subset.indices if i not in suggested
        ]

    def test_one_witness_is_not_enough_where_there_are_two(self):
        votes = torch.tensor([1.5, 2.0, 1.0, -1.0, 1.25])  # of ids 10 to 14, of which 10, 12 and 14 are flagged
        confirmed = report(suspects=replace(table(), parts={"knn": votes}))
        assert sample_ids(confirmed.drop(self.data)).tolist() == [*range(10), 11, 12, 13]
        assert sample_ids(confirmed.drop(self.data, all_flagged=True)).tolist() == [*range(10), 11, 13]
        assert self.labels(confirmed.relabel(self.data))[10:] == [self.expected()[10], 9, 9, 9, self.expected()[14]]
        assert self.labels(confirmed.relabel(self.data, all_flagged=True))[12] == self.expected()[12]
        by_votes = replace(table(), scores=votes.sort(descending=True).values, score_name="knn")
        assert by_votes.confirmed.tolist() == [True, False, True, False, False]

    @pytest.mark.parametrize("act", ["relabel", "drop"])
    def test_what_is_no_dataset_is_refused(self, act):
        act = getattr(report(suspects=table()), act)
        with pytest.raises(TypeError, match=r"^`dataset` is a `DataLoader`\. .* Pass its `\.dataset`\.$"):
            act(DataLoader(self.data))
        with pytest.raises(TypeError, match=r"^`dataset` is an `int`\. Expected the training dataset"):
            act(3)
        with pytest.raises(ValueError, match="`limit=-3` is too small"):
            act(self.data, limit=-3)

    def test_without_suggestions(self):
        table_without = replace(table(), suggested_labels=None, probabilities=None)
        with pytest.raises(ValueError, match=r"have no suggested labels\. Use `report\.drop"):
            replace(report(), suspects=table_without).relabel(self.data)


def test_samples_behind_a_mistake_that_are_suspects_themselves():
    """Two witnesses: the lists of a query, and the suspects."""
    suspects = replace(table(4), sample_ids=torch.tensor([42, 41, 44, 10]), flagged=torch.tensor([1, 0, 1, 1]).bool())
    marked = report().with_suspects(suspects)
    assert marked.suspects is suspects
    for each in marked.queries:
        assert [sample.is_suspect for sample in each.harmful] == [False, True]
        assert [sample.is_suspect for sample in each.teachers] == [False]
        assert [sample.is_suspect for sample in each.look_alikes] == [True]
    assert [row["is_suspect"] for row in marked.to_rows()][:4] == [False, True, False, True]
    assert "#41 ape -3.5  #42 dog -2.5 (suspect)\n" in marked.summary()
    assert not any(row["is_suspect"] for row in marked.with_suspects(SuspectTable.empty()).to_rows())


def test_which_labels_are_taken_for_which():
    pairs = torch.tensor([[0, 2], [1, 0], [0, 2], [2, 1], [1, 0], [1, 2], [0, 1]], dtype=torch.int32)
    suspects = replace(
        table(7), labels=pairs[:, 0], suggested_labels=pairs[:, 1], flagged=torch.tensor([1, 1, 1, 1, 1, 1, 0]).bool()
    )
    assert list(suspects.confusion().items()) == [((0, 2), 2), ((1, 0), 2), ((1, 2), 1), ((2, 1), 1)]
    shown = report(suspects=suspects)
    words = "cat -> ape (2), dog -> cat (2), dog -> ape (1), ape -> dog (1)"
    assert shown.confusion_in_words() == words
    assert f"labels flagged for another one: {words}\n" in shown.summary()
    assert shown.confusion_in_words(limit=1) == "cat -> ape (2), 3 other pairs"
    assert shown.to_dict()["confusion"][0] == {"label": 0, "suggested_label": 2, "count": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"suggested_labels": None},
        {"flagged": torch.zeros(5, dtype=torch.bool)},
        {"labels": torch.ones(5, 3, dtype=torch.int8), "suggested_labels": None},
    ],
    ids=str,
)
def test_no_labels_are_taken_for_others(changes):
    shown = report(suspects=replace(table(), **changes))
    assert shown.suspects.confusion() == {}
    assert "for another one" not in shown.summary()


class TestFrames:
    def test_columns_and_values(self):
        pytest.importorskip("pandas")
        report = golden_report()
        for source, columns in [(report.suspects, SUSPECT_COLUMNS), (report, INFLUENCE_COLUMNS)]:
            frame = source.to_frame()
            assert tuple(frame.columns) == columns
            assert frame["sample_id"].tolist() == [row["sample_id"] for row in source.to_rows()]

    def test_the_library_that_is_there(self, monkeypatch):
        polars = SimpleNamespace(DataFrame=dict)
        monkeypatch.setattr(plain_values, "find_spec", lambda name: name == "polars" or None)
        monkeypatch.setattr(plain_values, "import_module", {"polars": polars}.get)
        assert golden_report().suspects.to_frame()["rank"] == [1, 2, 3]

    def test_neither(self, monkeypatch):
        monkeypatch.setattr(plain_values, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match="needs pandas or polars, and neither is installed"):
            golden_report().to_frame()


def test_what_a_terminal_shows_is_short():
    assert repr(report()) == report().summary()
    lines = repr(table(12)).splitlines()
    assert lines[0] == "12 training samples by `self_influence`, 6 flagged"
    assert lines[1] == "  #10: labelled 0, rather 1, score 2"
    assert len(lines) == 12
    assert lines[-1] == "  ..."
    assert repr(SuspectTable.empty()) == "0 training samples by `self_influence`, 0 flagged"
