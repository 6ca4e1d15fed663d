"""The plan says what a pass does, and a pass does what the plan says."""

import copy
import json
from dataclasses import asdict

import pytest
import torch
from torch import nn

from lightning_gradsim import GradSimCallback, plan
from lightning_gradsim.adapter import Adapter
from lightning_gradsim.engine import EngineSettings, run_pass
from lightning_gradsim.errors import LayerSelectionError
from lightning_gradsim.factors import OuterFactors, product_cost
from lightning_gradsim.plan_record import LayerPlan, Plan, in_bytes
from lightning_gradsim.query_side import QueryBatch

QUERIES = 5


class Net(nn.Module):
    """A table, a convolution, attention, and a head."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.conv(self.table(x).transpose(1, 2)).transpose(1, 2)
        return self.head(self.mix(x, x, x, need_weights=False)[0].mean(1))


@pytest.fixture
def module():
    return Net()


@pytest.fixture
def batch():
    return torch.randint(50, (12, 6)), torch.randint(3, (12,))


def test_a_row_for_every_layer(module, batch):
    found = plan(module, batch, "all", num_queries=QUERIES, memory_budget=2**30, show=False)
    rows = {layer.name: (layer.kind, layer.step, layer.product) for layer in found.layers}
    assert rows == {
        "table": ("Embedding", "rule", "indexed"),
        "conv": ("Conv1d", "rule", "materialise"),
        "mix": ("MultiheadAttention", "vmap(layer)", "materialise"),
        "mix.out_proj": ("NonDynamicallyQuantizableLinear", "vmap(layer)", "materialise"),
        "head": ("Linear", "rule", "gram"),
    }
    assert sum(layer.num_parameters for layer in found.layers) == sum(p.numel() for p in module.parameters())
    assert (found.num_query_gradients, found.batch_size, found.rows, found.memory_budget) == (10, 12, 12, 2**30)
    assert all(layer.flops > 0 and layer.num_bytes > 0 and layer.query_bytes > 0 for layer in found.layers)
    assert [layer.name for layer in found.layers if layer.reason] == ["mix", "mix.out_proj"]
    assert found.layers[2].reason == "No gradient rule for layer `mix` (`MultiheadAttention`): its type has none."


def test_operations_of_the_head(module, batch):
    """A product of features for every query, one of output gradients for each of its labels, and the norm."""
    [head] = plan(module, batch, num_queries=QUERIES, show=False).layers
    assert head.flops == 2 * ((QUERIES + 1) * (8 + 1) + (2 * QUERIES + 1) * 3)
    assert head.num_bytes == 4 * (8 + 3)


def test_operations_of_a_plain_forward():
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    found = plan(module, (torch.randn(9, 6), torch.randint(3, (9,))), "all", show=False)
    assert found.forward_flops == 2 * (6 * 5 + 5 * 3)
    assert found.share(found.layers[0]) == found.layers[0].flops / found.forward_flops


def test_the_module_is_left_as_found(module, batch):
    module.train()
    state, hooks = copy.deepcopy(module.state_dict()), [len(part._forward_hooks) for part in module.modules()]
    generator = torch.get_rng_state()
    plan(module, batch, "all", show=False)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert all(part.training for part in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert [len(part._forward_hooks) for part in module.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("number", [1, 2, 9, 17])
def test_batches_of_any_size(module, number):
    found = plan(module, (torch.randint(50, (number, 6)), torch.randint(3, (number,))), "all", show=False)
    assert len(found.layers) == 5
    assert found.batch_size == number


def test_a_pass_reports_the_plan_that_was_made_before(module, batch):
    expected = plan(module, batch, "all", num_queries=QUERIES, memory_budget=2**30, show=False)
    adapter = Adapter()
    adapter.bind(module)
    with torch.no_grad():
        wrong = (module.eval()(batch[0][:QUERIES]).argmax(1) + 1) % 3
    queries = [QueryBatch(range(QUERIES), (batch[0][:QUERIES], wrong))]
    settings = EngineSettings("all", memory_budget=2**30)
    result = run_pass(module, adapter, queries, [(torch.arange(12), batch)], settings)
    assert result.plan == expected
    assert not result.ran_short


def test_a_small_budget_takes_few_samples_at_a_time(module, batch):
    found = plan(module, batch, "all", memory_budget=20_000, show=False)
    assert 1 <= found.rows < 12
    assert plan(module, batch, "all", memory_budget=1, show=False).rows == 1


def test_materialised_gradients_of_queries_count_where_they_are_kept(module, batch):
    conv = plan(module, batch, "conv", num_queries=QUERIES, teachers=False, show=False).layers[0]
    factors = 4 * (8 * 6 + 8 * 6)
    assert conv.num_bytes == factors
    assert conv.query_bytes == QUERIES * (factors + 4 * 8 * (8 * 3 + 1))


def test_parameters_by_name(module, batch):
    found = plan(module, batch, ["head.bias", "mix.in_proj_weight"], show=False)
    assert {layer.name: layer.num_parameters for layer in found.layers} == {"head.bias": 3, "mix.in_proj_weight": 192}


def test_the_table_is_printed(module, batch, capsys):
    found = GradSimCallback(layers="all", num_queries=QUERIES).plan(module, batch)
    output = capsys.readouterr().out
    assert output == f"{found}\n"
    lines = output.splitlines()
    assert lines[0].split("  ")[0] == "layer"
    assert [line.split()[0] for line in lines[1:6]] == ["table", "conv", "mix", "mix.out_proj", "head"]
    assert all("%" in line for line in lines[1:6])
    assert lines[6].startswith("10 query gradients; plain forward: ")
    assert lines[7].startswith("mix: No gradient rule")


def test_wrong_choices_raise(module, batch):
    with pytest.raises(LayerSelectionError, match="matches no layer"):
        plan(module, batch, "nothing")


def test_where_operations_cannot_be_counted():
    row = LayerPlan("head", "Linear", 10, "rule", "gram", 100, 44, 440)
    found = Plan((row,), 10, 64, 64, 2**20, None)
    assert found.share(row) is None
    assert str(found).splitlines()[1].endswith(" ?")
    assert "plain forward: not counted" in str(found)
    assert json.loads(json.dumps(asdict(found)))["layers"][0]["step"] == "rule"


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**31, "2.0 GiB"), (2**52, "4096.0 TiB")]
)
def test_bytes_in_words(number, words):
    assert in_bytes(number) == words


@pytest.mark.parametrize(("positions", "kind"), [(1, "gram"), (2, "gram"), (40, "materialise")])
def test_the_cheaper_product_is_chosen(positions, kind):
    factors = OuterFactors(torch.randn(8, positions, 1, 16), torch.randn(8, positions, 1, 16), bias=False)
    assert product_cost(factors, 4, 4, positions)[0] == kind


def test_influence_compares_preconditioned_gradients_too(module, batch):
    one, other = (
        plan(module, batch, "all", num_queries=QUERIES, similarity=similarity, show=False)
        for similarity in ("dot", "influence")
    )
    assert (one.num_query_gradients, other.num_query_gradients) == (2 * QUERIES, 4 * QUERIES)
