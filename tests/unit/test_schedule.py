"""Which validations are due."""

import pytest

from lightning_gradsim.schedule import Moment, Schedule


def moment(epoch, *, step=0, ends_epoch=True, ends_run=False):
    return Moment(epoch, step, ends_epoch, ends_run)


def due_epochs(schedule, number=8, **options):
    return [epoch for epoch in range(number) if schedule.is_due(moment(epoch, **options), 0)]


def test_every_epoch_by_default():
    assert due_epochs(Schedule()) == list(range(8))
    assert due_epochs(Schedule(), ends_epoch=False) == []


def test_every_n_epochs():
    assert due_epochs(Schedule(every_n_epochs=3)) == [2, 5]


def test_warmup_epochs():
    assert due_epochs(Schedule(warmup_epochs=5)) == [5, 6, 7]
    assert due_epochs(Schedule(every_n_epochs=2, warmup_epochs=4)) == [5, 7]


@pytest.mark.parametrize("ends_epoch", [True, False])
def test_every_n_steps(ends_epoch):
    schedule = Schedule(every_n_steps=10)
    steps = {n: schedule.is_due(moment(0, ends_epoch=ends_epoch), n) for n in (0, 9, 10, 11)}
    assert steps == {0: False, 9: False, 10: True, 11: True}


def test_every_n_steps_after_the_warmup():
    assert not Schedule(every_n_steps=1, warmup_epochs=1).is_due(moment(0), 5)
    assert Schedule(every_n_steps=1, warmup_epochs=1).is_due(moment(1), 5)


def test_with_the_last_epoch_only_any_may_be_the_last():
    assert due_epochs(Schedule(last_epoch_only=True)) == list(range(8))
    assert due_epochs(Schedule(last_epoch_only=True), ends_epoch=False) == []
    assert due_epochs(Schedule(last_epoch_only=True, warmup_epochs=7)) == [7]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"every_n_epochs": 1, "every_n_steps": 5}, "`every_n_epochs=1` and `every_n_steps=5`"),
        ({"every_n_epochs": 2, "last_epoch_only": True}, "`every_n_epochs=2` and `last_epoch_only=True`"),
        ({"every_n_steps": 2, "last_epoch_only": True}, "`every_n_steps=2` and `last_epoch_only=True`"),
    ],
)
def test_rules_that_contradict_each_other(options, named):
    with pytest.raises(ValueError, match=f"^{named} contradict each other. Pass one of them.$"):
        Schedule(**options)
