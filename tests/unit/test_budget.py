"""Seconds shared out over the reports of a run, on a clock that the test turns."""

import pytest

from lightning_gradsim import clock as clock_module
from lightning_gradsim.budget import MIN_READING, TimeBudget
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


class Run:
    """Epochs of training, each with a report if there is time for one."""

    def __init__(self, now, share, epoch, full_pass, besides, num_epochs=10):
        self.clock, self.read = Clock(), []
        self.clock.start_run()
        budget = TimeBudget(share, self.clock)
        for number in range(num_epochs):
            now.seconds += epoch
            is_last = number == num_epochs - 1
            if not (is_last or budget.allows_report()):
                continue
            with self.clock.working():
                seconds = budget.reading_seconds(is_last=is_last)
                reading = full_pass if seconds is None else min(full_pass, seconds)
                now.seconds += reading + besides
            budget.end_report(reading + besides, reading)
            self.read.append(reading / full_pass)


def test_no_limit(now):
    assert Run(now, None, epoch=1, full_pass=5, besides=1).read == [1] * 10


@pytest.mark.parametrize("besides", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("epoch", [10.0, 30.0, 300.0])
def test_a_tenth_of_a_run_whose_passes_would_take_six(now, epoch, besides):
    run = Run(now, 0.1, epoch, full_pass=0.6 * epoch, besides=besides)
    assert run.clock.share <= 0.12
    assert sum(run.read) >= 1


def test_what_fits_is_read_in_full_every_time(now):
    assert Run(now, 0.1, epoch=10, full_pass=0.5, besides=0.2).read == [1] * 10


def test_a_short_run_is_explained_at_its_begin_and_end(now):
    run = Run(now, 0.1, epoch=0.3, full_pass=0.1, besides=0.3)
    assert run.read == [1, 1]


def test_a_budget_that_is_spent_leaves_a_second_for_the_last_report(now):
    clock = Clock()
    clock.start_run()
    budget = TimeBudget(0.1, clock)
    now.seconds += 1
    with clock.working():
        now.seconds += 50
    budget.end_report(50, 40)
    assert not budget.allows_report()
    assert budget.reading_seconds(is_last=True) == MIN_READING
    assert budget.reading_seconds(is_last=False) == 0


def test_until(now):
    def items():
        for number in range(9):
            now.seconds += 1
            yield number

    assert list(until(items(), None)) == list(range(9))
    assert list(until(items(), 3)) == [0, 1, 2]
    assert list(until(items(), 0)) == [0]
    assert list(until([], 1)) == []
