from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback

from lightning_gradsim import Adapter, GradSimCallback
from tests.trainer.support import (
    Classifier,
    Recorder,
    Truth,
    assert_equal_states,
    assert_exact,
    collect_warnings,
    fit,
    loader,
    make_trainer,
    read,
    strict,
    train_data,
    val_data,
)


def train_and_save(tmp_path, callbacks, max_epochs=2):
    trainer, module = make_trainer(tmp_path, callbacks, max_epochs=max_epochs), Classifier()
    trainer.fit(module, loader(train_data()), loader(val_data()))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    return module


def resume(tmp_path, callbacks, max_epochs=4):
    trainer, module = make_trainer(tmp_path, callbacks, max_epochs=max_epochs), Classifier()
    trainer.fit(module, loader(train_data()), loader(val_data()), ckpt_path=tmp_path / "saved.ckpt")
    return module


def loaded(tmp_path):
    return torch.load(tmp_path / "saved.ckpt", weights_only=True)


def is_plain(value):
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(is_plain(each) for each in value)
    return type(value) in {int, float, str, bool, type(None), torch.Tensor}


def test_state_is_plain_and_versioned(tmp_path):
    gradsim = strict()
    train_and_save(tmp_path, [gradsim])
    state = loaded(tmp_path)["callbacks"][gradsim.state_key]
    assert is_plain(state)
    assert state["version"] == 2
    assert_equal_states(state, gradsim.state_dict())
    assert state["seconds"] > 0


def test_state_holds_no_samples_and_no_settings(tmp_path):
    gradsim = strict(train_data=train_data(), loss_fn=F.cross_entropy)
    train_and_save(tmp_path, [gradsim])
    state = gradsim.state_dict()
    past = state.pop("history")
    assert len(pickle.dumps(state)) < 200
    assert len(past["wrong_keys"]) == read(gradsim).num_errors, "12 bytes a mistake"
    assert len(pickle.dumps(past)) < 5000


def test_resume(tmp_path):
    before = strict()
    train_and_save(tmp_path, [before])
    after, module = strict(), None
    recorder = Recorder(after)
    module = resume(tmp_path, [after, recorder])
    assert recorder.moments == [(2, 18), (3, 24)]
    assert after.state_dict()["seconds"] > before.state_dict()["seconds"]
    assert_exact(read(after), Truth(module), train_data(), val_data())


RUNS = {
    "plain": ({}, {}),
    "all layers": ({"layers": "all", "similarity": "asymmetric"}, {}),
    "influence": ({"layers": "all", "similarity": "influence"}, {}),
    "every second epoch": ({"every_n_epochs": 2}, {}),
    "by steps": ({"every_n_steps": 10}, {"val_check_interval": 0.5}),
    "after a warmup": ({"warmup_epochs": 2}, {}),
    "the last epoch": ({"last_epoch_only": True}, {}),
    "chosen at random": ({"query_policy": "random", "max_train_samples": 30, "seed": 5}, {}),
    "across epochs": ({}, {"val_check_interval": 5, "check_val_every_n_epoch": None}),
}


def without_cost(report):
    return {**report.to_dict(), "seconds": None, "time_share": None, "plan": None}


