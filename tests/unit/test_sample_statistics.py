"""Values of single training samples, gathered in any order."""

import pytest
import torch

from lightning_gradsim import sample_statistics
from lightning_gradsim.errors import NonFiniteError
from lightning_gradsim.sample_statistics import SampleStatistics, labels_of, merge_suspects
from lightning_gradsim.tasks import Task, read_outcome

NUM_SAMPLES = 30


def make(task=Task.CLASSIFICATION):
    """Ids, squared norms, losses, logits and targets of all samples."""
    shapes = {Task.CLASSIFICATION: 4, Task.MULTILABEL: 3, Task.BINARY: 1, Task.REGRESSION: 1}
    logits = torch.randn(NUM_SAMPLES, shapes[task])
    targets = torch.randn(NUM_SAMPLES, 1) if task is Task.REGRESSION else torch.randint(2, logits.shape).float()
    if task is Task.CLASSIFICATION:
        targets = torch.randint(4, (NUM_SAMPLES,))
    ids = torch.randperm(1000)[:NUM_SAMPLES]
    return ids, torch.randint(8, (NUM_SAMPLES,)).double(), torch.rand(NUM_SAMPLES), logits, targets


def gather(samples, order=None, batch_size=7, task=Task.CLASSIFICATION):
    statistics = SampleStatistics()
    ids, norms, losses, logits, targets = samples
    for rows in (torch.arange(NUM_SAMPLES) if order is None else order).split(batch_size):
        outcome = read_outcome(task, logits[rows], targets[rows])
        statistics.update(ids[rows], norms[rows], losses[rows], outcome, has_classes=task is not Task.REGRESSION)
    return statistics.compute()


def test_sorted_by_falling_score_and_then_by_id():
    samples = make()
    table = gather(samples)
    expected = sorted(zip((-samples[1]).tolist(), samples[0].tolist(), strict=True))
    assert table.sample_ids.tolist() == [sample_id for _, sample_id in expected]
    assert table.scores.tolist() == [-score for score, _ in expected]


