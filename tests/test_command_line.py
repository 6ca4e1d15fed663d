import csv
import dataclasses
import io
import json
import subprocess
import sys

import pytest
import torch

from lightning_gradsim import load_report
from lightning_gradsim.command_line import main
from lightning_gradsim.sinks import write_report_files
from lightning_gradsim.suspects import SuspectTable
from tests.unit.test_golden_files import make_report
from tests.unit.test_saved_report import REPORTS


@pytest.fixture
def run(tmp_path):
    write_report_files(make_report(), tmp_path / "version_0" / "gradsim")
    return str(tmp_path)


def test_report(run, capsys):
    assert main(["report", run]) == 0
    assert capsys.readouterr().out == load_report(run).summary(6, 20) + "\n"
    assert main(["report", run, "--mistakes", "0", "--suspects", "1"]) == 0
    shown = capsys.readouterr().out
    assert "#4 " in shown
    assert "#9 " not in shown
    assert "validation sample 17" not in shown


def test_csv(run, capsys):
    assert main(["export", run]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["sample_id"] for row in rows] == ["4", "9", "7"]
    assert (rows[0]["label_name"], rows[0]["suggested_name"], rows[0]["flagged"]) == ("日本", "dog", "True")


def test_json_lines_of_the_flagged(run, tmp_path):
    assert main(["export", run, "--to", "jsonl", "--flagged", "--output", str(tmp_path / "flagged.jsonl")]) == 0
    (line,) = (tmp_path / "flagged.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["sample_id"] == 4
    assert json.loads(line)["suggested_label"] == 1


def test_cleanlab(run, capsys):
    assert main(["export", run, "--to", "cleanlab"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["sample_id"] for row in rows] == ["4", "7", "9"]
    assert rows[0] == {
        "sample_id": "4",
        "is_label_issue": "True",
        "label_quality": "0.0",
        "given_label": "2",
        "predicted_label": "1",
    }
    assert [row["predicted_label"] for row in rows[1:]] == [row["given_label"] for row in rows[1:]]
    assert float(rows[2]["label_quality"]) < float(rows[1]["label_quality"]) < 1


def test_cleanlab_takes_it(tmp_path):
    classification = pytest.importorskip("cleanlab.classification")
    pandas, linear_model = pytest.importorskip("pandas"), pytest.importorskip("sklearn.linear_model")
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(60, 2, generator=generator), torch.arange(60, dtype=torch.int32) % 3
    table = SuspectTable(
        torch.randperm(60, generator=generator), -torch.arange(60.0), labels, (labels + 1) % 3, labels / 3, labels < 1
    )
    order = table.sample_ids.argsort()
    write_report_files(dataclasses.replace(make_report(), suspects=table, class_names=None), tmp_path)
    assert main(["export", str(tmp_path), "--to", "cleanlab", "--output", str(tmp_path / "issues.csv")]) == 0
    issues = pandas.read_csv(tmp_path / "issues.csv", index_col="sample_id")
    learner = classification.CleanLearning(linear_model.LogisticRegression())
    learner.fit(features.numpy(), labels[order].numpy(), label_issues=issues)
    assert learner.get_label_issues()["is_label_issue"].tolist() == table.flagged[order].tolist()


def test_what_cannot_be_done_is_told(run, tmp_path, capsys):
    for arguments, words in [
        (["report", str(tmp_path / "nowhere")], "There is no `report.json`"),
        (["export", run, "--to", "cleanlab", "--flagged"], "cleanlab needs a line for each"),
        (["export", run, "--output", str(tmp_path)], "Is a directory"),
    ]:
        assert main(arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("lightning-gradsim: ")
        assert words in printed.err
    write_report_files(REPORTS["regression"], tmp_path / "regression")
    assert main(["export", str(tmp_path / "regression"), "--to", "cleanlab"]) == 2
    assert "the task is regression" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["show"], ["report"], ["report", ".", "--suspects", "-1"]])
def test_wrong_words(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: lightning-gradsim" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "words"), [("report", "--suspects N"), ("export", "cleanlab  a line for each")])
def test_help_teaches(command, words, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert words in capsys.readouterr().out


def test_as_a_command(run):
    done = subprocess.run(
        [sys.executable, "-m", "lightning_gradsim.command_line", "report", run],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "suspects (training samples, most suspect first" in done.stdout
