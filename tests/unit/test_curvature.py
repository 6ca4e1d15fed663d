"""What the curvature refuses, and what must not change it; that it is right is shown in ``rules/test_influence.py``."""

import pytest
import torch
from torch import nn

from lightning_gradsim import query_curvature
from lightning_gradsim.adapter import Adapter
from lightning_gradsim.curvature import Curvature
from lightning_gradsim.engine import EngineSettings, run_pass
from lightning_gradsim.errors import GradSimError, NonFiniteError, UnsupportedLayerError
from lightning_gradsim.factors import IndexedFactors, OuterFactors, dot
from lightning_gradsim.query_side import QueryBatch

FEATURES, CLASSES = 4, 3


def factors(number, positions=1, *, bias=True, dtype=torch.float64):
    activations = torch.randn(number, positions, 1, FEATURES, dtype=dtype)
    return OuterFactors(activations, torch.randn(number, positions, 1, CLASSES, dtype=dtype), bias)


def curvature_of(*parts):
    curvature = Curvature()
    for part in parts:
        curvature.update({"head": part})
    return curvature


def moments(curvature, which, number=40):
    """Those of the head, of which the lower triangle is kept."""
    lower = getattr(curvature._layers["head"], which)[0] / number
    return lower.tril() + lower.tril(-1).T


def influence(module, train, for_curvature=None, **settings):
    adapter = Adapter()
    adapter.bind(module, None)
    x = torch.randn(5, FEATURES)
    with torch.no_grad():
        y = (module(x).argmax(1) + 1) % CLASSES
    batches = [(torch.arange(len(train[0])), train)]
    settings = EngineSettings(similarity="influence", layers="all", **settings)
    for_curvature = batches if for_curvature is None else for_curvature
    return run_pass(module, adapter, [QueryBatch(range(5), (x, y))], batches, settings, curvature_batches=for_curvature)


def data(number=20):
    return torch.randn(number, FEATURES), torch.randint(CLASSES, (number,))


def test_little_damping_is_the_inverse_of_a_regression():
    """One output and a squared loss: the inverse moments of the inputs, as in the normal equations."""
    x, residuals = torch.randn(30, FEATURES, dtype=torch.float64), torch.randn(30, 1, dtype=torch.float64)
    train = OuterFactors(x[:, None, None], residuals[:, None, None], bias=False)
    solved = curvature_of(train).precondition({"head": train.samples(slice(3))}, 1e-12)["head"]
    moments = x.T @ x / 30
    expected = torch.linalg.solve(moments, (x * residuals)[:3].T).T / residuals.square().mean()
    torch.testing.assert_close(solved.flat, expected, rtol=1e-8, atol=1e-10)


def test_much_damping_turns_nothing():
    train = factors(30, positions=2)
    queries = train.samples(slice(4))
    solved = curvature_of(train).precondition({"head": queries}, 1e9)["head"]
    cosines = nn.functional.cosine_similarity(1e18 * solved.flat, queries.flat)
    torch.testing.assert_close(cosines, torch.ones_like(cosines))


@pytest.mark.parametrize("bias", [True, False])
def test_positions_without_gradient_do_not_count(bias):
    """How far a batch is padded must not matter, whatever the activations there are."""
    train, queries = factors(20, 2, bias=bias), factors(4, bias=bias)
    longer = OuterFactors(
        torch.cat([train.activations, torch.randn(20, 3, 1, FEATURES)], dim=1),
        torch.cat([train.output_grads, torch.zeros(20, 3, 1, CLASSES)], dim=1),
        bias,
    )
    one, other = (curvature_of(part).precondition({"head": queries}, 0.1)["head"] for part in (train, longer))
    torch.testing.assert_close(one.flat, other.flat)


def test_an_input_of_zero_does_not_divide():
    """Where the input for the bias comes out as zero, products stay right to rounding."""
    train, queries = factors(40), factors(3)
    queries.activations[0] = 0
    curvature = curvature_of(train)
    root = torch.linalg.inv(moments(curvature, "_inputs") + torch.eye(5))
    # Chosen so that the last entry of the solution is zero.
    queries.activations[1, 0, 0] = -root[-1, :-1] / root[-1, :-1].square().sum() * root[-1, -1]
    mean = moments(curvature, "_inputs").diagonal().mean()
    solved = curvature.precondition({"head": queries}, float(1 / mean))["head"]
    assert solved.activations.isfinite().all()
    rows = torch.cat([queries.activations[:, 0, 0], torch.ones(3, 1)], dim=1) @ root
    assert rows[1, -1].abs() < 1e-12
    grads = moments(curvature, "_grads")
    grads = grads + grads.diagonal().mean() / mean * torch.eye(CLASSES)
    left = torch.einsum("mi,mo->moi", rows, torch.linalg.solve(grads, queries.output_grads[:, 0, 0].T).T).flatten(1)
    ones = torch.ones(40, 1)
    right = torch.einsum("ni,no->noi", torch.cat([train.activations[:, 0, 0], ones], 1), train.output_grads[:, 0, 0])
    torch.testing.assert_close(dot(solved, train), left @ right.flatten(1).T)


def test_gradients_of_zero_need_no_curvature():
    unused = factors(4).unused(4)
    assert curvature_of(factors(9)).precondition({"other": unused}, 1.0)["other"] is unused


@pytest.mark.parametrize(
    "train",
    [factors(9).unused(9), IndexedFactors(torch.zeros(9, 1, dtype=torch.long), torch.zeros(9, 1, CLASSES), 5)],
    ids=["factors", "table"],
)
def test_a_layer_without_gradients_is_named(train):
    queries = (
        factors(2)
        if isinstance(train, OuterFactors)
        else IndexedFactors(torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1, CLASSES), 5)
    )
    message = r"Layer `head` has no curvature to precondition by: its gradients are zero .* Leave it out of `layers`"
    with pytest.raises(GradSimError, match=message):
        curvature_of(train).precondition({"head": queries}, 1.0)


def test_a_layer_that_only_queries_use_is_named():
    with pytest.raises(GradSimError, match=r"Layer `other` .*: no training sample .* uses it"):
        curvature_of(factors(9)).precondition({"other": factors(2)}, 1.0)


def test_singular_moments_are_named():
    train = factors(2)
    with pytest.raises(GradSimError, match=r"Layer `head` .*: its moments are singular under `damping=1e-30`"):
        curvature_of(train).precondition({"head": train}, 1e-30)


def test_no_samples_at_all():
    with pytest.raises(GradSimError, match="no training sample that the curvature is taken from uses it"):
        influence(nn.Linear(FEATURES, CLASSES), data(), for_curvature=[])


def test_moments_beyond_the_memory_are_refused():
    module = nn.Sequential(nn.Linear(FEATURES, 500), nn.ReLU(), nn.Linear(500, CLASSES))
    message = r"Layer `2` has 501 inputs and 3 outputs a channel group: second moments of them take 4,016,160 bytes"
    with pytest.raises(UnsupportedLayerError, match=message):
        influence(module, data(), memory_budget=int(4_016_159 / query_curvature.CURVATURE_SHARE))


def test_samples_that_are_not_finite_are_named():
    x, y = data()
    x[[3, 17]] = torch.inf
    with pytest.raises(NonFiniteError, match=r"sample ids \[3, 17\]\)\. Nothing is scored"):
        influence(nn.Linear(FEATURES, CLASSES), (x, y))
