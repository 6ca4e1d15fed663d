"""Which misclassified validation samples are kept, whatever the order in which they come."""

import pickle
from collections import Counter

import pytest
import torch
from torch import nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.errors import NonFiniteError
from lightning_gradsim.history import key_of
from lightning_gradsim.queries import QUERY_POLICIES, QuerySelection, merge_selections
from lightning_gradsim.tasks import Task

CLASSES, NUM_SAMPLES = 4, 60

every_policy = pytest.mark.parametrize("policy", QUERY_POLICIES)


class Logits(nn.Module):
    """The inputs are the logits, so that the test chooses the losses."""

    def forward(self, x):
        return x


def samples(ties=False):
    logits = torch.randn(NUM_SAMPLES, CLASSES)
    if ties:
        logits = logits.sign() * (1 + torch.arange(CLASSES) * 1e-3)
    labels = torch.randint(CLASSES, (NUM_SAMPLES,)).clamp(max=2)  # no sample of class 3
    labels[:40] = 0  # one class dominates
    return logits, labels


def select(data, *, num_queries=10, policy="highest_loss", seed=0, order=None, batch_size=7, with_ids=True, loader=0):
    selection, adapter = QuerySelection(num_queries, policy, seed), Adapter()
    logits, labels = data
    for rows in (torch.arange(len(labels)) if order is None else order).split(batch_size):
        batch = {"x": logits[rows], "label": labels[rows], "row": rows}
        step = adapter.step(Logits(), batch)
        selection.update(adapter, batch, step, rows if with_ids else None, loader)
        assert len(selection.queries) <= num_queries
    return selection


def ids(selection):
    return [query.sample_id for query in selection.queries]


def losses_and_mistakes(data):
    logits, labels = data
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    return losses, logits.argmax(1) != labels


@every_policy
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("num_queries", [1, 10, 100])
def test_streaming_equals_the_choice_at_once(policy, ties, num_queries):
    data = samples(ties)
    expected = ids(select(data, policy=policy, num_queries=num_queries, batch_size=NUM_SAMPLES))
    for order in (torch.arange(NUM_SAMPLES), torch.arange(NUM_SAMPLES).flip(0), torch.randperm(NUM_SAMPLES)):
        for batch_size in (3, 59):
            selection = select(data, policy=policy, num_queries=num_queries, order=order, batch_size=batch_size)
            assert ids(selection) == expected


@every_policy
def test_only_mistakes_and_all_of_them_if_there_is_room(policy):
    data = samples()
    _, wrong = losses_and_mistakes(data)
    assert sorted(ids(select(data, policy=policy, num_queries=1000))) == wrong.nonzero().flatten().tolist()


def test_highest_loss_is_balanced_over_labels():
    """First the worst of every class, then the second worst, and so on."""
    data = samples()
    losses, wrong = losses_and_mistakes(data)
    expected, rank = [], Counter()
    for sample_id in losses.argsort(descending=True).tolist():
        if wrong[sample_id]:
            label = int(data[1][sample_id])
            expected.append((rank[label], -float(losses[sample_id]), sample_id))
            rank[label] += 1
    expected.sort()
    chosen = ids(select(data, num_queries=9))
    assert chosen == [sample_id for _, _, sample_id in expected[:9]]
    assert Counter(data[1][chosen].tolist()) == {0: 3, 1: 3, 2: 3}


def test_ties_go_to_the_smaller_id():
    data = torch.tensor([[1.0, 0.0]]).expand(6, 2), torch.ones(6).long()
    assert ids(select(data, num_queries=3, order=torch.arange(6).flip(0), batch_size=1)) == [0, 1, 2]


