"""Shards of the training samples, scored by several processes, give what one pass over all of them gives."""

import pickle
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.engine import EngineSettings, merge_shards, run_pass, score_shard
from lightning_gradsim.errors import LabelRangeError, NonFiniteError
from lightning_gradsim.query_side import QueryBatch
from lightning_gradsim.scores import SIMILARITIES

FEATURES, CLASSES, NUM_SAMPLES, NUM_QUERIES = 4, 3, 41, 6
SHARES = {
    "uneven, one empty": (range(7), range(0), range(7, NUM_SAMPLES)),
    "interleaved": tuple(range(rank, NUM_SAMPLES, 3) for rank in range(3)),
    "repeating": (range(25), range(17, NUM_SAMPLES), range(3)),
    "all empty but one": (range(0), range(0), range(NUM_SAMPLES)),
}
TASKS = {
    "classification": (CLASSES, None),
    "binary": (1, nn.BCEWithLogitsLoss()),
    "multilabel": (CLASSES, nn.BCEWithLogitsLoss()),
    "regression": (1, nn.MSELoss()),
}

every_share = pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)


def network(outputs=CLASSES, dtype=torch.float64):
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, outputs)).to(dtype)


def data(number, task="classification", dtype=torch.float64):
    x, outputs = torch.randn(number, FEATURES, dtype=dtype), TASKS[task][0]
    if task == "classification":
        return x, torch.randint(CLASSES, (number,))
    if task == "regression":
        return x, torch.randn(number, outputs, dtype=dtype)
    return x, torch.randint(2, (number, outputs)).to(dtype)


def wrong_samples(module, number=NUM_QUERIES):
    x, _ = data(number, dtype=next(module.parameters()).dtype)
    with torch.no_grad():
        return x, (module(x).argmax(1) + 1) % CLASSES


def arguments(module, queries, train, rows, task="classification", ids=None, **settings):
    """Of a pass over some of the training samples, in batches of five."""
    adapter = Adapter()
    adapter.bind(module, TASKS[task][1])
    batches, for_curvature = (
        [
            (part if ids is None else ids[part], (train[0][part], train[1][part]))
            for part in torch.tensor(chosen, dtype=torch.long).split(5)
            if len(part)
        ]
        for chosen in (rows, range(len(train[0])))
    )
    query_batches = [] if queries is None else [QueryBatch(range(len(queries[0])), queries)]
    return module, adapter, query_batches, batches, EngineSettings(**settings), nullcontext, for_curvature


def whole(module, queries, train, **options):
    return run_pass(*arguments(module, queries, train, range(len(train[0])), **options))


def in_shards(module, queries, train, shares, **options):
    """The merged result, of the shards in both orders, each sent as if from another process."""
    shards = []
    for rows in shares:
        given = arguments(module, queries, train, rows, **options)
        shards.append(pickle.loads(pickle.dumps(score_shard(*given))))
    return merge_shards(shards, given[4]), merge_shards(shards[::-1], given[4])


