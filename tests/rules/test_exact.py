"""Every case of the table, and every way to cut the work, against one-sample-at-a-time autograd."""

from contextlib import nullcontext
from functools import cache

import pytest
import torch

from lightning_gradsim import rules, scorer
from lightning_gradsim.adapter import Adapter
from lightning_gradsim.engine import EngineSettings, run_pass
from lightning_gradsim.factors import concatenate_samples, dot, squared_norms
from lightning_gradsim.guard import evaluating
from lightning_gradsim.layer_selection import own_parameters
from lightning_gradsim.query_side import QueryBatch
from lightning_gradsim.scores import SIMILARITIES, compute_similarity
from lightning_gradsim.wrapper import PerSampleGradients
from tests.cases import CASES
from tests.reference import one_sample_gradients, outputs_of

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
STORED = 1e-6  # self-influence is kept in float32
TOP_K = 7
GRADIENTS_ALONE = [name for name in SIMILARITIES if name != "influence"]  # test_influence.py has it
SOME_CASES = ("linear-3d", "called-repeatedly", "sometimes-unused", "several-layers", "loss-ignore-index")

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
some_cases = pytest.mark.parametrize("case", [c for c in CASES if c.name in SOME_CASES], ids=lambda case: case.name)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


@cache
def reference_of(case):
    """Gradients of the queries, of the queries as predicted, and of the training samples."""
    built = case.build()
    given = one_sample_gradients(built.module, case.parameters, *built.queries, built.criterion())
    train = one_sample_gradients(built.module, case.parameters, *built.train, built.criterion())
    predicted = None
    if built.loss.predict is not None:
        targets = built.loss.predict(outputs_of(built.module, built.queries[0]))
        predicted = one_sample_gradients(built.module, case.parameters, built.queries[0], targets, built.criterion())
    return given, predicted, train


def similarities(similarity, queries, train):
    """The full matrix of a similarity, and the scale that its tolerance is relative to."""
    products = queries.joined @ train.joined.T
    scale = queries.norms[:, None] * train.norms[None]
    divisor = {"dot": torch.ones(()), "cosine": scale, "asymmetric": train.norms[None].square()}[similarity]
    safe = torch.where(divisor > 0, divisor, 1)
    return products / safe, scale / safe


def expected_names(case):
    """Names of layers, or of parameters where only some of a layer's are chosen."""
    names, module = [], case.build().module
    for layer in case.names:
        own = own_parameters(module.get_submodule(layer))
        chosen = case.parameters[layer] if isinstance(case.parameters, dict) else own
        names += [layer or "(the module)"] if len(chosen) == len(own) else [f"{layer}.{name}" for name in chosen]
    return names


def assert_close(values, expected, scale, tolerance):
    excess = (values.double() - expected).abs() - tolerance * scale
    assert values.shape == expected.shape
    assert not values.isnan().any()
    assert excess.max() <= 0, f"{int((excess > 0).sum())} of {excess.numel()} are off, by up to {excess.max():.2e}"


def factors_of(built, layers):
    """Factors of the queries and of the training samples."""
    with evaluating(built.module), PerSampleGradients(built.module, layers) as gradients:
        parts = [gradients.compute(lambda batch: built.losses(*batch), each) for each in (built.queries, built.train)]
        expected = dict.fromkeys(built.case.names, "rule") | (built.case.steps or {})
        assert list(gradients.steps) == list(built.case.names)
        assert all(step in expected[name] for name, step in gradients.steps.items())
    return parts


def pass_over(built, *, batch_size=8, order=None, groups=None, context=nullcontext, **settings):
    """``run_pass`` over the training samples; ids are 100, 101, ..., in any order of reading."""
    adapter = Adapter()
    adapter.bind(built.module, built.criterion("mean"))
    inputs, targets = built.queries
    groups = [range(len(inputs))] if groups is None else groups
    queries = [QueryBatch(list(group), (inputs[list(group)], targets[list(group)])) for group in groups]
    inputs, targets = built.train
    order = torch.arange(len(inputs)) if order is None else order
    train = [(100 + ids, (inputs[ids], targets[ids])) for ids in order.split(batch_size)]
    settings = EngineSettings(**{"layers": built.case.layers, "top_k": TOP_K, **settings})
    return run_pass(built.module, adapter, queries, train, settings, context, train)


