"""Scores against plain Python over one sample at a time."""

import math
import statistics as stats

import pytest
import torch

from lightning_gradsim.mislabel.scores import FLOOR, SCORES, choose_columns, mislabel_score, standardise
from lightning_gradsim.mislabel.statistics import RunAverages, bytes_a_sample
from lightning_gradsim.tasks import Task

NUM = 9


def averages(task=Task.CLASSIFICATION, *, neighbours=True, prediction=True):
    width = 1 if task in (Task.BINARY, Task.REGRESSION) else 3
    each = () if task in (Task.CLASSIFICATION, Task.REGRESSION) else (width,)
    labels = torch.randint(3 if task is Task.CLASSIFICATION else 2, (NUM, *each))
    p = torch.rand(NUM, width)
    means = {
        "margin": torch.randn(NUM, *each),
        "loss": torch.rand(NUM, *each),
        "prediction": p / p.sum(1, keepdim=True) if task is Task.CLASSIFICATION else p,
        "error_norm": torch.rand(NUM),
        "self_influence": torch.rand(NUM),
        "influence": torch.randn(NUM),
    }
    if not prediction:
        del means["prediction"]
    if task is Task.REGRESSION:
        labels = torch.randn(NUM)
    votes = torch.rand(NUM, *each) if neighbours else None
    return RunAverages(task, torch.arange(NUM), torch.ones(NUM), labels, means, votes, {})


def plain_log_margin(found):
    rows = []
    for p, y in zip(found.means["prediction"].tolist(), found.labels.tolist(), strict=True):
        if found.task is Task.CLASSIFICATION:
            rows.append([max(math.log(q) for c, q in enumerate(p) if c != y) - math.log(p[y])])
        elif found.task is Task.REGRESSION:
            rows.append([abs(p[0] - y)])
        else:
            rows.append([math.log((1 - q) / q) if t else math.log(q / (1 - q)) for q, t in zip(p, y, strict=True)])
    return rows


def plain_standardise(rows):
    values = [value for row in rows for value in row]
    mean, deviation = stats.fmean(values), stats.pstdev(values)
    return [[(value - mean) / deviation for value in row] for row in rows]


@pytest.mark.parametrize("task", list(Task))
def test_log_margin(task):
    found = averages(task)
    expected = [max(row) for row in plain_log_margin(found)]
    assert mislabel_score("log_margin", found).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("task", list(Task))
def test_the_default_adds_both_parts(task):
    found = averages(task)
    margins = plain_standardise(plain_log_margin(found))
    votes = plain_standardise(found.neighbours.reshape(NUM, -1).tolist())
    expected = [max(a + b for a, b in zip(*rows, strict=True)) for rows in zip(margins, votes, strict=True)]
    assert mislabel_score("margin_knn", found).tolist() == pytest.approx(expected, abs=1e-4)


def test_the_default_before_the_first_round_of_neighbours():
    found = averages(neighbours=False)
    expected = [row[0] for row in plain_standardise(plain_log_margin(found))]
    assert mislabel_score("margin_knn", found).tolist() == pytest.approx(expected, abs=1e-4)


def test_the_default_without_predictions():
    found = averages(prediction=False)
    margins = plain_standardise([[-value] for value in found.means["margin"].tolist()])
    votes = plain_standardise([[value] for value in found.neighbours.tolist()])
    expected = [a[0] + b[0] for a, b in zip(margins, votes, strict=True)]
    assert mislabel_score("margin_knn", found).tolist() == pytest.approx(expected, abs=1e-4)


def test_a_sample_without_neighbours_counts_as_average():
    found = averages()
    found.neighbours[4] = torch.nan
    alone = averages(neighbours=False)
    alone.means, alone.labels = found.means, found.labels
    assert float(mislabel_score("margin_knn", found)[4]) == pytest.approx(float(mislabel_score("margin_knn", alone)[4]))
    assert float(mislabel_score("knn", found)[4]) == 0


