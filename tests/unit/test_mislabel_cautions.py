import torch

from lightning_gradsim.mislabel.cautions import find_cautions
from lightning_gradsim.mislabel.statistics import RunAverages
from lightning_gradsim.tasks import Task


def averages(flagged, sureness, task=Task.CLASSIFICATION, number=100, classes=10):
    """Samples of class 0, a share of them flagged with some probability of class 1."""
    prediction = torch.full((number, classes), 0.02)
    prediction[:, 0] = 0.8
    rows = round(flagged * number)
    prediction[:rows] = (1 - sureness) / (classes - 1)
    prediction[:rows, 1] = sureness
    labels = torch.zeros(number, dtype=torch.long)
    means = {"prediction": prediction, "margin": torch.zeros(number)}
    return RunAverages(task, torch.arange(number), torch.ones(number), labels, means, None, {})


def test_all_is_well():
    assert find_cautions(averages(0.2, 0.6), train_accuracy=0.82, validation_accuracy=0.95, studied_queries=9) == ()
    assert find_cautions(averages(0.0, 0.6)) == ()
    assert find_cautions(averages(0.0, 0.6), validation_accuracy=1.0) == ()


def test_a_memorising_model():
    (found,) = find_cautions(averages(0.02, 0.6), train_accuracy=0.99, validation_accuracy=0.8)
    assert found.startswith(
        "Memorising model: 99% of the training labels are learned, and 80% of the validation labels."
    )
    assert find_cautions(averages(0.02, 0.6), train_accuracy=0.99, validation_accuracy=0.95) == ()
    assert find_cautions(averages(0.02, 0.6), train_accuracy=0.9, validation_accuracy=0.7) == ()
    assert find_cautions(averages(0.02, 0.6), train_accuracy=0.99) == ()


def test_an_underfitting_model():
    (found,) = find_cautions(averages(0.5, 0.3), validation_accuracy=0.55)
    assert found.startswith(
        "Underfitting model: 50% of the samples are flagged, about as many as it gets wrong on the validation set (45%)"
    )
    assert "gives 30% or less" in found
    assert find_cautions(averages(0.5, 0.3)) == ()
    assert find_cautions(averages(0.5, 0.45), validation_accuracy=0.55) == ()
    assert find_cautions(averages(0.1, 0.3), validation_accuracy=0.9) == ()
    assert find_cautions(averages(0.5, 0.3), validation_accuracy=0.2) == ()  # wrong labels in both, and flags are fewer
    assert find_cautions(averages(0.5, 0.3), validation_accuracy=0.95) == ()  # the labels are wrong, not the model


def test_a_noisy_validation_set():
    (found,) = find_cautions(averages(0.0, 0.6), doubted_queries=12, studied_queries=32)
    assert found.startswith("Noisy validation set: the label of 12 of 32 studied validation mistakes is doubtful.")
    assert find_cautions(averages(0.0, 0.6), doubted_queries=9, studied_queries=32) == ()
    assert find_cautions(averages(0.0, 0.6), doubted_queries=4, studied_queries=4) == ()
