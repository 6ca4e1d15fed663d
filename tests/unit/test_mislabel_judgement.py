import pytest
import torch

from lightning_gradsim.mislabel.judgement import find_contradicted, judge, otsu_count, suggest_labels
from lightning_gradsim.mislabel.scores import mislabel_score
from lightning_gradsim.mislabel.statistics import RunAverages
from lightning_gradsim.tasks import Task


def averages(task, labels, *, prediction=None, margin=None, neighbours=None, skipped=None):
    means = {"prediction": prediction, "margin": margin}
    means = {name: torch.tensor(value) for name, value in means.items() if value is not None}
    if "margin" not in means and task is not Task.REGRESSION:
        means["margin"] = torch.randn(torch.tensor(labels).shape)
    ids = torch.arange(len(labels)) * 2
    votes = None if neighbours is None else torch.tensor(neighbours)
    return RunAverages(task, ids, torch.arange(len(labels)) + 1, torch.tensor(labels), means, votes, skipped or {})


CLASSES = averages(
    Task.CLASSIFICATION,
    [0, 1, 2, 0],
    prediction=[[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.1, 0.45, 0.45], [0.2, 0.3, 0.5]],
    neighbours=[0.0, 0.25, 0.5, 0.25],
)


def test_classes():
    assert find_contradicted(CLASSES).tolist() == [False, True, False, True]
    suggested, probabilities = suggest_labels(CLASSES)
    assert suggested.tolist() == [1, 0, 1, 2]
    assert probabilities.tolist() == pytest.approx([0.2, 0.5, 0.45, 0.5])


def test_one_label():
    found = averages(Task.BINARY, [[0], [1], [1]], prediction=[[0.6], [0.3], [0.8]])
    assert find_contradicted(found).tolist() == [True, True, False]
    suggested, probabilities = suggest_labels(found)
    assert suggested.tolist() == [1, 0, 0]
    assert probabilities.tolist() == pytest.approx([0.6, 0.7, 0.2])


def test_several_labels():
    found = averages(Task.MULTILABEL, [[0, 1], [1, 1]], prediction=[[0.4, 0.1], [0.9, 0.6]])
    assert find_contradicted(found).tolist() == [True, False]
    suggested, probabilities = suggest_labels(found)
    assert suggested.tolist() == [1, 1]  # which label to switch
    assert probabilities.tolist() == pytest.approx([0.9, 0.4])


def test_a_regression():
    labels = [0.0, 1.0, 2.0, 3.0, 4.0]
    found = averages(Task.REGRESSION, labels, prediction=[[0.1], [1.2], [2.0], [3.1], [9.0]])
    assert find_contradicted(found).tolist() == [False, False, False, False, True]
    assert suggest_labels(found) == (None, None)
    table = judge(found)
    assert table.sample_ids[0] == 8
    assert "experimental" in " ".join(table.notes)


def test_without_predictions():
    found = averages(Task.CLASSIFICATION, [0, 1, 2], margin=[0.5, -0.1, 2.0], neighbours=[0.0, 1.0, 2.0])
    assert find_contradicted(found).tolist() == [False, True, False]
    assert suggest_labels(found) == (None, None)
    table = judge(found)
    assert table.suggested is table.probabilities is None
    assert "did not fit `max_state_mb`" in " ".join(table.notes)


def test_the_list_is_in_order_and_columns_belong_together():
    table = judge(CLASSES, parts=("aum", "knn"))
    scores = mislabel_score("margin_knn", CLASSES)
    expected = sorted(range(4), key=lambda row: (-float(scores[row]), row))
    assert table.sample_ids.tolist() == [2 * row for row in expected]
    assert torch.equal(table.scores, scores[expected])
    assert torch.equal(table.labels, CLASSES.labels[expected])
    assert torch.equal(table.visits, CLASSES.visits[expected])
    assert torch.equal(table.flagged, find_contradicted(CLASSES)[expected])
    assert torch.equal(table.suggested, suggest_labels(CLASSES)[0][expected])
    assert torch.equal(table.probabilities, suggest_labels(CLASSES)[1][expected])
    assert torch.equal(table.parts["aum"], -CLASSES.means["margin"][expected])
    assert torch.equal(table.parts["knn"], CLASSES.neighbours[expected])
    assert table.notes == ()


def test_ties_go_to_the_smaller_id():
    table = judge(averages(Task.CLASSIFICATION, [0] * 50, prediction=[[0.5, 0.5]] * 50))
    assert table.sample_ids.tolist() == list(range(0, 100, 2))


@pytest.mark.parametrize(("share", "expected"), [(0.01, 1), (0.05, 3), (0.5, 25), (1.0, 50)])
def test_review(share, expected):
    table = judge(averages(Task.CLASSIFICATION, [0] * 50, prediction=[[0.5, 0.5]] * 50))
    assert torch.equal(table.review(share), table.sample_ids[:expected])


def plain_otsu(scores):
    """The cut of largest between-class variance, every cut tried."""
    best, count = -1.0, 0
    for threshold in sorted(set(scores))[:-1]:
        low, high = [s for s in scores if s <= threshold], [s for s in scores if s > threshold]
        gap = sum(low) / len(low) - sum(high) / len(high)
        between = len(low) * len(high) * gap**2
        if between > best + 1e-9:
            best, count = between, len(high)
    return count


@pytest.mark.parametrize("seed", range(8))
def test_otsu(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(8, (30,), generator=generator).double() + (torch.arange(30) < 6) * 9
    assert otsu_count(scores) == plain_otsu(scores.tolist())


@pytest.mark.parametrize("scores", [[], [1.0], [2.0, 2.0, 2.0]])
def test_otsu_of_one_group(scores):
    assert otsu_count(torch.tensor(scores)) == 0


def test_what_limits_the_list_is_noted():
    before = averages(Task.CLASSIFICATION, [0, 1], prediction=[[0.5, 0.5]] * 2)
    assert judge(before).notes == ("No round of neighbours yet: samples are ranked by their margin alone.",)
    assert judge(before, "knn").notes == ("No round of neighbours yet: samples are not ranked.",)
    assert judge(before, "aum").notes == ()
    some = averages(
        Task.CLASSIFICATION,
        [0, 1],
        prediction=[[0.5, 0.5]] * 2,
        neighbours=[0.1, torch.nan],
        skipped={"outside": 3},
    )
    assert judge(some).notes == (
        "1 samples were in no round of neighbours, and count as average there.",
        "3 visits whose label is none of the classes.",
    )


def test_no_samples():
    found = averages(Task.CLASSIFICATION, [], margin=[])
    found.means["prediction"], found.labels = torch.empty(0, 3), torch.empty(0, dtype=torch.long)
    values = averages(Task.REGRESSION, [])
    values.means["prediction"] = torch.empty(0, 1)
    assert find_contradicted(values).tolist() == []
    table = judge(found)
    assert len(table.sample_ids) == table.upper_estimate == len(table.review()) == 0