def assert_is_top(samples, expected, scale, tolerance):
    """The list is the sorted positive end of ``expected``, up to exchanges of scores nearer than the tolerance."""
    margin = tolerance * scale
    best = expected.sort(descending=True).values
    ids = torch.tensor([sample.sample_id for sample in samples], dtype=torch.long) - 100
    scores = torch.tensor([sample.score for sample in samples], dtype=torch.float64)
    assert len(set(ids.tolist())) == len(ids)
    assert min(TOP_K, int((expected > margin).sum())) <= len(ids) <= min(TOP_K, int((expected > -margin).sum()))
    if not len(ids):
        return
    assert_close(scores, expected[ids], scale[ids], tolerance)
    assert_close(scores, best[: len(ids)], margin.max() / tolerance, tolerance)
    assert (scores.diff() <= 0).all()


def assert_is_exact(result, case, tolerance, similarity="dot", stored=STORED):
    """Lists equal the sort of the full reference matrix, self-influence the squared norms."""
    given, predicted, train = reference_of(case)
    opponents, scale = similarities(similarity, given, train)
    cosines, cosine_scale = similarities("cosine", given, train)
    assert list(result.layers) == expected_names(case)
    assert result.queries
    assert result.has_teachers == (predicted is not None)
    for position, query in result.queries.items():
        flipped = [type(sample)(sample.sample_id, sample.label, -sample.score, False) for sample in query.harmful]
        assert_is_top(flipped, -opponents[position], scale[position], tolerance)
        assert_is_top(query.look_alikes, cosines[position], cosine_scale[position], tolerance)
        if predicted is not None:
            proponents, predicted_scale = similarities(similarity, predicted, train)
            assert_is_top(query.teachers, proponents[position], predicted_scale[position], tolerance)
    norms = train.norms.square()
    suspects = result.suspects
    assert result.num_samples == len(suspects) == case.num_train
    assert sorted(suspects.sample_ids.tolist()) == list(range(100, 100 + case.num_train))
    assert_close(
        suspects.scores, norms[suspects.sample_ids - 100], norms[suspects.sample_ids - 100], tolerance + stored
    )
    assert (suspects.scores.diff() <= 0).all()


@every_case
@both_dtypes
def test_products_and_norms(case, dtype):
    queries, train = factors_of(case.build(dtype), case.layers)
    given, _, expected = reference_of(case)
    assert tuple(train) == case.names
    products = sum(dot(queries[name], train[name]) for name in queries)
    query_norms = sum(squared_norms(queries[name]) for name in queries)
    train_norms = sum(squared_norms(train[name]) for name in case.names)
    assert products.dtype == train_norms.dtype == dtype
    assert_close(train_norms, expected.norms.square(), expected.norms.square(), TOLERANCE[dtype])
    assert_close(query_norms, given.norms.square(), given.norms.square(), TOLERANCE[dtype])
    for similarity in GRADIENTS_ALONE:
        values = compute_similarity(similarity, products, query_norms, train_norms)
        assert_close(values, *similarities(similarity, given, expected), TOLERANCE[dtype])


@every_case
@both_dtypes
def test_materialised_gradients(case, dtype):
    built = case.build(dtype)
    _, train = factors_of(built, case.layers)
    for name, expected in reference_of(case)[2].by_layer.items():
        gradients = rules.split_gradients(built.module.get_submodule(name), train[name], list(expected))
        assert list(gradients) == list(expected)
        assert train[name].num_parameters == sum(column[0].numel() for column in expected.values())
        norms = torch.cat([column.flatten(1) for column in expected.values()], dim=1).norm(dim=1)
        for parameter, columns in expected.items():
            ours = gradients[parameter]
            assert ours.shape == columns.shape
            scale = norms.reshape(-1, *[1] * (columns.ndim - 1)).expand_as(columns)
            assert_close(ours, columns, scale, TOLERANCE[dtype])


@every_case
@both_dtypes
def test_pass(case, dtype):
    assert_is_exact(pass_over(case.build(dtype)), case, TOLERANCE[dtype])


@some_cases
@pytest.mark.parametrize("similarity", GRADIENTS_ALONE)
def test_pass_by_similarity(case, similarity):
    assert_is_exact(pass_over(case.build(), similarity=similarity), case, 1e-10, similarity)


