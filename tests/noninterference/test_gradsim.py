"""``GradSimCallback`` does its work and changes nothing, in every configuration of the table."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lightning_gradsim.presentation
import lightning_gradsim.rereading
from lightning_gradsim import GradSimCallback, GradSimWarning
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
TRUSTED = (
    "plain",
    "several_val_loaders",
    "dataset_generator",
    "val_dataset_generator",
    "transfer_hooks",
    "dropout",
    "batchnorm",
    "bf16_autocast",
    "manual_optimization",
    "module_generator",
    "copied_in_step",
    "compiled_in_place",
    "compiled_outside",
    "compiled_part",
)
INFLUENCE = ("accumulate", "dropout", "batchnorm", "bf16_autocast", "val_dataset_generator", "gradient_clipping")
PRECONDITIONED = ("accumulate", "dropout", "frozen_batchnorm", "dataset_generator")
MAY_FAIL = ("accumulate", "dropout", "frozen_batchnorm", "dataset_generator", "swa_last")
READS_AGAIN = (
    "plain",
    "workers",
    "dataset_generator",
    "accumulate",
    "bf16_autocast",
    "dropout",
    "batchnorm",
    "module_generator",
    "resume",
    "checkpoint_last",
    "swa_last",
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


@pytest.mark.parametrize("case", rows(TRUSTED))
def test_a_copy_that_learns_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where a copy of the model is trained on the validation labels at the end."""
    _draw_small_panels(monkeypatch)
    callback = _assert_nothing_changes(case, "last", trusted_val=True)
    assert callback.report is not None
    assert callback.report.suspects.score_name == "margin_knn+trusted"


@pytest.mark.parametrize("case", rows(INFLUENCE))
def test_gradients_of_a_validation_change_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the head is watched in validations, too."""
    _draw_small_panels(monkeypatch)
    callback = _assert_nothing_changes(case, "last", mislabel_score="influence")
    assert callback.report is not None
    assert callback.report.suspects.score_name == "influence"


@pytest.mark.parametrize("case", rows(ALL_LAYERS))
def test_sums_along_the_run_change_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where validation samples are kept that are right."""
    _draw_small_panels(monkeypatch)
    callback = _assert_nothing_changes(case, "all", along_run=[0, 1])
    assert callback.report is not None
    in_fit = callback.report.time_share is not None
    assert [query.sample_id for query in callback.report.along_run] == [0, 1] * in_fit


@pytest.mark.parametrize("case", rows(READS_AGAIN))
def test_reading_again_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where training steps choose which samples are read."""
    _draw_small_panels(monkeypatch)
    callback = _in_run(monkeypatch, on_error="raise", **case.options())
    assert differences(record_run(case, [callback]), record_baseline(case)) == []
    assert callback.report is not None
    assert callback.report.recall


@pytest.mark.parametrize("case", rows(("dropout", "swa_last")))
def test_failing_to_choose_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where this fails between two rounds."""

    def fail(*_: object, **__: object) -> None:
        torch.rand(1)
        raise RuntimeError("no choice any more")

    _draw_small_panels(monkeypatch)
    monkeypatch.setattr(lightning_gradsim.rereading.Shortlist, "update", fail)
    callback = _in_run(monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GradSimWarning)
        found = differences(record_run(case, [callback]), record_baseline(case))
    assert found == []
    assert any("failed in the report of epoch 1" in str(each.message) for each in caught)


@pytest.mark.parametrize("case", rows(PRECONDITIONED))
def test_influence_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the curvature is taken from the training samples before they are scored."""
    _draw_small_panels(monkeypatch)
    _assert_nothing_changes(case, "all", similarity="influence")


@pytest.mark.parametrize("case", rows(MAY_FAIL))
@pytest.mark.parametrize(("num_calls", "what"), [(1, "choice of queries"), (7, "report")])
def test_failing_changes_nothing(case: Case, num_calls: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the work fails in the middle, in the choice of queries or in the pass, and training goes on."""
    _draw_small_panels(monkeypatch)
    callback = GradSimCallback("all", num_queries=8, top_k=3, loss_fn=_Failing(num_calls))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GradSimWarning)
        found = differences(record_run(case, [callback]), record_baseline(case))
    assert found == []
    assert any(f"failed in the {what} of epoch 0" in str(each.message) for each in caught)


class _Failing:
    """Cross-entropy that fails for good after so many calls; those in training steps ask a copy of it."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.num_calls -= 1
        if self.num_calls < 0:
            torch.rand(1)
            raise RuntimeError("no loss any more")
        return nn.functional.cross_entropy(outputs, targets, reduction="none")


def _in_run(monkeypatch: pytest.MonkeyPatch, **options: Any) -> GradSimCallback:
    monkeypatch.setattr(lightning_gradsim.rereading, "MIN_PROBE", 16)
    return GradSimCallback(mode="in_run", num_queries=8, top_k=3, time_budget=None, **options)


def _assert_nothing_changes(case: Case, layers: str, **options: Any) -> GradSimCallback:
    options = {"num_queries": 8, "top_k": 3, "on_error": "raise", "every_n_epochs": 1, **case.options(), **options}
    callback = GradSimCallback(layers, **options)
    assert differences(record_run(case, [callback]), record_baseline(case)) == []
    assert callback.report is not None
    assert callback.report.queries
    return callback


def _draw_small_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = np.zeros((4, 4, 3), np.uint8)
    monkeypatch.setattr(lightning_gradsim.presentation, "mistake_panel", lambda *_, **__: panel)
