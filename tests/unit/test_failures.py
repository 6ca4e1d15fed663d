"""What a failure leaves: a count, one warning with the way out, a traceback in the log, and nothing held."""

import gc
import weakref

import pytest
import torch

from lightning_gradsim.errors import GradSimWarning, TrainingDataError
from lightning_gradsim.failures import Failures

FEWER = "Memory does not suffice for one sample. Choose fewer `layers=`, or pass a smaller `num_queries=`."
DISK = "Free space there, or give the logger another folder. The report is in `callback.report`."
READING = "It reads training data: repair the dataset, or pass other training data as `train_data=`."
REPAIR = 'Repair what the traceback shows, or pass `on_error="raise"` to stop at such a failure.'


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("x"), f"KeyError: 'x'. {REPAIR}"),
        (RuntimeError("no.\n"), f"RuntimeError: no. {REPAIR}"),
        (torch.OutOfMemoryError("CUDA out of memory."), f"OutOfMemoryError: CUDA out of memory. {FEWER}"),
        (MemoryError(), f"MemoryError. {FEWER}"),
        (OSError(28, "No space left on device"), f"OSError: [Errno 28] No space left on device. {DISK}"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), f"signal: Killed. {READING}"),
        (TrainingDataError("Sample 3 is broken. Repair it."), "TrainingDataError: Sample 3 is broken. Repair it."),
    ],
    ids=repr,
)
def test_the_way_out(tmp_path, error, words):
    failures, log = Failures("Us"), tmp_path / "new" / "errors.log"
    with pytest.warns(GradSimWarning) as caught:
        failures.record("the work", error, log)
    (text,) = [str(each.message) for each in caught]
    assert text.startswith("`Us` failed in the work: ")
    assert text.endswith(f"{words} The traceback is in `{log}`. Training goes on without it.")
    assert log.read_text(encoding="utf-8").startswith("the work:\n")


class Held:
    """Something large."""


def fail(held, cause):
    """Raise with a local variable, and with a cycle between the exception and its frame."""
    if cause is not None:
        try:
            fail(held, None)
        except KeyError as error:
            raise ValueError("no") from error
    own = KeyError(held)
    own.args = ("no",)
    raise own


@pytest.mark.parametrize("in_cycle", [False, True])
@pytest.mark.parametrize("cause", [None, "another"])
def test_what_the_frames_held_is_released_while_the_exception_lives(tmp_path, cause, in_cycle):
    held = Held()
    held.itself = held if in_cycle else None
    watch = weakref.ref(held)
    gc.disable()
    try:
        fail(held, cause)
    except Exception as error:
        del held
        assert watch() is not None
        with pytest.warns(GradSimWarning):
            Failures("Us").record("the work", error, tmp_path / "errors.log")
        assert watch() is None
    finally:
        gc.enable()
