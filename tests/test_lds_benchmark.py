"""The parts of ``benchmarks/lds.py``: side-by-side training, rank correlations, predictions, choices."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Imports a script of `benchmarks/`, and forgets it afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(BENCHMARKS):
            del sys.modules[name]


def small_data(truth, number=40):
    return truth.Mnist(
        (torch.randn(number, 784), torch.randint(10, (number,))), (torch.randn(6, 784), torch.randint(10, (6,)))
    )


def test_training_side_by_side_is_plain_training(load):
    truth = load("lds_truth")
    kind = truth.Kind("small", (784, 7, 5, 10), 0.0, 2)
    inputs, labels = small_data(truth, 150).train
    rows = torch.stack([torch.arange(100), torch.arange(50, 150)])
    trainer = truth.Trainer(kind, inputs, labels, rows, [3, 4])
    plain = kind.build(trainer.network(1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=truth.LEARNING_RATE, momentum=truth.MOMENTUM)
    orders = torch.Generator()
    orders.set_state(trainer._draws[1].get_state())
    for _ in range(2):
        for part in rows[1][torch.randperm(100, generator=orders)].split(truth.BATCH_SIZE):
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(inputs[part]), labels[part]).backward()
            optimizer.step()
        trainer.epoch()
    for (weight, bias), layer in zip(trainer.network(1), plain[::2], strict=True):
        torch.testing.assert_close(weight, layer.weight.detach())
        torch.testing.assert_close(bias, layer.bias.detach())
    expected = nn.functional.cross_entropy(plain(inputs), labels, reduction="none").detach()
    torch.testing.assert_close(trainer.losses(inputs, labels)[1], expected)


def test_dropout_leaves_out_its_share_and_keeps_the_mean(load):
    truth = load("lds_truth")
    data = small_data(truth, 64)
    networks = [
        truth.Trainer(truth.Kind("small", (784, 9, 10), share, 1), *data.train, torch.arange(64)[None], [0])
        for share in (0.0, 0.5)
    ]
    for trainer in networks:
        trainer.epoch()
    (one, _), (other, _) = (trainer.network(0)[1] for trainer in networks)
    assert not torch.equal(one, other)
    assert nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.9


def test_halves_are_halves(load):
    members = load("lds_truth").halves()
    assert members.shape == (100, 5000)
    assert members.sum(1).eq(2500).all()
    assert len({tuple(half.tolist()) for half in members[:5]}) == 5


def test_the_score_is_the_mean_rank_correlation(load):
    lds = load("lds_tables").lds
    losses = torch.tensor([[3.0, 1.0], [2.0, 2.0], [1.0, 3.0], [0.0, 4.0]])  # four halves, two queries
    rising = torch.tensor([1.0, 2.0, 30.0, 31.0])
    assert lds(torch.stack([rising, -rising]), losses) == pytest.approx(1)
    assert lds(torch.stack([rising, rising]), losses) == pytest.approx(0)
    # Ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3.
    assert lds(torch.tensor([[0.0, 1.0, 1.0, 2.0]]), losses[:, :1]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_predictions_are_sums_over_members(load):
    truth, scores = load("lds_truth"), load("lds_scores")
    data = small_data(truth)
    members = torch.rand(5, 40) < 0.5
    trainer = truth.Trainer(truth.Kind("small", (784, 6, 10), 0.0, 1), *data.train, torch.arange(40)[None], [0])
    network = truth.Kind("small", (784, 6, 10), 0.0, 1).build(trainer.network(0))
    found = scores.predictions(network, data, members, {"last": 1, "all": 2})
    losses = nn.functional.cross_entropy(network(data.train[0]), data.train[1], reduction="none")
    gradients = torch.stack([flat_gradient(loss, network) for loss in losses])
    of_queries = nn.functional.cross_entropy(network(data.queries[0]), data.queries[1], reduction="none")
    query_gradients = torch.stack([flat_gradient(loss, network) for loss in of_queries])
    expected = query_gradients @ gradients.T @ members.float().T
    torch.testing.assert_close(found[("dot", "", 0.0), "all"], expected, rtol=1e-4, atol=1e-4)
    # With much damping every preconditioner is a multiple of the identity in each layer.
    last = found[("dot", "", 0.0), "last"]
    for score in ("one damping", "EK-FAC"):
        damped = found[(score, "sampled", 10.0), "last"]
        assert nn.functional.cosine_similarity(damped.flatten(), last.flatten(), dim=0) > 0.95
    assert {key[0][0] for key in found} == {"dot", "cosine", "asymmetric", "influence", "one damping", "EK-FAC"}
    assert all(values.shape == (6, 5) and values.isfinite().all() for values in found.values())


def flat_gradient(loss, network):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()), retain_graph=True)])


def test_choices_are_made_on_one_part_and_reported_on_the_other(load):
    tables = load("lds_tables")
    row = {"score": "influence", "moments": "data", "damping": 1.0, "layers": "all"}
    rows = [
        {**row, "way": "epoch 1", "choice": 0.3, "report": [0.1, 0.2], "all runs": 0.2},
        {**row, "way": "epoch 2", "choice": 0.2, "report": [0.9, 0.9], "all runs": 0.9},
        {**row, "way": "sum 1-2", "choice": 0.1, "report": [0.4, 0.4], "all runs": 0.4},
        {**row, "way": "equal 1-2", "choice": 0.1, "report": [0.5, 0.5], "all runs": 0.5},
    ]
    printed = tables.tables({"ceiling": 0.5, "rows": rows}, 2)
    assert "| influence | data | 0.900 ± 0.000 (epoch 2, layers all, damping 1) | 0.150 ± 0.071 (epoch 1," in printed
    one = tables.ways((1, 2), {"1-2": (1, 2)})
    values = {1: torch.tensor([[1.0, 3.0]]), 2: torch.tensor([[10.0, 0.0]])}
    assert one["epoch 2"](values) is values[2]
    assert one["sum 1-2"](values).tolist() == [[11.0, 3.0]]
    torch.testing.assert_close(one["equal 1-2"](values).diff(), torch.zeros(1, 1))
