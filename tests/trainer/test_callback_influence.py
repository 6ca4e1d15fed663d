"""Suspects by influence on the classes of the latest validation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import TensorDataset

from tests.trainer.processes import ddp, run_processes
from tests.trainer.support import (
    NUM_CLASSES,
    NUM_TRAIN,
    Classifier,
    Recorder,
    Still,
    fit,
    loader,
    make_trainer,
    read,
    strict,
    train_data,
    val_data,
)
from tests.trainer.test_callback_in_run import assert_same_suspects

EARLY = "`mislabel_score='influence'` counts training steps from the first validation on"


def watching(**options):
    return strict(**{"mislabel_score": "influence", **options})


def gradient(module, x, y):
    """Of the mean loss, by the head, one plain autograd call."""
    loss = module.criterion(module(x), y)
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(module.head.parameters()))])


class Truth(Callback):
    """One sample at a time, and one class at a time."""

    def __init__(self):
        self.classes, self.sums, self.visits = None, torch.zeros(NUM_TRAIN), torch.zeros(NUM_TRAIN)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.classes is None:
            return
        x, y = batch
        for row in range(len(x)):
            with torch.enable_grad():
                own = gradient(pl_module, x[row : row + 1], y[row : row + 1])
            index = batch_idx * 10 + row  # the loader reads in order
            self.sums[index] += -(self.classes @ own).min()
            self.visits[index] += 1

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            x, y = trainer.val_dataloaders.dataset.tensors
            with torch.enable_grad():
                labels = range(int(y.max()) + 1)
                self.classes = torch.stack([gradient(pl_module, x[y == k], y[y == k]) for k in labels])


def binary(data):
    x, y = data.tensors
    return TensorDataset(x, (y > 1).float())


class Binary(Classifier):
    def __init__(self):
        super().__init__(nn.BCEWithLogitsLoss(), num_outputs=1)

    def forward(self, x):
        return super().forward(x).squeeze(1)


@pytest.mark.parametrize(("module", "form"), [(Classifier, lambda data: data), (Binary, binary)])
def test_is_the_largest_over_the_classes_averaged_over_visits(tmp_path, module, form):
    truth = Truth()
    gradsim, _, recorder = fit(
        tmp_path, watching(), module(), loader(form(train_data())), loader(form(val_data())), [truth], max_epochs=3
    )
    suspects = read(gradsim).suspects
    assert [report.suspects.score_name for report in recorder.reports] == ["self_influence", "influence", "influence"]
    assert f"suspects are those of largest gradient in this pass: {EARLY}" in recorder.reports[0].notes
    assert EARLY in read(gradsim).notes
    assert set(suspects.visits.tolist()) == {2}
    expected = (truth.sums / truth.visits)[suspects.sample_ids]
    torch.testing.assert_close(suspects.scores, expected, rtol=2e-3, atol=1e-4)  # features are in half precision
    assert suspects.suggested_labels is not None


def test_with_several_validations_an_epoch_the_latest_counts(tmp_path):
    truth = Truth()
    fit_options = {"val_check_interval": 2, "max_epochs": 2}
    gradsim, _, _ = fit(tmp_path, watching(every_n_steps=1), None, loader(train_data()), None, [truth], **fit_options)
    suspects = read(gradsim).suspects
    assert suspects.visits.sum() == truth.visits.sum() == 100
    expected = (truth.sums / truth.visits)[suspects.sample_ids]
    torch.testing.assert_close(suspects.scores, expected, rtol=2e-3, atol=1e-4)


def test_resumed_at_any_epoch_equals_uninterrupted(tmp_path):
    def run(callbacks, **options):
        trainer = make_trainer(tmp_path, callbacks, max_epochs=4)
        trainer.fit(Classifier(), loader(train_data()), loader(val_data()), **options)

    class Saves(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    whole = Recorder(watching())
    run([whole.gradsim, whole, Saves()])
    for epoch in range(3):
        resumed = Recorder(watching())
        run([resumed.gradsim, resumed], ckpt_path=tmp_path / f"{epoch}.ckpt")
        assert set(resumed.reports[-1].suspects.visits.tolist()) == {3}
        assert_same_suspects(resumed.reports[-1].suspects, whole.reports[-1].suspects)
    torch.load(tmp_path / "0.ckpt", weights_only=True)


@pytest.mark.filterwarnings(
    "ignore:It is recommended to use .self.log:UserWarning:lightning",
    "ignore:Using `DistributedSampler` with the dataloaders:UserWarning:lightning",
)
def test_two_processes_find_what_one_finds(tmp_path):
    def job():
        return read(fit(tmp_path / "two", watching(), Still(), max_epochs=3, **ddp())[0])

    expected = read(fit(tmp_path / "one", watching(), Still(), max_epochs=3)[0])
    for report in run_processes(job, tmp_path):
        assert_same_suspects(report.suspects, expected.suspects)


def test_a_second_fit_begins_anew(tmp_path):
    gradsim, _, _ = fit(tmp_path, watching(), max_epochs=2)
    fit(tmp_path, gradsim, max_epochs=2)
    assert set(read(gradsim).suspects.visits.tolist()) == {1}


class Several(Classifier):
    def __init__(self):
        super().__init__(nn.BCEWithLogitsLoss())


def test_labels_that_are_not_exclusive_have_none(tmp_path):
    def several(data):
        return TensorDataset(data.tensors[0], F.one_hot(data.tensors[1], NUM_CLASSES).float())

    gradsim, _, _ = fit(tmp_path, watching(), Several(), loader(several(train_data())), loader(several(val_data())))
    words = "`mislabel_score='influence'` needs exclusive classes, and the task is multilabel"
    assert f"suspects are those of largest gradient in this pass: {words}" in read(gradsim).notes


def test_gradients_that_would_take_too_much_are_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_gradsim.in_run.CLASS_GRADIENT_SHARE", 1e-9)
    gradsim, _, _ = fit(tmp_path, watching(), max_epochs=2)
    [note] = [note for note in read(gradsim).notes if "gradients of 4 classes take 0 MiB" in note]
    assert note.startswith("suspects are those of largest gradient in this pass: ")


def test_hooks_are_gone(tmp_path):
    _, module, _ = fit(tmp_path, watching(), max_epochs=2)
    assert not module.head._forward_hooks
