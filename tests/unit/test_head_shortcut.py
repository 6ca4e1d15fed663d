"""The short way through a head: taken where it is exact, with the results of the ordinary way, left otherwise."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_gradsim import batch_runner
from lightning_gradsim.adapter import Adapter
from lightning_gradsim.batch_runner import PROBE_ROWS
from lightning_gradsim.engine import EngineSettings, run_pass
from lightning_gradsim.errors import LabelRangeError, NonFiniteError
from lightning_gradsim.head_shortcut import HeadShortcut
from lightning_gradsim.query_side import QueryBatch

FEATURES, WIDTH, CLASSES = 4, 6, 3
QUERIES = PROBE_ROWS + 5  # two portions: the second one is like all batches to come, and opens the short way


@pytest.fixture(autouse=True)
def _batches_as_they_come(monkeypatch):
    monkeypatch.setattr(batch_runner, "JOINED_SAMPLES", 1)


class Net(nn.Module):
    """A head on a hidden layer; subclasses say what becomes of its output for a batch."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.finish(self.hidden(x).tanh(), len(x))

    def finish(self, features, number):
        return self.head(features)


class Cooler(Net):
    """Something follows the head."""

    def finish(self, features, number):
        return self.head(features) / 2


class SmallCooler(Net):
    """Something follows the head in batches of less than five, in place."""

    def finish(self, features, number):
        logits = self.head(features)
        return logits.mul_(0.5) if number < 5 else logits


class TwiceInSmall(Net):
    def finish(self, features, number):
        return self.head(features) if number >= 5 else self.head(features) + self.head(2 * features)


class AnotherInSmall(Net):
    """The first call is the output, and a second one is thrown away."""

    def finish(self, features, number):
        logits = self.head(features)
        if number < 5:
            self.head(features)
        return logits


class OwnStep(Net):
    def gradsim_step(self, batch):
        logits = self(batch[0])
        return logits, batch[1], F.cross_entropy(logits, batch[1], reduction="none")


class OrdinaryAdapter(Adapter):
    """Losses of its own, which keep batches apart."""

    def losses(self, logits, targets):
        return super().losses(logits, targets)