def assert_equal(found, expected, tolerance=1e-10):
    assert found.queries.keys() == expected.queries.keys()
    for position, query in found.queries.items():
        other = expected.queries[position]
        assert without_lists(query) == without_lists(other)
        for name in ("harmful", "teachers", "look_alikes"):
            ours, theirs = getattr(query, name), getattr(other, name)
            assert [without_score(sample) for sample in ours] == [without_score(sample) for sample in theirs]
            assert [s.score for s in ours] == pytest.approx([s.score for s in theirs], rel=tolerance, abs=tolerance)
    ours, theirs = found.suspects, expected.suspects
    for name in ("sample_ids", "labels", "suggested_labels", "flagged"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert one is other is None or torch.equal(one, other)
    torch.testing.assert_close(ours.scores, theirs.scores)
    for name in ("layers", "has_teachers", "num_samples", "ran_short"):
        assert getattr(found, name) == getattr(expected, name)
    assert (found.plan is None) == (expected.plan is None)


def without_lists(query):
    return replace(query, harmful=(), teachers=(), look_alikes=())


def without_score(sample):
    return sample.sample_id, sample.label, sample.label_is_prediction


@every_share
@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_shards_equal_one_pass(shares, similarity, layers):
    module = network()
    queries, train = wrong_samples(module), data(NUM_SAMPLES)
    options = {"similarity": similarity, "layers": layers, "ids": torch.randperm(500)[:NUM_SAMPLES]}
    expected = whole(module, queries, train, **options)
    assert len(expected.queries) == NUM_QUERIES
    for found in in_shards(module, queries, train, shares, **options):
        assert_equal(found, expected)


@every_share
@pytest.mark.parametrize("task", TASKS)
def test_shards_of_every_task(shares, task):
    module = network(TASKS[task][0])
    queries, train = data(NUM_QUERIES, task), data(NUM_SAMPLES, task)
    expected = whole(module, queries, train, task=task)
    assert expected.queries
    for found in in_shards(module, queries, train, shares, task=task):
        assert_equal(found, expected)


@every_share
def test_shards_in_single_precision(shares):
    module = network(dtype=torch.float32)
    queries, train = wrong_samples(module), data(NUM_SAMPLES, dtype=torch.float32)
    expected = whole(module, queries, train)
    for found in in_shards(module, queries, train, shares):
        assert_equal(found, expected, tolerance=1e-5)


@every_share
@pytest.mark.parametrize("top_k", [1, 12, 1000])
def test_ties_go_to_the_smaller_id(shares, top_k):
    module = nn.Linear(FEATURES, 1).double()
    with torch.no_grad():  # whole numbers, so that equal samples have equal scores in whatever batch they come
        module.weight.copy_(torch.tensor([[1.0, -2.0, 3.0, 1.0]]))
        module.bias.fill_(1)
    x, y = (torch.randint(-3, 4, (number, columns)).double() for number, columns in ((3, FEATURES), (3, 1)))
    train = x.repeat(14, 1)[:NUM_SAMPLES], y.repeat(14, 1)[:NUM_SAMPLES]
    queries = torch.randint(-3, 4, (NUM_QUERIES, FEATURES)).double(), torch.zeros(NUM_QUERIES, 1).double()
    expected = whole(module, queries, train, top_k=top_k, task="regression")
    for found in in_shards(module, queries, train, shares, top_k=top_k, task="regression"):
        assert_equal(found, expected)
    lists = [each for query in found.queries.values() for each in (query.harmful, query.look_alikes) if each]
    assert lists
    for samples in lists:
        tied = [sample.sample_id for sample in samples if sample.score == samples[0].score]
        assert tied == sorted(tied)
        assert len(tied) >= min(top_k, 13)


@every_share
def test_no_queries(shares):
    module, train = network(), data(NUM_SAMPLES)
    for found in in_shards(module, None, train, shares):
        assert_equal(found, whole(module, None, train))


@every_share
def test_queries_that_are_right_by_now_are_absent(shares):
    module, train = network(), data(NUM_SAMPLES)
    x, y = wrong_samples(module)
    y[[1, 4]] = (y[[1, 4]] - 1) % CLASSES
    for found in in_shards(module, (x, y), train, shares):
        assert list(found.queries) == [0, 2, 3, 5]
        assert_equal(found, whole(module, (x, y), train))
    for found in in_shards(module, (x[[1, 4]], y[[1, 4]]), train, shares):
        assert_equal(found, whole(module, (x[[1, 4]], y[[1, 4]]), train))


def test_queries_and_no_training_samples():
    module = network()
    for found in in_shards(module, wrong_samples(module), data(3), [[], []]):
        assert len(found.queries) == NUM_QUERIES
        assert all(not (q.harmful or q.teachers or q.look_alikes) for q in found.queries.values())
        assert (found.num_samples, found.plan) == (0, None)


def test_a_query_that_one_process_gets_right_is_absent():
    """Weights that differ between processes, such as statistics of a BatchNorm, may differ in what they predict."""
    module, train = network(), data(NUM_SAMPLES)
    x, y = wrong_samples(module)
    right = y.clone()
    right[2] = (y[2] - 1) % CLASSES
    shards = []
    for labels, rows in ((y, range(20)), (right, range(20, NUM_SAMPLES))):
        given = arguments(module, (x, labels), train, rows)
        shards.append(score_shard(*given))
    others = [0, 1, 3, 4, 5]
    expected = dict(zip(others, whole(module, (x[others], y[others]), train).queries.values(), strict=True))
    for ordered in (shards, shards[::-1]):
        found = merge_shards(ordered, given[4])
        assert list(found.queries) == others
        assert_equal(found, replace(whole(module, (x, y), train), queries=expected))


def test_witnesses_of_all_shards_count_whatever_the_length_of_the_lists():
    module = nn.Linear(FEATURES, CLASSES, bias=False).double()
    with torch.no_grad():
        module.weight.copy_(torch.eye(CLASSES, FEATURES))
    x, y = torch.tensor([[0.0, 6.0, 0.0, 5.0]]).double(), torch.tensor([0])
    train = x + 0.01 * torch.randn(8, FEATURES).double(), torch.ones(8).long()
    for found in in_shards(module, (x, y), train, [range(5), range(5, 8)], top_k=1):
        assert found.queries[0].label_looks_wrong
        assert_equal(found, whole(module, (x, y), train, top_k=1))


def test_influence_doubts_as_other_similarities_do():
    """Doubts come of look-alikes; those for predicted labels are sought only where the given one is improbable."""
    module = nn.Linear(FEATURES, CLASSES, bias=False).double()
    with torch.no_grad():
        module.weight.copy_(torch.eye(CLASSES, FEATURES))
    x = torch.tensor([[1.0, 1.5, 0.0, 0.0], [0.0, 6.0, 0.0, 5.0], [0.0, -6.0, 0.0, 5.0]]).double()
    y = torch.tensor([0, 0, 1])  # plausible, improbable and alone, improbable among samples of the predicted label
    others = torch.randn(8, FEATURES).double(), torch.randint(CLASSES, (8,))
    near = x[1] + 0.01 * torch.randn(8, FEATURES).double(), torch.ones(8).long()
    train = tuple(torch.cat(parts) for parts in zip(near, others, strict=True))
    given = arguments(module, (x, y), train, range(16))
    expected = [False, True, False]
    for similarity, num_gradients in {"cosine": 6, "influence": 3 + 2 + 6}.items():
        settings = replace(given[4], similarity=similarity)
        found = run_pass(*given[:4], settings, curvature_batches=[(torch.arange(16), train)])
        assert [query.label_looks_wrong for query in found.queries.values()] == expected
        assert found.plan.num_query_gradients == num_gradients


def test_memory_that_did_not_suffice_for_one_shard_is_said():
    module, train = network(), data(NUM_SAMPLES)
    given = arguments(module, None, train, range(NUM_SAMPLES))
    shard = score_shard(*given)
    assert merge_shards([shard, replace(shard, ran_short=True)], given[4]).ran_short
    assert not merge_shards([shard, shard], given[4]).ran_short


def test_samples_that_are_not_finite_are_named_over_all_shards():
    module, (x, y) = network(), data(NUM_SAMPLES)
    x[[3, 29]] = torch.nan
    with pytest.raises(NonFiniteError, match=r"sample ids \[3, 29\]\)\. Nothing is scored"):
        in_shards(module, wrong_samples(module), (x, y), SHARES["interleaved"])


def test_labels_out_of_range_are_named_by_their_shard():
    module, (x, y) = network(), data(NUM_SAMPLES)
    y[7] = 9
    given = arguments(module, None, (x, y), range(5, 20))
    with pytest.raises(LabelRangeError, match=r"Training samples \[7\]: Labels \[9\] lie outside"):
        score_shard(*given)


def test_what_a_shard_sends_is_small():
    """A few numbers a query and training sample, however large the gradients."""
    module = nn.Sequential(nn.Linear(FEATURES, 2000), nn.ReLU(), nn.Linear(2000, CLASSES)).double()
    given = arguments(module, wrong_samples(module), data(NUM_SAMPLES), range(NUM_SAMPLES), layers="all")
    assert sum(p.numel() for p in module.parameters()) * 8 > 10**5
    assert len(pickle.dumps(score_shard(*given))) < 2 * 10**4
