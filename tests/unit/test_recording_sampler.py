"""A recorder yields what the user's sampler draws, passes everything else on, and goes without a trace."""

import copy
import pickle

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from lightning_gradsim.recording_sampler import DrawnIndices, RecordingSampler, install, uninstall


def test_what_is_drawn_is_noted_while_it_is_drawn():
    drawn = DrawnIndices()
    iterator = iter(RecordingSampler([3, 1, 4], drawn))
    assert list(drawn.indices) == []
    assert [next(iterator), next(iterator)] == [3, 1]
    assert list(drawn.indices) == [3, 1]
    assert list(iterator) == [4]
    assert list(drawn.indices) == [3, 1, 4]
    assert drawn.refused is None


def test_the_newest_iteration_wins():
    drawn = DrawnIndices()
    recorder = RecordingSampler([0, 1, 2], drawn)
    old, new = iter(recorder), iter(recorder)
    next(old)
    next(new)
    assert list(old) == [1, 2]
    assert list(drawn.indices) == [0]


def test_iterations_of_others_are_not_noted():
    drawn = DrawnIndices(lambda: is_due)
    recorder, is_due = RecordingSampler([5, 6], drawn), True
    list(recorder)
    is_due = False
    recorder._recorded.append(7)
    assert list(recorder) == [5, 6, 7]
    assert list(drawn.indices) == [5, 6]


@pytest.mark.parametrize("ask_first", [True, False])
def test_random_numbers_are_drawn_when_they_were_drawn_before(ask_first):
    class Eager:
        def __iter__(self):
            return iter(torch.randperm(8).tolist())

    def draw(sampler):
        torch.manual_seed(2)
        if ask_first:
            iterator = iter(sampler)
            torch.rand(1)
            return [*iterator, float(torch.rand(1))]
        return [*RandomSampler(range(8)), *iter(sampler), float(torch.rand(1))]

    assert draw(RecordingSampler(Eager(), DrawnIndices())) == draw(Eager())


def test_everything_else_is_the_samplers_own():
    inner = DistributedSampler(range(10), num_replicas=2, rank=1, shuffle=True, seed=5)
    recorder = RecordingSampler(inner, DrawnIndices())
    recorder.set_epoch(3)
    assert inner.epoch == recorder.epoch == 3
    recorder.epoch = 4
    assert inner.epoch == 4
    recorder.mark = 1
    del recorder.mark
    assert not hasattr(inner, "mark")
    assert len(recorder) == len(inner) == 5
    assert list(recorder) == list(inner)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = recorder.nothing_like_it
    with pytest.raises(TypeError):
        len(RecordingSampler(iter([1]), DrawnIndices()))


def test_a_copy_is_one_of_the_users_sampler():
    recorder = RecordingSampler(SequentialSampler(range(3)), DrawnIndices(lambda: True))
    for other in (copy.deepcopy(recorder), copy.copy(recorder), pickle.loads(pickle.dumps(recorder))):
        assert type(other) is SequentialSampler
        assert list(other) == [0, 1, 2]


@pytest.mark.parametrize(("index", "noted"), [(torch.tensor(2), [2]), (True, [1]), ("b", []), ((1, 2), []), (2.0, [])])
def test_an_index_that_is_no_whole_number_is_said(index, noted):
    drawn = DrawnIndices()
    assert list(RecordingSampler([index], drawn)) == [index]
    assert list(drawn.indices) == noted
    assert drawn.refused == (None if noted else repr(index))


def test_recorders_of_several_owners_go_in_any_order():
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)):
        sampler = SequentialSampler(range(4))
        batch_sampler, notes = BatchSampler(sampler, 2, drop_last=False), [DrawnIndices() for _ in range(3)]
        for drawn in notes:
            install(batch_sampler, drawn)
            install(batch_sampler, drawn)
        for owner in order:
            assert list(batch_sampler) == [[0, 1], [2, 3]]
            assert list(notes[owner].indices) == [0, 1, 2, 3]
            uninstall(batch_sampler, notes[owner])
            uninstall(batch_sampler, notes[owner])
            notes[owner].begin()
            list(batch_sampler)
            assert list(notes[owner].indices) == []
        assert batch_sampler.sampler is sampler
