"""Layers that no rule serves, in a real run."""

import json

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_gradsim import GradSimCallback
from tests.trainer.support import Classifier, collect_warnings, fit, strict, train_data


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


def test_the_plan_is_in_the_report_and_in_the_log_once(tmp_path, caplog):
    with caplog.at_level("INFO", logger="lightning_gradsim"):
        gradsim, _, _ = fit(tmp_path, strict(layers="all", memory_budget=2**30), max_epochs=3)
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_gradsim")]
    assert len(logged) == 1
    assert logged[0].startswith("the plan of `gradsim`:\nlayer")
    report = gradsim.report
    assert [layer.name for layer in report.plan.layers] == list(report.layers) == ["body.0", "head"]
    assert report.plan.num_query_gradients == 2 * len(report.queries)
    assert report.plan.memory_budget == 2**30
    [path] = tmp_path.glob("**/report.json")
    written = json.loads(path.read_text())["plan"]
    assert [layer["step"] for layer in written["layers"]] == ["rule", "rule"]
    assert written["forward_flops"] == report.plan.forward_flops


def test_the_budget_changes_no_result(tmp_path):
    reports = []
    for budget in (None, 1):
        torch.manual_seed(0)
        gradsim, _, _ = fit(
            tmp_path / str(budget), GradSimCallback(layers="all", memory_budget=budget, on_error="raise"), Classifier()
        )
        reports.append(gradsim.report)
    first, second = reports
    assert second.plan.rows == 1 < first.plan.rows
    assert [q.sample_id for q in first.queries] == [q.sample_id for q in second.queries]
    for one, other in zip(first.queries, second.queries, strict=True):
        assert [s.sample_id for s in one.harmful] == [s.sample_id for s in other.harmful]
        assert [s.score for s in one.harmful] == pytest.approx([s.score for s in other.harmful], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize(
    ("budget", "error"), [(0, ValueError), (2.5, TypeError), ("1GB", TypeError), (True, TypeError)]
)
def test_budgets_that_are_none(budget, error):
    with pytest.raises(error, match=r"`memory_budget=.*Expected a whole number of at least 1"):
        GradSimCallback(memory_budget=budget)


def test_running_short_of_memory_is_noted(tmp_path):
    class Narrow(Classifier):
        capacity = 1000

        def forward(self, x):
            if len(x) > self.capacity:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x)

    class Squeeze(Callback):
        """Leaves little memory for what follows."""

        def on_validation_epoch_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                pl_module.capacity = 3

    def report_with(*callbacks):
        torch.manual_seed(0)
        gradsim, _, _ = fit(tmp_path, GradSimCallback(on_error="raise"), Narrow(), callbacks=list(callbacks))
        return gradsim.report

    assert not any("memory" in note for note in report_with().notes)
    report = report_with(Squeeze())
    assert any("memory did not suffice for what was planned" in note for note in report.notes)
    assert report.num_train_samples == len(train_data())