def test_random_choice_depends_on_seed_and_ids_alone():
    data, state = samples(), torch.get_rng_state()
    first = ids(select(data, policy="random", seed=1))
    assert ids(select(data, policy="random", seed=1, order=torch.randperm(NUM_SAMPLES))) == first
    assert ids(select(data, policy="random", seed=2)) != first
    torch.set_rng_state(state)
    select(data, policy="random", seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_random_choice_is_fair():
    data = torch.tensor([[1.0, 0.0]]).expand(20, 2), torch.ones(20).long()
    hits = Counter()
    for seed in range(100):
        hits.update(ids(select(data, policy="random", seed=seed, num_queries=5, batch_size=20)))
    assert all(10 <= hits[sample_id] <= 40 for sample_id in range(20))  # 25 expected, standard deviation 4


def test_random_choice_differs_between_loaders():
    data = samples()
    assert ids(select(data, policy="random")) != ids(select(data, policy="random", loader=1))


@every_policy
def test_kept_samples_are_whole_and_independent_copies(policy):
    data = samples()
    selection = select(data, policy=policy)
    losses, _ = losses_and_mistakes(data)
    before = [query.data["x"].clone() for query in selection.queries]
    for query, x in zip(selection.queries, before, strict=True):
        assert torch.equal(x, data[0][query.sample_id][None])
        assert query.data["row"].tolist() == [query.sample_id]
        assert query.label == query.data["label"].item() == int(data[1][query.sample_id])
        assert query.loss == pytest.approx(float(losses[query.sample_id]))
    data[0].zero_()
    assert all(torch.equal(query.data["x"], x) for query, x in zip(selection.queries, before, strict=True))


def test_memory_is_capped():
    """No more samples than asked for are copied at any time: each is copied when it is chosen, and only then."""
    copies = []

    class Counted(Adapter):
        def take_sample(self, batch, index, batch_size):
            copies.append(index)
            return super().take_sample(batch, index, batch_size)

    logits, labels = samples()
    selection, adapter = QuerySelection(3), Counted()
    batch = (logits, labels)
    selection.update(adapter, batch, adapter.step(Logits(), batch), None, 0)
    assert len(copies) == 3


def test_several_loaders():
    first, second = samples(), samples()
    selection, adapter = QuerySelection(1000), Adapter()
    for loader, batch in enumerate((first, second)):
        selection.update(adapter, batch, adapter.step(Logits(), batch), torch.arange(NUM_SAMPLES), loader)
    found = {(query.dataloader_idx, query.sample_id) for query in selection.queries}
    expected = {
        (i, int(row)) for i, data in enumerate((first, second)) for row in losses_and_mistakes(data)[1].nonzero()
    }
    assert found == expected
    assert len({query.ordinal for query in selection.queries}) == len(found)


def test_without_ids():
    selection = select(samples(), with_ids=False)
    assert ids(selection) == [None] * 10
    assert len({query.ordinal for query in selection.queries}) == 10


def test_counts_of_errors():
    data = samples()
    _, wrong = losses_and_mistakes(data)
    by_class, errors, total = select(data).error_counts()
    assert by_class == dict(sorted(Counter(data[1][wrong].tolist()).items()))
    assert (errors, total) == (int(wrong.sum()), NUM_SAMPLES)


def test_counts_before_any_batch():
    assert QuerySelection(3).error_counts() == ({}, 0, 0)
    assert QuerySelection(3).pair_counts() == {}


def test_counts_of_pairs():
    data = samples()
    _, wrong = losses_and_mistakes(data)
    expected = Counter(zip(data[1][wrong].tolist(), data[0].argmax(1)[wrong].tolist(), strict=True))
    counts = select(data).pair_counts()
    assert counts == expected
    assert list(counts.values()) == sorted(counts.values(), reverse=True)


def test_keys_of_what_was_seen_and_of_mistakes():
    data = samples()
    _, wrong = losses_and_mistakes(data)
    for loader in (0, 2):
        seen, mistaken = select(data, loader=loader).known_keys()
        assert seen.tolist() == [key_of(loader, i) for i in range(NUM_SAMPLES)]
        assert mistaken.tolist() == [key_of(loader, i) for i in wrong.nonzero().flatten().tolist()]
    assert [len(keys) for keys in select(data, with_ids=False).known_keys()] == [0, 0]


@pytest.mark.parametrize("criterion", [nn.BCEWithLogitsLoss(), nn.MSELoss()])
@pytest.mark.parametrize("outputs", [1, 3])
def test_counts_of_other_tasks(criterion, outputs):
    adapter, selection = Adapter(), QuerySelection(5)
    adapter.bind(Logits(), criterion)
    batch = torch.randn(NUM_SAMPLES, outputs), torch.randint(2, (NUM_SAMPLES, outputs)).float()
    step = adapter.step(Logits(), batch)
    selection.update(adapter, batch, step, None, 0)
    by_class, errors, total = selection.error_counts()
    assert total == NUM_SAMPLES
    assert errors == int(step.outcome.wrong.sum())
    assert sum(by_class.values()) == (errors if step.task is Task.BINARY else 0)
    assert sum(selection.pair_counts().values()) == sum(by_class.values())
    if step.task is not Task.BINARY:  # no classes to balance over
        expected = step.losses.masked_fill(~step.outcome.wrong, -1).sort(descending=True).values[:5]
        assert [query.loss for query in selection.queries] == pytest.approx(expected.tolist())


def test_ignored_samples_are_no_queries():
    data = samples()
    data[1][::2] = -100
    assert all(sample_id % 2 for sample_id in ids(select(data, num_queries=1000)))


def test_no_mistakes():
    logits, _ = samples()
    selection = select((logits, logits.argmax(1)))
    assert selection.queries == ()
    assert selection.error_counts() == ({}, 0, NUM_SAMPLES)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("with_ids", "words"), [(True, r"sample ids \[20, 33\]"), (False, r"places in this validation \[9, 26\]")]
)
def test_losses_that_are_not_finite_are_named(value, with_ids, words):
    logits, labels = samples()
    logits[[20, 33]] = torch.tensor([value] * CLASSES)
    order = torch.arange(NUM_SAMPLES)
    order[[9, 20]], order[[26, 33]] = order[[20, 9]], order[[33, 26]]
    with pytest.raises(NonFiniteError, match=rf"2 samples of loader 1 \({words}\)\. Nothing is scored") as caught:
        select((logits, labels), order=order, batch_size=NUM_SAMPLES, with_ids=with_ids, loader=1)
    assert "Check the loss in eval mode" in str(caught.value)


