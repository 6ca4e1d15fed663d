"""Every case of the table against the dense damped curvature, made of one-sample-at-a-time autograd."""

from functools import cache

import pytest
import torch
from torch import nn

from lightning_gradsim import query_curvature, scorer
from tests.reference import outputs_of, own_names, preconditioned
from tests.rules.test_exact import assert_is_top, both_dtypes, every_case, pass_over, reference_of, similarities

DAMPING = 0.3
# In float32 what the inverse makes of rounding counts, too.
DENSE = {torch.float64: 1e-8, torch.float32: 1e-3}

KRONECKER = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def kronecker_layers(case):
    """Layers with factors: by their type, unless they are served another way or their weight is not chosen."""
    module, steps = case.build().module, case.steps or {}
    chosen = (
        case.parameters
        if isinstance(case.parameters, dict)
        else {name: own_names(module.get_submodule(name)) for name in case.parameters}
    )
    return chosen, {
        name
        for name, parameters in chosen.items()
        if type(module.get_submodule(name)) in KRONECKER
        and steps.get(name, "rule") == "rule"
        and "weight" in parameters
    }


@cache
def dense(case, damping=DAMPING):
    """Preconditioned gradients of the queries for given and for predicted labels."""
    built = case.build()
    chosen, kronecker = kronecker_layers(case)

    def solve(targets):
        queries = (built.queries[0], targets)
        return preconditioned(built.module, chosen, kronecker, queries, built.train, built.criterion(), damping)

    given = solve(built.queries[1])
    if built.loss.predict is None:
        return given, None
    return given, solve(built.loss.predict(outputs_of(built.module, built.queries[0])))


def assert_is_dense(result, case, tolerance, damping=DAMPING):
    raw, _, train = reference_of(case)
    given, predicted = dense(case, damping)
    assert result.queries
    cosines, cosine_scale = similarities("cosine", raw, train)
    for position, query in result.queries.items():
        expected, scale = given[position] @ train.joined.T, given[position].norm() * train.norms
        flipped = [type(sample)(sample.sample_id, sample.label, -sample.score, False) for sample in query.harmful]
        assert_is_top(flipped, -expected, scale, tolerance)
        assert_is_top(query.look_alikes, cosines[position], cosine_scale[position], tolerance)
        if predicted is not None:
            expected, scale = predicted[position] @ train.joined.T, predicted[position].norm() * train.norms
            assert_is_top(query.teachers, expected, scale, tolerance)


@every_case
@both_dtypes
def test_pass(case, dtype):
    result = pass_over(case.build(dtype), similarity="influence", damping=DAMPING)
    assert_is_dense(result, case, DENSE[dtype])


@every_case
@pytest.mark.parametrize(
    ("batch_size", "memory_budget", "damping"), [(1, None, 0.3), (7, 20_000, 5.0), (64, 1, 0.01)], ids=str
)
def test_any_cut(case, batch_size, memory_budget, damping, monkeypatch):
    """Size of batches and of what is worked on together; with no memory at all, nothing is kept."""
    monkeypatch.setattr(scorer, "MIN_INTERMEDIATE", 1)
    monkeypatch.setattr(query_curvature, "CURVATURE_SHARE", 2.0**20)
    options = {"batch_size": batch_size, "memory_budget": memory_budget, "damping": damping}
    assert_is_dense(pass_over(case.build(), similarity="influence", **options), case, 1e-8, damping)