def cross_entropy(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none")


def samples(number, dtype=torch.float64):
    return torch.randn(number, FEATURES, dtype=dtype), torch.randint(CLASSES, (number,))


def run(module, train, *, adapter=None, batch_size=5, loss=None, context=nullcontext, **settings):
    adapter = adapter or Adapter()
    adapter.bind(module, loss)
    x = torch.randn(QUERIES, FEATURES, dtype=train[0].dtype, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        queries = [QueryBatch(range(QUERIES), (x, (module(x).argmax(1) + 1) % CLASSES))]
    ids = torch.arange(len(train[0])) + 100
    batches = [(ids[rows], tuple(part[rows] for part in train)) for rows in torch.arange(len(ids)).split(batch_size)]
    return run_pass(module, adapter, queries, batches, EngineSettings(**settings), context)


@pytest.fixture
def finished(monkeypatch):
    """Numbers of samples whose losses were computed together."""
    numbers, finish = [], HeadShortcut.finish

    def watched(self, outputs):
        numbers.append(sum(len(output.logits) for output in outputs))
        return finish(self, outputs)

    monkeypatch.setattr(HeadShortcut, "finish", watched)
    return numbers


def assert_same(found, expected, tolerance):
    assert found.num_samples == expected.num_samples
    by_id = [result.suspects.sample_ids.argsort() for result in (found, expected)]
    for name in ("sample_ids", "labels", "suggested", "wrong"):
        values = [getattr(result.suspects, name, None) for result in (found, expected)]
        assert (values[0] is None) == (values[1] is None)
        if values[0] is not None:
            assert torch.equal(values[0][by_id[0]], values[1][by_id[1]])
    scores = [result.suspects.scores[order] for result, order in zip((found, expected), by_id, strict=True)]
    torch.testing.assert_close(*scores, rtol=tolerance, atol=tolerance)
    assert list(found.queries) == list(expected.queries)
    for position, query in found.queries.items():
        for name in ("harmful", "look_alikes", "teachers"):
            ours, theirs = (
                {s.sample_id: s.score for s in getattr(q, name)} for q in (query, expected.queries[position])
            )
            assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("batch_size", [1, 5, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1)])
def test_finds_what_the_ordinary_way_finds(finished, batch_size, dtype, tolerance, loss):
    module, train = Net().to(dtype), samples(60, dtype)
    loss = loss if loss is None else loss.to(dtype)
    found = run(module, train, batch_size=batch_size, loss=loss, top_k=60)
    assert finished == [60]
    expected = run(module, train, adapter=OrdinaryAdapter(), batch_size=batch_size, loss=loss, top_k=60)
    assert finished == [60]
    assert_same(found, expected, tolerance)


def test_no_more_waits_than_may(finished, monkeypatch):
    module, train = Net().double(), samples(60)
    expected = run(module, train, top_k=60)
    monkeypatch.setattr(batch_runner, "HELD_SAMPLES", 12)
    assert_same(run(module, train, top_k=60), expected, 1e-10)
    assert finished == [60, *[10] * 6]
    monkeypatch.setattr(batch_runner, "HELD_ELEMENTS", 5 * (WIDTH + CLASSES + 1))
    run(module, train)
    assert finished[7:] == [5] * 12


@pytest.mark.parametrize("module_type", [SmallCooler, TwiceInSmall, AnotherInSmall])
def test_a_batch_that_differs_goes_the_ordinary_way(finished, module_type):
    module, train = module_type().double(), samples(53)  # the last batch has three samples
    found = run(module, train, top_k=53)
    assert finished == [50]
    assert_same(found, run(module, train, adapter=OrdinaryAdapter(), top_k=53), 1e-10)


@pytest.mark.parametrize("module_type", [Cooler, OwnStep])
def test_other_models_go_the_ordinary_way(finished, module_type):
    run(module_type().double(), samples(20))
    assert not finished


@pytest.mark.parametrize(
    "settings", [{"loss": cross_entropy}, {"layers": "all"}, {"layers": "hidden"}], ids=["loss", "all", "hidden"]
)
def test_other_choices_go_the_ordinary_way(finished, settings):
    run(Net().double(), samples(20), **settings)
    assert not finished


def test_half_precision_goes_the_ordinary_way(finished):
    run(Net(), samples(20, torch.float32), context=partial(torch.autocast, "cpu", torch.bfloat16))
    assert not finished


def test_a_gradient_changed_on_its_way_goes_the_ordinary_way(finished):
    class Reversed(Net):
        def finish(self, features, number):
            logits = self.head(features)
            if logits.requires_grad:
                logits.register_hook(torch.neg)
            return logits

    run(Reversed().double(), samples(20))
    assert not finished


def test_labels_outside_the_classes_are_named_by_id(finished):
    x, y = samples(20)
    y[13] = CLASSES
    with pytest.raises(LabelRangeError, match=r"\[113\]"):
        run(Net().double(), (x, y))
    assert finished == [20]


def test_losses_that_are_not_finite_are_named_by_id(finished):
    x, y = samples(20)
    x[7] = torch.nan
    with pytest.raises(NonFiniteError, match=r"\[107\]"):
        run(Net().double(), (x, y))
    assert finished == [20]


def test_some_of_the_parameters(finished):
    module, train = Net().double(), samples(20)
    module.head.bias.requires_grad_(False)
    found = run(module, train, top_k=20)
    assert finished == [20]
    assert_same(found, run(module, train, adapter=OrdinaryAdapter(), top_k=20), 1e-10)


def test_features_keep_no_larger_tensor_alive(monkeypatch):
    class FirstToken(Net):
        def finish(self, features, number):
            return self.head(features[:, None].repeat(1, 50, 1)[:, 0])

    sizes, finish = [], HeadShortcut.finish

    def watched(self, outputs):
        sizes.extend(output.features.untyped_storage().nbytes() for output in outputs)
        return finish(self, outputs)

    monkeypatch.setattr(HeadShortcut, "finish", watched)
    run(FirstToken().double(), samples(20))
    assert sizes == [5 * WIDTH * 8] * 4
