from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback

from lightning_gradsim import GradSimCallback
from tests.trainer.support import (
    Classifier,
    Recorder,
    Truth,
    assert_exact,
    collect_warnings,
    fit,
    loader,
    make_data,
    make_trainer,
    read,
    strict,
    train_data,
    val_data,
)


class InferenceMode(Callback):
    """Keeps the mode in which a validation ran before and after our work."""

    def __init__(self):
        self.modes = []

    def on_validation_batch_end(self, *_):
        self.modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    on_validation_end = on_validation_batch_end


@pytest.mark.parametrize("inference_mode", [True, False])
def test_after_fit_with_the_same_callback(tmp_path, inference_mode):
    gradsim, module, _ = fit(tmp_path)
    first, others = gradsim.report, make_data(25, seed=9)
    modes = InferenceMode()
    trainer = make_trainer(tmp_path, [gradsim, modes], inference_mode=inference_mode)
    trainer.validate(module, loader(others), verbose=False)
    report = read(gradsim)
    assert report is not first
    assert report.num_validation_samples == 25
    assert report.time_share is None
    assert set(modes.modes) == {(inference_mode, False)}
    assert_exact(report, Truth(module), train_data(), others)


def test_after_fit_with_the_same_trainer(tmp_path):
    gradsim = strict()
    trainer = make_trainer(tmp_path, [gradsim])
    module = Classifier()
    trainer.fit(module, loader(train_data()), loader(val_data()))
    trainer.validate(module, loader(make_data(25, seed=9)), verbose=False)
    assert_exact(read(gradsim), Truth(module), train_data(), make_data(25, seed=9))


@pytest.mark.parametrize("layers", ["last", "all"])
def test_alone_with_train_data(tmp_path, layers):
    gradsim, module = strict(train_data=train_data(), layers=layers, num_queries=99), Classifier()
    trainer = make_trainer(tmp_path, [gradsim])
    trainer.validate(module, [loader(val_data()), loader(make_data(20, seed=9))], verbose=False)
    report, truth = read(gradsim), Truth(module, list(module.parameters()) if layers == "all" else None)
    assert {query.sample_id for query in report.queries if query.dataloader_idx == 1} == set(
        truth.mistakes(make_data(20, seed=9))
    )
    gradients = torch.stack([truth.gradient(sample, sample[1]) for sample in train_data()])
    scores = gradients.square().sum(1)[report.suspects.sample_ids]
    torch.testing.assert_close(report.suspects.scores, scores, rtol=1e-4, atol=1e-7)
    assert (tmp_path / "run" / "version_0" / "gradsim" / "report.json").exists()


def test_every_n_epochs_does_not_matter(tmp_path):
    gradsim = strict(train_data=train_data(), every_n_epochs=7)
    make_trainer(tmp_path, [gradsim]).validate(Classifier(), loader(val_data()), verbose=False)
    assert gradsim.report is not None


def test_without_training_data_one_warning_and_nothing_is_scored(tmp_path):
    gradsim = GradSimCallback()
    trainer = make_trainer(tmp_path, [gradsim])
    with collect_warnings() as texts:
        for _ in range(2):
            trainer.validate(Classifier(), loader(val_data()), verbose=False)
    (text,) = texts
    assert "no training data" in text
    assert "Pass `train_data=`" in text
    assert gradsim.report is None
    assert not (tmp_path / "run" / "version_0" / "gradsim").exists()


def test_the_layers_are_checked(tmp_path):
    gradsim = GradSimCallback(layers="heed", train_data=train_data())
    with pytest.raises(ValueError, match="Closest: `head`"):
        make_trainer(tmp_path, [gradsim]).validate(Classifier(), loader(val_data()), verbose=False)


def test_nothing_happens_in_test_and_predict(tmp_path):
    class All(Classifier):
        def test_step(self, batch, batch_idx):
            self(batch[0])

        def predict_step(self, batch, batch_idx):
            return self(batch[0])

    gradsim = strict(train_data=train_data())
    trainer = make_trainer(tmp_path, [gradsim, Recorder(gradsim)])
    trainer.test(All(), loader(val_data()), verbose=False)
    trainer.predict(All(), loader(val_data()))
    assert gradsim.report is None


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning")
@pytest.mark.filterwarnings("ignore:.*no validation of this run was one to look at")
def test_fit_without_validation_data(tmp_path):
    gradsim = strict()
    trainer = make_trainer(tmp_path, [gradsim])
    trainer.fit(Classifier(), loader(train_data()))
    assert gradsim.report is None
