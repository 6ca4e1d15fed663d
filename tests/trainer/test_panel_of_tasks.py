"""The panel of every kind of task, pixel by pixel: the right picture in the right place, marked where it must be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_gradsim.views.canvas import MARK
from lightning_gradsim.views.tiles import FRAME_ROOM, GAP, MARGIN, PICTURE, TILE, TILES_PER_ROW
from tests.trainer.support import Classifier, fit, loader, read, strict

NUM_TRAIN, NUM_VAL = 40, 20


def train_grey(sample_id: int) -> int:
    return 3 + 4 * sample_id


def val_grey(sample_id: int) -> int:
    return 180 + 2 * sample_id


class Greys(Dataset[Any]):
    """Pictures of one grey each, which tells the sample; labels that no model can learn from it."""

    def __init__(self, number: int, grey: Any, targets: Tensor) -> None:
        self.pictures = [torch.full((1, 8, 8), grey(place), dtype=torch.uint8) for place in range(number)]
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pictures[index], self.targets[index]


class Pictures(Classifier):
    """Takes pictures; the criterion makes the task."""

    def __init__(self, criterion: nn.Module, num_outputs: int) -> None:
        super().__init__(criterion)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x.float() / 255)
        return logits.squeeze(1)


def random_targets(task: str, number: int, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    if task == "classification":
        return torch.randint(3, (number,), generator=source)
    if task == "binary":
        return torch.randint(2, (number,), generator=source).float()
    if task == "multilabel":
        return torch.randint(2, (number, 2), generator=source).float()
    return torch.randn(number, generator=source)


TASKS = {
    "classification": (nn.CrossEntropyLoss(), 3),
    "binary": (nn.BCEWithLogitsLoss(), 1),
    "multilabel": (nn.BCEWithLogitsLoss(), 2),
    "regression": (nn.MSELoss(), 1),
}


def greys_down(panel: np.ndarray, left: int) -> list[tuple[int, bool]]:
    """Grey of each picture in a column of the panel, from above, and whether its frame is marked."""
    column, found, start = panel[:, left + FRAME_ROOM + PICTURE // 2].astype(int), [], 0
    changes = [*(np.flatnonzero((column[1:] != column[:-1]).any(1)) + 1).tolist(), len(column)]
    for end in changes:
        red, green, blue = column[start]
        if end - start == PICTURE and red == green == blue:
            frame = panel[start + PICTURE // 2, left + 4]
            found.append((int(red), tuple(frame.tolist()) == MARK))
        start = end
    return found


@pytest.mark.usefixtures("real_panel")
@pytest.mark.parametrize("task", TASKS)
def test_pictures_and_marks_of_every_task(tmp_path, task):
    torch.manual_seed(0)
    train = Greys(NUM_TRAIN, train_grey, random_targets(task, NUM_TRAIN, 1))
    val = Greys(NUM_VAL, val_grey, random_targets(task, NUM_VAL, 2))
    gradsim, _, _ = fit(tmp_path, strict(show_teachers=True), Pictures(*TASKS[task]), loader(train), loader(val))
    report = read(gradsim)
    assert report.task == task
    shown = report.queries[:6]
    lists = [(query.harmful, query.look_alikes, query.teachers) for query in shown]
    marks = [sample.label_is_prediction for rows in lists for row in rows for sample in row[:TILES_PER_ROW]]
    assert len(shown) == 6
    assert any(marks) == (task != "regression")
    (path,) = tmp_path.rglob("mistakes.png")
    panel = np.asarray(Image.open(path))
    for place in range(TILES_PER_ROW):
        expected = []
        for query, rows in zip(shown, lists, strict=True):
            # The picture of the mistake itself has no frame, and stands where that of a tile would without one.
            expected += [] if place else [(val_grey(query.sample_id), False)]
            tiles = [row[place] for row in rows if len(row) > place]
            expected += [(train_grey(tile.sample_id), tile.label_is_prediction) for tile in tiles]
        assert greys_down(panel, MARGIN + place * (TILE + GAP)) == expected
