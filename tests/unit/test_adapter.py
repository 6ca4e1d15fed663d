"""What a batch means: every usual form, and clear words for the others."""

import warnings
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_gradsim.adapter import INPUT_KEYS, TARGET_KEYS, Adapter, find_logits
from lightning_gradsim.errors import BatchFormatError, LabelRangeError, LossError
from lightning_gradsim.tasks import Task

BATCH, FEATURES, CLASSES = 5, 3, 4
Pair = namedtuple("Pair", ["x", "y"])


class Plain(nn.Module):
    def __init__(self, outputs=CLASSES, **parts):
        super().__init__()
        self.layer = nn.Linear(FEATURES, outputs)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.layer(x)


class HuggingFace(Plain):
    """Takes its inputs by name and returns an object with logits."""

    def forward(self, pixel_values, attention_mask=None, labels=None):
        logits = self.layer(pixel_values)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits if attention_mask is None else logits * attention_mask)


class InMapping(Plain):
    def forward(self, x):
        return {"logits": self.layer(x), "embedding": x}


def bound(module, loss_fn=None):
    adapter = Adapter()
    adapter.bind(module, loss_fn)
    return adapter


@pytest.fixture
def x():
    return torch.randn(BATCH, FEATURES)


@pytest.fixture
def y():
    return torch.randint(CLASSES, (BATCH,))


@pytest.mark.parametrize("form", [tuple, list, lambda pair: Pair(*pair)], ids=["tuple", "list", "named tuple"])
def test_pairs(x, y, form):
    module = Plain()
    step = bound(module).step(module, form([x, y]))
    assert torch.equal(step.logits, module(x))
    assert torch.equal(step.targets, y)
    torch.testing.assert_close(step.losses, F.cross_entropy(module(x), y, reduction="none"))
    assert step.task is Task.CLASSIFICATION
    assert step.losses.requires_grad


@pytest.mark.parametrize("target_key", TARGET_KEYS)
@pytest.mark.parametrize("input_key", INPUT_KEYS)
def test_mappings_with_one_known_input(x, y, input_key, target_key):
    module = Plain()
    step = bound(module).step(module, {input_key: x, target_key: y, "sample_id": torch.arange(BATCH)})
    assert torch.equal(step.logits, module(x))
    assert torch.equal(step.targets, y)


@pytest.mark.parametrize("module", [HuggingFace(), InMapping()])
def test_outputs_with_logits(module, x, y):
    name = "pixel_values" if isinstance(module, HuggingFace) else "x"
    step = bound(module).step(module, {name: x, "labels": y})
    assert torch.equal(step.logits, module.layer(x))


def test_mappings_are_passed_by_the_names_of_forward(x, y):
    module, mask = HuggingFace(), torch.randint(2, (BATCH, 1))
    batch = {"pixel_values": x, "attention_mask": mask, "labels": y, "path": ["a"] * BATCH}
    assert torch.equal(bound(module).step(module, batch).logits, module.layer(x) * mask)


def test_the_target_is_not_handed_to_the_model(x, y):
    """A model that gets labels computes its own, reduced loss: for nothing."""
    inputs, targets = Adapter().split({"pixel_values": x, "labels": y})
    assert set(inputs) == {"pixel_values"}
    assert targets is y


def test_find_logits():
    logits = torch.zeros(2)
    assert find_logits(logits) is logits
    assert find_logits({"logits": logits}) is logits
    assert find_logits(SimpleNamespace(logits=logits)) is logits
    for other in (None, (logits,), {"outputs": logits}, SimpleNamespace(loss=logits)):
        assert find_logits(other) is None


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.zeros(3), r"A batch is a Tensor"),
        ((torch.zeros(3),), r"A batch is a tuple of 1"),
        ([torch.zeros(3)] * 3, r"A batch is a list of 3"),
        ((torch.zeros(3), [1, 2, 3]), r"its targets, is a `list` of `int`\. Expected a tensor"),
        ((torch.zeros(3), None), r"its targets, is a `NoneType`\. Expected a tensor"),
        (
            [torch.zeros(2), ("cat", "dog")],
            r"its targets, is a `tuple` of `str` such as 'cat'\..* maps them to numbers",
        ),
        ({"image": torch.zeros(3)}, r"keys \['image'\]; 0 of them are known target keys"),
        ({"label": torch.zeros(3), "y": torch.zeros(3)}, r"keys \['label', 'y'\]; 2 of them"),
        ({"x": torch.zeros(3), "label": [1, 2, 3]}, r"The entry `label` of a batch is a `list` of `int`\. Expected a"),
        ({"x": torch.zeros(2), "label": ["cat", "dog"]}, r"`label` .* `list` of `str` such as 'cat'\..*to numbers"),
    ],
)
def test_batches_that_cannot_be_read(batch, words):
    with pytest.raises(BatchFormatError, match=words) as caught:
        Adapter().split(batch)
    assert "`Adapter` subclass as `adapter=`" in str(caught.value)


