"""The self-check: silent on what is right, loud and precise on what is not, and without a trace."""

import copy
import dataclasses
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

from lightning_gradsim import Adapter, Verification, verify
from lightning_gradsim.errors import (
    BatchFormatError,
    LabelRangeError,
    LayerSelectionError,
    LossError,
    NonFiniteError,
    VerificationError,
)
from lightning_gradsim.factors import OuterFactors
from lightning_gradsim.rules import registry
from lightning_gradsim.verification import descent, exactness, run
from lightning_gradsim.verification.record import Check
from tests.cases import CASES

SELECTED = """
linear-3d in-place-relu-after-3d called-repeatedly called-twice sometimes-unused no-bias frozen-weight
linear-is-the-module keyword-call dropout-and-batchnorm-below conv1d-stride-dilation-groups
conv2d-reflect-tuple layernorm groupnorm batchnorm2d embedding embedding-padding embedding-sparse lstm gru
attention attention-time-first encoder-layer weight-norm spectral-norm lora embedding-bag time-first flattened
instance-norm-1d instance-norm-running class-token tied tied-head used-outside own-layer-sometimes-used
weight-alone all-biases last-two loss-class-weights loss-ignore-index loss-soft-targets loss-binary
loss-multi-label loss-mse-vector
"""
BATCH = 10


class Net(nn.Module):
    def __init__(self, *body, change=lambda x: x):
        super().__init__()
        self.head = nn.Linear(8, 4)
        self.body = nn.Sequential(nn.Linear(6, 8), *body)
        self.change = change

    def forward(self, x):
        return self.head(self.change(self.body(x)))


class Own(nn.Module):
    """A layer without parameters that does something to its input."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(x)


def data(number=BATCH, dtype=torch.float32):
    return torch.randn(number, 6, dtype=dtype), torch.arange(number) % 4


def check_of(found, name):
    return next(check for check in found.checks if check.name == name)


def composition_of(module, **options):
    found = verify(module, data(), **options)
    assert not found
    assert check_of(found, "sign").passed is None
    assert check_of(found, "exactness").passed is not True
    check = check_of(found, "batch composition")
    assert check.passed is False
    assert check.difference > 1e-3
    return check.message


@pytest.mark.parametrize("name", SELECTED.split())
def test_what_is_right_passes(name):
    case = next(case for case in CASES if case.name == name)
    built = case.build()
    found = verify(built.module, built.train, case.layers, loss_fn=built.criterion(), num_samples=3)
    assert found, str(found)
    assert [check.passed for check in found.checks] == [True] * 3, str(found)
    assert all(check.difference < 1e-10 for check in found.checks[:2])
    expected = dict.fromkeys(case.names, "rule") | (case.steps or {})
    assert list(found.steps) == list(case.names)
    assert all(step in expected[name] for name, step in found.steps.items())
    assert all((name in found.reasons) == (step not in ("rule", "opacus")) for name, step in found.steps.items())


@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("number", [2, 3, BATCH])
def test_float32(layers, number):
    found = verify(Net(nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout()), data(number), layers)
    assert [check.passed for check in found.checks] == [True] * 3, str(found)
    assert check_of(found, "exactness").count.startswith(f"{min(number, 4)} samples")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    found = verify(Net(nn.Tanh()), data(), "all", forward_context=lambda: torch.autocast("cpu", dtype=dtype))
    assert found, str(found)
    assert check_of(found, "exactness").difference > 1e-5
    # Steps are taken in float64, without it.
    assert check_of(found, "sign").passed


def test_a_module_in_half_precision():
    x, y = data()
    assert verify(Net(nn.Tanh()).to(torch.bfloat16), (x.to(torch.bfloat16), y), "all")


def test_a_module_that_asks_for_its_dtype_takes_larger_steps():
    found = verify(Net(Own(lambda x: F.linear(x.float(), torch.eye(8))), nn.Tanh()), data(), "all")
    assert check_of(found, "sign").passed, str(found)
    assert "to 50 %" in check_of(found, "sign").message


@pytest.mark.parametrize("margin", [8, 12, 14, 16])
def test_samples_that_the_model_is_sure_of(margin):
    """In float32 their gradients are made of rounding, and sums may run in another order for one sample."""
    module = Net(nn.Tanh(), change=lambda x: x * (1 + 3e-6 * (len(x) > 1)))
    module.head.bias.data[0] += margin
    found = verify(module, (data(32)[0], torch.zeros(32, dtype=torch.long)), "all")
    assert [check.passed for check in found.checks[:2]] == [True, True], str(found)
    assert check_of(found, "sign").passed is not False, str(found)


def test_a_criterion_that_asks_for_its_dtype():
    found = verify(Net(), data(), loss_fn=nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 2.0, 3.0])))
    assert check_of(found, "sign").passed, str(found)


def test_a_loss_in_float32_takes_larger_steps():
    found = verify(Net(), data(), loss_fn=lambda o, y: F.cross_entropy(o.float(), y, reduction="none"))
    assert check_of(found, "sign").passed, str(found)
    assert "to 50 %" in check_of(found, "sign").message


@pytest.mark.parametrize("form", ["mapping", "step"])
def test_batches_as_the_adapter_reads_them(form):
    class OwnStep(Net):
        def gradsim_step(self, batch):
            logits = self(batch["wave"])
            return logits, batch["word"], F.cross_entropy(logits, batch["word"], reduction="none")

    x, y = data()
    if form == "mapping":
        assert verify(Net(), {"x": x, "labels": y, "note": "common"}, "all")
    else:
        assert verify(OwnStep(), {"wave": x, "word": y}, "all")


def test_an_adapter_is_asked_and_left_as_found():
    class Scaled(Adapter):
        def split(self, batch):
            return batch[0] / 7, batch[2]

    adapter = Scaled()
    before = dict(vars(adapter))
    x, y = data()
    assert verify(Net(), (x, "a word", y), adapter=adapter, loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1))
    assert vars(adapter) == before


def test_a_lightning_module():
    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.token = Net(nn.ReLU()), nn.Parameter(torch.zeros(6))

        def forward(self, x):
            return self.net(x + self.token)

    found = verify(Module(), data(), "all")
    assert found, str(found)
    assert found.steps[""] == "vmap(layer)"


class Branches(nn.Module):
    """Which layer comes first depends on the size of the batch."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.head((self.one if len(x) > 1 else self.other)(x))


