"""What reports know of earlier ones: since when a sample is wrong, and when it was fixed."""

import io

import numpy as np
import pytest
import torch

from lightning_gradsim import history
from lightning_gradsim.history import History, TrendPoint, key_of

SEEN = np.arange(10)


def keys(*values):
    return np.array(values, np.int64)


def seen_after(*validations, seen=SEEN):
    """A history of these validations, one an epoch: the wrong samples of each."""
    past = History()
    for epoch, wrong in enumerate(validations):
        past.see(epoch, seen, keys(*wrong))
    return past


@pytest.mark.parametrize(
    ("validations", "since"),
    [
        ([[3]], 0),
        ([[3], [3, 4]], 0),
        ([[], [3], [2, 3]], 1),
        ([[3], [], [3]], 2),
        ([[3], []], None),
        ([[2, 4]], None),
        ([], None),
    ],
)
def test_since_when_a_sample_is_wrong(validations, since):
    assert seen_after(*validations).wrong_since(3) == since


def test_what_a_validation_has_not_seen_stays():
    past = seen_after([3, 7])
    past.see(1, keys(0, 1, 2, 3), keys(2))
    assert [past.wrong_since(key) for key in (2, 3, 7)] == [1, None, 0]


def test_of_too_many_the_longest_wrong_stay(monkeypatch):
    monkeypatch.setattr(history, "MAX_WRONG", 3)
    past = seen_after([5, 6], [1, 2, 5, 6])
    assert [past.wrong_since(key) for key in (5, 6)] == [0, 0]
    assert len(past.state_dict()["wrong_keys"]) == 3


def test_followed_queries():
    past = seen_after([], [3, 4])
    past.follow([(3, 1, 2), (4, 0, 1), (5, 0, 1)])
    assert [each.in_words for each in past.followed] == ["wrong since epoch 1"] * 2
    past.see(2, SEEN, keys(3))
    past.see(3, SEEN, keys(3))
    assert [(each.sample_id, each.in_words) for each in past.followed] == [
        (3, "wrong since epoch 1"),
        (4, "fixed at epoch 2, wrong since epoch 1"),
    ]
    past.see(4, keys(0, 1), keys())
    assert past.followed[0].fixed_at is None, "not looked at"
    past.see(5, SEEN, keys(4))
    assert [(each.sample_id, each.in_words) for each in past.followed] == [
        (4, "wrong since epoch 5"),
        (3, "fixed at epoch 5, wrong since epoch 1"),
    ]


def test_loaders_are_told_apart():
    past = History()
    past.see(0, keys(4, key_of(1, 4)), keys(key_of(1, 4)))
    past.follow([(key_of(1, 4), 0, 1)])
    assert past.wrong_since(4) is None
    (query,) = past.followed
    assert (query.dataloader_idx, query.sample_id) == (1, 4)


def test_the_oldest_fixed_ones_make_room(monkeypatch):
    monkeypatch.setattr(history, "MAX_FOLLOWED", 3)
    past = seen_after([1, 2, 3])
    past.follow([(key, 0, 1) for key in (1, 2, 3)])
    past.see(1, SEEN, keys(2, 3))
    past.see(2, SEEN, keys(3, 4))
    past.follow([(4, 0, 1)])
    assert {each.sample_id for each in past.followed} == {2, 3, 4}


@pytest.mark.parametrize(("number", "top"), [(4, 4), (50, 10), (3000, 30), (500_000, 1000)])
def test_overlap_of_the_first_suspects(number, top):
    past, ids = History(), torch.arange(number)
    assert past.overlap(ids) is None
    half = top // 2
    moved = torch.cat([ids[:half], ids[half:].flip(0)])
    assert past.overlap(moved) == pytest.approx((half + max(0, 2 * top - half - number)) / top if number > top else 1.0)
    assert past.overlap(moved) == 1.0


def test_points_are_thinned(monkeypatch):
    monkeypatch.setattr(history, "MAX_POINTS", 8)
    past = History()
    for step in range(100):
        past.add(TrendPoint(0, step, 1, 1, None, None))
    steps = [point.step for point in past.points]
    assert len(steps) <= 8
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 99)


def test_in_how_many_reports_samples_were_flagged():
    past = History()
    for ids, flagged in (([4, 1, 2], [1, 0, 1]), ([2, 7], [1, 1]), ([4, 1, 2, 7], [1, 0, 0, 0])):
        past.count_flagged(torch.tensor(ids), torch.tensor(flagged, dtype=torch.bool))
    assert [each.tolist() for each in past.flag_counts(torch.tensor([4, 1, 2, 7]))] == [[2, 0, 2, 1], [2, 2, 3, 2]]
    again = History()
    again.load_state_dict(past.state_dict())
    again.count_flagged(torch.tensor([7]), torch.tensor([True]))
    again.count_flagged(torch.tensor([7, 0]), torch.tensor([True, True]))
    assert [each.tolist() for each in again.flag_counts(torch.tensor([7, 0]))] == [[3, 1], [4, 1]]
    assert again.flag_counts(torch.tensor([7, 8])) is None, "8 has not been counted"


def test_counting_flags_takes_four_bytes_a_sample_and_stops_at_its_limits(monkeypatch):
    past, ids = History(), torch.arange(1000)
    past.count_flagged(ids, ids < 500)
    counts = past.state_dict()["counts"]
    assert counts.numel() * counts.element_size() == 4 * 1000
    past.load_state_dict({**past.state_dict(), "counts": torch.full((1000, 2), 32767, dtype=torch.int16)})
    past.count_flagged(ids, ids < 500)
    num_flagged, num_judged = past.flag_counts(ids)
    assert num_flagged.min() == num_judged.min() == 32767, "no wrap to negative numbers"
    assert past.flag_counts(ids[:0]) is None
    monkeypatch.setattr(history, "MAX_COUNTED", 999)
    past = History()
    past.count_flagged(ids, ids < 500)
    assert past.flag_counts(ids) is None


def test_a_state_without_counts_begins_at_zero():
    past = History()
    past.load_state_dict({name: value for name, value in History().state_dict().items() if name != "counts"})
    past.count_flagged(torch.tensor([1]), torch.tensor([True]))
    assert [each.tolist() for each in past.flag_counts(torch.tensor([1]))] == [[1], [1]]


def test_the_state_is_plain_and_goes_on():
    past = seen_after([3], [3, 4])
    past.follow([(3, (0, 2), 1.5)])
    past.overlap(torch.arange(50))
    past.add(TrendPoint(1, 20, 2, 5, None, 0.5))
    buffer = io.BytesIO()
    torch.save(past.state_dict(), buffer)
    buffer.seek(0)
    again = History()
    again.load_state_dict(torch.load(buffer, weights_only=True))
    for each in (past, again):
        each.see(2, SEEN, keys(4))
    assert again.points == past.points
    assert again.followed == past.followed
    assert again.followed[0].fixed_at == 2
    assert again.wrong_since(4) == 1
    assert again.overlap(torch.arange(50)) == 1.0


def test_an_empty_state_is_that_of_a_new_run():
    past = History()
    past.load_state_dict({})
    assert past.points == past.followed == ()
