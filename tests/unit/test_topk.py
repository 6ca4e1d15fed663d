"""The streaming top-k equals the sort of the whole matrix, ties by the smaller id."""

import pytest
import torch

from lightning_gradsim import topk
from lightning_gradsim.topk import ScoreSums, TopK, merge_largest


def sorted_all(scores, ids, k):
    rows = [
        sorted(zip(row, ids.tolist(), strict=True), key=lambda pair: (-pair[0], pair[1])) for row in scores.tolist()
    ]
    best = [row[:k] for row in rows]
    return [[score for score, _ in row] for row in best], [[sample_id for _, sample_id in row] for row in best]


def stream(scores, ids, k, order, sizes):
    top, start = TopK(k), 0
    for size in sizes:
        columns = order[start : start + size]
        top.update(scores[:, columns], ids[columns])
        start += size
    return top.compute()


def splits(total):
    return [[total], [1] * total, [7] * (total // 7) + [total % 7], [total - 1, 1]]


@pytest.mark.parametrize("k", [1, 3, 8, 60])
@pytest.mark.parametrize("merge_columns", [1, 10, 1024])
@pytest.mark.parametrize("values", [1, 3, 10**6], ids=["all tied", "many ties", "no ties"])
def test_equals_the_sort_in_any_order_and_split(k, merge_columns, values, monkeypatch):
    monkeypatch.setattr(topk, "MERGE_COLUMNS", merge_columns)
    total = 50
    scores = torch.randint(values, (4, total)).double() - values / 2
    ids = torch.randperm(1000)[:total]
    expected = sorted_all(scores, ids, k)
    for sizes in splits(total):
        for order in (torch.arange(total), torch.arange(total).flip(0), torch.randperm(total)):
            kept, kept_ids = stream(scores, ids, k, order, sizes)
            assert kept.tolist() == expected[0]
            assert kept_ids.tolist() == expected[1]


def test_rows_are_independent():
    scores = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    top = TopK(2)
    top.update(scores, torch.tensor([10, 20, 30]))
    assert top.compute()[1].tolist() == [[30, 20], [10, 20]]


def test_fewer_samples_than_asked_for():
    top = TopK(5)
    top.update(torch.tensor([[1.0, 2.0]]), torch.tensor([4, 5]))
    scores, ids = top.compute()
    assert scores.tolist() == [[2.0, 1.0]]
    assert ids.tolist() == [[5, 4]]


def test_nothing_seen_and_no_rows():
    scores, ids = TopK(3).compute()
    assert scores.shape == ids.shape == (0, 0)
    assert ids.dtype == torch.long
    top = TopK(3)
    top.update(torch.empty(0, 4), torch.arange(4))
    assert top.compute()[1].shape == (0, 3)


def test_an_empty_batch_changes_nothing():
    top = TopK(2)
    top.update(torch.tensor([[1.0, 2.0]]), torch.tensor([4, 5]))
    top.update(torch.empty(1, 0), torch.empty(0, dtype=torch.long))
    assert top.compute()[1].tolist() == [[5, 4]]


def test_computing_in_between_changes_nothing():
    top = TopK(2)
    for sample_id, score in enumerate([1.0, 5.0, 3.0, 4.0]):
        top.update(torch.tensor([[score]]), torch.tensor([sample_id]))
        top.compute()
    assert top.compute()[1].tolist() == [[1, 3]]


def test_keeps_no_more_than_it_needs():
    top = TopK(3)
    for start in range(0, 20 * topk.MERGE_COLUMNS, topk.MERGE_COLUMNS // 2):
        ids = torch.arange(start, start + topk.MERGE_COLUMNS // 2)
        top.update(torch.randn(2, len(ids)), ids)
        assert sum(len(part) for _, part in top._waiting) < topk.MERGE_COLUMNS
    assert top.compute()[0].shape == (2, 3)


@pytest.mark.parametrize("k", [1, 3, 8, 60])
@pytest.mark.parametrize("values", [1, 3, 10**6], ids=["all tied", "many ties", "no ties"])
@pytest.mark.parametrize("shared", [0, 12])
def test_merged_streams_equal_one(k, values, shared):
    """Also where several of them hold a sample."""
    total = 50
    scores = torch.randint(values, (4, total)).double() - values / 2
    ids = torch.randperm(1000)[:total]
    expected = sorted_all(scores, ids, k)
    parts = []
    for columns in (range(20 + shared), range(20, 21), range(21, total)):
        top = TopK(k)
        top.update(scores[:, columns], ids[columns])
        parts.append(top.compute())
    for ordered in (parts, parts[::-1]):
        merged_scores, merged_ids = merge_largest(ordered, k)
        assert (merged_scores[:, :total].tolist(), merged_ids[:, :total].tolist()) == expected
        assert torch.equal(merged_scores[:, total:], torch.full_like(merged_scores[:, total:], -torch.inf))


def test_of_a_repeated_id_the_largest_score_counts():
    parts = [(torch.tensor([[3.0, 1.0]]), torch.tensor([[7, 8]])), (torch.tensor([[2.0]]), torch.tensor([[8]]))]
    for ordered in (parts, parts[::-1]):
        scores, ids = merge_largest(ordered, 2)
        assert (scores.tolist(), ids.tolist()) == ([[3.0, 2.0]], [[7, 8]])


@pytest.mark.parametrize("batch_size", [1, 4, 9])
def test_sums_over_passes(batch_size):
    ids = torch.randperm(30)[:9]
    sums, expected = ScoreSums(ids, 4), torch.zeros(3, 30)
    for weights in (2.0, torch.tensor([1.0, 0.5, 3.0])):
        sums.weights = weights
        scores, order = torch.randint(5, (3, 9)).float(), torch.randperm(9)
        expected[:, ids] += (weights if isinstance(weights, float) else weights[:, None]) * scores
        for part in order.split(batch_size):
            sums.update(scores[:, part], ids[part])
    values, found = sums.compute()
    for row in range(3):
        best = sorted(ids.tolist(), key=lambda i: (-expected[row, i], i))[:4]
        assert found[row].tolist() == best
        assert values[row].tolist() == expected[row, best].tolist()


def test_sums_of_nothing():
    assert [part.shape for part in ScoreSums(torch.arange(3), 2).compute()] == [(0, 0), (0, 0)]


def test_what_is_no_score_costs_no_sorting(monkeypatch):
    """A row without scores is tied in all columns; it must not bring every sample of the others back to be sorted."""
    sorts = []
    order = topk._order
    monkeypatch.setattr(topk, "_order", lambda scores, ids: (sorts.append(scores.shape[1]), order(scores, ids))[1])
    monkeypatch.setattr(topk, "MERGE_COLUMNS", 50)
    scores = torch.randn(2, 1000)
    scores[1] = -torch.inf
    top = TopK(8)
    for start in range(0, 1000, 50):
        top.update(scores[:, start : start + 50], torch.arange(start, start + 50))
    values, ids = top.compute()
    torch.testing.assert_close((values[0], ids[0]), tuple(scores[0].topk(8)))
    assert (values[1] == -torch.inf).all()
    assert max(sorts) <= 16
