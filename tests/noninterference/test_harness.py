"""The harness is blind to nothing that it promises to see, and two equal runs are equal for it."""

from __future__ import annotations

from dataclasses import dataclass

import lightning
import pytest
import torch
from lightning.pytorch import Callback
from packaging.version import Version

from tests.noninterference import offenders
from tests.noninterference.cases import CASE_BY_NAME, Case, rows
from tests.noninterference.harness import RunRecord, differences, record_baseline, record_run

pytestmark = pytest.mark.filterwarnings("ignore:.*sampler has shuffling enabled:UserWarning:lightning")


@dataclass(frozen=True)
class Offence:
    """An offender, a case in which it does harm, and the beginnings of the differences that must be named."""

    offender: type[Callback]
    case: str
    caught: tuple[str, ...]


OFFENCES = (
    Offence(offenders.PeeksIntoTrainLoader, "shuffle", ("rng: torch", "train ids: epoch 1 batch 0", "weights: net.1")),
    Offence(offenders.PeeksIntoTrainLoader, "persistent_workers", ("train ids: epoch 0 batch 5", "weights: net.1")),
    Offence(offenders.RereadsTrainLoader, "persistent_workers", ("train ids: epoch 0 batch", "weights: net.1")),
    Offence(offenders.RereadsTrainLoader, "shuffle_own_generator", ("rng: train loader", "train ids: epoch 1 batch 0")),
    Offence(
        offenders.RereadsDataset,
        "dataset_generator",
        ("rng: train loader dataset generator", "train batch contents", "weights: "),
    ),
    Offence(offenders.CallsBackward, "accumulate", ("grad: net.1.weight", "weights: net.1.weight", "optimizer: 0")),
    Offence(offenders.ClearsGradients, "accumulate", ("grad: net.1.weight with None", "weights: net.1.weight")),
    Offence(offenders.DrawsTorch, "dropout", ("rng: torch", "weights: net.1", "logged: step 11 train_loss_step")),
    Offence(offenders.DrawsTorch, "transfer_hooks", ("rng: torch", "train batch contents: epoch 1", "weights: net.1")),
    Offence(offenders.DrawsNumpy, "plain", ("rng: numpy",)),
    Offence(offenders.DrawsPython, "plain", ("rng: python",)),
    Offence(offenders.LeavesForwardHook, "plain", ("hooks: module.net.3 _forward_hooks with ['LeavesForwardHook",)),
    Offence(offenders.LeavesTensorHook, "plain", ("hooks: net.3.weight _backward_hooks with ['LeavesTensorHook",)),
    Offence(offenders.FlipsMode, "frozen_batchnorm", ("mode: module.net.2 with 'train', without 'eval'",)),
    Offence(
        offenders.FlipsModeAfterRestore,
        "frozen_batchnorm",
        ("mode: module.net.2 with 'train'", "buffers: net.2.running_mean", "weights: net.1.weight"),
    ),
    Offence(offenders.ForwardsInTrainMode, "batchnorm", ("buffers: net.2.running_mean", "buffers: net.2.num_batches")),
    Offence(offenders.LeavesParameterAttribute, "plain", ("attributes: net.3.weight gained ['grad_sample']",)),
    Offence(offenders.LeavesModuleAttribute, "plain", ("attributes: module.net.3 gained ['activations']",)),
    Offence(offenders.RegistersBuffer, "plain", ("state_dict keys: module gained ['norms']", "buffers: norms only")),
    Offence(offenders.FlipsRequiresGrad, "plain", ("requires_grad: net.3.weight with False", "weights: net.3.weight")),
    Offence(offenders.NudgesWeight, "plain", ("weights: net.3.weight differ, max", "checkpoint: ")),
    Offence(offenders.ChangesLearningRate, "plain", ("optimizer: 0.param_groups.0.lr", "weights: net.1.weight")),
    Offence(offenders.LogsUnderUsersName, "plain", ("logged: step 11 val_loss",)),
    Offence(offenders.LeavesGradModeOn, "plain", ("globals: gradient mode with True",)),
    Offence(offenders.LeavesEnvironment, "plain", ("globals: environment with ['GRADSIM_OFFENDER']",)),
    Offence(offenders.PollutesCheckpoint, "plain", ("checkpoint: saved/final.ckpt gradsim only with the callback",)),
    Offence(offenders.LeavesStrategyWrapped, "plain", ("attributes: trainer.strategy gained ['process_dataloader']",)),
    Offence(offenders.DrawsTorch, "several_val_loaders", ("val ids: validation 2 loader 2", "val batch contents: ")),
    Offence(offenders.ForwardsInTrainMode, "module_generator", ("rng: module generator", "weights: net.1")),
    Offence(offenders.RereadsValDataset, "val_dataset_generator", ("val batch contents: validation 2",)),
    Offence(offenders.RereadsDataset, "transform_generator", ("rng: train loader dataset transform generator",)),
    Offence(offenders.LeavesGlobalHook, "plain", ("hooks: torch.nn _global_forward_hooks with ['LeavesGlobalHook",)),
    Offence(offenders.LeavesAccumulationHook, "plain", ("hooks: net.3.weight _post_accumulate_grad_hooks with",)),
    Offence(offenders.LeavesOptimizerHook, "plain", ("hooks: optimizer 0 _optimizer_step_post_hooks with",)),
    Offence(offenders.ReplacesForward, "plain", ("forward: module.net.3 with", "attributes: module.net.3 gained")),
    Offence(offenders.ChangesModuleAttribute, "plain", ("values: module.net.3 in_features with 13, without 12",)),
    Offence(offenders.LeavesDatasetAttribute, "plain", ("attributes: train loader dataset gained ['positions']",)),
    Offence(offenders.LeavesOptimizerAttribute, "plain", ("attributes: optimizer 0 gained ['norms']",)),
    Offence(offenders.LeavesTrainerAttribute, "plain", ("attributes: trainer gained ['norms']",)),
    Offence(offenders.ReplacesCollate, "plain", ("loader: train loader collate_fn with",)),
    Offence(offenders.AdvancesScheduler, "plain", ("scheduler: 0.last_epoch with 2, without 1",)),
    Offence(offenders.ChangesMetric, "plain", ("metrics: train_loss_step",)),
    Offence(offenders.StopsTraining, "plain", ("point: only without the callback (epoch 1 end)",)),
    Offence(offenders.LeavesInferenceMode, "plain", ("globals: inference mode with True",)),
    Offence(offenders.LeavesAutocast, "plain", ("globals: autocast with True",)),
    Offence(offenders.LeavesAttentionUnfused, "plain", ("globals: fused attention with False",)),
    Offence(offenders.LeavesDefaultDtype, "plain", ("globals: default dtype with 'torch.float64'",)),
    Offence(offenders.LeavesDeterminism, "plain", ("globals: deterministic algorithms with True",)),
    Offence(offenders.LeavesThreads, "plain", ("globals: threads with 2, without 1",)),
    Offence(offenders.LeavesLogHandler, "plain", ("globals: root log handlers with",)),
)