@pytest.mark.parametrize(
    ("name", "column", "sign"),
    [
        ("aum", "margin", -1),
        ("loss", "loss", 1),
        ("el2n", "error_norm", 1),
        ("self_influence", "self_influence", 1),
        ("influence", "influence", 1),
    ],
)
def test_averages_as_they_are(name, column, sign):
    found = averages()
    assert torch.equal(mislabel_score(name, found), sign * found.means[column])


def test_the_worst_label_of_a_sample_counts():
    found = averages(Task.MULTILABEL)
    assert torch.equal(mislabel_score("aum", found), -found.means["margin"].amin(1))


def test_neighbours_alone():
    found = averages()
    assert torch.equal(mislabel_score("knn", found), found.neighbours)
    assert not mislabel_score("knn", averages(neighbours=False)).any()


def test_probabilities_of_zero_and_one():
    found = averages()
    found.means["prediction"] = torch.eye(3)[torch.arange(NUM) % 3]
    found.labels = torch.zeros(NUM, dtype=torch.long)
    scores = mislabel_score("log_margin", found)
    assert scores[0] == pytest.approx(math.log(FLOOR))
    assert scores[1] == pytest.approx(-math.log(FLOOR))


def test_standardise():
    assert standardise(torch.tensor([1.0, 3.0, torch.nan])).tolist() == [-1.0, 1.0, 0.0]
    assert standardise(torch.full((3,), 7.0)).tolist() == [0.0, 0.0, 0.0]
    assert standardise(torch.full((2,), torch.nan)).tolist() == [0.0, 0.0]
    assert not len(standardise(torch.empty(0)))


def test_every_score_has_what_it_needs_and_says_what_it_is():
    for name, score in SCORES.items():
        found = averages()
        found.means = {column: found.means[column] for column in score.columns}
        assert len(mislabel_score(name, found)) == NUM
        assert score.formula
        assert score.source


def test_columns_within_the_budget():
    assert choose_columns(["margin_knn"], Task.CLASSIFICATION, 1000, 10) == ("margin", "prediction")
    assert choose_columns(["margin_knn"], Task.CLASSIFICATION, 10**6, 1000) == ("margin",)
    assert choose_columns(["margin_knn", "el2n"], Task.CLASSIFICATION, 1000, 10) == (
        "margin",
        "prediction",
        "error_norm",
    )
    assert choose_columns(["margin_knn"], Task.REGRESSION, 10**9, 1) == ("prediction",)
    limit = 1000 * bytes_a_sample(Task.CLASSIFICATION, 10, ("margin", "prediction")) / 2**20
    assert "prediction" in choose_columns(["margin_knn"], Task.CLASSIFICATION, 1000, 10, limit)
    assert "prediction" not in choose_columns(["margin_knn"], Task.CLASSIFICATION, 1000, 10, limit * 0.999)


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_bytes_of_both_forms(classes):
    for name, score in SCORES.items():
        columns = choose_columns([name], Task.CLASSIFICATION, 1000, classes)
        assert bytes_a_sample(Task.CLASSIFICATION, classes, columns) <= 4 * classes + 16
        if score.without_prediction is not None or "prediction" not in columns:
            columns = choose_columns([name], Task.CLASSIFICATION, 1000, classes, 1e-6)
            assert bytes_a_sample(Task.CLASSIFICATION, classes, columns) <= 16


def test_scores_that_cannot_be():
    with pytest.raises(ValueError, match=r"`score='margin'` is not known\. Expected one of 'margin_knn', 'log_margin'"):
        choose_columns(["margin"], Task.CLASSIFICATION, 10, 2)
    with pytest.raises(
        ValueError, match="`score='log_margin'` sums the predictions of 1000000 samples and 1000 classes"
    ):
        choose_columns(["log_margin"], Task.CLASSIFICATION, 10**6, 1000)
    with pytest.raises(ValueError, match="`score='aum'` needs classes, and the task is a regression"):
        choose_columns(["aum"], Task.REGRESSION, 10, 1)
