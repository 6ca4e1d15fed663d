"""The table of layer cases that ``tests/rules/test_exact.py`` compares with one-sample-at-a-time autograd.

A new rule, or a new way to use a layer, is a new row here and no new test code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.reference import to_dtype

NUM_CLASSES = 4
IGNORED = -1
SEED = 7


@dataclass(frozen=True, eq=False)
class Loss:
    """A criterion with the targets that it takes."""

    name: str
    make_criterion: Callable[[str], nn.Module]  # from a reduction
    make_targets: Callable[[int], Tensor]  # from a number of samples
    predict: Callable[[Tensor], Tensor] | None  # from outputs to the targets that the model would have right
    num_outputs: int = NUM_CLASSES


@dataclass(frozen=True, eq=False)
class Case:
    """A module, its inputs, the choice of layers, and the names that the choice must come to."""

    name: str
    make_module: Callable[[int], nn.Module]  # from a number of outputs
    make_inputs: Callable[[int], Tensor]  # from a number of samples
    layers: Any = "last"
    names: tuple[str, ...] = ("head",)
    loss: Loss = None  # cross-entropy
    num_train: int = 20
    num_queries: int = 6
    chosen: Any = None  # parameters by layer, where they are not all of the layers' own
    steps: Any = None  # step of the ladder by layer, or several that will do, where it is not a rule

    @property
    def parameters(self):
        """What the choice must come to, as the reference takes it."""
        return self.names if self.chosen is None else self.chosen

    def build(self, dtype=torch.float64):
        """The case in one dtype; the numbers are the same in each."""
        torch.manual_seed(SEED)
        loss = self.loss or CROSS_ENTROPY
        total = self.num_queries + self.num_train
        module = self.make_module(loss.num_outputs)
        inputs, targets = to_dtype(self.make_inputs(total), dtype), to_dtype(loss.make_targets(total), dtype)
        return Built(self, loss, module.to(dtype), inputs, targets, dtype)


@dataclass(frozen=True, eq=False)
class Built:
    """A case as tensors; the first samples are the queries."""

    case: Case
    loss: Loss
    module: nn.Module
    inputs: Tensor
    targets: Tensor
    dtype: torch.dtype

    @property
    def queries(self):
        number = self.case.num_queries
        return self.inputs[:number], self.targets[:number]

    @property
    def train(self):
        number = self.case.num_queries
        return self.inputs[number:], self.targets[number:]

    def criterion(self, reduction="none"):
        return self.loss.make_criterion(reduction).to(self.dtype)

    def losses(self, inputs, targets):
        values = self.criterion()(self.module(inputs), targets)
        return values.flatten(1).mean(1) if values.ndim > 1 else values


class Net(nn.Module):
    """``tail(head(body(x)))``."""

    def __init__(self, head, body=None, tail=None):
        super().__init__()
        # The head is registered first: "last" means the last called.
        self.head = head
        self.body = nn.Identity() if body is None else body
        self.tail = nn.Identity() if tail is None else tail

    def forward(self, x):
        return self.tail(self.head(self.body(x)))


class Mean(nn.Module):
    """Average over all positions: ``[n, ..., o]`` to ``[n, o]``, not linear in the positions."""

    def forward(self, x):
        return torch.tanh(x).flatten(1, -2).mean(1)


class KeywordCall(Net):
    def forward(self, x):
        return self.head(input=self.body(x))


class Recurrent(Net):
    def forward(self, x):
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = torch.tanh(self.body(state + x[:, step]))
        return self.head(state)


class Siamese(Net):
    def forward(self, x):
        return self.head(x[:, 0]) - self.head(x[:, 1]).square()


class SometimesUsed(Net):
    """Calls ``body`` only for batches that hold a sample with a positive first feature, and only these need it."""

    def forward(self, x):
        needed = (x[:, :1] > 0).to(x.dtype)
        if needed.any():
            x = x + needed * torch.tanh(self.body(x))
        return self.head(x)


class Unheard(Net):
    def forward(self, x):
        self.body(x)
        return self.head(x)


class Residual(Net):
    def forward(self, x):
        hidden = self.body(x)
        hidden += x  # in place, on the output of a chosen layer
        return self.head(hidden + hidden.sigmoid())


class Rearranged(nn.Module):
    """Runs a layer on an input whose memory is in another order."""

    def __init__(self, layer, *, channels_last=False):
        super().__init__()
        self.layer = layer
        self.channels_last = channels_last

    def forward(self, x):
        if self.channels_last:
            return self.layer(x.to(memory_format=torch.channels_last))
        return self.layer(x.transpose(1, 2))


class FirstOf(nn.Module):
    """A layer that returns several things, of which the first goes on."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.mix = nn.MultiheadAttention(4, 2, **options)

    def forward(self, x):
        return self.mix(x, x, x, need_weights=False)[0]


