"""The code that the README shows runs as it stands."""

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer

from lightning_gradsim import Adapter, GradSimCallback
from tests.trainer.support import Classifier, loader, train_data, val_data

README = Path(__file__).parents[1] / "README.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_each_block_has_its_test():
    assert len(blocks()) == 2


def test_the_quick_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"model": Classifier(), "train_loader": loader(train_data()), "val_loader": loader(val_data())}
    exec(blocks()[0].replace("max_epochs=10,", 'max_epochs=1, accelerator="cpu", enable_progress_bar=False,'), names)
    assert "validation samples wrong" in capsys.readouterr().out
    assert (tmp_path / "lightning_logs" / "version_0" / "gradsim" / "mistakes.png").exists()


def test_other_batches(tmp_path):
    names = {"LightningModule": LightningModule, "Adapter": Adapter, "F": F}
    exec(blocks()[1], names)
    batch = {"waveform": 255 * torch.randn(6, 8), "word": torch.arange(6) % 4}
    inputs, targets = names["MyAdapter"]().split(batch)
    assert torch.equal(inputs, batch["waveform"] / 255)
    assert torch.equal(targets, batch["word"])
    module = names["MyModule"]()
    module.net = torch.nn.Linear(8, 4)
    logits, _, losses = module.gradsim_step(batch)
    assert (logits.shape, losses.shape) == ((6, 4), (6,))


def test_a_module_with_its_own_step(tmp_path):
    class OwnStep(Classifier):
        def gradsim_step(self, batch):
            logits = self(batch[0])
            return logits, batch[1], F.cross_entropy(logits, batch[1], reduction="none")

    gradsim = GradSimCallback(on_error="raise")
    Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[gradsim],
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    ).fit(OwnStep(), loader(train_data()), loader(val_data()))
    assert gradsim.report.queries
    assert any("`gradsim_step`" in note for note in gradsim.report.notes)