torch.manual_seed(3)  # the modules of the table are made on import, before any fixture
MIXERS = {
    "batch-norm": (Net(nn.BatchNorm1d(8)), {"evaluate": False}, r"`body\.1` \(`BatchNorm1d`\) mixes.*evaluate=True"),
    "no-statistics": (
        Net(nn.Tanh(), nn.BatchNorm1d(8, track_running_stats=False)),
        {},
        r"`body\.2` \(`BatchNorm1d`\) mixes samples.*track_running_stats=True",
    ),
    "own-layer": (Net(Own(lambda x: x - x.mean(0)), nn.Tanh()), {}, r"Layer `body\.1` \(`Own`\) mixes samples"),
    "in-place": (Net(Own(lambda x: x.sub_(x.mean(0)))), {}, r"Layer `body\.1` \(`Own`\) mixes samples"),
    "time-first": (
        Net(
            Own(lambda x: x.unflatten(1, (2, 4)).transpose(0, 1)),
            Own(lambda x: x - x.mean(1, keepdim=True)),
            Own(lambda x: x.transpose(0, 1).flatten(1)),
        ),
        {},
        r"Layer `body\.2` \(`Own`\) mixes samples",
    ),
    "flattened": (
        Net(Own(lambda x: x.reshape(-1, 4)), Own(lambda x: x - x.mean(0)), Own(lambda x: x.reshape(-1, 8))),
        {},
        r"Layer `body\.2` \(`Own`\) mixes samples",
    ),
    "branches": (Branches(), {}, r"No layer gives other outputs.*or code between the layers does"),
    "first-of-two": (
        Net(Own(lambda x: x - x.mean(0)), Own(lambda x: x / x.norm(dim=0))),
        {},
        r"Layer `body\.1` \(`Own`\)",
    ),
    "by-place": (
        Net(Own(lambda x: x * torch.arange(1, len(x) + 1)[:, None])),
        {},
        r"(alone|place).*`body\.1` \(`Own`\) mixes",
    ),
    "before-the-layers": (
        nn.Sequential(Net()),
        {
            "adapter": type(
                "Centred", (Adapter,), {"split": lambda self, batch: (batch[0] - batch[0].mean(0), batch[1])}
            )()
        },
        r"No layer gives other outputs.*so the loss mixes samples, or code between the layers",
    ),
    "forward": (Net(change=lambda x: x - x.mean(0)), {}, r"The forward of `Net`, between the layers in it, mixes"),
    "inner-forward": (nn.Sequential(Net(change=lambda x: x.cumsum(0))), {}, r"Layer `0` \(`Net`\), between the layers"),
    "contrastive": (
        Net(),
        {"loss_fn": lambda o, y: F.cross_entropy(o, y, reduction="none") * (o @ o.T).logsumexp(1)},
        r"No layer gives other outputs.*so the loss mixes samples",
    ),
    "shared-constant": (
        Net(),
        {"loss_fn": lambda o, y: F.cross_entropy(o, y, reduction="none") + o.detach().mean()},
        r"No layer gives other outputs.*so the loss mixes samples",
    ),
    "dropout": (Net(nn.Tanh(), nn.Dropout()), {"evaluate": False}, r"`body\.2` \(`Dropout`\) draws random.*eval mode"),
    "ignores-eval": (
        Net(Own(lambda x: F.dropout(x, training=True)), nn.Tanh()),
        {},
        r"again. Layer `body\.1` \(`Own`\) draws random numbers.*training=self\.training",
    ),
    "random-loss": (
        Net(),
        {"loss_fn": lambda o, y: F.cross_entropy(o + torch.randn_like(o), y, reduction="none")},
        r"so the loss draws random numbers, or code",
    ),
    "random-forward": (Net(change=lambda x: x + torch.rand(8)), {}, r"The forward of `Net`.*draws random numbers"),
}


