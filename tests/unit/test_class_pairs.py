"""All mistakes of a class pair as one query."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_gradsim import GradSimError, explain
from lightning_gradsim.scores import SIMILARITIES
from tests.reference import one_sample_gradients, outputs_of, preconditioned

CLASSES, NUM_TRAIN, NUM_QUERIES, DAMPING, WORDS = 3, 24, 30, 0.5, 7


class Network(nn.Module):
    """A layer of each form of factors: a table, patches, a norm, outer products with many positions and with one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, 6)
        self.conv = nn.Conv1d(6, 4, 3, padding=1)
        self.norm = nn.LayerNorm(4)
        self.mixed = nn.Linear(4, 5)
        self.head = nn.Linear(5, CLASSES, bias=False)
        self.head.weight.data *= 8  # or it takes all for one class

    def forward(self, x):
        hidden = self.conv(self.table(x).transpose(1, 2)).transpose(1, 2)
        return self.head(torch.tanh(self.mixed(self.norm(hidden))).mean(1))


CHOSEN = {
    "table": ("weight",),
    "conv": ("weight", "bias"),
    "norm": ("weight", "bias"),
    "mixed": ("weight", "bias"),
    "head": ("weight",),
}
KRONECKER = ("conv", "mixed", "head")


def data(number):
    return TensorDataset(torch.randint(WORDS, (number, 9)), torch.randint(CLASSES, (number,)))


def mean_scores(similarity, module, mistakes, train):
    """``[N]`` by plain autograd: the mean of the gradients first."""
    criterion = nn.CrossEntropyLoss(reduction="none")
    theirs = one_sample_gradients(module, CHOSEN, *train, criterion)
    own = one_sample_gradients(module, CHOSEN, *mistakes, criterion).joined.mean(0)
    if similarity == "influence":
        own = preconditioned(module, CHOSEN, KRONECKER, mistakes, train, criterion, DAMPING).mean(0)
    products = theirs.joined @ own
    divisor = {"cosine": own.norm() * theirs.norms, "asymmetric": theirs.norms.square()}
    return products / divisor.get(similarity, 1.0)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("number", [1, 2], ids=["one checkpoint", "two"])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_is_the_mean_gradient_of_all_of_them(similarity, number, batch_size):
    train, queries = data(NUM_TRAIN), data(NUM_QUERIES)
    checkpoints = [Network().double() for _ in range(number)]
    x, y = queries.tensors
    predicted = outputs_of(checkpoints[-1], x).argmax(1)
    report = explain(
        Network().double(),
        torch.utils.data.DataLoader(queries, batch_size),
        train,
        [each.state_dict() for each in checkpoints],
        layers="all",
        similarity=similarity,
        damping=DAMPING,
        top_k=NUM_TRAIN,
        class_pairs=2,
    )
    assert len(report.error_pairs) > 2
    for pair in report.error_pairs[:2]:
        among = (y == pair.label) & (predicted == pair.prediction)
        assert among.sum() == pair.count > 1
        scores = [mean_scores(similarity, each, (x[among], y[among]), train.tensors) for each in checkpoints]
        expected = torch.stack(scores).mean(0) if similarity == "cosine" else torch.stack(scores).sum(0)
        order = [i for i in expected.argsort().tolist() if expected[i] < 0]
        assert [sample.sample_id for sample in pair.harmful] == order
        assert [sample.score for sample in pair.harmful] == pytest.approx(expected[order].tolist(), rel=1e-8)
        for sample in pair.harmful:
            assert sample.label == train.tensors[1][sample.sample_id]
            assert sample.label_is_prediction == (sample.label == pair.prediction)
    assert not any(pair.harmful for pair in report.error_pairs[2:])


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("number", [30, 300], ids=["as factors", "materialised"])
def test_wide_layers(similarity, number):
    train = TensorDataset(torch.randn(NUM_TRAIN, 30, dtype=torch.float64), torch.randint(CLASSES, (NUM_TRAIN,)))
    x, y = torch.randn(number, 30, dtype=torch.float64), torch.randint(CLASSES, (number,))
    module = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, CLASSES)).double()
    predicted = outputs_of(module, x).argmax(1)
    options = {"similarity": similarity, "damping": DAMPING, "top_k": NUM_TRAIN, "class_pairs": 1}
    report = explain(module, TensorDataset(x, y), train, layers="0", **options)
    pair = report.error_pairs[0]
    assert pair.count >= 2
    assert (pair.count * (31 + 40) >= 31 * 40) == (number == 300), "either way"
    among = (y == pair.label) & (predicted == pair.prediction)
    criterion, chosen = nn.CrossEntropyLoss(reduction="none"), {"0": ("weight", "bias")}
    theirs = one_sample_gradients(module, chosen, *train.tensors, criterion)
    mistakes = (x[among], y[among])
    own = one_sample_gradients(module, chosen, *mistakes, criterion).joined.mean(0)
    if similarity == "influence":
        own = preconditioned(module, chosen, ("0",), mistakes, train.tensors, criterion, DAMPING).mean(0)
    divisor = {"cosine": own.norm() * theirs.norms, "asymmetric": theirs.norms.square()}
    expected = theirs.joined @ own / divisor.get(similarity, 1.0)
    assert [sample.score for sample in pair.harmful] == pytest.approx(
        expected[expected < 0].sort().values.tolist(), rel=1e-8
    )


def test_by_default_there_are_none():
    report = explain(Network(), data(NUM_QUERIES), data(NUM_TRAIN))
    assert not any(pair.harmful for pair in report.error_pairs)


def test_without_mistakes_there_are_none():
    module, train = Network(), data(NUM_TRAIN)
    x = train.tensors[0]
    right = TensorDataset(x, outputs_of(module, x).argmax(1))
    report = explain(module, right, train, class_pairs=3)
    assert report.error_pairs == ()


def test_more_than_memory_has_room_for():
    with pytest.raises(GradSimError, match=r"^The mean gradients of 3 class pairs take more than [\d,]+ bytes, the"):
        explain(Network(), data(NUM_QUERIES), data(NUM_TRAIN), layers="all", class_pairs=3, memory_budget=1000)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), ("2", TypeError), (True, TypeError)])
def test_wrong_numbers(value, error):
    with pytest.raises(error, match=r"^`class_pairs='?\w+'?` is .*\. Expected a whole number of at least 1\.$"):
        explain(Network(), data(NUM_QUERIES), data(NUM_TRAIN), class_pairs=value)
