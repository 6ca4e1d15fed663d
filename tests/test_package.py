"""The wheel, away from the source tree."""

import os
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="builds the wheel")
ROOT = Path(__file__).parents[1]
SMOKE = """
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

plain = [type(callback).__name__ for callback in Trainer(accelerator="cpu", logger=False).callbacks]
import lightning_gradsim
from lightning_gradsim import GradSimCallback

assert Path(lightning_gradsim.__file__).parents[1] == Path(sys.argv[1]), lightning_gradsim.__file__
assert plain == [type(callback).__name__ for callback in Trainer(accelerator="cpu", logger=False).callbacks]


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def loader(n):
    return DataLoader(TensorDataset(torch.randn(n, 6), torch.arange(n) % 3), batch_size=8)


gradsim = GradSimCallback(on_error="raise")
trainer = Trainer(
    max_epochs=2, accelerator="cpu", callbacks=[gradsim], enable_progress_bar=False, enable_model_summary=False
)
trainer.fit(Net(), loader(40), loader(24))
assert gradsim.report.queries
files = sorted(path.name for path in Path(trainer.log_dir, "gradsim").iterdir())
assert {"mistakes.png", "report.html", "report.json", "suspects.csv", "influences.csv"} <= set(files), files
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_what_it_holds(site):
    assert (site / "lightning_gradsim" / "py.typed").exists()
    (info,) = site.glob("*.dist-info")
    assert (info / "licenses" / "LICENSE").exists()
    assert sorted(path.name for path in site.iterdir()) == sorted(["lightning_gradsim", info.name])
    source = {path.relative_to(ROOT) for path in (ROOT / "lightning_gradsim").rglob("*") if path.is_file()}
    source = {path for path in source if "__pycache__" not in path.parts}
    assert source == {path.relative_to(site) for path in (site / "lightning_gradsim").rglob("*") if path.is_file()}


def test_no_entry_point_attaches_the_callback_to_every_trainer(site):
    entry_points = ConfigParser()
    entry_points.read(next(site.glob("*.dist-info")) / "entry_points.txt")
    assert [name for name in entry_points.sections() if name != "console_scripts"] == []


def test_it_runs_away_from_the_source_tree(site, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SMOKE, site],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
