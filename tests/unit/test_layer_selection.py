"""From what the user writes as `layers` to names."""

import pytest
from torch import nn

from lightning_gradsim.errors import LayerSelectionError
from lightning_gradsim.layer_selection import check_layer_spec, parameter_names, select_layers, trainable_layers


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.BatchNorm2d(2), nn.Linear(4, 4))
        self.head = nn.ModuleDict({"fc": nn.Linear(4, 3), "frozen": nn.Linear(4, 3).requires_grad_(False)})


ALL = ("encoder.0", "encoder.2", "encoder.3", "head.fc")


@pytest.fixture
def module():
    return Classifier()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("all", ALL),
        ("head.fc", ("head.fc",)),
        ("head", ("head.fc",)),
        ("encoder", ALL[:3]),
        ("encoder.*", ALL[:3]),
        ("*c", ("head.fc",)),
        ("encoder.[02]", ("encoder.0", "encoder.2")),
        (nn.Linear, ("encoder.3", "head.fc")),
        (nn.Module, ALL),
        (["head.fc", "encoder.0"], ("head.fc", "encoder.0")),
        (("encoder", "encoder.0"), ALL[:3]),
        ([nn.Linear, "encoder.0"], ("encoder.3", "head.fc", "encoder.0")),
        (lambda name, layer: isinstance(layer, nn.Conv2d) or name.endswith("fc"), ("encoder.0", "head.fc")),
    ],
)
def test_forms(module, spec, expected):
    check_layer_spec(spec)
    assert tuple(select_layers(module, spec)) == expected


def test_last_is_the_last_called_not_the_last_registered(module):
    assert select_layers(module, "last") == {}
    assert tuple(select_layers(module, "last", ["head.fc", "encoder.0", "encoder.2"])) == ("encoder.2",)


@pytest.mark.parametrize(
    ("spec", "expected"), [("last:1", ("c",)), ("last:2", ("b", "c")), ("last:3", ("a", "b", "c"))]
)
def test_the_last_several_called(spec, expected):
    module = nn.ModuleDict({name: nn.Linear(1, 1) for name in "cab"})
    check_layer_spec(spec)
    assert select_layers(module, spec) == {}
    assert tuple(select_layers(module, spec, ["a", "b", "c"])) == expected


def test_more_than_were_called(module):
    with pytest.raises(LayerSelectionError, match=r"`layers=\"last:3\"` asks for more layers than the 2 trainable"):
        select_layers(module, "last:3", ["head.fc", "encoder.0"])


@pytest.mark.parametrize("spec", ["last:0", "last:", "last:x", "last:-1", "last:03"])
def test_no_number_of_last_layers(spec):
    with pytest.raises(ValueError, match=rf"`layers='{spec}'` names no number\. Expected \"last:\" and a whole"):
        check_layer_spec(spec)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("head.fc.weight", {"head.fc": ("weight",)}),
        ("*.bias", dict.fromkeys(ALL, ("bias",))),
        (["head.fc.bias", "head.fc.weight"], {"head.fc": ("weight", "bias")}),
        (["head.fc.bias", "head.fc"], {"head.fc": ("weight", "bias")}),
        ("encoder.0.*", {"encoder.0": ("weight", "bias")}),
    ],
)
def test_parameters_by_name(module, spec, expected):
    chosen = select_layers(module, spec)
    assert chosen == expected
    assert parameter_names(chosen, trainable_layers(module)) == {
        layer: [layer] if len(own) == 2 else [f"{layer}.{parameter}" for parameter in own]
        for layer, own in expected.items()
    }


def test_a_frozen_parameter(module):
    with pytest.raises(LayerSelectionError, match=r"Parameter `head.frozen.bias` is frozen.*`requires_grad`"):
        select_layers(module, "head.frozen.bias")


def test_parametrizations_belong_to_their_layer():
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
    weights = ("parametrizations.weight.original0", "parametrizations.weight.original1")
    assert select_layers(module, "all") == {"0": ("bias", *weights), "1": ("weight", "bias")}
    assert select_layers(module, "0.parametrizations*") == {"0": weights}
    root = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2, bias=False))
    assert select_layers(root, "all") == {"": weights}


def test_no_layer_was_called(module):
    with pytest.raises(LayerSelectionError, match=r'`Classifier` called none of its trainable.*"no_grad"'):
        select_layers(module, "last", [])