@pytest.mark.parametrize(("batch", "count"), [({"left": 0, "right": 0}, 0), ({"image": 0, "input_ids": 0}, 2)])
def test_mappings_whose_inputs_are_not_known(batch, count, y):
    batch = {key: torch.randn(BATCH, FEATURES) for key in batch}
    with pytest.raises(BatchFormatError, match=rf"`Plain.forward`, and {count} of them are known input keys") as caught:
        bound(Plain()).step(Plain(), {**batch, "label": y})
    assert all(f"'{key}'" in str(caught.value) for key in batch)
    assert "overrides `forward`" in str(caught.value)


def test_outputs_without_logits(x, y):
    class Two(Plain):
        def forward(self, x):
            return self.layer(x), x

    with pytest.raises(BatchFormatError, match=r"`Two` returned a tuple\..*overrides `forward`"):
        Adapter().step(Two(), (x, y))


def test_an_adapter_of_ones_own(x, y):
    class Reversed(Adapter):
        def split(self, batch):
            return batch[1], batch[0]

    module = Plain()
    assert torch.equal(Reversed().step(module, (y, x)).logits, module(x))


TASKS = [
    (nn.CrossEntropyLoss(), (BATCH, 4), torch.zeros(BATCH).long(), Task.CLASSIFICATION),
    (nn.CrossEntropyLoss(), (BATCH, 4), torch.full((BATCH, 4), 0.25), Task.CLASSIFICATION),
    (nn.CrossEntropyLoss(), (BATCH, 4, 7), torch.zeros(BATCH, 7).long(), Task.REGRESSION),  # tokens: by loss
    (None, (BATCH, 4), torch.zeros(BATCH).long(), Task.CLASSIFICATION),
    (nn.BCEWithLogitsLoss(), (BATCH,), torch.zeros(BATCH), Task.BINARY),
    (nn.BCEWithLogitsLoss(), (BATCH, 1), torch.zeros(BATCH).long(), Task.BINARY),
    (nn.BCEWithLogitsLoss(), (BATCH, 1), torch.zeros(BATCH, 1), Task.BINARY),
    (nn.BCEWithLogitsLoss(), (BATCH, 3), torch.zeros(BATCH, 3), Task.MULTILABEL),
    (nn.BCELoss(), (BATCH, 1), torch.zeros(BATCH, 1), Task.BINARY),
    (nn.MultiLabelSoftMarginLoss(), (BATCH, 3), torch.zeros(BATCH, 3), Task.MULTILABEL),
    (nn.MSELoss(), (BATCH, 1), torch.zeros(BATCH), Task.REGRESSION),
    (nn.MSELoss(), (BATCH,), torch.zeros(BATCH), Task.REGRESSION),
    (nn.MSELoss(), (BATCH, 3), torch.zeros(BATCH, 3), Task.REGRESSION),
    (nn.HuberLoss(), (BATCH, 1), torch.zeros(BATCH, 1), Task.REGRESSION),
]


@pytest.mark.parametrize(("criterion", "shape", "targets", "task"), TASKS)
def test_task(criterion, shape, targets, task):
    outputs = torch.rand(shape)
    step = bound(Plain(criterion=criterion)).step_from_logits(outputs, targets)
    assert step.task is task
    assert step.losses.shape == (BATCH,)
    assert len(step.outcome.wrong) == BATCH


