"""Every place that a report goes to, alone and with others: the same pictures, pixel by pixel, and the same numbers."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from numpy.typing import NDArray
from PIL import Image

from lightning_gradsim import GradSimCallback
from tests.trainer.support import collect_warnings, fit, loader, read
from tests.trainer.test_callback_logging import Pictures, events, pictures
from tests.trainer.test_callback_sinks import Broken
from tests.unit.test_sinks_protocol import Memory

Read = Callable[[], tuple[dict[str, NDArray[np.uint8]], dict[str, float]]]
"""Gives the pictures and the numbers that arrived, by the last part of their tags."""


@dataclass
class Place:
    """Where a run writes, and how what arrived is read back."""

    files: Path
    logger: Any = False
    sinks: list[Any] = field(default_factory=list)
    readers: list[Read] = field(default_factory=list)
    warning: str | None = None


def decode(png: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB"))


def last(tag: str) -> str:
    return tag.rpartition("/")[2]


def from_tensorboard(directory: Path) -> Read:
    def read_back() -> tuple[dict[str, NDArray[np.uint8]], dict[str, float]]:
        found = events(directory)
        pictures = {last(tag): decode(found.Images(tag)[-1].encoded_image_string) for tag in found.Tags()["images"]}
        return pictures, {last(tag): found.Scalars(tag)[-1].value for tag in found.Tags()["scalars"]}

    return read_back


def from_memory(sink: Memory) -> Read:
    def read_back() -> tuple[dict[str, NDArray[np.uint8]], dict[str, float]]:
        got = {kind: {last(tag): value for tag, value in values.items()} for kind, values, _ in sink.got}
        return got["images"], got["scalars"]

    return read_back


def from_wandb(run: Any, directory: Path) -> Read:
    def read_back() -> tuple[dict[str, NDArray[np.uint8]], dict[str, float]]:
        numbers = {last(tag): value for tag, value in dict(run.summary).items() if isinstance(value, (int, float))}
        pictures = {
            name: decode(next(directory.rglob(f"media/images/gradsim/{name}_*.png")).read_bytes())
            for name in ("mistakes", "class_pairs")
        }
        return pictures, numbers

    return read_back


def one_tensorboard(root: Path) -> Place:
    directory = root / "run" / "version_0"
    return Place(directory, TensorBoardLogger(root, "run", 0), readers=[from_tensorboard(directory)])


def two_tensorboards(root: Path) -> Place:
    place = one_tensorboard(root)
    place.logger = [place.logger, TensorBoardLogger(root, "run", 1)]
    place.readers.append(from_tensorboard(root / "run" / "version_1"))
    return place


def csv_alone(root: Path) -> Place:
    return Place(root / "run" / "version_0", CSVLogger(root, "run", 0), warning="no logger takes pictures")


def no_logger(root: Path) -> Place:
    return Place(root, warning="no logger takes pictures")


def own_sink(root: Path) -> Place:
    sink = Memory()
    return Place(root, sinks=[sink], readers=[from_memory(sink)])


def failing_sink_before_others(root: Path) -> Place:
    place, sink = one_tensorboard(root), Memory()
    place.sinks, place.warning = [Broken(), sink], "no route to host"
    place.readers.append(from_memory(sink))
    return place


def csv_and_tensorboard_and_sink(root: Path) -> Place:
    sink = Memory()
    loggers = [CSVLogger(root, "csv", 0), TensorBoardLogger(root, "run", 0)]
    readers = [from_tensorboard(root / "run" / "version_0"), from_memory(sink)]
    return Place(root / "csv" / "version_0", loggers, [sink], readers)


PLACES = [
    one_tensorboard,
    two_tensorboards,
    csv_alone,
    no_logger,
    own_sink,
    failing_sink_before_others,
    csv_and_tensorboard_and_sink,
]


def check(place: Place) -> None:
    """A run that writes there, and what arrived."""
    gradsim = GradSimCallback(time_budget=None, sinks=place.sinks)
    with collect_warnings() as texts:
        fit(
            place.files,
            gradsim,
            module=Pictures(),
            train=loader(pictures(30, 1)),
            val=loader(pictures(20, 2)),
            logger=place.logger,
        )
    assert [place.warning in text for text in texts if place.warning] == [True] * (place.warning is not None)
    report = read(gradsim)
    saved = {path.stem: decode(path.read_bytes()) for path in (place.files / "gradsim").glob("*.png")}
    assert set(saved) == {"mistakes", "suspects", "class_pairs"}
    assert (place.files / "gradsim" / "report.html").exists()
    for read_back in place.readers:
        images, numbers = read_back()
        assert set(images) >= set(saved) - {"suspects"}
        for name, pixels in images.items():
            np.testing.assert_array_equal(pixels, saved[name], err_msg=name)
        assert numbers["errors"] == report.num_errors
        assert numbers["suspects_flagged"] == report.suspects.num_flagged


@pytest.mark.usefixtures("real_panel")
@pytest.mark.parametrize("make_place", PLACES, ids=lambda make: make.__name__)
def test_the_same_arrives_everywhere(tmp_path, make_place):
    check(make_place(tmp_path))


@pytest.fixture
def wandb_run(tmp_path, monkeypatch) -> Iterator[tuple[Any, Any]]:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")  # Lightning sets it, and leaves it set
    logger = WandbLogger(project="gradsim", save_dir=tmp_path, offline=True, settings={"console": "off"})
    yield logger, logger.experiment
    wandb.finish()
    wandb.teardown()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("real_panel")
def test_the_same_arrives_in_wandb(tmp_path, wandb_run):
    logger, run = wandb_run
    check(Place(tmp_path, logger, readers=[from_wandb(run, tmp_path)]))