@pytest.mark.filterwarnings("ignore:.*no validation of this run was one to look at")
@pytest.mark.parametrize(("settings", "options"), RUNS.values(), ids=RUNS)
def test_resumed_at_any_epoch_equals_uninterrupted(tmp_path, settings, options):
    def run(callbacks, max_epochs, **fit_options):
        trainer = make_trainer(tmp_path, callbacks, max_epochs=max_epochs, **options)
        trainer.fit(Classifier(), loader(train_data()), loader(val_data()), **fit_options)
        return trainer

    class Saves(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    recorder = Recorder(strict(**settings))
    run([recorder.gradsim, recorder, Saves()], 5)
    assert recorder.reports
    for epoch in range(4):
        resumed = Recorder(strict(**settings))
        run([resumed.gradsim, resumed], 5, ckpt_path=tmp_path / f"{epoch}.ckpt")
        expected = [without_cost(report) for report in recorder.reports if report.epoch > epoch]
        assert [without_cost(report) for report in resumed.reports] == expected
        assert resumed.gradsim.state_dict()["num_read"] == recorder.gradsim.state_dict()["num_read"]


def test_seconds_add_up_over_a_resume():
    gradsim = strict()
    gradsim.load_state_dict({"version": 1, "seconds": 12.5, "failures": 0})
    assert gradsim.state_dict()["seconds"] == 12.5


def test_share_of_time_after_a_resume_is_that_of_this_run(tmp_path):
    before = strict()
    train_and_save(tmp_path, [before])
    state = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    state["callbacks"][before.state_key]["seconds"] = 1e6
    torch.save(state, tmp_path / "saved.ckpt")
    after = strict()
    resume(tmp_path, [after])
    assert read(after).time_share < 1000


@pytest.mark.parametrize("state", [{}, {"version": 1}, {"version": 1, "seconds": 3.0, "failures": 1, "more": [1]}])
def test_states_of_other_versions_load(state):
    strict().load_state_dict(state)


def test_a_state_of_a_newer_version_is_told():
    with collect_warnings() as texts:
        strict().load_state_dict({"version": 99, "seconds": 3.0})
    assert texts == [
        "`GradSimCallback`: the checkpoint holds a state of version 99, this release knows version 2: what it does not "
        "know is left out. Resume with the release that wrote the checkpoint to keep all of it."
    ]


def test_a_checkpoint_made_without_the_callback(tmp_path):
    train_and_save(tmp_path, [])
    gradsim = strict()
    module = resume(tmp_path, [gradsim])
    assert_exact(read(gradsim), Truth(module), train_data(), val_data())


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used:UserWarning")  # Lightning's
def test_a_checkpoint_made_with_the_callback_loads_without(tmp_path):
    train_and_save(tmp_path, [strict()])
    assert resume(tmp_path, []).trainer.global_step == 24
    assert Classifier.load_from_checkpoint(tmp_path / "saved.ckpt") is not None


def test_the_module_has_no_keys_of_ours(tmp_path):
    train_and_save(tmp_path, [strict()])
    assert set(loaded(tmp_path)["state_dict"]) == set(Classifier().state_dict())


class Fails(Adapter):
    def split(self, batch):
        raise TypeError("not today")


def test_failures_are_counted_over_a_resume(tmp_path):
    with collect_warnings() as texts:
        train_and_save(tmp_path, [GradSimCallback(adapter=Fails())], max_epochs=2)
    assert len(texts) == 2
    with collect_warnings() as texts:
        resume(tmp_path, [GradSimCallback(adapter=Fails())], max_epochs=6)
    assert len(texts) == 1
    assert "the callback stops" in texts[0]


def test_a_callback_that_had_stopped_tries_again_after_a_resume(tmp_path):
    with collect_warnings() as texts:
        train_and_save(tmp_path, [GradSimCallback(adapter=Fails())], max_epochs=3)
    assert "the callback stops" in texts[-1]
    gradsim = strict()
    resume(tmp_path, [gradsim], max_epochs=4)
    assert gradsim.report is not None


class Copies(Callback):
    """Copies the callback in the middle of a validation, as Lightning's tuner does with the trainer's."""

    def __init__(self, copier):
        self.copier, self.copies = copier, []

    def on_validation_batch_end(self, trainer, pl_module, *_):
        self.copies.append(self.copier(trainer.callbacks[0]))


COPIERS = {"pickle": lambda value: pickle.loads(pickle.dumps(value)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)
class TestCopies:
    def test_of_a_new_callback(self, tmp_path, copier):
        gradsim = copier(strict(layers=["head"], similarity="cosine", loss_fn=F.cross_entropy, top_k=3))
        gradsim, module, _ = fit(tmp_path, gradsim)
        assert_exact(read(gradsim), Truth(module), train_data(), val_data(), top_k=3)

    @pytest.mark.parametrize("loss_fn", [None, F.cross_entropy], ids=["criterion", "function"])
    def test_of_a_used_callback(self, tmp_path, copier, loss_fn):
        gradsim, module, _ = fit(tmp_path, strict(loss_fn=loss_fn))
        twin = copier(gradsim)
        assert read(twin).to_rows() == read(gradsim).to_rows()
        make_trainer(tmp_path, [twin]).validate(module, loader(val_data()), verbose=False)
        assert read(twin).to_rows() == read(gradsim).to_rows()

    def test_in_the_middle_of_a_validation(self, tmp_path, copier):
        gradsim = strict()
        copies = Copies(copier)
        trainer = make_trainer(tmp_path, [gradsim, copies], num_sanity_val_steps=0)
        trainer.fit(Classifier(), loader(train_data()), loader(val_data()))
        assert len(copies.copies) == 4


def test_state_keys_differ_by_name():
    assert strict().state_key == strict(layers="all").state_key
    assert strict().state_key != strict(name="other").state_key


def test_two_callbacks_keep_two_states(tmp_path):
    train_and_save(tmp_path, [strict(), strict(name="other")])
    assert len(loaded(tmp_path)["callbacks"]) == 2
