"""Layers that no rule serves, in a real run."""

import pytest
import torch
from torch import nn

from lightning_gradsim import GradSimCallback
from tests.trainer.support import Classifier, collect_warnings, fit


class Ends(Classifier):
    """A Classifier whose outputs go through one more layer."""

    def __init__(self, layer):
        super().__init__()
        self.mix = layer

    def forward(self, x):
        x = super().forward(x)
        if isinstance(self.mix, nn.GRU):
            return self.mix(x[:, None])[0][:, 0]
        return self.mix(x, x) if isinstance(self.mix, nn.Bilinear) else self.mix(x)


LAYERS = {
    "bilinear": lambda: nn.Bilinear(4, 4, 4),
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "gru": lambda: nn.GRU(4, 4, batch_first=True),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize(("layers", "names"), [("last", ("mix",)), ("all", ("body.0", "head", "mix"))])
def test_layers_without_a_rule(tmp_path, make, layers, names):
    torch.manual_seed(0)
    with collect_warnings() as texts:
        gradsim, _, _ = fit(tmp_path, GradSimCallback(layers=layers, on_error="raise"), Ends(make()))
    assert not texts
    assert sorted(gradsim.report.layers) == sorted(names)
    assert gradsim.report.queries
    assert all(query.look_alikes for query in gradsim.report.queries)


def test_a_layer_without_a_rule_that_is_never_called_is_harmless(tmp_path):
    class Unused(Classifier):
        def __init__(self):
            super().__init__()
            self.mix = nn.Bilinear(2, 2, 2)

    gradsim, _, _ = fit(tmp_path, GradSimCallback(layers="all", on_error="raise"), Unused())
    plain, _, _ = fit(tmp_path, GradSimCallback(layers="all", on_error="raise"), Classifier())
    assert gradsim.report.num_train_samples == plain.report.num_train_samples


def test_the_last_two(tmp_path):
    gradsim, _, _ = fit(tmp_path, GradSimCallback(layers="last:2", on_error="raise"))
    assert gradsim.report.layers == ("body.0", "head")


def test_a_parameter_by_name(tmp_path):
    gradsim, _, _ = fit(tmp_path, GradSimCallback(layers="head.bias", on_error="raise"))
    assert gradsim.report.layers == ("head.bias",)