@pytest.mark.parametrize("task", list(Task))
def test_columns_belong_to_their_sample(task):
    samples = make(task)
    ids, norms, _, logits, targets = samples
    table = gather(samples, task=task)
    outcome = read_outcome(task, logits, targets)
    rows = torch.stack([(ids == sample_id).nonzero()[0, 0] for sample_id in table.sample_ids])
    torch.testing.assert_close(table.scores.double(), norms[rows])
    assert torch.equal(table.labels.to(outcome.labels.dtype), outcome.labels[rows])
    if task is Task.REGRESSION:
        assert not table.flagged.any()
    else:
        assert torch.equal(table.flagged, outcome.wrong[rows])
    if outcome.suggested is None:
        assert table.suggested_labels is table.probabilities is None
    else:
        assert torch.equal(table.suggested_labels.long(), outcome.suggested[rows])
        torch.testing.assert_close(
            table.probabilities.float(), outcome.suggested_probabilities[rows], rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("batch_size", [1, 7, NUM_SAMPLES])
def test_order_and_batches_change_nothing(batch_size):
    samples = make()
    table = gather(samples)
    for order in (torch.arange(NUM_SAMPLES).flip(0), torch.randperm(NUM_SAMPLES)):
        other = gather(samples, order, batch_size)
        for name in ("sample_ids", "scores", "labels", "suggested_labels", "flagged"):
            assert torch.equal(getattr(other, name), getattr(table, name))


def test_bytes_a_sample():
    samples = make()
    statistics = SampleStatistics()
    outcome = read_outcome(Task.CLASSIFICATION, samples[3], samples[4])
    statistics.update(samples[0], samples[1], samples[2], outcome, has_classes=True)
    assert sum(column.element_size() for column in statistics._columns.values()) == 23


@pytest.mark.parametrize("pieces", [1, 7, 40])
def test_columns_grow(monkeypatch, pieces):
    monkeypatch.setattr(sample_statistics, "MIN_ROWS", 2)
    samples = make()
    outcome = read_outcome(Task.CLASSIFICATION, samples[3], samples[4])
    whole = SampleStatistics()
    whole.update(samples[0], samples[1], samples[2], outcome, has_classes=True)
    statistics = SampleStatistics()
    for rows in torch.arange(len(samples[0])).chunk(pieces):
        part = read_outcome(Task.CLASSIFICATION, samples[3][rows], samples[4][rows])
        statistics.update(samples[0][rows], samples[1][rows], samples[2][rows], part, has_classes=True)
    found, expected = statistics.compute(), whole.compute()
    for name in ("sample_ids", "scores", "labels", "suggested_labels", "probabilities", "flagged"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


def test_nothing_seen():
    assert len(SampleStatistics().compute()) == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [1, 2], ids=["gradient", "loss"])
def test_samples_that_are_not_finite_are_named(value, column):
    samples = make()
    samples[column][[3, 17]] = value
    named = sorted(samples[0][[3, 17]].tolist())
    with pytest.raises(NonFiniteError, match=rf"not finite \(sample ids \[{named[0]}, {named[1]}\]\)") as caught:
        merge_suspects([gather(samples)])
    assert "Check the loss of these samples in eval mode" in str(caught.value)


def test_long_lists_of_samples_are_cut():
    samples = make()
    samples[2][:] = torch.nan
    with pytest.raises(NonFiniteError, match=r"\] and 20 more\)"):
        merge_suspects([gather(samples)])


def rows_of(samples, rows):
    return tuple(part[rows] for part in samples)


def gather_some(samples, rows, task):
    statistics = SampleStatistics()
    ids, norms, losses, logits, targets = rows_of(samples, torch.tensor(rows))
    has_classes = task is not Task.REGRESSION
    statistics.update(ids, norms, losses, read_outcome(task, logits, targets), has_classes=has_classes)
    return statistics.compute()


@pytest.mark.parametrize("task", list(Task))
@pytest.mark.parametrize("shared", [0, 5])
def test_merged_tables_equal_one(task, shared):
    """Also where several of them hold a sample."""
    samples = make(task)
    whole = gather(samples, task=task)
    parts = [gather_some(samples, range(11 + shared), task), gather_some(samples, range(11, NUM_SAMPLES), task)]
    for tables in (parts, parts[::-1], [parts[0], SampleStatistics().compute(), parts[1]], [whole]):
        merged = merge_suspects(tables)
        for name in ("sample_ids", "scores", "labels", "suggested_labels", "probabilities", "flagged"):
            ours, theirs = getattr(merged, name), getattr(whole, name)
            assert ours is theirs is None or torch.equal(ours, theirs)


def test_of_a_repeated_sample_the_largest_score_counts():
    samples = make()
    table = gather(samples)
    larger = gather([samples[0], 2 * samples[1], *samples[2:]])
    for tables in ([table, larger], [larger, table]):
        assert torch.equal(merge_suspects(tables).scores, larger.scores)


def test_no_tables():
    assert len(merge_suspects([])) == len(merge_suspects([SampleStatistics().compute()] * 2)) == 0


def test_samples_that_are_not_finite_are_named_over_all_tables():
    samples = make()
    samples[1][[3, 17]] = torch.nan
    named = sorted(samples[0][[3, 17]].tolist())
    parts = [
        gather_some(samples, range(10), Task.CLASSIFICATION),
        gather_some(samples, range(8, 30), Task.CLASSIFICATION),
    ]
    with pytest.raises(NonFiniteError, match=rf"not finite \(sample ids \[{named[0]}, {named[1]}\]\)"):
        merge_suspects(parts)


def test_labels_of_single_samples():
    samples = make()
    table = gather(samples)
    chosen = samples[0][[4, 0, 9]].tolist()
    assert labels_of(table, chosen) == dict(zip(chosen, samples[4][[4, 0, 9]].tolist(), strict=True))
    assert labels_of(table, []) == {}


def test_labels_of_a_multi_label_task():
    samples = make(Task.MULTILABEL)
    table = gather(samples, task=Task.MULTILABEL)
    sample_id = int(samples[0][2])
    active = tuple(samples[4][2].nonzero().flatten().tolist())
    assert labels_of(table, [sample_id]) == {sample_id: active}
