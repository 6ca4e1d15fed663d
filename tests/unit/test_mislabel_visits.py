"""What a visit gives, against plain Python over one sample at a time."""

import math

import pytest
import torch
import torch.nn.functional as F

from lightning_gradsim.errors import BatchFormatError
from lightning_gradsim.mislabel.visits import COLUMNS, class_gradients, class_influence, measure_visits
from lightning_gradsim.tasks import Task

NAMES = ("margin", "loss", "prediction", "error_norm")


def softmax(row):
    powers = [math.exp(value - max(row)) for value in row]
    return [power / sum(powers) for power in powers]


def test_classes():
    logits, labels = torch.randn(12, 4, dtype=torch.float64) * 3, torch.randint(4, (12,))
    visits = measure_visits(Task.CLASSIFICATION, logits, labels, NAMES)
    for i, (row, label) in enumerate(zip(logits.tolist(), labels.tolist(), strict=True)):
        p = softmax(row)
        others = [value for c, value in enumerate(row) if c != label]
        errors = [value - (c == label) for c, value in enumerate(p)]
        assert float(visits.values["margin"][i]) == pytest.approx(row[label] - max(others))
        assert float(visits.values["loss"][i]) == pytest.approx(-math.log(p[label]))
        assert visits.values["prediction"][i].tolist() == pytest.approx(p)
        assert float(visits.values["error_norm"][i]) == pytest.approx(math.hypot(*errors))
    assert torch.equal(visits.labels, labels)
    assert visits.usable.all()


@pytest.mark.parametrize("task", [Task.BINARY, Task.MULTILABEL])
def test_labels(task):
    shape = (12,) if task is Task.BINARY else (12, 3)
    logits, targets = torch.randn(shape, dtype=torch.float64) * 3, torch.randint(2, shape)
    visits = measure_visits(task, logits, targets, NAMES)
    for i, (row, label) in enumerate(
        zip(logits.reshape(12, -1).tolist(), targets.reshape(12, -1).tolist(), strict=True)
    ):
        p = [1 / (1 + math.exp(-value)) for value in row]
        given = [value if y else 1 - value for value, y in zip(p, label, strict=True)]
        signed = [value if y else -value for value, y in zip(row, label, strict=True)]
        assert visits.values["margin"][i].tolist() == pytest.approx(signed)
        assert visits.values["loss"][i].tolist() == pytest.approx([-math.log(value) for value in given])
        assert visits.values["prediction"][i].tolist() == pytest.approx(p)
        assert float(visits.values["error_norm"][i]) == pytest.approx(math.hypot(*(1 - value for value in given)))
        assert visits.labels[i].tolist() == label


def test_values_of_a_regression():
    outputs, targets = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    visits = measure_visits(Task.REGRESSION, outputs, targets, ("loss", "prediction"))
    assert visits.values["loss"].tolist() == pytest.approx(
        [abs(sum(a) - sum(b)) / 2 for a, b in zip(outputs.tolist(), targets.tolist(), strict=True)]
    )
    assert visits.values["prediction"][:, 0].tolist() == pytest.approx(outputs.mean(1).tolist())
    assert visits.labels.tolist() == pytest.approx(targets.mean(1).tolist())


def head_gradients(features, logits, labels):
    """Gradient of each sample's loss by weight and bias of the head, joined, by autograd."""
    rows = []
    for feature, logit, label in zip(features, logits, labels, strict=True):
        weight = torch.zeros(logits.shape[1], len(feature), dtype=torch.float64, requires_grad=True)
        bias = logit.clone().requires_grad_()
        F.cross_entropy((weight @ feature + bias)[None], label[None]).backward()
        rows.append(torch.cat([weight.grad, bias.grad[:, None]], dim=1))
    return torch.stack(rows)


