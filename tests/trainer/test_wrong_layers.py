"""Layers and losses without gradients of single samples: refused by name, with the way out."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_gradsim import GradSimCallback
from lightning_gradsim.errors import (
    LayerSelectionError,
    LossError,
    SampleMixingError,
)
from tests.trainer.support import (
    NUM_FEATURES,
    WIDTH,
    Classifier,
    Truth,
    Untouched,
    assert_exact,
    collect_warnings,
    fit,
    read,
    strict,
    train_data,
    val_data,
)

LIST_ALL = "`GradSimCallback.available_layers(model)` lists all."


class Unused(Classifier):
    """Holds layers that its forward does not call; the parameters of one are used all the same."""

    def __init__(self):
        super().__init__()
        self.unused, self.bare = nn.Linear(2, 2), nn.ParameterDict({"scale": torch.ones(NUM_FEATURES)})

    def forward(self, x):
        return super().forward(x * self.bare["scale"])


class Bare(Classifier):
    """Calls no layer with parameters."""

    def __init__(self):
        super().__init__()
        del self.body, self.head
        self.weights = nn.ParameterDict({"w": torch.randn(NUM_FEATURES, 4)})

    def forward(self, x):
        return x @ self.weights["w"]


class Mixing(Classifier):
    """Normalises by the statistics of the batch, in eval mode too."""

    def __init__(self):
        super().__init__()
        self.body.append(nn.BatchNorm1d(WIDTH, track_running_stats=False))


class Contrastive(Classifier):
    """Its outputs depend on the whole batch, without any layer for it."""

    def forward(self, x):
        outputs = super().forward(x)
        return outputs - outputs.mean(0)


class TestLayers:
    """What can be told of the module alone raises at the start of fit, whatever ``on_error`` says."""

    @pytest.mark.parametrize(
        ("layers", "message"),
        [
            (
                "head.fcc",
                f"`layers='head.fcc'` matches no layer or parameter of `Classifier`. Closest: `head`. {LIST_ALL}",
            ),
            ("heed", f"`layers='heed'` matches no layer or parameter of `Classifier`. Closest: `head`. {LIST_ALL}"),
            (
                ["head", "boody.0"],
                f"`layers='boody.0'` matches no layer or parameter of `Classifier`. Closest: `body.0`. {LIST_ALL}",
            ),
            (
                "head.weigh",
                "`layers='head.weigh'` matches no layer or parameter of `Classifier`. Closest: `head.weight`, "
                f"`head.bias`, `body.0.weight`. {LIST_ALL}",
            ),
            (
                "xyz",
                f"`layers='xyz'` matches no layer or parameter of `Classifier`. Trainable layers: `body.0`, `head`. "
                f"{LIST_ALL}",
            ),
            (
                nn.Conv2d,
                "`layers` names the type `Conv2d`, but `Classifier` has no trainable layer of it. Trainable layers: "
                "`body.0`, `head`.",
            ),
            (
                "body.1",
                "Layer `body.1` (`ReLU`) has no trainable parameter, so it has no gradient. Set `requires_grad`, or "
                "choose among `body.0`, `head`.",
            ),
            pytest.param(
                lambda name, layer: False,
                "The predicate passed as `layers` accepts none of the 2 trainable layers: `body.0`, `head`.",
                id="predicate",  # the address of a function differs between processes
            ),
        ],
        ids=str,
    )
    def test_unknown(self, tmp_path, layers, message):
        with pytest.raises(LayerSelectionError, match=f"^{re.escape(message)}$"):
            fit(tmp_path, GradSimCallback(layers=layers), callbacks=[Untouched()])

    @pytest.mark.parametrize(
        ("layers", "message"),
        [
            (
                "head",
                "Layer `head` (`Linear`) has no trainable parameter, so it has no gradient. Set `requires_grad`, or "
                "choose among `body.0`.",
            ),
            (
                "head.bias",
                "Parameter `head.bias` is frozen, so it has no gradient. Set `requires_grad`, or choose among "
                "`body.0`.",
            ),
        ],
    )
    def test_frozen(self, tmp_path, layers, message):
        module = Classifier()
        module.head.requires_grad_(False)
        with pytest.raises(LayerSelectionError, match=f"^{re.escape(message)}$"):
            fit(tmp_path, GradSimCallback(layers=layers), module, callbacks=[Untouched()])

    def test_all_frozen(self, tmp_path):
        class Frozen(Classifier):
            def training_step(self, batch, batch_idx):
                return None

        message = (
            "`Frozen` has no trainable parameters, so there are no gradients to compare. Set `requires_grad` on the "
            "layers of interest."
        )
        with pytest.raises(LayerSelectionError, match=f"^{re.escape(message)}$"):
            fit(tmp_path, GradSimCallback(), Frozen().requires_grad_(False), callbacks=[Untouched()])

    @pytest.mark.parametrize(
        ("module", "layers", "error", "message"),
        [
            (
                Unused,
                "unused",
                LayerSelectionError,
                "Layer `unused` was not called in the forward pass, and the losses do not depend on it. It is unused "
                "for this batch. Choose another layer.",
            ),
            (
                Unused,
                "last:9",
                LayerSelectionError,
                '`layers="last:9"` asks for more layers than the 2 trainable ones that the forward pass of `Unused` '
                'called. Ask for fewer, or for "all".',
            ),
            (
                Bare,
                "last",
                LayerSelectionError,
                "The forward pass of `Bare` called none of its trainable layers with gradients on (`weights`), so "
                "there is no last one. Choose by name, which also finds parameters that are used without calling "
                'their layer, and check that `forward` sets no "no_grad".',
            ),
            (
                Mixing,
                "last",
                SampleMixingError,
                "Layer `body.2` (`BatchNorm1d`) normalises by the statistics of the batch, so a sample has no "
                "gradient of its own. Put the module into eval mode, and keep `track_running_stats=True`.",
            ),
            (
                Contrastive,
                "all",
                SampleMixingError,
                "The loss of one sample depends on other rows of the output of layer `body.0`. 1. The batch is not the "
                "first dimension there. 2. A layer above mixes samples (BatchNorm without running statistics, a "
                "contrastive loss). Such a sample has no gradient of its own. Choose a layer above it.",
            ),
        ],
    )
    def test_that_only_a_forward_can_refuse(self, tmp_path, module, layers, error, message):
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            fit(tmp_path, strict(layers=layers), module())

    @pytest.mark.parametrize(("module", "layers"), [(Bare, "weights"), (Unused, "bare"), (Unused, "last")])
    def test_the_way_out(self, tmp_path, module, layers):
        gradsim, module, _ = fit(tmp_path, strict(layers=layers), module())
        parameters = module.head if layers == "last" else module.get_submodule(layers)
        assert_exact(read(gradsim), Truth(module, list(parameters.parameters())), train_data(), val_data())


class TestLosses:
    def test_several_criteria(self, tmp_path):
        module = Classifier()
        module.other = nn.MSELoss()
        message = (
            "`Classifier` holds several criteria: `criterion` (CrossEntropyLoss), `other` (MSELoss). Which one is the "
            "loss of a sample cannot be told. Pass it as `loss_fn=` to `GradSimCallback`."
        )
        with pytest.raises(LossError, match=f"^{re.escape(message)}$"):
            fit(tmp_path, GradSimCallback(), module, callbacks=[Untouched()])

    def test_one_without_a_form_for_samples(self, tmp_path):
        message = (
            "The criterion `criterion` (CTCLoss) has no known per-sample form. Pass `loss_fn=` to `GradSimCallback`, a "
            "function of (outputs, targets) that returns one loss a sample."
        )
        with pytest.raises(LossError, match=f"^{re.escape(message)}$"):
            fit(tmp_path, GradSimCallback(), Classifier(nn.CTCLoss()), callbacks=[Untouched()])

    def test_one_value_for_all_samples(self, tmp_path):
        gradsim = GradSimCallback(loss_fn=lambda outputs, targets: F.cross_entropy(outputs, targets))
        with collect_warnings() as texts:
            fit(tmp_path, gradsim)
        assert gradsim.report is None
        (text,) = texts
        assert (
            "LossError: The loss from `loss_fn` returned shape () for 10 samples. Expected one value a sample. Pass "
            "`loss_fn=` to `GradSimCallback`, a function of (outputs, targets) that does not reduce over the batch "
            '(`reduction="none"`). '
        ) in text