def test_probabilities_are_not_squashed_again():
    adapter = bound(Plain(criterion=nn.BCELoss()))
    step = adapter.step_from_logits(torch.tensor([[0.3], [0.9]]), torch.tensor([[1.0], [1.0]]))
    assert step.outcome.wrong.tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_loss_is_computed_in_float32_at_least(dtype, y):
    step = Adapter().step_from_logits(torch.randn(BATCH, CLASSES).to(dtype), y)
    assert step.logits.dtype == step.losses.dtype == torch.float32
    assert Adapter().step_from_logits(torch.randn(BATCH, CLASSES).double(), y).losses.dtype == torch.float64


def test_labels_out_of_range_are_refused_before_the_loss_kernel(x):
    with pytest.raises(LabelRangeError, match=r"\[4, 9\].*4 classes"):
        Adapter().step(Plain(), (x, torch.tensor([0, 4, 9, 1, 2])))


@pytest.mark.parametrize("ignored", [-100, 7])
def test_ignored_labels_pass(x, ignored):
    adapter = bound(Plain(criterion=nn.CrossEntropyLoss(ignore_index=ignored)))
    step = adapter.step(Plain(), (x, torch.tensor([0, ignored, 1, 2, 3])))
    assert step.losses[1] == 0
    assert not step.outcome.wrong[1]


@pytest.mark.parametrize("targets", [torch.rand(BATCH), torch.zeros(BATCH, 1).long(), torch.rand(BATCH, CLASSES)])
def test_no_loss_is_made_up(x, targets):
    with pytest.raises(
        LossError, match=r"No loss is known for outputs of shape \(5, 4\) and targets of shape"
    ) as caught:
        bound(Plain()).step(Plain(), (x, targets))
    assert str(tuple(targets.shape)) in str(caught.value)
    assert str(targets.dtype) in str(caught.value)
    assert "`loss_fn=`" in str(caught.value)


@pytest.mark.parametrize(
    ("targets", "change"),
    [
        (torch.ones(BATCH), "targets.long()"),
        (torch.ones(BATCH, 1).long(), "targets[:, 0]"),
        (torch.ones(BATCH, 1), "targets[:, 0].long()"),
    ],
)
@pytest.mark.parametrize("criterion", [None, nn.CrossEntropyLoss()], ids=["none", "cross-entropy"])
def test_class_indices_in_another_form_are_told_how_to_be_read(x, targets, change, criterion):
    module = Plain() if criterion is None else Plain(criterion=criterion)
    with pytest.raises(LossError) as caught:
        bound(module).step(module, (x, targets))
    assert f"whose `split` returns `{change}`" in str(caught.value)


@pytest.mark.parametrize("targets", [torch.full((BATCH,), 0.5), torch.ones(BATCH, CLASSES)])
def test_other_targets_are_not_taken_for_class_indices(x, targets):
    with pytest.raises(LossError) as caught:
        bound(Plain()).step(Plain(), (x, targets))
    assert "class indices" not in str(caught.value)


def test_the_source_of_the_loss_is_said():
    assert "cross-entropy" in bound(Plain()).loss_source
    assert bound(Plain(criterion=nn.NLLLoss())).loss_source == "`Plain.criterion` (NLLLoss)"
    assert bound(Plain(criterion=nn.NLLLoss()), F.cross_entropy).loss_source == "`loss_fn`"


def test_binding_again_replaces_the_loss():
    adapter = bound(Plain(criterion=nn.NLLLoss()))
    adapter.bind(Plain())
    assert "cross-entropy" in adapter.loss_source


def test_batch_loss_is_the_users(x, y):
    criterion = nn.CrossEntropyLoss(torch.rand(CLASSES), label_smoothing=0.1)
    module = Plain(criterion=criterion)
    adapter = bound(module)
    torch.testing.assert_close(adapter.batch_loss(adapter.step(module, (x, y))), criterion(module(x), y))


