"""Seconds of our work and their share of training, on a clock that the test turns."""

import pytest

from lightning_gradsim import clock as clock_module
from lightning_gradsim.clock import Clock, until


@pytest.fixture
def now(monkeypatch):
    class Now:
        seconds = 100.0

        def perf_counter(self):
            return self.seconds

    now = Now()
    monkeypatch.setattr(clock_module, "time", now)
    return now


def work(clock, now, seconds):
    with clock.working():
        now.seconds += seconds


def test_adds_up(now):
    clock = Clock()
    work(clock, now, 2)
    now.seconds += 50
    work(clock, now, 3)
    assert clock.seconds == clock.validation_seconds == 5


def test_counts_work_that_fails(now):
    clock = Clock()

    def fail():
        with clock.working():
            now.seconds += 2
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert clock.seconds == 2


def test_each_validation_counts_from_zero(now):
    clock = Clock()
    work(clock, now, 2)
    clock.start_validation()
    work(clock, now, 3)
    assert clock.validation_seconds == 3
    assert clock.seconds == 5


def test_counts_the_work_at_hand(now):
    clock = Clock()
    with clock.working():
        now.seconds += 2
        assert clock.seconds == 2
        now.seconds += 3
    assert clock.seconds == clock.validation_seconds == 5


def test_share_is_ours_over_the_rest(now):
    clock = Clock()
    clock.start_run()
    now.seconds += 8
    work(clock, now, 2)
    assert clock.share == pytest.approx(2 / 8)


def test_work_before_the_run_is_not_its_share(now):
    clock = Clock()
    work(clock, now, 40)
    clock.start_run()
    now.seconds += 8
    work(clock, now, 2)
    assert clock.share == pytest.approx(2 / 8)
    assert clock.seconds == 42


def test_no_share_outside_of_a_run(now):
    clock = Clock()
    assert clock.share is None
    clock.start_run()
    now.seconds += 8
    clock.end_run()
    assert clock.share is None


def test_no_share_of_nothing(now):
    clock = Clock()
    clock.start_run()
    work(clock, now, 2)
    assert clock.share is None


@pytest.mark.parametrize("has_before", [True, False])
def test_the_time_of_items(now, has_before):
    """From the first one on, with what was counted before; not what lies between call and first item."""
    clock = Clock()
    items = until(range(5), 10.0, clock if has_before else None)
    work(clock, now, 4)
    now.seconds += 100
    assert next(items) == 0
    now.seconds += 5
    assert next(items) == 1
    now.seconds += 1
    assert list(items) == ([] if has_before else [2, 3, 4])