@every_case
@pytest.mark.parametrize(
    ("batch_size", "scored_together", "memory_budget", "groups"),
    [
        (1, 1, 1, [[0], [1], [2], [3], [4], [5]]),
        (7, 7, 20_000, [[3, 0, 5], [4, 1], [2]]),
        (64, 1024, 2**30, [[5, 4, 3, 2, 1, 0]]),
        (64, 1024, 1, [[0, 1, 2, 3, 4, 5]]),
    ],
    ids=["singly", "in-parts", "at-once", "no-memory"],
)
def test_any_cut(case, batch_size, scored_together, memory_budget, groups, monkeypatch):
    """Size of batches, of what is scored together and of all chunks, order of the samples, grouping of the queries."""
    monkeypatch.setattr(scorer, "GROUP_SAMPLES", scored_together)
    monkeypatch.setattr(scorer, "MIN_INTERMEDIATE", 1)
    order = torch.randperm(case.num_train, generator=torch.Generator().manual_seed(batch_size))
    result = pass_over(case.build(), batch_size=batch_size, order=order, groups=groups, memory_budget=memory_budget)
    assert_is_exact(result, case, 1e-10)


@pytest.mark.parametrize("max_intermediate", [1, 300])
def test_batches_of_different_length(max_intermediate):
    """Sentences of a batch are as long as its longest: queries and training batches need not agree."""
    case = next(case for case in CASES if case.name == "linear-3d")
    built = case.build()
    lengths = [3, 1, 5]
    inputs = [torch.randn(4, length, 6, dtype=torch.float64) for length in lengths]
    targets = [torch.randint(4, (4,)) for _ in lengths]
    parts, expected = [], []
    with evaluating(built.module), PerSampleGradients(built.module) as gradients:
        for x, y in zip(inputs, targets, strict=True):
            with gradients.recording():
                losses = built.losses(x, y)
            parts.append(gradients.factors(losses)["head"])
            expected.append(one_sample_gradients(built.module, ("head",), x, y, built.criterion()).joined)
    expected = torch.cat(expected)
    joined = concatenate_samples(parts)
    scale = expected.norm(dim=1)[:, None] * expected.norm(dim=1)[None]
    assert_close(dot(joined, joined, max_intermediate=max_intermediate), expected @ expected.T, scale, 1e-10)
    assert_close(
        squared_norms(joined, max_intermediate=max_intermediate), expected.square().sum(1), scale.diag(), 1e-10
    )


@every_case
def test_autocast_is_close(case):
    """bfloat16 has 8 bits: scores agree to 10 % of the product of the norms, taken as its mean where it is smaller."""
    built = case.build(torch.float32)
    _skip_where_torch_cannot(case.build(torch.float32))  # another one: statistics of batches change
    queries_before = reference_of(case)[0]
    result = pass_over(built, context=lambda: torch.autocast("cpu", dtype=torch.bfloat16), top_k=case.num_train)
    opponents, scale = similarities("dot", queries_before, reference_of(case)[2])
    assert result.suspects.scores.isfinite().all()
    norms = reference_of(case)[2].norms.square()[result.suspects.sample_ids - 100]
    assert_close(result.suspects.scores, norms, norms.clamp(min=norms.mean()), 0.1)
    for position, query in result.queries.items():
        ids = torch.tensor([sample.sample_id for sample in query.harmful], dtype=torch.long) - 100
        scores = torch.tensor([sample.score for sample in query.harmful], dtype=torch.float64)
        limit = scale[position, ids].clamp(min=scale[position].mean())
        if len(ids):
            assert_close(scores, opponents[position, ids], limit, 0.1)


def _skip_where_torch_cannot(built):
    """Skip if the module alone, without us, cannot run in bfloat16: recurrent layers need instructions for it."""
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            built.module(built.train[0])
    except RuntimeError as error:
        if "could not create a primitive descriptor" not in str(error):
            raise
        pytest.skip("this processor has no bfloat16 for the layer: torch itself refuses its forward")


@pytest.mark.parametrize("name", ["linear-2d", "linear-3d", "mlp-all", "conv-trunk"])
def test_half_precision_modules_give_float32(name):
    case = next(case for case in CASES if case.name == name)
    _, train = factors_of(case.build(torch.bfloat16), case.layers)
    expected = reference_of(case)[2]
    norms = sum(squared_norms(train[name]) for name in case.names)
    assert norms.dtype == torch.float32
    assert_close(norms, expected.norms.square(), expected.norms.square().clamp(min=expected.norms.square().mean()), 0.1)


def test_every_registered_type_has_a_case():
    covered = {
        type(module.get_submodule(name)) for case in CASES for module in [case.build().module] for name in case.names
    }
    missing = [kind.__name__ for kind in rules.registered_types() if kind not in covered]
    assert not missing, f"no row in tests/cases.py for {', '.join(missing)}"
