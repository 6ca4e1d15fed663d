"""Run averages against lists of visits in plain Python."""

import copy
import pickle

import pytest
import torch

from lightning_gradsim.errors import TrainingDataError
from lightning_gradsim.mislabel.statistics import MislabelStatistics, bytes_a_sample, column_shapes
from lightning_gradsim.mislabel.visits import COLUMNS, measure_visits
from lightning_gradsim.neighbours import NeighbourVotes
from lightning_gradsim.tasks import Task

NUM_SAMPLES, NUM_OUTPUTS, NUM_VISITS = 17, 3, 90
TASKS = list(Task)


def make(task):
    """Ids with repeats, logits and targets that belong to the id; sample 11 is never visited."""
    ids = torch.randint(NUM_SAMPLES - 1, (NUM_VISITS,))
    ids += (ids >= 11).long()
    outputs = 1 if task is Task.BINARY else NUM_OUTPUTS
    logits = torch.randn(NUM_VISITS, outputs)
    targets = {
        Task.CLASSIFICATION: torch.randint(NUM_OUTPUTS, (NUM_SAMPLES,)),
        Task.BINARY: torch.randint(2, (NUM_SAMPLES, 1)).float(),
        Task.MULTILABEL: torch.randint(2, (NUM_SAMPLES, NUM_OUTPUTS)),
        Task.REGRESSION: torch.randn(NUM_SAMPLES, NUM_OUTPUTS),
    }[task]
    return ids, logits, targets[ids]


def columns_of(task):
    return tuple(name for name in COLUMNS[:4] if name in column_shapes(task, NUM_OUTPUTS))


def gather(task, visits, batch_size=7, order=None, statistics=None):
    if statistics is None:
        statistics = MislabelStatistics(NUM_SAMPLES, visits[1].shape[1], task, columns_of(task))
    order = torch.arange(NUM_VISITS) if order is None else order
    for rows in order.split(batch_size):
        statistics.update(*(column[rows] for column in visits))
    return statistics


def assert_same(found, expected):
    assert torch.equal(found.sample_ids, expected.sample_ids)
    assert torch.equal(found.visits, expected.visits)
    assert torch.equal(found.labels, expected.labels)
    assert found.means.keys() == expected.means.keys()
    for name, mean in expected.means.items():
        torch.testing.assert_close(found.means[name], mean)
    assert found.skipped == expected.skipped


@pytest.mark.parametrize("task", TASKS)
def test_averages_over_the_visits(task):
    ids, logits, targets = make(task)
    found = gather(task, (ids, logits, targets)).compute()
    single = measure_visits(task, logits, targets, columns_of(task))
    assert found.sample_ids.tolist() == sorted(set(ids.tolist()))
    assert 11 not in found.sample_ids
    for row, sample_id in enumerate(found.sample_ids.tolist()):
        visits = [i for i in range(NUM_VISITS) if int(ids[i]) == sample_id]
        assert found.visits[row] == len(visits)
        assert torch.equal(found.labels[row], single.labels[visits[0]])
        for name, mean in found.means.items():
            expected = sum(single.values[name][i] for i in visits) / len(visits)
            torch.testing.assert_close(mean[row], expected)
    assert found.skipped == {}
    assert found.neighbours is None


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("batch_size", [1, 13, NUM_VISITS])
def test_order_and_batches_change_nothing(task, batch_size):
    visits = make(task)
    other = gather(task, visits, batch_size, torch.randperm(NUM_VISITS)).compute()
    assert_same(other, gather(task, visits).compute())


@pytest.mark.parametrize("task", TASKS)
def test_shards_are_merged(task):
    visits = make(task)
    whole = gather(task, visits)
    shards = [gather(task, visits, order=rows) for rows in torch.arange(NUM_VISITS).split([50, 33, 7])]
    # What torchmetrics gathers from the ranks, one state after the other.
    gathered = iter(list(zip(*(shard.state_dict().values() for shard in shards), strict=True)))
    first = shards[0]
    first.dist_sync_fn = lambda state, group=None: list(next(gathered))
    first.distributed_available_fn = lambda: True
    assert_same(first.compute(), whole.compute())
    assert int(first.visits.sum()) == 50  # its own again


@pytest.mark.parametrize("task", TASKS)
def test_a_saved_state_goes_on(task):
    visits = make(task)
    first, rest = torch.arange(NUM_VISITS).split([40, 50])
    state = gather(task, visits, order=first).state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    resumed = MislabelStatistics(NUM_SAMPLES, visits[1].shape[1], task, columns_of(task))
    resumed.load_state_dict(copy.deepcopy(state))
    assert_same(resumed.compute(), gather(task, visits, order=first).compute())
    gather(task, visits, order=rest, statistics=resumed)
    assert_same(resumed.compute(), gather(task, visits).compute())


