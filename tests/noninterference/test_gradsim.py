"""``GradSimCallback`` does its work and changes nothing, in every configuration of the table."""

from __future__ import annotations

import numpy as np
import pytest

import lightning_gradsim.callback
from lightning_gradsim import GradSimCallback
from tests.noninterference.cases import Case, rows
from tests.noninterference.harness import differences, record_baseline, record_run

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*sampler has shuffling enabled:UserWarning:lightning",
    "ignore:.*augmented at random",
    "ignore:.*`training_step` returned a loss",  # one that holds more than the criterion
)
ALL_LAYERS = (
    "accumulate",
    "dropout",
    "batchnorm",
    "frozen_batchnorm",
    "bf16_autocast",
    "manual_optimization",
    "compiled_part",
    "validate_checkpoint",
    "swa_first",
)
REAL_PANELS = ("plain", "batchnorm", "dataset_generator")
"""Elsewhere a panel of a few pixels is written: drawing one takes longer than the run."""


@pytest.mark.parametrize("case", rows())
def test_callback_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the callback and without: the same run, bit for bit, while queries were scored."""
    if case.name not in REAL_PANELS:
        _draw_small_panels(monkeypatch)
    _assert_nothing_changes(case, "last")


@pytest.mark.parametrize("case", rows(ALL_LAYERS))
def test_all_layers_change_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where every layer is watched in the pass."""
    _draw_small_panels(monkeypatch)
    _assert_nothing_changes(case, "all")


def _assert_nothing_changes(case: Case, layers: str) -> None:
    callback = GradSimCallback(layers, num_queries=8, top_k=3, on_error="raise", every_n_epochs=1, **case.options())
    assert differences(record_run(case, [callback]), record_baseline(case)) == []
    assert callback.report is not None
    assert callback.report.queries


def _draw_small_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = np.zeros((4, 4, 3), np.uint8)
    monkeypatch.setattr(lightning_gradsim.callback, "mistake_panel", lambda *_, **__: panel)