def test_trainable_layers_are_those_with_parameters_of_their_own(module):
    assert tuple(trainable_layers(module)) == ALL
    module.encoder[0].weight.requires_grad_(False)
    assert "encoder.0" in trainable_layers(module)  # its bias still trains


def test_the_module_itself_is_a_layer():
    assert list(trainable_layers(nn.Linear(2, 2))) == [""]
    assert select_layers(nn.Linear(2, 2), "all") == {"": ("weight", "bias")}


def test_a_layer_under_two_names_is_one(module):
    module.alias = module.head["fc"]
    assert tuple(trainable_layers(module)) == ALL


@pytest.mark.parametrize(
    ("typed", "closest"),
    [("head.fcc", "`head.fc`"), ("encodr.3", "`encoder.3`"), ("head.fc.bia", "`head.fc.bias`")],
)
def test_near_names_are_offered(module, typed, closest):
    with pytest.raises(
        LayerSelectionError, match=rf"`layers='{typed}'` matches no layer or parameter of `Classifier`"
    ) as caught:
        select_layers(module, typed)
    message = str(caught.value)
    assert closest in message.split("Closest: ")[1]
    assert "GradSimCallback.available_layers(model)" in message


@pytest.mark.parametrize(
    ("typed", "meant"), [("lastt", "last"), ("lst", "last"), ("Last", "last"), ("last3", "last:3"), ("al", "all")]
)
def test_keywords_are_offered(module, typed, meant):
    with pytest.raises(LayerSelectionError, match=rf"Closest: `{meant}`"):
        select_layers(module, typed)


@pytest.mark.parametrize("keyword", ["last", "last:2", "all"])
def test_keywords_stand_alone(module, keyword):
    with pytest.raises(LayerSelectionError, match=f"holds '{keyword}' among others. Expected it alone"):
        select_layers(module, ["head", keyword])


def test_a_name_like_nothing_gets_the_whole_list(module):
    with pytest.raises(LayerSelectionError, match=r"Trainable layers: `encoder.0`, `encoder.2`"):
        select_layers(module, ["head", "qqqqqqqqqqq"])


def test_long_lists_are_cut():
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(14)))
    with pytest.raises(LayerSelectionError, match=r"`9` and 4 more") as caught:
        select_layers(module, nn.Conv2d)
    assert "`10`" not in str(caught.value)


@pytest.mark.parametrize("spec", ["head.frozen", "encoder.1"])
def test_layers_with_nothing_to_train_are_named(module, spec):
    kind = type(module.get_submodule(spec)).__name__
    with pytest.raises(LayerSelectionError, match=rf"Layer `{spec}` \(`{kind}`\) has no trainable parameter") as caught:
        select_layers(module, spec)
    assert "Set `requires_grad`" in str(caught.value)
    assert "`head.fc`" in str(caught.value)


def test_types_that_do_not_occur_are_named(module):
    with pytest.raises(LayerSelectionError, match=r"type `LSTM`, but `Classifier` has no trainable layer.*`head.fc`"):
        select_layers(module, nn.LSTM)


def test_a_predicate_that_accepts_nothing(module):
    with pytest.raises(LayerSelectionError, match=r"predicate.*none of the 4 trainable layers: `encoder.0`"):
        select_layers(module, lambda name, layer: False)


@pytest.mark.parametrize("spec", ["last", "all", "head.fc"])
def test_a_module_with_nothing_to_train(module, spec):
    module.requires_grad_(False)
    with pytest.raises(LayerSelectionError, match=r"`Classifier` has no trainable parameters.*`requires_grad`"):
        select_layers(module, spec)


@pytest.mark.parametrize("spec", [[], ()])
def test_an_empty_choice(spec):
    with pytest.raises(ValueError, match=r"chooses nothing\. Expected \"last\", \"last:3\", \"all\", names"):
        check_layer_spec(spec)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [(3, "an int"), (None, "a NoneType"), (["head", 3], "an int"), (int, "a type"), ([lambda n, m: 1], "a function")],
)
def test_wrong_types_are_named(spec, kind):
    with pytest.raises(TypeError, match=rf"holds {kind}\. Expected \"last\", \"last:3\", \"all\", names, globs"):
        check_layer_spec(spec)


def test_a_layer_instead_of_its_name(module):
    with pytest.raises(TypeError, match="holds a Linear"):
        check_layer_spec(module.head["fc"])