class TimeFirst(nn.Module):
    """Runs a layer on ``[t, n, ...]``."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class Flattened(nn.Module):
    """Runs a layer on ``[n t, ...]``."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Lora(nn.Linear):
    """A Linear with a low-rank addition to its weight."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.down = nn.Parameter(torch.randn(2, inputs))
        self.up = nn.Parameter(torch.randn(outputs, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


class Squared(nn.Module):
    """A layer of the user's own."""

    def __init__(self, features):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(features))

    def forward(self, x):
        return (x * self.scale).square() + x


class ClassToken(Net):
    """A bare parameter of the module itself."""

    def __init__(self, head, body):
        super().__init__(head, body)
        self.token = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x):
        return self.head(self.body(torch.cat([self.token.expand(len(x), -1, -1), x], dim=1))[:, 0])


class Tied(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self, outputs):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.table.weight
        self.last = nn.Linear(7, outputs)

    def forward(self, x):
        return self.last(torch.tanh(self.head(torch.tanh(self.table(x)).mean(1))))


class UsedOutside(Net):
    """The weight of ``body`` is used once more, without its layer."""

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)) + F.linear(x.sin(), self.body.weight))


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 4)

    def forward(self, x):
        return self.bag(x)


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = nn.Bilinear(3, 3, 4)

    def forward(self, x):
        return self.pair(x, x.sin())


class NoGradTrunk(Net):
    def forward(self, x):
        with torch.no_grad():
            hidden = self.body(x)
        return self.head(hidden)


class Checkpointed(Net):
    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def frozen(module, *names):
    for name, parameter in module.named_parameters():
        if not names or name in names:
            parameter.requires_grad_(False)
    return module


def with_hook(layer):
    layer.register_forward_hook(_double)
    return layer


def _double(_, __, output):
    return 2 * output


def trained_batchnorm(features):
    """A BatchNorm whose running statistics and affine parameters are not the initial ones."""
    layer = nn.BatchNorm1d(features)
    for values in (layer.running_mean, layer.running_var, layer.weight.data, layer.bias.data):
        values.uniform_(0.5, 1.5)
    return layer


def normal(*shape):
    return lambda number: torch.randn(number, *shape)


def flagged_normal(features):
    """The first sample has a positive first feature, some others have a negative one."""

    def make(number):
        inputs = torch.randn(number, features)
        inputs[:, 0] = inputs[:, 0].abs() * torch.where(torch.arange(number) % 3 == 0, 1, -1)
        return inputs

    return make


def late_flagged_normal(features):
    """Samples from the seventeenth on have a positive first feature."""

    def make(number):
        inputs = torch.randn(number, features)
        inputs[:, 0] = inputs[:, 0].abs() * torch.where(torch.arange(number) < 16, -1, 1)
        return inputs

    return make


def class_indices(number):
    return torch.randint(NUM_CLASSES, (number,))


def some_ignored(number):
    return class_indices(number).masked_fill(torch.arange(number) % 4 == 1, IGNORED)


def class_weights():
    return torch.linspace(0.2, 3.0, NUM_CLASSES)


def most_probable(outputs):
    return outputs.argmax(1)


def above_zero(outputs):
    return (outputs > 0).to(outputs.dtype)


def mlp(outputs, *activations):
    return Net(nn.Linear(8, outputs), nn.Sequential(nn.Linear(6, 8), *(activations or (nn.Tanh(),))))