CRITERIA = {
    "classification": None,
    "binary": nn.BCEWithLogitsLoss(),
    "multilabel": nn.BCEWithLogitsLoss(),
    "regression": nn.MSELoss(),
}


def samples_of(task):
    logits, labels = samples(ties=True)
    if task == "classification":
        return logits, labels
    outputs = 1 if task == "binary" else CLASSES
    return logits[:, :outputs], torch.randint(2, (NUM_SAMPLES, outputs)).float()


def select_shares(data, shares, *, with_ids=True, criterion=None, loader=0, loaders=1, **settings):
    """The merged selection of processes that meet some of the samples each, in batches of three."""
    adapter, selections = Adapter(), []
    adapter.bind(Logits(), criterion)
    for rank, share in enumerate(shares):
        selection = QuerySelection(rank=rank, world_size=len(shares), **settings)
        for loader in range(loaders):
            for rows in torch.tensor(share, dtype=torch.long).split(3):
                if len(rows):
                    batch = tuple(part[rows] for part in data)
                    selection.update(adapter, batch, adapter.step(Logits(), batch), rows if with_ids else None, loader)
        selections.append(pickle.loads(pickle.dumps(selection)))
    return merge_selections(selections), merge_selections(selections[::-1])


def told(selection):
    queries = [(q.dataloader_idx, q.sample_id, q.label, q.loss, q.data[0].tolist()) for q in selection.queries]
    seen, wrong = selection.known_keys()
    keys = sorted(seen.tolist()), sorted(wrong.tolist())
    return queries, selection.error_counts(), selection.pair_counts(), keys, selection.task, selection.num_classes


@every_policy
@pytest.mark.parametrize("task", CRITERIA)
@pytest.mark.parametrize("num_queries", [1, 10, 100])
def test_several_processes_choose_as_one_does(policy, task, num_queries):
    data = samples_of(task)
    settings = {"num_queries": num_queries, "policy": policy, "criterion": CRITERIA[task]}
    one, _ = select_shares(data, [range(NUM_SAMPLES)], **settings)
    assert len(one.queries) == min(num_queries, one.error_counts()[1])
    every_third = [range(rank, NUM_SAMPLES, 3) for rank in range(3)]
    uneven = [range(41), [], range(41, NUM_SAMPLES)]
    repeating = [range(50), range(40, NUM_SAMPLES), [0, 1, 2]]
    for shares in (every_third, uneven, repeating):
        for merged in select_shares(data, shares, **settings):
            assert told(merged) == told(one)


@every_policy
def test_several_processes_and_loaders(policy):
    data, settings = samples(), {"num_queries": 20, "policy": policy, "loaders": 2}
    one, _ = select_shares(data, [range(NUM_SAMPLES)], **settings)
    for merged in select_shares(data, [range(rank, NUM_SAMPLES, 2) for rank in range(2)], **settings):
        assert told(merged) == told(one)
    assert {query.dataloader_idx for query in one.queries} == {0, 1}


def test_a_process_without_mistakes():
    logits, labels = samples()
    labels[::2] = logits[::2].argmax(1)
    one, _ = select_shares((logits, labels), [range(NUM_SAMPLES)], num_queries=10)
    for merged in select_shares((logits, labels), [range(rank, NUM_SAMPLES, 2) for rank in range(2)], num_queries=10):
        assert told(merged) == told(one)


def test_a_sample_that_only_one_process_gets_wrong_is_counted():
    """Weights that differ between processes, such as statistics of a BatchNorm, may differ in what they predict."""
    logits, labels = torch.eye(3), torch.tensor([0, 1, 1])
    right, wrong = QuerySelection(5, rank=0, world_size=2), QuerySelection(5, rank=1, world_size=2)
    for selection, targets in ((right, torch.arange(3)), (wrong, labels)):
        adapter, batch = Adapter(), (logits, targets)
        selection.update(adapter, batch, adapter.step(Logits(), batch), torch.arange(3), 0)
    for merged in (merge_selections([right, wrong]), merge_selections([wrong, right])):
        assert (ids(merged), merged.error_counts()) == ([2], ({1: 1}, 1, 3))


def test_processes_that_have_seen_nothing():
    for merged in select_shares(samples(), [[], []], num_queries=3):
        assert (merged.queries, merged.error_counts(), merged.task) == ((), ({}, 0, 0), None)


@every_policy
def test_without_ids_samples_of_all_processes_count(policy):
    """None is taken for another one, and the choice is among all of them."""
    data, shares = samples(), [range(rank, NUM_SAMPLES, 3) for rank in range(3)]
    one = select(data, num_queries=1000, with_ids=False)
    everything, _ = select_shares(data, shares, with_ids=False, num_queries=1000, policy=policy)
    assert everything.error_counts() == one.error_counts()
    assert len(everything.queries) == len(one.queries) == len({query.ordinal for query in everything.queries})
    some = select_shares(data, shares, with_ids=False, num_queries=7, policy=policy)
    if policy == "random":  # the first of the whole order
        expected = sorted(query.ordinal for query in everything.queries[:7])
        assert [sorted(query.ordinal for query in merged.queries) for merged in some] == [expected] * 2
    assert told(some[0]) == told(some[1])