@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("name", MIXERS)
def test_mixing_is_named(name, layers):
    module, options, message = MIXERS[name]
    found = composition_of(copy.deepcopy(module), layers=layers, **options)
    assert re.search(message, found), found


def test_a_module_that_refuses_a_batch_of_one():
    def refuse(x):
        if len(x) == 1:
            raise ValueError("more than one, please")
        return x

    found = verify(Net(Own(refuse)), data())
    check = check_of(found, "batch composition")
    assert check.passed is False
    assert "cannot run alone: more than one, please. Expected" in check.message


def test_batch_norm_by_a_batch_of_two():
    check = check_of(verify(Net(nn.BatchNorm1d(8)), data(2), evaluate=False), "batch composition")
    assert "Layer `body.1` (`BatchNorm1d`) mixes samples" in check.message


def test_a_place_that_is_special():
    """A sample is the same alone, in a smaller batch, and where it is; but not one place further."""

    def change(x):
        return x * (1 + ((torch.arange(len(x)) == 8) & (len(x) == BATCH)).float()[:, None])

    labels = torch.zeros(BATCH, dtype=torch.long).index_fill(0, torch.tensor([2, 9]), 3)
    loss_fn = lambda o, y: F.cross_entropy(o, y, reduction="none") + 100 * y  # noqa: E731 -- chooses both
    check = check_of(verify(Net(Own(change)), (data()[0], labels), loss_fn=loss_fn, num_samples=2), "batch composition")
    assert re.match(r"Sample 9 has .* at another place of its batch. Layer `body\.1` \(`Own`\) mixes", check.message)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.shape[0]


def test_gradients_that_mix_where_losses_do_not():
    message = composition_of(Net(Own(Scaled.apply)), layers="all")
    assert "one loss in its batch and alone, but two gradients" in message
    assert "A backward of the module's own" in message


