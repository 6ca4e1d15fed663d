"""The watcher leaves no trace, and refuses by name whatever could not be exact."""

import copy
import re
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_gradsim.errors import (
    GradSimError,
    LayerSelectionError,
    LossError,
    SampleMixingError,
    UnsupportedLayerError,
)
from lightning_gradsim.factors import OuterFactors, dot, squared_norms
from lightning_gradsim.rules import register_rule, registry
from lightning_gradsim.wrapper import PerSampleGradients
from tests.cases import Net, SometimesUsed
from tests.reference import one_sample_gradients

BATCH, FEATURES, CLASSES = 5, 4, 3


class Free(nn.Module):
    """Layers by name, and a forward that the test writes."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.run(self, x)


def linear(inputs=FEATURES, outputs=CLASSES, **options):
    return nn.Linear(inputs, outputs, **options)


def batch(*shape):
    return torch.randn(BATCH, *(shape or (FEATURES,))), torch.randint(CLASSES, (BATCH,))


def factors(module, layers="last", data=None, number=1):
    x, y = data or batch()
    with PerSampleGradients(module.eval(), layers) as gradients:
        for _ in range(number):
            with gradients.recording():
                losses = F.cross_entropy(module(x), y, reduction="none")
            result = gradients.factors(losses)
        return result


def traces(module):
    """Everything of a module that one could leave something on."""
    return {
        name: (
            sorted(vars(part)),
            part.training,
            [len(getattr(part, hooks)) for hooks in vars(part) if hooks.endswith("_hooks")],
            {key: value._version for key, value in part.named_parameters(recurse=False)},
        )
        for name, part in module.named_modules()
    }


def module_with_grads():
    module = Net(linear(), nn.Sequential(linear(FEATURES, FEATURES), nn.ReLU(inplace=True))).eval()
    module.head.register_forward_hook(lambda *_: None)
    x, y = batch()
    F.cross_entropy(module(x), y).backward()
    return module


@pytest.mark.parametrize("layers", ["last", "all"])
def test_no_trace(layers):
    module = module_with_grads()
    before, state, grads = (
        traces(module),
        copy.deepcopy(module.state_dict()),
        [p.grad.clone() for p in module.parameters()],
    )
    hooks = {name: list(part._forward_hooks) for name, part in module.named_modules()}
    factors(module, layers, number=3)
    assert traces(module) == before
    assert {name: list(part._forward_hooks) for name, part in module.named_modules()} == hooks
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(module.parameters(), grads, strict=True))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("place", ["forward", "loss", "factors", "between"])
@pytest.mark.parametrize("batches_before", [0, 1])
def test_no_trace_after_an_exception(place, batches_before):
    module = module_with_grads()
    before, (x, y) = traces(module), batch()

    def fail(at):
        if place == at:
            raise KeyError(at)

    def work():
        with PerSampleGradients(module, "all") as gradients:
            for number in range(batches_before + 1):
                last = number == batches_before
                with gradients.recording():
                    outputs = module(x)
                    _ = last and fail("forward")
                    losses = F.cross_entropy(outputs, y, reduction="none")
                    _ = last and fail("loss")
                gradients.factors(losses.sum() if last and place == "factors" else losses)
                _ = last and fail("between")

    with pytest.raises((KeyError, SampleMixingError)):
        work()
    assert traces(module) == before
    assert torch.is_grad_enabled()


def test_no_trace_where_the_choice_of_layers_fails():
    module = module_with_grads()
    before = traces(module)
    with pytest.raises(LayerSelectionError):
        factors(module, "nothing")
    with pytest.raises(UnsupportedLayerError):
        factors(Free(lambda self, x: self.rnn(x[:, None])[0][:, 0], rnn=nn.GRU(FEATURES, CLASSES)), "rnn")
    assert traces(module) == before


def test_no_activations_are_kept():
    module, (x, y) = module_with_grads(), batch()
    gradients = PerSampleGradients(module)
    with gradients:
        with gradients.recording():
            losses = F.cross_entropy(module(x), y, reduction="none")
        gradients.factors(losses, retain=True)
    assert not gradients._recorder.calls


@pytest.mark.parametrize("outside", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_works_within_and_restores_any_grad_mode(outside):
    module, data = module_with_grads(), batch()
    expected = factors(module, "all", data)
    with outside():
        mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        found = factors(module, "all", data, number=2)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == mode
    for name, layer_factors in found.items():
        torch.testing.assert_close(layer_factors.gradients, expected[name].gradients)


def test_forwards_outside_of_a_recording_are_not_seen():
    module, (x, y) = module_with_grads(), batch()
    with PerSampleGradients(module, "all") as gradients:
        for _ in range(2):
            with gradients.recording():
                losses = F.cross_entropy(module(x), y, reduction="none")
            module(torch.randn(9, FEATURES))
            found = gradients.factors(losses)
    expected = factors(module, "all", (x, y))
    for name, layer_factors in found.items():
        torch.testing.assert_close(layer_factors.gradients, expected[name].gradients)


def test_two_losses_of_one_forward():
    module, (x, y) = module_with_grads(), batch()
    other = (y + 1) % CLASSES
    with PerSampleGradients(module, "all") as gradients:
        for _ in range(2):
            with gradients.recording():
                outputs = module(x)
                first = F.cross_entropy(outputs, y, reduction="none")
                second = F.cross_entropy(outputs, other, reduction="none")
            pairs = [(gradients.factors(first, retain=True), y), (gradients.factors(second), other)]
            for found, targets in pairs:
                expected = factors(module, "all", (x, targets))
                for name in expected:
                    torch.testing.assert_close(found[name].gradients, expected[name].gradients)


def test_two_watchers_at_once():
    module, (x, y) = module_with_grads(), batch()
    with PerSampleGradients(module) as one, PerSampleGradients(module, "all") as other:
        with one.recording(), other.recording():
            losses = F.cross_entropy(module(x), y, reduction="none")
        first = one.factors(losses, retain=True)["head"]
        torch.testing.assert_close(first.gradients, other.factors(losses)["head"].gradients)


def test_names_are_known_once_a_batch_was_seen():
    module, (x, y) = module_with_grads(), batch()
    with PerSampleGradients(module) as gradients:
        assert gradients.names == ()
        with gradients.recording():
            losses = F.cross_entropy(module(x), y, reduction="none")
        gradients.factors(losses)
        assert gradients.names == ("head",)


def test_the_last_layer_is_the_last_called():
    module = Free(lambda self, x: self.first(self.second(x)), second=linear(FEATURES, FEATURES), first=linear())
    assert list(factors(Free(lambda s, x: s.b(s.a(x)), b=linear(), a=linear(FEATURES, FEATURES)))) == ["b"]
    assert list(factors(module)) == ["first"]


def test_the_trunk_below_runs_without_a_graph():
    seen = []
    module = Net(linear(), nn.Sequential(linear(FEATURES, FEATURES), nn.Tanh()))
    module.body.register_forward_hook(lambda _, __, output: seen.append(output.requires_grad))
    factors(module, "head", number=3)
    assert seen == [True, False, False]  # the first batch is checked against autograd


def test_a_layer_that_a_batch_does_not_use_has_zero_gradients():
    module, (x, y) = SometimesUsed(linear(), linear(FEATURES, FEATURES)).eval(), batch()
    x[:, 0] = x[:, 0].abs()
    with PerSampleGradients(module, "all") as gradients:
        for inputs, is_used in ((x, True), (-x, False), (x, True)):
            with gradients.recording():
                losses = F.cross_entropy(module(inputs), y, reduction="none")
            found = gradients.factors(losses)
            assert bool(found["body"].gradients.any()) == is_used
            assert squared_norms(found["body"]).shape == (BATCH,)


def test_all_leaves_out_what_is_never_called():
    module = Free(lambda self, x: self.head(x), head=linear(), unused=linear())
    assert list(factors(module, "all")) == ["head"]


def test_a_layer_that_only_later_batches_use_is_not_dropped_silently():
    module, (x, y) = SometimesUsed(linear(), linear(FEATURES, FEATURES)).eval(), batch()
    x[:, 0] = x[:, 0].abs()
    expected = one_sample_gradients(
        module, ("head", "body"), x, y, nn.CrossEntropyLoss(reduction="none"), torch.float32
    )
    with PerSampleGradients(module, "all") as gradients:
        for inputs in (-x, x):
            with gradients.recording():
                losses = F.cross_entropy(module(inputs), y, reduction="none")
            try:
                found = gradients.factors(losses)
            except GradSimError:
                return  # said by name
    torch.testing.assert_close(sum(squared_norms(each) for each in found.values()), expected.norms.square())


def test_a_named_layer_that_was_not_called():
    module = Free(lambda self, x: self.head(x), head=linear(), spare=linear())
    with pytest.raises(LayerSelectionError, match=r"Layer `spare` was not called in the forward pass.*Choose another"):
        factors(module, ["head", "spare"])


def test_a_layer_under_no_grad():
    def forward(self, x):
        with torch.no_grad():
            hidden = self.body(x)
        return self.head(hidden)

    module = Free(forward, body=linear(FEATURES, FEATURES), head=linear())
    with pytest.raises(LayerSelectionError, match=r'Layer `body` runs under "no_grad".*Leave it out of `layers`'):
        factors(module, ["body", "head"])
    assert list(factors(module)) == ["head"]


def test_a_module_under_no_grad():
    module = Free(torch.no_grad()(lambda self, x: self.head(x)), head=linear())
    with pytest.raises(LayerSelectionError, match=r'`Free` called none of its trainable.*sets no "no_grad"'):
        factors(module)


def test_outputs_without_a_graph():
    module = Free(lambda self, x: self.head(x).detach(), head=linear())
    with pytest.raises(LossError, match=r"`losses` has no graph.*1\. The outputs were detached"):
        factors(module)

    def forward(self, x):
        hidden = self.body(x)
        with torch.no_grad():
            return self.head(hidden)

    with pytest.raises(LossError, match=r"`losses` has no graph"):
        factors(Free(forward, body=linear(FEATURES, FEATURES), head=linear()))


@pytest.mark.parametrize("losses", [torch.zeros(()), torch.zeros(BATCH, 2)])
def test_losses_of_another_shape(losses):
    with (
        PerSampleGradients(linear()) as gradients,
        pytest.raises(SampleMixingError, match=r"Expected one loss a sample"),
    ):
        gradients.factors(losses)


def test_tied_weights():
    module = Free(lambda self, x: self.b(self.a(x)), a=linear(FEATURES, FEATURES), b=linear(FEATURES, FEATURES))
    module.b.weight = module.a.weight
    with pytest.raises(
        UnsupportedLayerError, match=r"Layers `b` and `a` share a parameter \(tied weights\).*leave both out"
    ):
        factors(module)


def test_a_weight_used_outside_of_its_layer():
    module = Free(lambda self, x: self.fc(x) + F.linear(x.sin(), self.fc.weight), fc=linear())
    with pytest.raises(GradSimError, match=r"layer `fc` do not sum to autograd's gradient: its weight is also used"):
        factors(module)


def test_a_wrong_rule(monkeypatch):
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))

    class Odd(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    @register_rule(Odd)
    def wrong(layer, activations, output_grads):
        return OuterFactors(activations[:, None, None], output_grads[:, None, None], bias=True)  # forgets the 2

    with pytest.raises(GradSimError, match=r"layer `fc` do not sum.*or its gradient rule is wrong"):
        factors(Free(lambda self, x: self.fc(x), fc=Odd(FEATURES, CLASSES)))


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x.relu_(), lambda x: x.zero_()])
def test_an_input_changed_in_place_after_the_layer(change):
    def forward(self, x):
        hidden = x * 1.0
        outputs = self.fc(hidden.detach())
        change(hidden)
        return outputs

    with pytest.raises(
        GradSimError, match=r"input of layer `fc` was changed in place.*out of place, or leave the layer"
    ):
        factors(Free(forward, fc=linear()))


def test_flattened_positions():
    module = Free(lambda self, x: self.fc(x.flatten(0, 1)).view(BATCH, -1, CLASSES).mean(1), fc=linear())
    with pytest.raises(
        SampleMixingError, match=r"Layer `fc` ran on 30 rows for 5 samples.*Expected the batch as the first"
    ):
        factors(module, data=batch(6, FEATURES))


def test_time_first():
    module = Free(lambda self, x: self.fc(x.transpose(0, 1)).tanh().mean(0), fc=linear())
    with pytest.raises(
        SampleMixingError, match=r"other rows of the output of layer `fc`.*1\. The batch is not the first"
    ):
        factors(module, data=batch(BATCH, FEATURES))


def test_time_first_of_another_length():
    module = Free(lambda self, x: self.fc(x.transpose(0, 1)).tanh().mean(0), fc=linear())
    with pytest.raises(SampleMixingError, match=r"Layer `fc` ran on 7 rows for 5 samples"):
        factors(module, data=batch(7, FEATURES))


MIXERS = {
    "centering": Free(lambda self, x: x - x.mean(0)),
    "attention over the batch": Free(lambda self, x: x + (x @ x.T).softmax(1) @ x),
    "shuffling": Free(lambda self, x: x.roll(1, dims=0)),
}


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS.keys())
def test_samples_mixed_above_the_layer(mixer):
    with pytest.raises(
        SampleMixingError, match=r"layer `head`.*2\. A layer above mixes samples.*Choose a layer above it"
    ):
        factors(Net(linear(), tail=mixer))


def test_mixing_is_found_although_the_first_sample_is_ignored():
    x, y = batch()
    y[0] = -100
    with pytest.raises(SampleMixingError, match="layer `head`"):
        factors(Net(linear(), tail=MIXERS["centering"]), data=(x, y))


@pytest.mark.parametrize("place", ["body", "tail"])
def test_batch_statistics_mix_samples_wherever_they_are(place):
    mixer = nn.BatchNorm1d(CLASSES if place == "tail" else FEATURES, affine=False, track_running_stats=False)
    with pytest.raises(SampleMixingError, match=rf"Layer `{place}` \(`BatchNorm1d`\).*`track_running_stats=True`"):
        factors(Net(linear(), **{place: mixer}), "head")


def test_mixing_is_found_in_the_first_batch_of_more_than_one_sample():
    module, (x, y) = Net(linear(), tail=MIXERS["centering"]).eval(), batch()
    with PerSampleGradients(module) as gradients:
        with gradients.recording():
            losses = F.cross_entropy(module(x[:1]), y[:1], reduction="none")
        gradients.factors(losses)
        with gradients.recording():
            losses = F.cross_entropy(module(x), y, reduction="none")
        with pytest.raises(SampleMixingError, match="layer `head`"):
            gradients.factors(losses)


def test_samples_mixed_below_the_layer():
    module = Net(linear(), nn.BatchNorm1d(FEATURES, track_running_stats=False))
    with pytest.raises(GradSimError, match="body"):
        factors(module)


def test_batchnorm_in_eval_mixes_nothing():
    module = Net(linear(), tail=nn.BatchNorm1d(CLASSES))
    assert list(factors(module, "head")) == ["head"]


class Lora(nn.Linear):
    def forward(self, x):
        return super().forward(x) + x.sum(1, keepdim=True)


class Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class Renamed(nn.Linear):
    """Keeps the forward: as good as a Linear."""


def replaced_forward():
    layer = linear()
    layer.forward = MethodType(lambda self, x: F.linear(x, self.weight), layer)
    return layer


def low_rank():
    layer = linear()
    layer.register_parameter("lora_A", nn.Parameter(torch.zeros(2, FEATURES)))
    return layer


WITHOUT_RULE = {
    "lora": (lambda: Lora(FEATURES, CLASSES), r"layer `fc` \(`Lora`\): it overrides `Linear.forward`"),
    "replaced forward": (replaced_forward, r"layer `fc` \(`Linear`\): it overrides `Linear.forward`"),
    "more parameters": (low_rank, r"layer `fc` \(`Linear`\): it trains `lora_A` instead of `weight` and `bias`"),
    "lstm": (lambda: nn.LSTM(FEATURES, CLASSES, batch_first=True), r"layer `fc` \(`LSTM`\): its type has none"),
    "bilinear": (lambda: nn.Bilinear(FEATURES, FEATURES, CLASSES), r"layer `fc` \(`Bilinear`\): its type has none"),
}


@pytest.mark.parametrize(("make", "words"), WITHOUT_RULE.values(), ids=WITHOUT_RULE.keys())
@pytest.mark.parametrize("layers", ["fc", "all", "last"])
def test_layers_without_a_rule_run_again(make, words, layers):
    def forward(self, x):
        if isinstance(self.fc, nn.LSTM):
            return self.fc(x[:, None])[0][:, 0]
        return self.fc(x, x) if isinstance(self.fc, nn.Bilinear) else self.fc(x)

    module, (x, y) = Free(forward, fc=make()).eval(), batch()
    with PerSampleGradients(module, layers) as gradients:
        for _ in range(2):
            with gradients.recording():
                losses = F.cross_entropy(module(x), y, reduction="none")
            found = gradients.factors(losses)["fc"]
        assert gradients.steps["fc"] in ("vmap(layer)", "one at a time")
        assert re.search(r"No gradient rule for " + words, str(gradients.reasons["fc"]))
        assert "register a rule with `register_rule(" in str(gradients.reasons["fc"])
    expected = one_sample_gradients(module, ("fc",), x, y, nn.CrossEntropyLoss(reduction="none"), torch.float32)
    torch.testing.assert_close(squared_norms(found).sqrt(), expected.norms)


@pytest.mark.parametrize("layers", ["fc", "last"])
def test_a_layer_without_a_rule_that_mixes_samples(layers):
    with pytest.raises(GradSimError, match=r"`fc`.*does not run on single samples: Samples taken alone do not have"):
        factors(Free(lambda self, x: self.fc(x), fc=Centred(FEATURES, CLASSES)), layers)


def test_the_lowest_layer_that_runs_again_needs_no_graph_inside():
    seen = []

    def forward(self, x):
        hidden = self.low(x)
        seen.append(hidden.grad_fn)
        return self.fc(hidden.relu_())

    class Doubled(nn.Linear):
        def forward(self, x):
            seen.append(torch.is_grad_enabled())
            return 2 * super().forward(x)

    module, data = Free(forward, low=Doubled(FEATURES, FEATURES), fc=linear()), batch()
    found = factors(module, "all", data, number=2)
    # A replay of the first batch, then the forward of the second: without a graph, on to a leaf and its copy.
    assert seen[-2 - seen[::-1].index(seen[-2])] is not None
    expected = one_sample_gradients(module, ("low", "fc"), *data, nn.CrossEntropyLoss(reduction="none"), torch.float32)
    total = sum(squared_norms(layer_factors) for layer_factors in found.values())
    torch.testing.assert_close(total.sqrt(), expected.norms)


def test_the_layer_inside_of_an_attention():
    module = Free(
        lambda self, x: self.fc(self.mix(x, x, x)[0][:, 0]),
        mix=nn.MultiheadAttention(FEATURES, 1, batch_first=True),
        fc=linear(),
    )
    x, y = batch(2, FEATURES)
    [found] = factors(module, "mix.out_proj", (x, y), number=2).values()
    expected = one_sample_gradients(
        module, ("mix.out_proj",), x, y, nn.CrossEntropyLoss(reduction="none"), torch.float32
    )
    torch.testing.assert_close(squared_norms(found).sqrt(), expected.norms)


def test_a_layer_used_by_a_parent_that_has_nothing_to_train():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            return F.linear(x, self.inner.weight, self.inner.bias)

    module = Free(lambda self, x: self.fc(x), fc=Parent())
    with pytest.raises(UnsupportedLayerError, match=r"`fc.inner` was not called.*Its parent uses the weight directly"):
        factors(module, "fc.inner")


def test_inputs_that_change_their_form():
    """A mask that all samples share is told from one that each has of its own by the first batch."""

    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x * mask)

    module = Free(lambda self, x: self.fc(x, self.mask), fc=Masked(FEATURES, CLASSES))
    module.mask = torch.rand(1, FEATURES)
    with PerSampleGradients(module.eval()) as gradients:
        for mask in (torch.rand(1, FEATURES), torch.rand(BATCH, FEATURES)):
            x, y = batch()
            module.mask = mask
            with gradients.recording():
                losses = F.cross_entropy(module(x), y, reduction="none")
            if len(mask) == 1:
                gradients.factors(losses)
        with pytest.raises(UnsupportedLayerError, match=r"Layer `fc`: a `Masked` does not run on single.*mixes inputs"):
            gradients.factors(losses)


def test_a_subclass_that_keeps_the_forward_is_a_linear():
    x, y = batch()
    module = Free(lambda self, x: self.fc(x), fc=Renamed(FEATURES, CLASSES))
    expected = one_sample_gradients(module, ("fc",), x, y, nn.CrossEntropyLoss(reduction="none"))
    found = squared_norms(factors(module, data=(x, y))["fc"])
    torch.testing.assert_close(found, expected.norms.square().to(found.dtype))


def test_non_finite_gradients_are_left_to_be_named():
    """The engine names the samples; here they only must not be taken for mixing."""
    x, y = batch()
    x[2] = torch.nan
    norms = squared_norms(factors(Net(linear(), nn.Sequential(linear(FEATURES, FEATURES))), data=(x, y))["head"])
    assert norms.isfinite().tolist() == [True, True, False, True, True]


def test_the_choice_of_layers_is_checked_at_once():
    with pytest.raises(TypeError, match="holds an int"):
        PerSampleGradients(linear(), 3)


EMPTY = {
    "linear": (lambda: nn.Linear(FEATURES, CLASSES), lambda number: torch.randn(number, FEATURES)),
    "conv": (
        lambda: nn.Sequential(nn.Conv1d(2, CLASSES, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten()),
        lambda number: torch.randn(number, 2, 6),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(5, CLASSES), nn.Flatten()),
        lambda number: torch.randint(5, (number, 1)),
    ),
    "norm": (lambda: nn.LayerNorm(CLASSES), lambda number: torch.randn(number, CLASSES)),
    "again": (lambda: Lora(FEATURES, CLASSES), lambda number: torch.randn(number, FEATURES)),
}


@pytest.mark.parametrize(("make", "inputs"), EMPTY.values(), ids=EMPTY.keys())
@pytest.mark.parametrize("first", [False, True])
def test_an_empty_batch(make, inputs, first):
    module = make().eval()
    with PerSampleGradients(module, "all") as gradients:
        for number in (0, 4) if first else (4, 0):
            y = torch.randint(CLASSES, (number,))
            found = gradients.compute(
                lambda batch: F.cross_entropy(module(batch[0]), batch[1], reduction="none"), (inputs(number), y)
            )
            for layer_factors in found.values():
                assert squared_norms(layer_factors).shape == (number,)
                assert dot(layer_factors, layer_factors).shape == (number, number)


class CausalText(nn.Module):
    """Attention under a causal mask that is as long as the first batch is large."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(FEATURES, 1, 8, batch_first=True)
        self.mix = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.fc = linear()

    def forward(self, x):
        return self.fc(self.mix(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1])).mean(1))


