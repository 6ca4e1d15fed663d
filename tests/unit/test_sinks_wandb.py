"""Weights & Biases: what a run gets, offline."""

import json

import numpy as np
import pytest

from lightning_gradsim.sinks import Publication, WandbSink
from lightning_gradsim.views.sortable import Cell, Column, Table

CONTENT = Publication(
    7,
    {"a/mistakes": np.zeros((2, 4, 3), np.uint8)},
    {"a/mistakes": "| a |"},
    {"a/errors": 4.0},
    {"a/self_influence": np.array([1.0, 2.0, 2.5])},
    {"a/mistakes": Table((Column("text"), Column("score", True)), ((Cell("b"), Cell("1.5")), (Cell("c"), Cell(""))))},
)


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield wandb
    wandb.teardown()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_gets_everything_at_its_step(wandb, tmp_path):
    logged = []

    class Run:
        def log(self, values):
            logged.append(values)

    CONTENT.write_to(WandbSink(Run()))
    assert all(values["trainer/global_step"] == 7 for values in logged)
    by_tag = {tag: value for values in logged for tag, value in values.items()}
    assert by_tag["a/errors"] == 4.0
    assert isinstance(by_tag["a/mistakes"], wandb.Image)
    assert (by_tag["a/mistakes"].image.size, by_tag["a/mistakes"].image.mode) == ((4, 2), "RGB")
    table = by_tag["a/mistakes_table"]
    assert (table.columns, table.data) == (["text", "score"], [["b", 1.5], ["c", None]])
    assert isinstance(by_tag["a/self_influence"], wandb.Histogram)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_real_run_takes_it(wandb, tmp_path):
    run = wandb.init(project="gradsim", mode="offline", dir=str(tmp_path), settings={"console": "off"})
    CONTENT.write_to(WandbSink(run))
    summary = dict(run.summary)
    run.finish()
    assert summary["a/errors"] == 4.0
    assert summary["trainer/global_step"] == 7
    assert len(list(tmp_path.rglob("a/mistakes*.png"))) == 1
    (table,) = tmp_path.rglob("a/mistakes_table*.json")
    assert json.loads(table.read_text())["data"] == [["b", 1.5], ["c", None]]
