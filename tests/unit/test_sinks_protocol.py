"""Sinks: a failing one stops no other one."""

import numpy as np
import pytest

from lightning_gradsim.errors import SinkError
from lightning_gradsim.sinks import Publication, Sink, write_everywhere

CONTENT = Publication(
    7, {"a/b": np.zeros((2, 2, 3), np.uint8)}, {"a/b": "text"}, {"a/b": 1.5}, {"a/c": np.array([1.0, 2.0])}
)


class Memory:
    """Keeps what it gets."""

    def __init__(self):
        self.got = []

    def write_images(self, images, step):
        self.got.append(("images", dict(images), step))

    def write_texts(self, texts, step):
        self.got.append(("texts", dict(texts), step))

    def write_scalars(self, scalars, step):
        self.got.append(("scalars", dict(scalars), step))


class WithHistograms(Memory):
    def write_histograms(self, histograms, step):
        self.got.append(("histograms", dict(histograms), step))


def test_a_sink_gets_everything():
    sink = Memory()
    assert isinstance(sink, Sink)
    CONTENT.write_to(sink)
    assert [kind for kind, _, _ in sink.got] == ["texts", "images", "scalars"]
    assert sink.got[0] == ("texts", {"a/b": "text"}, 7)
    assert sink.got[2] == ("scalars", {"a/b": 1.5}, 7)


def test_histograms_go_where_they_are_taken():
    sink = WithHistograms()
    CONTENT.write_to(sink)
    assert "histograms" in [kind for kind, _, _ in sink.got]


def test_a_failing_one_stops_no_other_one():
    sinks, error = [Memory(), Memory()], OSError("full")

    def fail():
        raise error

    writers = [("files", fail), *((type(sink).__name__, lambda sink=sink: CONTENT.write_to(sink)) for sink in sinks)]
    with pytest.raises(OSError, match=r"^full$") as caught:
        write_everywhere(writers)
    assert caught.value is error
    assert all(len(sink.got) == 3 for sink in sinks)


def test_several_failures_are_named():
    def fail():
        raise ValueError("no")

    writers = [("files", fail), ("Memory", lambda: CONTENT.write_to(Memory())), ("Other", fail)]
    with pytest.raises(SinkError, match=r"^2 of 3 places took no report\. files: ValueError: no; Other: ValueError"):
        write_everywhere(writers)


def test_an_interrupt_ends_it():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_everywhere([("files", interrupt)])