class PaddedText(nn.Module):
    """A mask only where a batch needs one."""

    def __init__(self):
        super().__init__()
        self.mix = nn.MultiheadAttention(FEATURES, 1, batch_first=True)
        self.fc = linear()

    def forward(self, x):
        padded = (x == 0).all(2)
        mask = padded if padded.any() else None
        return self.fc(self.mix(x, x, x, key_padding_mask=mask)[0][:, 0])


@pytest.mark.parametrize("kind", [CausalText, PaddedText])
def test_inputs_of_attention_that_come_and_go(kind):
    module = kind().eval()
    criterion = nn.CrossEntropyLoss(reduction="none")
    with PerSampleGradients(module, "all") as gradients:
        for number in (5, 5, 3, 9, 5, 1, 5):
            x, y = torch.randn(number, 5, FEATURES), torch.randint(CLASSES, (number,))
            if kind is PaddedText and number > 1 and gradients.names:
                x[::2, 3:] = 0
            found = gradients.compute(lambda batch: criterion(module(batch[0]), batch[1]), (x, y))
            expected = one_sample_gradients(module, gradients.names, x, y, criterion, torch.float32)
            total = sum(squared_norms(layer_factors) for layer_factors in found.values())
            torch.testing.assert_close(total.sqrt(), expected.norms, rtol=1e-4, atol=1e-6)
