"""What a first user ran into: things in the user's code that our forwards must not disturb."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import Dataset, Subset, SubsetRandomSampler

from lightning_gradsim import Adapter, GradSimCallback
from lightning_gradsim.lightning_bridge import isolated_rng
from tests.trainer.support import (
    NUM_FEATURES,
    Classifier,
    collect_warnings,
    fit,
    loader,
    make_trainer,
    read,
    strict,
    train_data,
    val_data,
)


class Logging(Classifier):
    """Logs in its forward, which only a step may do."""

    def forward(self, x):
        self.log("norm", x.norm(), on_epoch=True)
        return super().forward(x)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.head(self.body(batch[0]))


def test_logging_in_the_forward_is_not_ours(tmp_path):
    gradsim, module, _ = fit(tmp_path / "with", module=Logging(), train=loader(train_data()))
    assert read(gradsim).queries
    assert "log" not in vars(module)
    alone = Logging()
    trainer = make_trainer(tmp_path / "without", [])
    trainer.fit(alone, loader(train_data()), loader(val_data()))
    assert module.trainer.callback_metrics == trainer.callback_metrics
    assert module.trainer.logged_metrics == trainer.logged_metrics


class Counting(Classifier):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_buffers_that_a_forward_changes_get_their_values_back(tmp_path):
    _, module, _ = fit(tmp_path, module=Counting(), num_sanity_val_steps=0)
    assert int(module.calls) == 6 + 4  # training and validation batches


def generators():
    return {
        "torch": torch.Generator().manual_seed(1),
        "new": np.random.default_rng(1),
        "old": np.random.RandomState(1),
        "python": random.Random(1),
    }


def draw(generators):
    torch.randn(2, generator=generators["torch"])
    generators["new"].normal()
    generators["old"].normal()  # leaves a second number waiting
    generators["python"].gauss(0, 1)


def states(generators):
    return repr(
        [
            generators["torch"].get_state().tolist(),
            generators["new"].bit_generator.state,
            [np.asarray(part).tolist() for part in generators["old"].get_state()],
            generators["python"].getstate(),
        ]
    )


class TestOwnGenerators:
    @pytest.mark.parametrize("place", ["module", "submodule", "datamodule"])
    def test_get_their_states_back_also_after_an_exception(self, place):
        module, datamodule = Classifier(), LightningDataModule()
        owner = {"module": module, "submodule": module.body[0], "datamodule": datamodule}[place]
        own = generators()
        vars(owner).update(own)
        trainer = SimpleNamespace(lightning_module=module, datamodule=datamodule)
        before = states(own)
        with isolated_rng(trainer):
            draw(own)
            assert states(own) != before
        assert states(own) == before
        with pytest.raises(AttributeError), isolated_rng(trainer):
            draw(own | {"python": None})  # fails when the others have drawn
        assert states(own) == before


class Combined(Classifier):
    """Trains on batches of two loaders."""

    def training_step(self, batch, batch_idx):
        return sum(super(Combined, self).training_step(part, batch_idx) for part in batch.values())


class Demanding(Combined):
    """Its transfer hook, too, knows training batches in no other form."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        is_validation_batch = isinstance(batch, list) and len(batch[0]) == 8
        return batch if is_validation_batch else {name: batch[name] for name in "ab"}


def two_loaders():
    return {"a": loader(train_data(), shuffle=True), "b": loader(train_data(30), shuffle=True)}


def test_several_training_loaders_with_train_data(tmp_path):
    gradsim, _, _ = fit(tmp_path, strict(train_data=train_data()), Combined(), two_loaders())
    assert read(gradsim).num_train_samples == 60
    assert any("could not be checked" in note for note in read(gradsim).notes)


def test_a_transfer_hook_that_demands_batches_of_several_loaders(tmp_path):
    gradsim = GradSimCallback(train_data=train_data())
    with collect_warnings() as texts:
        fit(tmp_path, gradsim, Demanding(), two_loaders(), loader(val_data(), batch_size=8))
    assert gradsim.report is None
    assert len(texts) == 1
    assert "transfer hooks of `Demanding` failed on a batch of `train_data=`" in texts[0]
    assert "TypeError: list indices must be integers" in texts[0]
    assert "one loader" in texts[0]
    assert "Training goes on without it" in texts[0]


class Single(Classifier):
    """One logit, integer targets and a functional loss."""

    def __init__(self):
        super().__init__(num_outputs=1)
        del self.criterion

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.binary_cross_entropy_with_logits(self(x)[:, 0], y.clamp(max=1).float())

    def validation_step(self, batch, batch_idx):
        pass


def test_one_logit_is_never_taken_for_classes(tmp_path):
    with collect_warnings() as texts:
        gradsim, _, _ = fit(tmp_path, GradSimCallback(), Single())
    assert gradsim.report is None
    assert "No loss is known for outputs of shape" in texts[0]
    assert "`loss_fn=`" in texts[0]


def test_a_functional_binary_loss_makes_the_task_binary(tmp_path):
    train, val = train_data(), val_data()
    for data in (train, val):
        data.tensors = (data.tensors[0], (data.tensors[1] > 1).long())
    gradsim = GradSimCallback(loss_fn=F.binary_cross_entropy_with_logits, on_error="raise")
    fit(tmp_path, gradsim, Single(), loader(train), loader(val))
    assert read(gradsim).task == "binary"


def test_samples_that_the_sampler_never_draws_are_no_training_samples(tmp_path):
    train = loader(train_data(), sampler=SubsetRandomSampler(range(5, 45)))
    gradsim, _, _ = fit(tmp_path, train=train)
    assert sorted(read(gradsim).suspects.sample_ids.tolist()) == list(range(5, 45))


class Every(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(0, 60, 2))

    def __len__(self):
        return 30


def test_an_unknown_sampler_is_noted(tmp_path):
    gradsim, _, _ = fit(tmp_path, train=loader(train_data(), sampler=Every()))
    assert any("sampler of its own" in note for note in read(gradsim).notes)


class Endless(Dataset):
    """Any index, no length."""

    def __getitem__(self, index):
        return train_data()[index % 60]


def test_a_subset_of_a_dataset_without_length(tmp_path):
    gradsim, _, _ = fit(tmp_path, train=loader(Subset(Endless(), [3, 70, 8])))
    assert sorted(read(gradsim).suspects.sample_ids.tolist()) == [3, 8, 70]


def test_a_module_without_forward_is_told_at_once(tmp_path):
    module = Classifier()
    module.__class__ = type("NoForward", (Classifier,), {"forward": LightningModule.forward})
    with pytest.raises(MisconfigurationException, match=r"`NoForward` defines no `forward`.*`gradsim_step\(batch\)`"):
        fit(tmp_path, module=module)


def test_mappings_with_any_keyword(tmp_path):
    class AnyKeyword(nn.Module):
        def forward(self, **inputs):
            assert set(inputs) == {"a", "b"}
            return inputs["a"] + inputs["b"]

    x = torch.randn(3, NUM_FEATURES)
    assert torch.equal(Adapter().forward(AnyKeyword(), {"a": x, "b": x}), 2 * x)
    assert torch.equal(Adapter().forward(nn.Identity(), {"pixels": x}), x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_scripted_part_of_the_module(tmp_path):
    module = Classifier()
    module.body = torch.jit.script(module.body)
    gradsim, _, _ = fit(tmp_path, module=module)
    assert read(gradsim).layers == ("head",)
    assert read(gradsim).notes == ()
