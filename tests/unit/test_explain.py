"""Explaining a trained module: which queries, which weights, which labels, and what is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradsim import GradSimError, explain
from lightning_gradsim.errors import CheckpointError, LossError, TrainingDataError
from lightning_gradsim.scores import SIMILARITIES
from lightning_gradsim.views import report_page
from tests.reference import one_sample_gradients, outputs_of, preconditioned

FEATURES, CLASSES, NUM_TRAIN, NUM_QUERIES, DAMPING = 4, 3, 30, 7, 0.5
RATES = [0.1, 0.03, 0.01]
LAYERS = {"0": ("weight", "bias"), "2": ("weight", "bias")}


def network(outputs=CLASSES):
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def data(number):
    return TensorDataset(torch.randn(number, FEATURES, dtype=torch.float64), torch.randint(CLASSES, (number,)))


def states(number=3):
    return [network().state_dict() for _ in range(number)]


def with_state(state):
    module = network()
    module.load_state_dict(state)
    return module


def expected_scores(similarity, module, queries, train):
    """``[M, N]`` by plain autograd."""
    criterion = nn.CrossEntropyLoss(reduction="none")
    ours = one_sample_gradients(module, LAYERS, *queries, criterion)
    theirs = one_sample_gradients(module, LAYERS, *train, criterion)
    if similarity == "influence":
        return preconditioned(module, LAYERS, LAYERS, queries, train, criterion, DAMPING) @ theirs.joined.T
    products = ours.joined @ theirs.joined.T
    divisor = {"dot": 1.0, "cosine": ours.norms[:, None] * theirs.norms, "asymmetric": theirs.norms.square()}
    return products / divisor[similarity]


def assert_lists(report, expected, cosines, teachers):
    assert [query.sample_id for query in report.queries] == list(range(NUM_QUERIES))
    for row, query in enumerate(report.queries):
        for samples, values, sign in (
            (query.harmful, expected[row], -1),
            (query.look_alikes, cosines[row], 1),
            (query.teachers, teachers[row], 1),
        ):
            order = (sign * values).argsort(descending=True)
            order = [i for i in order.tolist() if sign * values[i] > 0][:5]
            assert [sample.sample_id for sample in samples] == order
            assert [sample.score for sample in samples] == pytest.approx(values[order].tolist(), rel=1e-8)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("rates", [None, RATES], ids=["plain", "weighted"])
@pytest.mark.parametrize("target", ["true", "predicted"])
def test_scores_are_sums_over_checkpoints(similarity, rates, target):
    checkpoints, train, queries = states(), data(NUM_TRAIN), data(NUM_QUERIES)
    options = {"layers": "all", "similarity": similarity, "damping": DAMPING, "top_k": 5, "target": target}
    report = explain(network(), queries, DataLoader(train, 4), checkpoints, learning_rates=rates, **options)
    x, y = queries.tensors
    predicted = outputs_of(with_state(checkpoints[-1]), x).argmax(1)
    given, totals = (y if target == "true" else predicted), []
    for labels, kind in ((given, similarity), (given, "cosine"), (predicted, similarity)):
        weights = [1.0] * 3 if rates is None else rates
        if kind == "cosine":
            weights = [weight / sum(weights) for weight in weights]
        parts = [expected_scores(kind, with_state(state), (x, labels), train.tensors) for state in checkpoints]
        totals.append(sum(weight * part for weight, part in zip(weights, parts, strict=True)))
    assert_lists(report, *totals)
    assert [query.prediction for query in report.queries] == predicted.tolist()
    assert [query.label for query in report.queries] == y.tolist()
    how = "" if rates is None else ", weighted by learning rates"
    assert report.notes == (f"scores are sums over 3 checkpoints{how}, look-alikes averages",)
    assert (report.num_validation_samples, report.num_errors) == (NUM_QUERIES, int((predicted != y).sum()))


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_the_weights_at_hand(similarity):
    module, train, queries = network(), data(NUM_TRAIN), data(NUM_QUERIES)
    report = explain(module, queries, train, layers="all", similarity=similarity, damping=DAMPING, top_k=5)
    x, y = queries.tensors
    predicted = outputs_of(module, x).argmax(1)
    scores = (
        expected_scores(kind, module, (x, labels), train.tensors)
        for labels, kind in ((y, similarity), (y, "cosine"), (predicted, similarity))
    )
    assert_lists(report, *scores)
    assert report.notes == ()
    again = explain(module, queries, train, [module.state_dict()], layers="all", similarity=similarity, damping=DAMPING)
    assert again.queries[0].harmful[:5] == report.queries[0].harmful[:5]


def test_files_of_weights_and_of_lightning(tmp_path):
    checkpoints, train, queries = states(2), data(NUM_TRAIN), data(NUM_QUERIES)
    torch.save(checkpoints[0], tmp_path / "plain.pt")
    torch.save({"state_dict": checkpoints[1], "epoch": 3}, tmp_path / "lightning.ckpt")
    files = [tmp_path / "plain.pt", str(tmp_path / "lightning.ckpt")]
    found, expected = (explain(network(), queries, train, each) for each in (files, checkpoints))
    assert found.queries == expected.queries


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_is_left_as_found(fails):
    module = network().train()
    module[0].eval()
    module[2].bias.requires_grad_(False)
    module[0].weight.grad = torch.ones_like(module[0].weight)
    before = copy.deepcopy(module.state_dict())
    checkpoints, train, queries = states(2), data(NUM_TRAIN), data(NUM_QUERIES)
    if fails:
        checkpoints[0]["0.weight"][:] = torch.nan
    random_state = torch.get_rng_state()
    try:
        explain(module, queries, train, checkpoints, similarity="influence")
    except GradSimError:
        assert fails
    else:
        assert not fails
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [part.training for part in module] == [False, True, True]
    assert [parameter.requires_grad for parameter in module.parameters()] == [True, True, True, False]
    assert torch.equal(module[0].weight.grad, torch.ones_like(module[0].weight))


def test_regression_has_no_predicted_target():
    module = network(1)
    train = TensorDataset(torch.randn(9, FEATURES, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64))
    report = explain(module, train, train, states_of(module), loss_fn=nn.MSELoss())
    assert len(report.queries) == 9
    assert not any(query.teachers for query in report.queries)
    with pytest.raises(LossError, match=r'`target="predicted"` needs a loss .* Pass `target="true"`'):
        explain(module, train, train, loss_fn=nn.MSELoss(), target="predicted")


def states_of(module):
    return [module.state_dict(), copy.deepcopy(module.state_dict())]


def other(key, value=None):
    """A checkpoint without a key, or with another value for it."""
    state = network().state_dict()
    if value is None:
        del state[key]
    else:
        state[key] = value
    return state


REFUSED = {
    "no checkpoints": ({"checkpoints": []}, TypeError, r"`checkpoints` is \[\]. Expected a list"),
    "one file": ({"checkpoints": "a.pt"}, TypeError, r"`checkpoints` is 'a.pt'. Expected a list"),
    "no such file": (
        {"checkpoints": ["a.pt"]},
        CheckpointError,
        r"Checkpoint `a.pt` cannot be read: .*Pass a file",
    ),
    "missing": (
        {"checkpoints": [other("2.bias")]},
        CheckpointError,
        r"does not fit `Sequential`: it misses `2.bias`\.",
    ),
    "besides": (
        {"checkpoints": [other("x", torch.ones(1))]},
        CheckpointError,
        r"it has besides `x`\. Pass checkpoints",
    ),
    "shape": ({"checkpoints": [other("2.bias", torch.ones(4))]}, CheckpointError, r"has in another shape `2.bias`"),
    "another model": ({"checkpoints": [{}]}, CheckpointError, r"misses `0.weight`, `0.bias`, `2.weight`, `2.bias`\."),
    "no weights": ({"checkpoints": [{"state_dict": 3}]}, CheckpointError, r"has besides `state_dict`"),
    "too few rates": ({"checkpoints": states(), "learning_rates": [1.0]}, ValueError, r"1 values for 3 checkpoints"),
    "rates alone": ({"learning_rates": [1.0]}, ValueError, r"`learning_rates` has 1 values for no checkpoints"),
    "rate of zero": (
        {"checkpoints": states(2), "learning_rates": [1.0, 0.0]},
        ValueError,
        r"`learning_rates\[1\]=0.0` is too small",
    ),
    "target": ({"target": "given"}, ValueError, r"`target='given'` is not known. Expected one of 'true', 'predicted'"),
    "similarity": ({"similarity": "dots"}, ValueError, r"`similarity='dots'` is not known"),
    "sums": ({"checkpoints": states(2), "memory_budget": 3359}, CheckpointError, r"28 rows .* take 3,360 bytes"),
    "sums of pairs": (
        {"checkpoints": states(2), "memory_budget": 3479, "class_pairs": 1},
        CheckpointError,
        r"29 rows .* take 3,480 bytes",
    ),
    "seed": ({"seed": 0.5}, TypeError, r"`seed=0.5`"),
    "samples": ({"max_train_samples": 0}, ValueError, r"`max_train_samples=0` is too small"),
}


@pytest.mark.parametrize(("options", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(options, error, message):
    module = network()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(error, match=message):
        explain(module, data(NUM_QUERIES), data(NUM_TRAIN), **options)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class Broken(TensorDataset):
    def __getitem__(self, index):
        raise OSError("gone")


@pytest.mark.parametrize("argument", ["queries", "train_data"])
def test_messages_name_the_argument(argument):
    def given(value):
        return {"queries": data(3), "train_data": data(9), argument: value}

    way = rf"Pass a map-style dataset or a `DataLoader` over one as `{argument}` to `explain`\.$"
    with pytest.raises(TrainingDataError, match=rf"is a `dict`\. .*{way}"):
        explain(network(), **given({"x": torch.zeros(2, FEATURES)}))
    broken = r"cannot be read: OSError: gone\. Repair it, or pass other .*data"
    with pytest.raises(TrainingDataError, match=rf"{broken} as `{argument}` to `explain`\.$"):
        explain(network(), **given(Broken(torch.zeros(3))))


def test_each_checkpoint_is_loaded_once(monkeypatch):
    module, loaded, plain_load = network(), [], nn.Module.load_state_dict

    def load(self, state, *args, **kwargs):
        loaded.append(next((i for i, each in enumerate(checkpoints) if state is each), None))
        return plain_load(self, state, *args, **kwargs)

    checkpoints = states()
    monkeypatch.setattr(nn.Module, "load_state_dict", load)
    explain(module, data(NUM_QUERIES), data(NUM_TRAIN), checkpoints)
    assert loaded == [2, 1, 0, None]


@pytest.mark.parametrize("number", [0, 3], ids=["at hand", "several"])
def test_listed_samples_that_are_suspects_are_marked(number):
    train, queries = data(NUM_TRAIN), data(NUM_QUERIES)
    report = explain(network(), queries, train, states(number) or None, top_k=NUM_TRAIN)
    flagged = {suspect.sample_id for suspect in report.suspects if suspect.flagged}
    listed = [s for query in report.queries for s in (*query.harmful, *query.teachers, *query.look_alikes)]
    assert {sample.is_suspect for sample in listed} == {False, True}
    assert all(sample.is_suspect == (sample.sample_id in flagged) for sample in listed)


@pytest.mark.parametrize(("number", "words"), [(0, "its present weights"), (1, "1 checkpoint"), (3, "3 checkpoints")])
def test_the_report_says_what_it_is_of(number, words):
    checkpoints = states(number) or None
    report = explain(network(), data(NUM_QUERIES), data(NUM_TRAIN), checkpoints, similarity="cosine")
    assert report.occasion == f"Sequential, {words}"
    assert report.summary().startswith(f"Sequential, {words}: ")
    page = report_page(report)
    assert f"Sequential, {words} · layer 2 · cosine" in page
    assert "epoch 0" not in page + report.summary()
    settings = dict(report.settings)
    assert (settings["model"], settings["similarity"], settings["top_k"]) == ("Sequential", "'cosine'", "8")
    assert settings["checkpoints"] == str(["a state dict"] * number if number else None)
    assert report.versions["torch"] == torch.__version__
    assert "<h3>Settings</h3>" in page
    assert "<h3>Versions</h3>" in page


def test_files_of_checkpoints_are_named(tmp_path):
    torch.save(network().state_dict(), tmp_path / "a.pt")
    report = explain(network(), data(2), data(9), [tmp_path / "a.pt"])
    assert report.settings["checkpoints"] == f"['{tmp_path / 'a.pt'}']"


def test_the_report_says_what_it_took():
    assert explain(network(), data(2), data(9)).seconds > 0


@pytest.mark.parametrize(("names", "num_notes"), [(["a", "b"], 1), (["a", "b", "c"], 0)])
def test_another_number_of_class_names_is_noted(names, num_notes):
    train = data(9)
    train.classes = names
    notes = explain(network(), data(2), train).notes
    assert [f"{len(names)} class names and 3 classes" in note for note in notes] == [True] * num_notes