def test_reset_and_pickle():
    visits = make(Task.CLASSIFICATION)
    statistics = gather(Task.CLASSIFICATION, visits)
    assert_same(pickle.loads(pickle.dumps(statistics)).compute(), statistics.compute())
    statistics.reset()
    assert not len(statistics.compute().sample_ids)
    assert_same(
        gather(Task.CLASSIFICATION, visits, statistics=statistics).compute(),
        gather(Task.CLASSIFICATION, visits).compute(),
    )


@pytest.mark.parametrize("task", TASKS)
def test_bytes_a_sample(task):
    statistics = MislabelStatistics(1000, NUM_OUTPUTS, task, columns_of(task))
    held = {"visits", "labels", *statistics.columns}
    size = sum(getattr(statistics, name).nbytes for name in held)
    assert size == 1000 * bytes_a_sample(task, NUM_OUTPUTS, statistics.columns)
    # What torchmetrics keeps to reset to is a number, not a second copy.
    assert all(statistics._defaults[name].numel() == 1 for name in held)


def test_a_sample_that_changes_its_label_is_counted():
    statistics = MislabelStatistics(3, 2)
    ids, logits = torch.tensor([1, 1, 2]), torch.zeros(3, 2)
    statistics.update(ids, logits, torch.tensor([1, 1, 0]))
    statistics.update(ids, logits, torch.tensor([1, 0, 0]))
    averages = statistics.compute()
    assert averages.skipped == {"relabelled": 1}
    assert averages.labels.tolist() == [1, 0]
    assert averages.visits.tolist() == [4, 2]


def test_visits_that_do_not_count_are_told_apart():
    statistics = MislabelStatistics(4, 2)
    logits = torch.zeros(4, 2)
    logits[3] = torch.nan
    statistics.update(torch.arange(4), logits, torch.tensor([0, -100, 1, 1]))
    statistics.update(torch.arange(2), torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    averages = statistics.compute()
    assert averages.skipped == {"mixed": 1, "outside": 1, "non_finite": 1}
    assert averages.sample_ids.tolist() == [0, 2]
    assert averages.visits.tolist() == [2, 1]


def test_a_visit_that_does_not_count_gives_no_label():
    statistics = MislabelStatistics(2, 3)
    statistics.update(torch.tensor([1]), torch.zeros(1, 3), torch.tensor([[0.0, 0.4, 0.6]]))
    statistics.update(torch.tensor([1]), torch.zeros(1, 3), torch.tensor([1]))
    averages = statistics.compute()
    assert averages.labels.tolist() == [1]
    assert averages.skipped == {"mixed": 1}


def test_a_repeat_that_does_not_count_leaves_the_label():
    statistics = MislabelStatistics(2, 2)
    logits = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])
    for order in ([0, 1], [1, 0]):
        statistics.reset()
        statistics.update(torch.tensor([1, 1]), logits[order], torch.tensor([1, 1]))
        assert statistics.compute().labels.tolist() == [1]


def test_rounds_of_neighbours():
    statistics = MislabelStatistics(4, 2)
    statistics.update(torch.arange(4), torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    first = NeighbourVotes(torch.tensor([0.5, 1.0, 0.0]), torch.tensor([0.0, 1.0, -1.0]), 3)
    second = NeighbourVotes(torch.tensor([0.0, 0.5]), torch.tensor([-1.0, 0.25]), 2)
    statistics.add_neighbours(torch.tensor([0, 1, 2]), first)
    statistics.add_neighbours(torch.tensor([0, 1]), second, weight=3.0)
    found = statistics.compute().neighbours
    assert found[:3].tolist() == pytest.approx([(0.5 - 3) / 4, (2 + 3 * 0.75) / 4, -1])
    assert found[3].isnan()


def test_rounds_of_neighbours_by_label():
    statistics = MislabelStatistics(2, 3, Task.MULTILABEL)
    statistics.update(torch.arange(2), torch.zeros(2, 3), torch.zeros(2, 3))
    share = torch.rand(2, 3)
    statistics.add_neighbours(torch.arange(2), NeighbourVotes(share, 2 * share - 1, 2))
    torch.testing.assert_close(statistics.compute().neighbours, 3 * share - 1)


@pytest.mark.parametrize("ids", [[0, 17], [-1, 3]])
def test_ids_outside_of_the_dataset(ids):
    with pytest.raises(
        TrainingDataError, match=f"Sample ids from {min(ids)} to {max(ids)} for a training dataset of 17"
    ):
        MislabelStatistics(17, 2).update(torch.tensor(ids), torch.zeros(2, 2), torch.tensor([0, 1]))


def test_no_samples():
    statistics = MislabelStatistics(5, 2)
    statistics.update(torch.empty(0, dtype=torch.long), torch.empty(0, 2), torch.empty(0, dtype=torch.long))
    assert not len(statistics.compute().sample_ids)
