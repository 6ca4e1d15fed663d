"""Two hundred validations leave behind what one does."""

import gc
from collections import Counter

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import TensorDataset

from lightning_gradsim import GradSimCallback
from lightning_gradsim.history import FollowedQuery, TrendPoint
from lightning_gradsim.records import ErrorPair, InfluentialSample, QueryReport
from tests.trainer.support import Classifier, loader, make_trainer

OURS = ("lightning_gradsim", "jinja2", "tensorboard")
# What grows on purpose, up to a bound (the trends of a run, and the queries that it follows), and what the newest
# report has more or fewer of.
GROWING = {
    f"{kind.__module__}.{kind.__qualname__}"
    for kind in (TrendPoint, FollowedQuery, ErrorPair, InfluentialSample, QueryReport)
}


class Pictures(Classifier):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU())


class Count(Callback):
    """Objects of our types, and tensors, behind some of the validations: to count them takes as long as one."""

    def __init__(self, epochs):
        self.epochs, self.counts = epochs, []

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch not in self.epochs:
            return
        gc.collect()
        kinds = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
        self.counts.append(
            {
                kind: number
                for kind, number in kinds.items()
                if (kind.startswith(OURS) and kind not in GROWING) or kind == "torch.Tensor"
            }
        )


def pictures(number, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(number, 1, 4, 4, generator=generator)
    return TensorDataset(images, torch.randint(4, (number,), generator=generator))


def run(tmp_path, early, num_validations):
    count = Count({early, num_validations - 1})
    gradsim = GradSimCallback(on_error="raise", num_queries=2, top_k=2, time_budget=None)
    trainer = make_trainer(tmp_path, [gradsim, count], max_epochs=num_validations)
    trainer.fit(Pictures(), loader(pictures(8, 1)), loader(pictures(6, 2)))
    assert len(gradsim.report.trends) == num_validations
    return count.counts


def growth(early, late):
    return {kind: late[kind] - early.get(kind, 0) for kind in late if late[kind] > early.get(kind, 0)}


def test_a_few_validations_leave_nothing_behind(tmp_path):
    early, late = run(tmp_path, 4, 8)
    assert {kind for kind in late if kind.startswith("lightning_gradsim.views")}, "something is counted"
    assert growth(early, late) == {}


@pytest.mark.slow
def test_two_hundred_validations_leave_nothing_behind(tmp_path):
    early, late = run(tmp_path, 20, 200)
    assert growth(early, late) == {}
