import numpy as np
import pytest
import torch

from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.tasks import Task
from lightning_gradsim.true_labels import TrueLabels, auroc, average_precision


@pytest.mark.parametrize("levels", [3, 50, 10**6])
def test_figures_are_those_of_scikit_learn(levels):
    """Also where many scores are equal."""
    metrics = pytest.importorskip("sklearn.metrics", reason="an extra: `examples`")
    for number in (2, 7, 300):
        positive = torch.rand(number) < 0.2
        positive[0], positive[1] = True, False
        scores = torch.randint(levels, (number,)).float() - levels // 2 + 0.3 * positive
        assert auroc(scores, positive) == pytest.approx(metrics.roc_auc_score(positive, scores), abs=1e-12)
        expected = metrics.average_precision_score(positive, scores)
        assert average_precision(scores, positive) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", [False, True])
def test_of_one_kind_there_is_no_area(kind):
    assert auroc(torch.arange(3.0), torch.full((3,), kind)) is None
    assert average_precision(torch.arange(3.0), torch.full((3,), kind)) == (1.0 if kind else None)


def table(given, **changes):
    number = len(given)
    columns = {
        "sample_ids": torch.arange(number).flip(0),
        "scores": torch.arange(float(number), 0, -1),
        "labels": torch.tensor(given, dtype=torch.int32),
        "suggested_labels": torch.zeros(number, dtype=torch.int32),
        "probabilities": torch.full((number,), 0.5),
        "flagged": torch.arange(number) < 2,
    }
    return SuspectTable(**{**columns, **changes})


def test_judges_a_table():
    # By falling score: ids 4, 3, 2, 1, 0, of which 4, 2 and 1 are wrong.
    quality = TrueLabels([3, 0, 1, 2, 0]).judge(table([1, 2, 2, 2, 3]))
    assert quality.num_wrong == 3
    assert quality.auroc == pytest.approx(4 / 6)
    assert quality.average_precision == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    assert quality.precision_at_n == pytest.approx(2 / 3)
    assert quality.precision_at_1_percent == 1.0
    assert quality.precision_flagged == 0.5
    assert quality.recall_flagged == pytest.approx(1 / 3)
    assert quality.suggestion_accuracy == pytest.approx(2 / 3)
    assert list(dict(quality.shares())) == [
        "auroc",
        "average_precision",
        "precision_at_n",
        "precision_at_1_percent",
        "precision_flagged",
        "recall_flagged",
        "suggestion_accuracy",
    ]


def test_the_first_percent_is_rounded_up():
    labels = torch.ones(250, dtype=torch.long)
    labels[249 - 2] = 0  # the third of the table
    assert TrueLabels(labels).judge(table([1] * 250)).precision_at_1_percent == pytest.approx(1 / 3)


def test_without_anything_to_judge_by():
    quality = TrueLabels([0, 0, 0]).judge(table([0, 0, 0], flagged=torch.zeros(3, dtype=torch.bool)))
    assert dict(quality.shares()) == {"precision_at_1_percent": 0.0}
    assert TrueLabels([0]).judge(SuspectTable.empty()) is None
    without = table([1, 0, 0], suggested_labels=None, probabilities=None)
    assert TrueLabels([0, 0, 0]).judge(without).suggestion_accuracy is None


def test_several_labels_and_values():
    several = table([0, 0], labels=torch.tensor([[1, 0], [0, 1]], dtype=torch.int8), suggested_labels=None)
    assert TrueLabels([[0, 1], [1, 1]]).judge(several).num_wrong == 1
    values = table([0, 0, 0], labels=torch.tensor([0.1, 2.0, 3.0]), suggested_labels=None)
    assert TrueLabels([3, 2.5, 0.1]).judge(values).num_wrong == 1


def test_what_is_given_is_copied():
    for values in (np.array([0, 1]), torch.tensor([0, 1])):
        labels = TrueLabels(values)
        values[0] = 1
        assert labels.judge(table([1, 0])).num_wrong == 0


REFUSED = [
    (
        [0, 4],
        Task.CLASSIFICATION,
        4,
        "holds the label 4, and the task is classification. Expected whole numbers from 0 to 3",
    ),
    ([0.5, 1], Task.CLASSIFICATION, 4, "holds floating-point numbers, and the task is classification"),
    ([0, 2], Task.BINARY, 1, "holds the label 2, and the task is binary. Expected whole numbers from 0 to 1"),
    ([[0, 1]], Task.CLASSIFICATION, 4, r"has the shape \[1, 2\], and the task is classification. Expected \[N\]"),
    ([0, 1], Task.MULTILABEL, 3, r"has the shape \[2\], and the task is multilabel. Expected \[N, 3\], one column"),
    ([[0, 1]], Task.MULTILABEL, 3, r"has the shape \[1, 2\], and the task is multilabel. Expected \[N, 3\]"),
    ([[0, 2]], Task.MULTILABEL, 2, "holds the label 2, and the task is multilabel"),
    ([[0, 1]], Task.REGRESSION, 1, r"has the shape \[1, 2\], and the task is regression"),
]


@pytest.mark.parametrize(("values", "task", "num_outputs", "words"), REFUSED)
def test_labels_of_another_task_are_refused(values, task, num_outputs, words):
    with pytest.raises(ValueError, match=f"^`true_labels` {words}"):
        TrueLabels(values).check_task(task, num_outputs)


@pytest.mark.parametrize(
    ("values", "task", "num_outputs"),
    [
        ([0, 3], Task.CLASSIFICATION, 4),
        ([0, 300], Task.CLASSIFICATION, None),
        ([False, True], Task.BINARY, 1),
        ([[0, 1, 1]], Task.MULTILABEL, 3),
        ([[0, 1, 1]], Task.MULTILABEL, None),
        ([3, 2], Task.REGRESSION, 1),
    ],
)
def test_labels_that_fit(values, task, num_outputs):
    TrueLabels(values).check_task(task, num_outputs)


def test_samples_without_a_label_are_refused():
    with pytest.raises(ValueError, match=r"^`true_labels` holds 2 labels for 3 training samples"):
        TrueLabels([0, 1]).judge(table([0, 0, 0]))
    with pytest.raises(ValueError, match="of a `Subset`, for all samples of the dataset beneath"):
        TrueLabels([0, 1]).check_count(3)