@pytest.mark.parametrize("offence", OFFENCES, ids=lambda offence: f"{offence.offender.__name__}-{offence.case}")
def test_offender_is_caught(offence: Offence) -> None:
    """Each planted offender is found out, by the name of what it changed."""
    case = CASE_BY_NAME[offence.case]
    found = differences(record_run(case, [offence.offender()]), record_baseline(case))
    for start in offence.caught:
        assert any(line.startswith(start) for line in found), (start, found)


def test_whatever_is_compared_has_an_offender() -> None:
    """Every kind of fact, and every global setting and state, is one that the harness was seen to catch."""
    caught = [start for offence in OFFENCES for start in offence.caught]
    records = [record_baseline(CASE_BY_NAME[name]) for name in ("plain", "frozen_batchnorm")]
    facts = {fact for record in records for point in record.points.values() for fact in point}
    assert {start.split(":")[0] for start in caught} == {kind for kind, _ in facts} | {"point"}
    for kind, name in facts:
        if kind in {"globals", "rng"}:
            assert any(start.startswith(f"{kind}: {name}") for start in caught), (kind, name)


@pytest.mark.parametrize("case", rows())
def test_harmless_callback_changes_nothing(case: Case) -> None:
    """Two seeded runs are equal: whatever differs with a callback comes from it."""
    assert differences(record_run(case, [offenders.Harmless()]), record_baseline(case)) == []


@pytest.mark.parametrize("case", rows())
def test_record_is_complete(case: Case) -> None:
    """Every batch, checkpoint and kind of fact is in the record, and the model is wrong about some samples."""
    if case.name.startswith("batch_size_finder") and Version(lightning.__version__) < Version("2.6"):
        pytest.skip("older releases take other trial steps")
    points = record_baseline(case).points
    ids = [fact for fact in points["train batches"] if fact[0] == "train ids"]
    assert len(ids) == case.num_batches
    assert {"epoch 0 end", "epoch 1 end", "validation 2 end", "batch after validation 1", "after fit"} <= set(points)
    assert {"weights", "grad", "optimizer", "scheduler", "rng", "metrics", "hooks", "mode"} <= {
        kind for kind, _ in points["after fit"]
    }
    assert any(name.startswith("saved/step=") for _, name in points["files"])
    assert any(name.startswith("step 0 train_loss_step") for _, name in points["log"])
    metrics = {name: value for (kind, name), value in points["after fit"].items() if kind == "metrics"}
    assert all(value < 1 for name, value in metrics.items() if name.startswith("val_accuracy"))


def test_pending_gradients_are_seen() -> None:
    """Under accumulation the last validation of an epoch meets gradients that the next step needs."""
    facts = record_baseline(CASE_BY_NAME["accumulate"]).points["batch after validation 3"]
    assert facts["grad", "net.1.weight"].abs().max() > 0


@pytest.mark.parametrize(
    ("ours", "theirs", "equal"),
    [
        (torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0]), True),
        (torch.tensor([torch.nan, 1.0]), torch.tensor([0.0, 1.0]), False),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.zeros(2), torch.zeros(3), False),
        (torch.zeros(2), torch.zeros(2).double(), False),
        (float("nan"), float("nan"), True),
        (1, 1.0, False),
        (None, torch.zeros(2), False),
        (frozenset("ab"), frozenset("ba"), True),
    ],
)
def test_comparison_is_bit_for_bit(ours: object, theirs: object, equal: bool) -> None:
    """Equal means the same type, shape and bits; NaN equals itself."""
    records = [RunRecord({"point": {("kind", "name"): value}}) for value in (ours, theirs)]
    assert (differences(*records) == []) is equal


def test_missing_facts_are_named() -> None:
    """A fact or a point that only one run has is a difference."""
    full, empty = RunRecord({"a": {("kind", "name"): 1}, "b": {}}), RunRecord({"a": {}})
    assert differences(full, empty) == ["kind: name only with the callback (a)", "point: only with the callback (b)"]