def test_gradients_scaled_by_frequency():
    module = nn.Sequential(nn.Embedding(3, 6, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(12, 4))
    batch = torch.randint(3, (BATCH, 2)), torch.arange(BATCH) % 4
    found = verify(module, batch, "all")
    assert "`0` (`Embedding`) scales gradients by how often" in check_of(found, "batch composition").message
    assert verify(module, batch, "last")


@pytest.fixture
def _registered(monkeypatch):
    """What a test registers is gone afterwards."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x):
        return x * self.weight


@pytest.mark.usefixtures("_registered")
def test_a_wrong_rule_whose_sum_is_wrong_is_not_used_and_named():
    @registry.register_rule(Scale, parameters=("weight",))
    def doubled(layer, activations, output_grads):
        return OuterFactors.from_gradients([2 * activations * output_grads])

    found = verify(Net(Scale()), data(), "all")
    assert found, str(found)
    assert found.steps["body.1"] == "vmap(module)"
    assert "layer `body.1` do not sum to autograd's gradient" in found.reasons["body.1"]
    assert "its gradient rule is wrong" in " ".join(str(found).split())


@pytest.mark.usefixtures("_registered")
def test_a_wrong_rule_whose_sum_is_right():
    @registry.register_rule(Scale, parameters=("weight",))
    def exchanged(layer, activations, output_grads):
        return OuterFactors.from_gradients([(activations * output_grads).roll(1, 0)])

    found = verify(Net(Scale()), data(), "all")
    check = check_of(found, "exactness")
    assert check.passed is False
    assert "for layer `body.1`" in check.message
    assert "If `register_rule(Scale)` gave it a rule, this rule is wrong" in check.message
    assert check_of(found, "batch composition").passed
    assert verify(Net(Scale()), data(), "body.0")


@pytest.mark.parametrize("product", ["dot", "squared_norms"])
def test_wrong_products_are_told_from_wrong_gradients(product, monkeypatch):
    right = getattr(exactness, product)
    monkeypatch.setattr(exactness, product, lambda *parts: right(*parts) + 1)
    check = check_of(verify(Net(), data()), "exactness")
    assert check.passed is False
    assert "Gradients are right, but their products are off" in check.message


@pytest.mark.parametrize("factor", [-1, 0.9], ids=["sign", "size"])
def test_steps_that_do_not_follow_the_similarities(factor, monkeypatch):
    right = exactness.compute_products
    monkeypatch.setattr(
        run,
        "compute_products",
        lambda *args: dataclasses.replace(right(*args), dots=factor * right(*args).dots),
    )
    check = check_of(verify(Net(nn.Tanh()), data(), "all"), "sign")
    assert check.passed is False
    assert "A step on sample" in check.message
    assert "by their dot product, to 5 %" in check.message


def test_pairs_that_say_nothing_are_counted(monkeypatch):
    monkeypatch.setattr(descent, "MIN_COSINE", 0.999999)
    found = verify(Net(nn.Tanh()), data(), "all")
    assert check_of(found, "sign").count == "4 of 16 pairs, 4 proponents"
    monkeypatch.setattr(descent, "MIN_COSINE", 1.1)
    found = verify(Net(nn.Tanh()), data(), "all")
    assert check_of(found, "sign").passed is None
    assert found
    assert "not tested  sign" in str(found)


class InPlace(Net):
    def forward(self, x):
        hidden = self.body(x)
        output = self.head(hidden)
        hidden.mul_(2)
        return output


@pytest.mark.parametrize("layers", ["last", "all", "body.0"])
def test_an_input_changed_in_place(layers):
    found = verify(InPlace(), data(), layers)
    check = check_of(found, "exactness")
    assert check.passed is False
    assert "Autograd has no gradient: the input of layer `head` is changed in place" in check.message
    assert [check.passed for check in found.checks[1:]] == [None, None]


class Untidy(Net):
    """Changes whatever it can: buffers, modes, weights (through `max_norm`), random numbers."""

    def __init__(self):
        super().__init__(nn.BatchNorm1d(8), nn.Dropout(), nn.ReLU(inplace=True))
        self.register_buffer("calls", torch.zeros(()))
        self.table = nn.Embedding(3, 8, max_norm=0.1)

    def forward(self, x):
        self.calls += 1
        self.body[2].training = not self.body[2].training
        random.random(), np.random.rand(), torch.rand(1)
        with torch.no_grad():
            self.table(torch.tensor([0, 1]))
        return super().forward(x)


def trace_of(module):
    return (
        {name: (id(p), p.detach().clone(), p.grad.clone()) for name, p in module.named_parameters()},
        {name: (id(b), b.clone()) for name, b in module.named_buffers()},
        [part.training for part in module.modules()],
        [
            len(part._forward_hooks) + len(part._forward_pre_hooks) + len(part._backward_hooks)
            for part in module.modules()
        ],
        [sorted(vars(part)) for part in module.modules()],
        torch.get_rng_state(),
        random.getstate(),
        str(np.random.get_state()),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.backends.mha.get_fastpath_enabled()),
    )


def assert_same(first, second):
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        assert_same(list(first.values()), list(second.values()))
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    else:
        assert first == second


@pytest.mark.parametrize("evaluate", [True, False])
@pytest.mark.parametrize("outside", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fails", [False, True])
def test_the_module_is_left_as_found(evaluate, outside, fails):
    module, batch = Untidy(), data()
    (module.head(module.body(batch[0])).sum() + module.table.weight.sum()).backward()
    module.body[1].eval()
    if fails:
        module.change = lambda x: x[:, :5]
    before, batch_before = trace_of(module), [part.clone() for part in batch]
    with outside():
        if fails:
            with pytest.raises(RuntimeError):
                verify(module, batch, "body*", evaluate=evaluate)
        else:
            verify(module, batch, "body*", evaluate=evaluate)
    assert_same(before, trace_of(module))
    assert_same(batch_before, list(batch))


ERRORS = {
    "module": ({"module": Net}, TypeError, "`module` is a type. Expected an `nn.Module`"),
    "adapter": ({"adapter": Adapter}, TypeError, "`adapter` is a type. Expected an instance"),
    "num-samples": ({"num_samples": 1}, ValueError, "`num_samples=1` is too few.* at least 2"),
    "step-size": ({"step_size": 0}, ValueError, "`step_size=0` is no small step"),
    "one-sample": ({"batch": data(1)}, BatchFormatError, "`batch` holds 1 sample. Expected at least 2"),
    "form": ({"batch": torch.zeros(3)}, BatchFormatError, "A batch is a Tensor"),
    "layers": ({"layers": "hed"}, LayerSelectionError, "Closest: `head`"),
    "labels": ({"batch": (data()[0], torch.full((BATCH,), 4))}, LabelRangeError, "4"),
    "loss": ({"batch": (data()[0], torch.rand(BATCH))}, LossError, "No loss is known"),
    "not-finite": (
        {"batch": (data()[0].index_fill(0, torch.tensor([3]), float("nan")), data()[1])},
        NonFiniteError,
        r"The losses of samples \[3\] of `batch` are not finite",
    ),
    "detached": (
        {"module": Net(), "loss_fn": lambda o, y: o.detach()[:, 0]},
        LossError,
        "no graph",
    ),
    "scalar-loss": ({"loss_fn": lambda o, y: F.cross_entropy(o, y)}, LossError, "one"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_input(name):
    options, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        verify(**{"module": Net(), "batch": data(), **options})


def test_the_record():
    good, bad = Check("sign", True, "as it should", 1e-12, "4 pairs"), Check("exactness", False, "Layer `a` is wrong.")
    found = Verification((good, bad), {"a": "vmap", "b": "rule"}, {"a": "It has no rule."})
    assert not found
    assert not found.passed
    with pytest.raises(VerificationError, match=r"^exactness: Layer `a` is wrong\.$"):
        found.raise_if_failed()
    assert str(found).splitlines() == [
        "passed      sign                1.0e-12  4 pairs",
        "            as it should",
        "FAILED      exactness",
        "            Layer `a` is wrong.",
        "layer `a`: vmap",
        "            It has no rule.",
        "layer `b`: rule",
    ]
    right = Verification((good, Check("sign", None, "nothing")), {}, {})
    assert right
    right.raise_if_failed()
    with pytest.raises(dataclasses.FrozenInstanceError):
        right.steps = {}


def test_a_layer_that_the_forward_does_not_use():
    module = Net()
    module.spare = nn.Linear(2, 2)
    found = verify(module, data(), "all")
    assert found, str(found)
