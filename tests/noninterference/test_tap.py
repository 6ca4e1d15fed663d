"""The tap and the recording of sample ids change nothing, in every configuration of the table."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_gradsim import lightning_bridge as bridge
from lightning_gradsim.adapter import Adapter
from lightning_gradsim.sample_id_recorder import SampleIdRecorder
from lightning_gradsim.tap import Tap
from lightning_gradsim.tapped_samples import TappedBlock
from tests.noninterference.cases import Case, rows
from tests.noninterference.harness import differences, record_baseline, record_run

pytestmark = pytest.mark.filterwarnings("ignore:.*sampler has shuffling enabled:UserWarning:lightning")
WITHOUT_IDS = ("custom_batch_sampler", "combined_loader", "list_of_loaders")
WITHOUT_TAP = ("compiled_in_place", "compiled_outside", "compiled_part")
ANOTHER_LOSS = ("copied_in_step",)
"""Its loss holds a distance between logits: gradients by them are not those of the criterion alone."""


class TapCallback(Callback):
    """Taps every training step whose sample ids are known."""

    def __init__(self) -> None:
        self.adapter, self.recorder = Adapter(), SampleIdRecorder()
        self.tap: Tap | None = None
        self.blocks: list[TappedBlock] = []
        self.tapped: list[tuple[list[int], list[int]]] = []
        """Ids of the batches tapped, as recorded and as carried by the samples."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.recorder.attach(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.adapter.bind(pl_module)
        self.tap = Tap(self.adapter, self.blocks.append)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        loaders = bridge.flatten_loaders(trainer.train_dataloader)
        ids = self.recorder.find_ids(
            loaders, batch, batch_idx, len(batch[1]) if isinstance(batch, (list, tuple)) else 0
        )
        if ids is not None:
            self.tapped.append((ids.tolist(), batch[0].flatten(1)[:, 0].long().tolist()))
            self.tap.begin_step(pl_module, batch, ids, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.tap.end_step(bridge.loss_of_outputs(outputs, trainer.accumulate_grad_batches))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.tap is not None:
            self.tap.flush()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.recorder.detach()


@pytest.mark.slow  # `test_gradsim.py` runs the whole table, too, with the tap in the callback
@pytest.mark.parametrize("case", rows())
def test_the_tap_changes_nothing(case: Case) -> None:
    """With it and without: the same run, bit for bit, while samples were tapped, each under its own id."""
    callback = TapCallback()
    assert differences(record_run(case, [callback]), record_baseline(case)) == []
    assert all(ours == theirs for ours, theirs in callback.tapped)
    assert (not callback.tapped) == (case.name in WITHOUT_IDS)
    assert callback.tap is not None
    callback.tap.flush()
    number = sum(len(block) for block in callback.blocks)
    if case.name in WITHOUT_TAP:
        assert "compiled" in str(callback.tap.reason)
    elif case.name not in (*WITHOUT_IDS, *ANOTHER_LOSS):
        assert callback.tap.reason is None
        assert not callback.tap.left_out
        assert number == sum(len(ours) for ours, _ in callback.tapped) > 0