def conv_net(outputs):
    trunk = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten())
    return Net(nn.Linear(12, outputs), trunk)


def regularised(outputs):
    return mlp(outputs, trained_batchnorm(8), nn.ReLU(inplace=True), nn.Dropout(0.5)).train()


def trained(layer):
    """A layer with parameters and running statistics unlike those at the start."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    if getattr(layer, "running_mean", None) is not None:
        nn.init.normal_(layer.running_mean)
        nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return layer.eval()


def layer_case(name, make_layer, *shape, inputs=None):
    """A layer without a head of its own kind: its outputs go through a Linear, and both are chosen."""

    def make_module(outputs):
        layer = trained(make_layer())
        example = torch.zeros(1, *shape, dtype=torch.float32 if inputs is None else torch.long)
        return Net(nn.Linear(layer(example).numel(), outputs), nn.Sequential(layer, nn.Tanh(), nn.Flatten()))

    return Case(name, make_module, inputs or normal(*shape), layers="all", names=("head", "body.0"))


def indices(*shape):
    return lambda number: torch.randint(7, (number, *shape))


PADDINGS = {"number": 1, "tuple": (2, 1), "same": "same", "valid": "valid"}
CONVOLUTIONS = (
    layer_case("conv1d", lambda: nn.Conv1d(2, 3, 3), 2, 8),
    layer_case("conv1d-stride-dilation-groups", lambda: nn.Conv1d(4, 6, 3, stride=2, dilation=2, groups=2), 4, 11),
    layer_case("conv2d", lambda: nn.Conv2d(2, 3, (3, 2)), 2, 5, 4),
    layer_case("conv2d-no-bias", lambda: nn.Conv2d(2, 3, 3, bias=False), 2, 5, 4),
    layer_case("conv2d-frozen-weight", lambda: frozen(nn.Conv2d(2, 3, 3), "weight"), 2, 5, 4),
    layer_case("conv2d-frozen-bias", lambda: frozen(nn.Conv2d(2, 3, 3), "bias"), 2, 5, 4),
    layer_case("conv2d-stride-dilation", lambda: nn.Conv2d(2, 3, 2, stride=(2, 1), dilation=(1, 2)), 2, 5, 5),
    layer_case("conv2d-depthwise", lambda: nn.Conv2d(4, 8, 3, groups=4), 4, 5, 4),
    layer_case("conv3d", lambda: nn.Conv3d(2, 4, 2, groups=2, padding=1), 2, 2, 3, 2),
    *(
        layer_case(
            f"conv2d-{mode}-{name}",
            lambda mode=mode, padding=padding: nn.Conv2d(2, 3, 3, padding=padding, padding_mode=mode),
            2,
            5,
            4,
        )
        for mode in ("zeros", "reflect", "replicate", "circular")
        for name, padding in PADDINGS.items()
    ),
)
NORMS = (
    layer_case("layernorm", lambda: nn.LayerNorm(5), 3, 5),
    layer_case("layernorm-flat", lambda: nn.LayerNorm(5), 5),
    layer_case("layernorm-two-dimensions", lambda: nn.LayerNorm((3, 5)), 2, 3, 5),
    layer_case("layernorm-no-bias", lambda: nn.LayerNorm(5, bias=False), 3, 5),
    layer_case("layernorm-frozen-weight", lambda: frozen(nn.LayerNorm(5), "weight"), 3, 5),
    layer_case("rmsnorm", lambda: nn.RMSNorm(5), 3, 5),
    layer_case("groupnorm", lambda: nn.GroupNorm(2, 6), 6, 3, 2),
    layer_case("batchnorm1d", lambda: nn.BatchNorm1d(5), 5),
    layer_case("batchnorm1d-long", lambda: nn.BatchNorm1d(5), 5, 4),
    layer_case("batchnorm2d", lambda: nn.BatchNorm2d(3), 3, 4, 2),
    layer_case("batchnorm3d", lambda: nn.BatchNorm3d(2), 2, 2, 3, 2),
)
EMBEDDINGS = (
    layer_case("embedding", lambda: nn.Embedding(7, 4), 5, inputs=indices(5)),
    layer_case("embedding-two-dimensions", lambda: nn.Embedding(7, 4), 2, 3, inputs=indices(2, 3)),
    layer_case("embedding-padding", lambda: nn.Embedding(7, 4, padding_idx=2), 5, inputs=indices(5)),
    layer_case("embedding-sparse", lambda: nn.Embedding(7, 4, sparse=True), 5, inputs=indices(5)),
)


def ladder_case(name, make_body, inputs, steps, features, chosen=None, layers="all", **options):
    """A body without a rule below a Linear head: the head goes by its rule, the body by the step named."""

    def make_module(outputs):
        return Net(nn.Linear(features, outputs), nn.Sequential(make_body(), nn.Tanh(), nn.Flatten()))

    steps = {f"body.0.{layer}" if layer else "body.0": step for layer, step in steps.items()}
    if chosen is not None:
        chosen = {"head": ("weight", "bias"), **{f"body.0.{k}" if k else "body.0": v for k, v in chosen.items()}}
    names = ("head", *steps)
    return Case(name, make_module, inputs, layers, names, chosen=chosen, steps=steps, **options)


# Some builds of PyTorch let vmap follow an LSTM in float32.
LSTM = {"layer": ("one at a time", "vmap(layer)")}
ATTENTION = {"mix": "vmap(layer)", "mix.out_proj": "vmap(layer)"}
WEIGHT_NORM = ("bias", "parametrizations.weight.original0", "parametrizations.weight.original1")
SPECTRAL_NORM = ("bias", "parametrizations.weight.original")
ENCODER_LAYER = {"self_attn": "vmap(layer)", "self_attn.out_proj": "vmap(layer)"}
ENCODER_RULES = dict.fromkeys(("linear1", "linear2", "norm1", "norm2"), "rule")


def encoder_layer(**options):
    return trained(nn.TransformerEncoderLayer(4, 2, 6, **options))


REARRANGED = (
    ladder_case(
        "conv2d-channels-last",
        lambda: Rearranged(nn.Conv2d(3, 4, 3), channels_last=True),
        normal(3, 7, 6),
        {"layer": "rule"},
        80,
    ),
    ladder_case("linear-not-contiguous", lambda: Rearranged(nn.Linear(5, 4)), normal(5, 3), {"layer": "rule"}, 12),
    ladder_case("conv1d-not-contiguous", lambda: Rearranged(nn.Conv1d(3, 4, 2)), normal(5, 3), {"layer": "rule"}, 16),
    ladder_case("layernorm-not-contiguous", lambda: Rearranged(nn.LayerNorm(5)), normal(5, 3), {"layer": "rule"}, 15),
    ladder_case(
        "large-conv2d",  # enough output pixels for convolution kernels instead of patches
        lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1, dilation=2),
        normal(2, 15, 13),
        {"": "rule"},
        126,
    ),
    ladder_case("large-conv2d-groups", lambda: nn.Conv2d(4, 6, (3, 2), groups=2), normal(4, 8, 8), {"": "rule"}, 252),
)
LADDER = (
    ladder_case("lstm", lambda: FirstOf(nn.LSTM(3, 4, batch_first=True)), normal(5, 3), LSTM, 20),
    ladder_case(
        "gru", lambda: FirstOf(nn.GRU(3, 4, 2, batch_first=True)), normal(5, 3), {"layer": "one at a time"}, 20
    ),
    ladder_case(
        "rnn-time-first", lambda: TimeFirst(FirstOf(nn.RNN(3, 4))), normal(5, 3), {"layer.layer": "one at a time"}, 20
    ),
    ladder_case("attention", lambda: trained(Attention(batch_first=True)), normal(3, 4), ATTENTION, 12),
    ladder_case(
        "attention-time-first",
        lambda: TimeFirst(trained(Attention())),
        normal(3, 4),
        {f"layer.{name}": "vmap(module)" for name in ATTENTION},
        12,
    ),
    ladder_case(
        "encoder-layer", lambda: encoder_layer(batch_first=True), normal(3, 4), ENCODER_LAYER | ENCODER_RULES, 12
    ),
    ladder_case(
        "encoder-time-first",
        lambda: TimeFirst(encoder_layer()),
        normal(3, 4),
        {f"layer.{name}": "vmap(module)" for name in ENCODER_LAYER | ENCODER_RULES},
        12,
    ),
    ladder_case(
        "encoder-above-a-fast-one",
        lambda: nn.TransformerEncoder(encoder_layer(batch_first=True), 2, enable_nested_tensor=False),
        normal(3, 4),
        {"layers.1.linear2": "rule"},
        12,
        layers=["head", "body.0.layers.1.linear2"],
    ),
    ladder_case(
        "weight-norm",
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)),
        normal(6),
        {"": "vmap(layer)"},
        4,
        {"": WEIGHT_NORM},
    ),
    ladder_case(
        "spectral-norm",
        lambda: nn.utils.parametrizations.spectral_norm(nn.Conv1d(2, 3, 3)),
        normal(2, 6),
        {"": "vmap(layer)"},
        12,
        {"": SPECTRAL_NORM},
    ),
    ladder_case("lora", lambda: Lora(6, 4), normal(6), {"": "vmap(layer)"}, 4),
    ladder_case("own-layer", lambda: Squared(6), normal(6), {"": "vmap(layer)"}, 6),
    ladder_case("bilinear", Bilinear, normal(3), {"pair": "vmap(layer)"}, 4),
    ladder_case("conv-transpose", lambda: nn.ConvTranspose2d(2, 3, 2), normal(2, 2, 2), {"": "vmap(layer)"}, 27),
    ladder_case("embedding-bag", Bags, indices(5), {"bag": "vmap(layer)"}, 4),
    ladder_case("time-first", lambda: TimeFirst(nn.Linear(3, 4)), normal(5, 3), {"layer": "vmap(module)"}, 20),
    ladder_case("flattened", lambda: Flattened(nn.Linear(3, 4)), normal(5, 3), {"layer": "vmap(module)"}, 20),
    *(
        ladder_case(
            f"instance-norm-{len(shape)}d",
            lambda kind=kind: trained(kind(3, affine=True)),
            normal(3, *shape),
            {"": "opacus"},
            3 * torch.Size(shape).numel(),
        )
        for kind, shape in ((nn.InstanceNorm1d, (4,)), (nn.InstanceNorm2d, (2, 3)), (nn.InstanceNorm3d, (2, 1, 2)))
    ),
    ladder_case(
        "instance-norm-running",
        lambda: trained(nn.InstanceNorm1d(3, affine=True, track_running_stats=True)),
        normal(3, 4),
        {"": "vmap(layer)"},
        12,
    ),
    Case(
        "class-token",
        lambda outputs: ClassToken(
            nn.Linear(4, outputs), nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Unflatten(1, (1, 4)))
        ),
        normal(3, 4),
        layers="all",
        names=("", "head", "body.1"),
        steps={"": "vmap(layer)"},
    ),
    Case(
        "tied",
        Tied,
        indices(3),
        layers="all",
        names=("table", "head", "last"),
        chosen={"table": ("weight",), "head": ("bias",), "last": ("weight", "bias")},
        steps={"table": "vmap(module)", "head": "vmap(module)"},
    ),
    Case("tied-head", Tied, indices(3), layers="head", names=("head",), steps={"head": "vmap(module)"}),
    Case(
        "used-outside",
        lambda outputs: UsedOutside(nn.Linear(6, outputs), nn.Linear(6, 6)),
        normal(6),
        layers="all",
        names=("head", "body"),
        steps={"body": "vmap(module)"},
    ),
    Case(
        "own-layer-sometimes-used",
        lambda outputs: SometimesUsed(nn.Linear(6, outputs), Squared(6)),
        flagged_normal(6),
        layers="all",
        names=("head", "body"),
        steps={"body": "vmap(layer)"},
    ),
)

PARTIAL = (
    Case("weight-alone", mlp, normal(6), "head.weight", ("head",), chosen={"head": ("weight",)}),
    Case(
        "bias-alone",
        mlp,
        normal(6),
        ["body.0.bias", "head"],
        ("body.0", "head"),
        chosen={"body.0": ("bias",), "head": ("weight", "bias")},
    ),
    Case("all-biases", mlp, normal(6), "*.bias", ("head", "body.0"), chosen={"head": ("bias",), "body.0": ("bias",)}),
    Case(
        "norm-scale-alone",
        lambda outputs: Net(nn.Linear(5, outputs), trained(nn.LayerNorm(5))),
        normal(5),
        "body.weight",
        ("body",),
        chosen={"body": ("weight",)},
    ),
    Case(
        "attention-projection-alone",
        lambda outputs: Net(nn.Linear(12, outputs), nn.Sequential(Attention(batch_first=True), nn.Flatten())),
        normal(3, 4),
        "body.0.mix.in_proj_weight",
        ("body.0.mix",),
        chosen={"body.0.mix": ("in_proj_weight",)},
        steps={"body.0.mix": "vmap(layer)"},
    ),
    Case("last-two", conv_net, normal(2, 4, 4), "last:2", ("body.0", "head")),
)

CROSS_ENTROPY = Loss(
    "cross-entropy", lambda reduction: nn.CrossEntropyLoss(reduction=reduction), class_indices, most_probable
)
LOSSES = (
    Loss(
        "class-weights",
        lambda reduction: nn.CrossEntropyLoss(class_weights(), reduction=reduction),
        class_indices,
        most_probable,
    ),
    Loss(
        "label-smoothing",
        lambda reduction: nn.CrossEntropyLoss(label_smoothing=0.2, reduction=reduction),
        class_indices,
        most_probable,
    ),
    Loss(
        "ignore-index",
        lambda reduction: nn.CrossEntropyLoss(ignore_index=IGNORED, reduction=reduction),
        some_ignored,
        most_probable,
    ),
    Loss(
        "soft-targets",
        lambda reduction: nn.CrossEntropyLoss(reduction=reduction),
        lambda number: torch.randn(number, NUM_CLASSES).mul(3).softmax(1),
        lambda outputs: F.one_hot(outputs.argmax(1), NUM_CLASSES).to(outputs.dtype),
    ),
    Loss(
        "binary",
        lambda reduction: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0]), reduction=reduction),
        lambda number: torch.randint(2, (number, 1)).float(),
        above_zero,
        num_outputs=1,
    ),
    Loss(
        "multi-label",
        lambda reduction: nn.BCEWithLogitsLoss(reduction=reduction),
        lambda number: torch.randint(2, (number, 3)).float(),
        above_zero,
        num_outputs=3,
    ),
    Loss("mse", lambda reduction: nn.MSELoss(reduction=reduction), normal(1), None, num_outputs=1),
    Loss("mse-vector", lambda reduction: nn.MSELoss(reduction=reduction), normal(3), None, num_outputs=3),
    Loss("huber", lambda reduction: nn.HuberLoss(reduction=reduction), normal(1), None, num_outputs=1),
)

CASES = (
    Case("linear-2d", lambda outputs: Net(nn.Linear(6, outputs)), normal(6)),
    Case("linear-3d", lambda outputs: Net(nn.Linear(6, outputs), tail=Mean()), normal(3, 6)),
    Case("linear-4d", lambda outputs: Net(nn.Linear(6, outputs), tail=Mean()), normal(2, 3, 6)),
    Case("linear-wide", lambda outputs: Net(nn.Linear(32, outputs), tail=Mean()), normal(2, 32)),
    Case("linear-long", lambda outputs: Net(nn.Linear(5, outputs), tail=Mean()), normal(30, 5)),
    Case("linear-is-the-module", lambda outputs: nn.Linear(6, outputs), normal(6), names=("",)),
    Case("no-bias", lambda outputs: Net(nn.Linear(6, outputs, bias=False)), normal(6)),
    Case("no-bias-3d", lambda outputs: Net(nn.Linear(6, outputs, bias=False), tail=Mean()), normal(3, 6)),
    Case("frozen-weight", lambda outputs: Net(frozen(nn.Linear(6, outputs), "weight")), normal(6)),
    Case("frozen-weight-3d", lambda outputs: Net(frozen(nn.Linear(6, outputs), "weight"), tail=Mean()), normal(3, 6)),
    Case("frozen-bias", lambda outputs: Net(frozen(nn.Linear(6, outputs), "bias")), normal(6)),
    Case("one-sample", lambda outputs: Net(nn.Linear(6, outputs)), normal(6), num_train=1),
    Case("in-place-relu-before", lambda outputs: mlp(outputs, nn.ReLU(inplace=True)), normal(6)),
    Case(
        "in-place-relu-after",
        lambda outputs: mlp(outputs, nn.ReLU(inplace=True)),
        normal(6),
        layers="body.0",
        names=("body.0",),
    ),
    Case("in-place-relu-at-the-end", lambda outputs: Net(nn.Linear(6, outputs), tail=nn.ReLU(inplace=True)), normal(6)),
    Case(
        "in-place-relu-after-3d",
        lambda outputs: Net(nn.Linear(8, outputs), nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True)), tail=Mean()),
        normal(3, 6),
        layers="all",
        names=("head", "body.0"),
    ),
    Case(
        "in-place-sum-after",
        lambda outputs: Residual(nn.Linear(6, outputs), nn.Linear(6, 6)),
        normal(6),
        layers="body",
        names=("body",),
    ),
    Case(
        "in-place-sum-after-3d",
        lambda outputs: Residual(nn.Sequential(nn.Linear(6, outputs), Mean()), nn.Linear(6, 6)),
        normal(3, 6),
        layers="body",
        names=("body",),
    ),
    Case(
        "called-repeatedly",
        lambda outputs: Recurrent(nn.Linear(6, outputs), nn.Linear(6, 6)),
        normal(3, 6),
        layers="all",
        names=("head", "body"),
    ),
    Case("called-twice", lambda outputs: Siamese(nn.Linear(6, outputs)), normal(2, 6)),
    Case(
        "sometimes-unused",
        lambda outputs: SometimesUsed(nn.Linear(6, outputs), nn.Linear(6, 6)),
        flagged_normal(6),
        layers="all",
        names=("head", "body"),
    ),
    Case(
        "used-by-late-samples-only",
        lambda outputs: SometimesUsed(nn.Linear(6, outputs), nn.Linear(6, 6)),
        late_flagged_normal(6),
        layers="all",
        names=("head", "body"),
    ),
    Case(
        "output-without-effect",
        lambda outputs: Unheard(nn.Linear(6, outputs), nn.Linear(6, 6)),
        normal(6),
        layers=["head", "body"],
        names=("head", "body"),
    ),
    Case("keyword-call", lambda outputs: KeywordCall(nn.Linear(6, outputs)), normal(6)),
    Case("hook-of-the-user", lambda outputs: Net(with_hook(nn.Linear(6, outputs)), nn.Linear(6, 6)), normal(6)),
    Case("frozen-trunk", lambda outputs: Net(nn.Linear(8, outputs), frozen(nn.Linear(6, 8))), normal(6)),
    Case("trunk-without-grad", lambda outputs: NoGradTrunk(nn.Linear(8, outputs), nn.Linear(6, 8)), normal(6)),
    Case(
        "checkpointed-trunk",
        lambda outputs: Checkpointed(
            nn.Sequential(nn.Linear(8, outputs), Mean()), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        ),
        normal(3, 6),
        layers=["body.2", "head.0"],
        names=("body.2", "head.0"),
    ),
    Case("mlp-all", mlp, normal(6), layers="all", names=("head", "body.0")),
    Case(
        "several-layers",
        lambda outputs: mlp(outputs, nn.GELU(), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh()),
        normal(6),
        layers=["body.0", "body.4"],
        names=("body.0", "body.4"),
    ),
    Case("dropout-and-batchnorm", regularised, normal(6)),
    Case("dropout-and-batchnorm-below", regularised, normal(6), layers="body.0", names=("body.0",)),
    Case("conv-trunk", conv_net, normal(2, 4, 4)),
    *CONVOLUTIONS,
    *NORMS,
    *EMBEDDINGS,
    *REARRANGED,
    *LADDER,
    *PARTIAL,
    *(Case(f"loss-{loss.name}", mlp, normal(6), layers="all", names=("head", "body.0"), loss=loss) for loss in LOSSES),
)