def test_self_influence_is_the_gradient_of_the_head():
    features, logits, labels = torch.randn(7, 5).double(), torch.randn(7, 4).double(), torch.randint(4, (7,))
    found = measure_visits(
        Task.CLASSIFICATION, logits, labels, ("self_influence",), features=features, learning_rate=0.25
    ).values["self_influence"]
    torch.testing.assert_close(found, 0.25 * head_gradients(features, logits, labels).square().sum((1, 2)))


def test_given_output_gradients_count():
    features, logits, labels = torch.randn(7, 5), torch.randn(7, 4), torch.randint(4, (7,))
    grads = torch.randn(7, 4)
    found = measure_visits(
        Task.CLASSIFICATION, logits, labels, ("self_influence",), features=features, output_grads=grads
    ).values["self_influence"]
    torch.testing.assert_close(found, grads.square().sum(1) * (features.square().sum(1) + 1))


def test_influence_is_that_of_the_class_harmed_most():
    features, logits, labels = torch.randn(20, 5).double(), torch.randn(20, 4).double(), torch.arange(20) % 3
    gradients = head_gradients(features, logits, labels)
    by_class = class_gradients(features, logits.softmax(1) - F.one_hot(labels, 4), labels, 4)
    expected = torch.stack([gradients[labels == c].mean(0) if c < 3 else torch.zeros(4, 6).double() for c in range(4)])
    torch.testing.assert_close(by_class, expected)
    found = measure_visits(
        Task.CLASSIFICATION, logits, labels, ("influence",), features=features, class_gradients=by_class
    ).values["influence"]
    products = [[-float((g * k).sum()) for k in expected] for g in gradients]
    torch.testing.assert_close(found, torch.tensor([max(row) for row in products]).double())
    torch.testing.assert_close(found, class_influence(features, logits.softmax(1) - F.one_hot(labels, 4), by_class))


def test_one_hot_targets_are_labels_and_mixed_ones_are_left_out():
    logits, labels = torch.randn(4, 3), torch.tensor([2, 0, 1, 1])
    targets = F.one_hot(labels, 3).float()
    targets[1] = torch.tensor([0.7, 0.3, 0.0])
    visits = measure_visits(Task.CLASSIFICATION, logits, targets)
    expected = measure_visits(Task.CLASSIFICATION, logits, labels)
    assert visits.usable.tolist() == [True, False, True, True]
    assert visits.mixed.tolist() == [False, True, False, False]
    for name, value in visits.values.items():
        assert torch.equal(value[[0, 2, 3]], expected.values[name][[0, 2, 3]])
        assert not value[1].any()


def test_labels_outside_of_the_classes_are_left_out():
    visits = measure_visits(Task.CLASSIFICATION, torch.randn(4, 3), torch.tensor([2, -100, 3, 0]))
    assert visits.usable.tolist() == [True, False, False, True]
    assert visits.outside.tolist() == [False, True, True, False]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["logits", "features"])
def test_what_is_not_finite_is_left_out(value, where):
    logits, features = torch.randn(4, 3), torch.randn(4, 2)
    {"logits": logits, "features": features}[where][2, 1] = value
    visits = measure_visits(Task.CLASSIFICATION, logits, torch.tensor([0, 1, 2, 1]), COLUMNS[:5], features=features)
    assert visits.usable.tolist() == [True, True, False, True]
    assert visits.non_finite.tolist() == [False, False, True, False]
    for measured in visits.values.values():
        assert measured.isfinite().all()
        assert not measured[2].any()


def test_half_precision_is_raised():
    logits = torch.randn(5, 3)
    visits = measure_visits(Task.CLASSIFICATION, logits.bfloat16(), torch.zeros(5, dtype=torch.long))
    assert visits.values["loss"].dtype == torch.float32


@pytest.mark.parametrize(("column", "missing"), [("self_influence", "features"), ("influence", "features")])
def test_features_that_are_missing(column, missing):
    with pytest.raises(BatchFormatError, match=f"`{column}` is measured from `{missing}`"):
        measure_visits(Task.CLASSIFICATION, torch.randn(2, 3), torch.tensor([0, 1]), (column,))
