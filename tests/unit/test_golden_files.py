"""What `report.json` and the CSV files look like: programs of users read them.

After a change that is meant, rewrite the golden file: `python -m tests.unit.test_golden_files`.
"""

import csv
import io
import json
from pathlib import Path

import torch

from lightning_gradsim.history import FollowedQuery, TrendPoint
from lightning_gradsim.plan_record import LayerPlan, Plan
from lightning_gradsim.records import (
    INFLUENCE_COLUMNS,
    ErrorPair,
    Histogram,
    InfluentialSample,
    QueryAlongRun,
    QueryReport,
)
from lightning_gradsim.report import Report
from lightning_gradsim.sinks import write_report_files
from lightning_gradsim.suspects import SUSPECT_COLUMNS, SuspectTable

GOLDEN = Path(__file__).parent / "golden" / "report.json"
DOCS = Path(__file__).parents[2] / "docs" / "report.md"


def make_report():
    """Every field has a value of its own, in exact binary fractions."""
    query = QueryReport(
        sample_id=17,
        dataloader_idx=0,
        label=1,
        prediction=2,
        probability=0.75,
        loss=1.5,
        harmful=(InfluentialSample(4, 2, -3.5, True), InfluentialSample(9, 0, -1.25, False)),
        teachers=(InfluentialSample(4, 2, 2.5, True),),
        look_alikes=(InfluentialSample(7, 1, 0.875, False),),
        label_looks_wrong=True,
        wrong_since=2,
    )
    suspects = SuspectTable(
        torch.tensor([4, 9, 7]),
        torch.tensor([6.5, 0.5, -2.0]),
        torch.tensor([2, 0, 1], dtype=torch.int32),
        torch.tensor([1, 2, 0], dtype=torch.int32),
        torch.tensor([0.5, 0.25, 0.125]),
        torch.tensor([True, False, False]),
        "margin_knn",
        {"log_margin": torch.tensor([1.5, -0.5, -3.0]), "knn": torch.tensor([1.0, 0.0, 0.25])},
        torch.tensor([3, 3, 2]),
        2,
    )
    layer = LayerPlan("head", "Linear", 30, "rule", "gram", 1000, 64, 128)
    return Report(
        epoch=3,
        step=40,
        layers=("head",),
        similarity="dot",
        reference="all 3 training samples",
        num_train_samples=3,
        share_read=1.0,
        num_validation_samples=20,
        num_errors=2,
        errors_per_class={1: 2},
        num_dropped_queries=1,
        queries=(query,),
        suspects=suspects,
        class_names=("cat", "dog", "日本"),
        notes=("a note",),
        seconds=0.5,
        time_share=0.0625,
        plan=Plan((layer,), 2, 8, 8, 2**20, 500),
        settings={"layers": "'last'"},
        versions={"torch": "2.9.0"},
        error_pairs=(ErrorPair(1, 2, 2),),
        self_influence=Histogram((0.0, 1.0, 2.0), (1, 2), 0),
        trends=(TrendPoint(2, 30, 3, 1, None, 0.5), TrendPoint(3, 40, 2, 1, 1.0, 0.5)),
        followed=(FollowedQuery(17, 0, 1, 2, 2, None), FollowedQuery(5, 1, 0, 1, 1, 3)),
        along_run=(
            QueryAlongRun(
                5,
                1,
                0,
                1,
                0.625,
                0.5,
                since_epoch=1,
                num_reports=2,
                harmful=(InfluentialSample(9, 0, -2.25, False),),
                proponents=(InfluentialSample(7, 1, 4.5, True),),
            ),
        ),
    )


def as_text(values):
    return json.dumps(values, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def test_report_json(tmp_path):
    path = write_report_files(make_report(), tmp_path)[2]
    values = json.loads(path.read_text(encoding="utf-8"))
    assert as_text(values) == GOLDEN.read_text(encoding="utf-8")


def test_csv_files(tmp_path):
    suspects, influences, _ = write_report_files(make_report(), tmp_path)
    assert suspects.read_text(encoding="utf-8") == (
        "rank,sample_id,label,suggested_label,probability,score,flagged,log_margin,knn,trusted,visits\n"
        "1,4,2,1,0.5,6.5,True,1.5,1.0,,3\n"
        "2,9,0,2,0.25,0.5,False,-0.5,0.0,,3\n"
        "3,7,1,0,0.125,-2.0,False,-3.0,0.25,,2\n"
    )
    rows = list(csv.DictReader(io.StringIO(influences.read_text(encoding="utf-8"))))
    assert tuple(rows[0]) == INFLUENCE_COLUMNS
    assert rows[0] == {
        "query": "0",
        "dataloader_idx": "0",
        "query_id": "17",
        "query_label": "1",
        "prediction": "2",
        "query_probability": "0.75",
        "query_loss": "1.5",
        "label_looks_wrong": "True",
        "list": "harmful",
        "rank": "1",
        "sample_id": "4",
        "label": "2",
        "score": "-3.5",
        "label_is_prediction": "True",
        "is_suspect": "False",
    }
    assert [(row["list"], row["rank"], row["sample_id"]) for row in rows] == [
        ("harmful", "1", "4"),
        ("harmful", "2", "9"),
        ("teachers", "1", "4"),
        ("look_alikes", "1", "7"),
        ("harmful_along_run", "1", "9"),
        ("proponents_along_run", "1", "7"),
    ]
    assert [row["query"] for row in rows] == ["0"] * 4 + ["1"] * 2
    assert rows[-1]["query_id"] == "5"
    assert rows[-1]["label_looks_wrong"] == ""


def test_every_column_and_field_is_documented():
    text = DOCS.read_text(encoding="utf-8").partition("## Files\n")[2].partition("\n## In ")[0]
    fields = json.loads(GOLDEN.read_text(encoding="utf-8"))
    (query,), points, followed = fields["queries"], fields["trends"], fields["followed"]
    names = {*SUSPECT_COLUMNS, *INFLUENCE_COLUMNS, *fields, *query, *points[0], *followed[0], *fields["along_run"][0]}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    folder = write_report_files(make_report(), GOLDEN.parent)[2].parent
    for name in ("suspects.csv", "influences.csv"):
        (folder / name).unlink()
    GOLDEN.write_text(as_text(json.loads(GOLDEN.read_text(encoding="utf-8"))), encoding="utf-8")
