"""From logits and targets to labels, predictions and mistakes."""

import pytest
import torch

from lightning_gradsim.errors import GradSimError, LabelRangeError
from lightning_gradsim.tasks import Task, check_class_indices, predicted_targets, read_outcome


def test_classification():
    logits = torch.tensor([[3.0, 1.0, 0.0], [0.0, 1.0, 3.0], [0.0, 2.0, 1.0]])
    outcome = read_outcome(Task.CLASSIFICATION, logits, torch.tensor([0, 1, 1]))
    assert outcome.labels.tolist() == [0, 1, 1]
    assert outcome.predictions.tolist() == [0, 2, 1]
    assert outcome.wrong.tolist() == [False, True, False]
    assert outcome.suggested.tolist() == [1, 2, 2]  # the most probable class other than the label
    probabilities = logits.softmax(1)
    torch.testing.assert_close(outcome.probabilities, probabilities.max(1).values)
    torch.testing.assert_close(outcome.suggested_probabilities, probabilities[[0, 1, 2], [1, 2, 2]])


def test_class_probabilities_as_targets():
    targets = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])
    outcome = read_outcome(Task.CLASSIFICATION, torch.tensor([[0.0, 5.0, 0.0], [0.0, 5.0, 0.0]]), targets)
    assert outcome.labels.tolist() == [0, 1]
    assert outcome.wrong.tolist() == [True, False]
    assert predicted_targets(Task.CLASSIFICATION, outcome, targets).tolist() == [[0, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize("ignored", [-100, -1, 255])
def test_an_ignored_sample_is_never_wrong(ignored):
    outcome = read_outcome(Task.CLASSIFICATION, torch.randn(2, 3), torch.tensor([ignored, ignored]))
    assert not outcome.wrong.any()
    assert outcome.labels.tolist() == [ignored, ignored]


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@pytest.mark.parametrize("are_probabilities", [False, True])
def test_binary(shape, are_probabilities):
    logits = torch.tensor([2.0, -2.0, 2.0, -2.0])
    outputs = (logits.sigmoid() if are_probabilities else logits).reshape(shape)
    targets = torch.tensor([1.0, 1.0, 0.0, 0.0]).reshape(shape)
    outcome = read_outcome(Task.BINARY, outputs, targets, are_probabilities=are_probabilities)
    assert outcome.wrong.tolist() == [False, True, True, False]
    assert outcome.predictions.tolist() == [1, 0, 1, 0]
    assert outcome.suggested.tolist() == [0, 0, 1, 1]
    sure = torch.tensor(2.0).sigmoid()
    torch.testing.assert_close(outcome.probabilities, sure.expand(4))
    torch.testing.assert_close(outcome.suggested_probabilities, torch.stack([1 - sure, sure, sure, 1 - sure]))
    relabelled = predicted_targets(Task.BINARY, outcome, targets)
    assert relabelled.shape == targets.shape
    assert relabelled.dtype == targets.dtype
    assert relabelled.flatten().tolist() == [1, 0, 1, 0]


def test_multilabel():
    logits = torch.tensor([[3.0, -3.0, 1.0], [3.0, -3.0, 1.0]])
    targets = torch.tensor([[1, 0, 1], [1, 1, 1]])
    outcome = read_outcome(Task.MULTILABEL, logits, targets)
    assert outcome.wrong.tolist() == [False, True]
    assert outcome.suggested is None
    torch.testing.assert_close(outcome.probabilities, torch.tensor(1.0).sigmoid().expand(2))  # of the least sure label
    assert predicted_targets(Task.MULTILABEL, outcome, targets).tolist() == [[1, 0, 1], [1, 0, 1]]


def test_regression_has_no_classes():
    outcome = read_outcome(Task.REGRESSION, torch.tensor([[1.0], [2.0]]), torch.tensor([[1.5], [2.0]]))
    assert outcome.wrong.all()
    assert outcome.labels.tolist() == [1.5, 2.0]
    assert outcome.predictions.tolist() == [1.0, 2.0]
    assert outcome.probabilities is None
    assert outcome.suggested is None
    assert predicted_targets(Task.REGRESSION, outcome, torch.zeros(2, 1)) is None


def test_a_vector_valued_target_is_shown_by_its_mean():
    outcome = read_outcome(Task.REGRESSION, torch.zeros(1, 2), torch.tensor([[1.0, 4.0]]))
    assert outcome.labels.tolist() == [2.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_give_probabilities_in_float32(dtype):
    outcome = read_outcome(Task.CLASSIFICATION, torch.randn(3, 4).to(dtype), torch.tensor([0, 1, 2]))
    assert outcome.probabilities.dtype == torch.float32


@pytest.mark.parametrize("task", [Task.CLASSIFICATION, Task.BINARY, Task.MULTILABEL])
def test_no_samples(task):
    targets = torch.zeros(0, dtype=torch.long) if task is Task.CLASSIFICATION else torch.zeros(0, 3)
    logits = torch.zeros(0, 1) if task is Task.BINARY else torch.zeros(0, 3)
    targets = torch.zeros(0, 1) if task is Task.BINARY else targets
    assert read_outcome(task, logits, targets).wrong.shape == (0,)


def test_labels_outside_the_classes_are_named():
    with pytest.raises(LabelRangeError, match=r"Labels \[-1, 3, 7\] lie outside the model's 3 classes") as caught:
        check_class_indices(torch.tensor([0, 3, 7, -1, 3]), 3, None)
    assert "ignore_index" in str(caught.value)
    assert isinstance(caught.value, (GradSimError, ValueError))


def test_ignored_labels_may_lie_outside():
    check_class_indices(torch.tensor([0, -100, 2]), 3, -100)
    check_class_indices(torch.tensor([0, 255]), 3, 255)
    with pytest.raises(LabelRangeError, match=r"\[-1\]"):
        check_class_indices(torch.tensor([-100, -1]), 3, -100)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_of_any_integer_dtype_are_checked(dtype):
    with pytest.raises(LabelRangeError, match=r"\[5\]"):
        check_class_indices(torch.tensor([5], dtype=dtype), 3, None)
