"""The callback under the other name of Lightning, whose classes are not those of ``lightning.pytorch``."""

import pytest
import torch
from torch import nn

from lightning_gradsim import GradSimCallback
from lightning_gradsim.lightning_twins import overrides, with_twin
from tests.trainer.support import Truth, assert_exact, loader, read, strict, train_data, val_data

pl = pytest.importorskip("pytorch_lightning")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning:pytorch_lightning"),
]


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(12, 4)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        return self.criterion(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.criterion(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class WithoutForward(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)

    def training_step(self, batch, batch_idx): ...

    def validation_step(self, batch, batch_idx): ...

    def configure_optimizers(self): ...


def fit(tmp_path, callbacks, module_class=Classifier, **trainer):
    torch.manual_seed(5)
    module = module_class()
    trainer = pl.Trainer(
        **{"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False, **trainer},
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=callbacks,
    )
    trainer.fit(module, loader(train_data(), shuffle=True), loader(val_data()))
    return module, trainer


def test_reports_are_exact_and_the_run_is_left_alone(tmp_path):
    gradsim, watching = strict(), strict(mislabel_score="margin_knn", name="watching")
    module, _ = fit(tmp_path / "with", [gradsim, watching])
    plain, _ = fit(tmp_path / "without", [])
    assert_exact(read(gradsim), Truth(module.eval()), train_data(), val_data())
    assert watching.report.suspects.visits.unique().tolist() == [2]
    for name, value in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)


def test_its_loggers_and_bars_are_known(tmp_path):
    fit(tmp_path, [GradSimCallback(on_error="raise")], enable_progress_bar=True)
    assert (tmp_path / "lightning_logs" / "version_0" / "gradsim" / "mistakes.png").exists()
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "lightning_logs" / "version_0"))
    events.Reload()
    assert "gradsim/mistakes" in events.Tags()["images"]


def test_wrong_uses_are_told(tmp_path):
    with pytest.raises(Exception, match="`WithoutForward` defines no `forward`"):
        fit(tmp_path, [GradSimCallback()], WithoutForward)


def test_twins():
    from lightning.pytorch import LightningModule

    assert set(with_twin(LightningModule)) == {LightningModule, pl.LightningModule}
    assert with_twin(nn.Module) == (nn.Module,)
    assert overrides("forward", Classifier(), LightningModule)
    assert not overrides("forward", WithoutForward(), LightningModule)
    module = WithoutForward()
    module.forward = module.add_module
    assert overrides("forward", module, LightningModule)