@pytest.mark.parametrize(
    ("criterion", "shape", "targets"), [(c, s, t) for c, s, t, task in TASKS if task is not Task.REGRESSION]
)
def test_relabelled_losses_are_those_of_the_predictions(criterion, shape, targets):
    adapter = bound(Plain(criterion=criterion))
    step = adapter.step_from_logits(torch.rand(shape).requires_grad_(), targets)
    losses = adapter.losses(step.logits, adapter.predicted_targets(step))
    assert losses.requires_grad
    again = adapter.step_from_logits(step.logits, step.targets)
    predictions = again.outcome.predictions
    if targets.is_floating_point() and step.task is Task.CLASSIFICATION:
        predictions = F.one_hot(predictions, CLASSES)
    expected = adapter.losses(step.logits, predictions.reshape(targets.shape).to(targets.dtype))
    torch.testing.assert_close(losses, expected)
    if step.task is Task.CLASSIFICATION:
        assert (losses <= step.losses + 1e-6).all()


def test_predictions_have_no_loss_in_regression():
    adapter = bound(Plain(criterion=nn.MSELoss()))
    assert adapter.predicted_targets(adapter.step_from_logits(torch.rand(BATCH, 1), torch.rand(BATCH))) is None


class OwnStep(Plain):
    """Batches of three, which nothing else could read."""

    scale = 1.0

    def gradsim_step(self, batch):
        left, right, targets = batch
        logits = self.layer(left + right)
        return logits, targets, self.scale * F.cross_entropy(logits, targets, reduction="none")


def test_gradsim_step_is_asked_instead(x, y):
    module = OwnStep()
    step = bound(module).step(module, (x, x, y))
    assert torch.equal(step.logits, module.layer(2 * x))
    assert step.task is Task.CLASSIFICATION
    assert step.losses.requires_grad


def test_gradsim_step_settles_which_of_several_criteria(x, y):
    module = OwnStep(one=nn.CrossEntropyLoss(), other=nn.MSELoss())
    bound(module).step(module, (x, x, y))
    with pytest.raises(LossError, match="several criteria"):
        bound(Plain(one=nn.CrossEntropyLoss(), other=nn.MSELoss()))


def test_teachers_only_where_the_own_loss_agrees_with_the_criterion(x, y):
    module = OwnStep()
    adapter = bound(module)
    assert adapter.predicted_targets(adapter.step(module, (x, x, y))) is not None
    module.scale = 3.0
    assert adapter.predicted_targets(adapter.step(module, (x, x, y))) is None


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.zeros(2), r"`Odd.gradsim_step` returned a Tensor\. Expected the tuple \(logits, targets, losses\)"),
        ((torch.zeros(2), torch.zeros(2)), r"returned a tuple"),
        ((torch.zeros(2, 3), None, torch.zeros(2)), r"of tensors, with one loss a sample"),
    ],
)
def test_gradsim_step_with_another_result(result, words):
    class Odd(Plain):
        def gradsim_step(self, batch):
            return result

    with pytest.raises(BatchFormatError, match=words):
        Adapter().step(Odd(), None)


@pytest.mark.parametrize("losses", [torch.zeros(()), torch.zeros(3), torch.zeros(2, 1)])
def test_gradsim_step_with_a_reduced_loss(losses):
    class Odd(Plain):
        def gradsim_step(self, batch):
            return torch.zeros(2, 3), torch.zeros(2).long(), losses

    with pytest.raises(LossError, match=r"`Odd.gradsim_step` returned losses of shape .* for 2 samples"):
        Adapter().step(Odd(), None)


def test_outputs_as_dataclass(x, y):
    @dataclass
    class Output:
        logits: torch.Tensor

    class Wrapped(Plain):
        def forward(self, x):
            return Output(self.layer(x))

    module = Wrapped()
    assert torch.equal(bound(module).step(module, (x, y)).logits, module.layer(x))


def test_samples_are_cut_in_the_form_of_the_batch(x, y):
    module = HuggingFace()
    adapter = bound(module)
    sample = adapter.take_sample({"pixel_values": x, "labels": y}, 2, BATCH)
    torch.testing.assert_close(adapter.step(module, sample).logits, module.layer(x[2:3]))


def test_flat_targets_and_a_column_of_outputs_warn_of_nothing(x):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bound(Plain(1, criterion=nn.MSELoss())).step(Plain(1), (x, torch.rand(BATCH)))
