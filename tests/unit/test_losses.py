"""One loss a sample, from whatever the user trains with."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_gradsim.errors import LossError
from lightning_gradsim.losses import PAIRWISE_CRITERIA, PerSampleLoss, cross_entropy, find_loss

BATCH, CLASSES = 6, 4


def indices():
    return torch.randint(CLASSES, (BATCH,))


def ignored(value):
    return indices().masked_fill(torch.arange(BATCH) % 3 == 0, value)


def probabilities(*shape):
    return torch.rand(shape).clamp(0.05, 0.95)


def zero_or_one(*shape):
    return torch.randint(2, shape).float()


def make_criteria():
    """Criterion, outputs, targets; the first dimension is the sample."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {
            "cross-entropy": (nn.CrossEntropyLoss(), torch.randn(BATCH, CLASSES), indices()),
            "class weights": (nn.CrossEntropyLoss(torch.rand(CLASSES)), torch.randn(BATCH, CLASSES), indices()),
            "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.3), torch.randn(BATCH, CLASSES), indices()),
            "all of them": (
                nn.CrossEntropyLoss(torch.rand(CLASSES), ignore_index=-1, label_smoothing=0.3),
                torch.randn(BATCH, CLASSES),
                ignored(-1),
            ),
            "default ignored": (nn.CrossEntropyLoss(), torch.randn(BATCH, CLASSES), ignored(-100)),
            "class probabilities": (
                nn.CrossEntropyLoss(),
                torch.randn(BATCH, CLASSES),
                torch.rand(BATCH, CLASSES).softmax(1),
            ),
            "nll": (nn.NLLLoss(), torch.randn(BATCH, CLASSES).log_softmax(1), indices()),
            "bce with logits": (nn.BCEWithLogitsLoss(), torch.randn(BATCH), zero_or_one(BATCH)),
            "bce": (nn.BCELoss(), probabilities(BATCH), zero_or_one(BATCH)),
            "multi-label": (
                nn.BCEWithLogitsLoss(pos_weight=torch.rand(3)),
                torch.randn(BATCH, 3),
                zero_or_one(BATCH, 3),
            ),
            "multi-label soft margin": (nn.MultiLabelSoftMarginLoss(), torch.randn(BATCH, 3), zero_or_one(BATCH, 3)),
            "mse": (nn.MSELoss(), torch.randn(BATCH), torch.randn(BATCH)),
            "mse of vectors": (nn.MSELoss(), torch.randn(BATCH, 3), torch.randn(BATCH, 3)),
            "l1": (nn.L1Loss(), torch.randn(BATCH, 3), torch.randn(BATCH, 3)),
            "smooth l1": (nn.SmoothL1Loss(beta=0.5), torch.randn(BATCH), torch.randn(BATCH)),
            "huber": (nn.HuberLoss(delta=0.5), torch.randn(BATCH), torch.randn(BATCH)),
            "poisson": (nn.PoissonNLLLoss(), torch.randn(BATCH), torch.rand(BATCH)),
            "multi margin": (nn.MultiMarginLoss(), torch.randn(BATCH, CLASSES), indices()),
            "soft margin": (nn.SoftMarginLoss(), torch.randn(BATCH), zero_or_one(BATCH) * 2 - 1),
        }


CRITERIA = make_criteria()
every_criterion = pytest.mark.parametrize(("criterion", "outputs", "targets"), CRITERIA.values(), ids=CRITERIA.keys())


def one_by_one(criterion, outputs, targets):
    criterion = type(criterion)(**{**settings_of(criterion), "reduction": "none"})
    return torch.stack([criterion(outputs[i : i + 1], targets[i : i + 1]).mean() for i in range(len(outputs))])


def settings_of(criterion):
    names = ("weight", "ignore_index", "label_smoothing", "pos_weight", "beta", "delta")
    return {name: getattr(criterion, name) for name in names if hasattr(criterion, name)}


@every_criterion
def test_equals_one_sample_at_a_time(criterion, outputs, targets):
    expected = one_by_one(criterion, outputs, targets)
    losses = PerSampleLoss("test", copy.deepcopy(criterion))(outputs, targets)
    assert losses.shape == (BATCH,)
    torch.testing.assert_close(losses, expected)


@every_criterion
def test_the_users_criterion_is_left_as_it_is(criterion, outputs, targets):
    criterion = copy.deepcopy(criterion)
    before = criterion.reduction, criterion(outputs, targets)
    loss = PerSampleLoss("test", criterion)
    loss(outputs, targets)
    assert criterion.reduction == before[0]
    assert torch.equal(criterion(outputs, targets), before[1])
    assert torch.equal(loss.batch_value(outputs, targets), before[1])


def test_every_pairwise_criterion_is_tried():
    tried = {type(criterion) for criterion, _, _ in CRITERIA.values()}
    assert set(PAIRWISE_CRITERIA) - tried == {nn.KLDivLoss}


def test_kl_divergence_is_summed_over_classes_where_its_own_reduction_is():
    outputs, targets = torch.randn(BATCH, CLASSES).log_softmax(1), torch.rand(BATCH, CLASSES).softmax(1)
    entries = F.kl_div(outputs, targets, reduction="none")
    torch.testing.assert_close(PerSampleLoss("", nn.KLDivLoss(reduction="batchmean"))(outputs, targets), entries.sum(1))
    torch.testing.assert_close(PerSampleLoss("", nn.KLDivLoss(reduction="mean"))(outputs, targets), entries.mean(1))


def test_a_sum_over_outputs_stays_a_sum():
    outputs, targets = torch.randn(BATCH, 3), torch.randn(BATCH, 3)
    losses = PerSampleLoss("", nn.MSELoss(reduction="sum"))(outputs, targets)
    torch.testing.assert_close(losses, (outputs - targets).square().sum(1))


def test_tokens_are_averaged_without_the_ignored_ones():
    outputs, targets = torch.randn(BATCH, CLASSES, 5), torch.randint(CLASSES, (BATCH, 5))
    targets[0, 2:], targets[1] = -100, -100
    losses = PerSampleLoss("", nn.CrossEntropyLoss())(outputs, targets)
    torch.testing.assert_close(losses[0], F.cross_entropy(outputs[:1], targets[:1]))
    torch.testing.assert_close(losses[2], F.cross_entropy(outputs[2:3], targets[2:3]))
    assert losses[1] == 0


@pytest.mark.parametrize("criterion", [nn.BCEWithLogitsLoss(), nn.MSELoss(), nn.L1Loss(), nn.HuberLoss()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_column_of_outputs_against_flat_targets(criterion, dtype):
    """Broadcasting would pair every sample with every other."""
    outputs, targets = torch.randn(BATCH, 1), torch.randint(2, (BATCH,))
    expected = one_by_one(criterion, outputs.flatten(), targets.float())
    for shape in ((BATCH,), (BATCH, 1)):
        losses = PerSampleLoss("", criterion)(outputs, targets.to(dtype).reshape(shape))
        torch.testing.assert_close(losses, expected)
    flat = PerSampleLoss("", criterion)(outputs.flatten(), targets.to(dtype)[:, None])
    torch.testing.assert_close(flat, expected)


def test_integer_targets_of_a_multi_label_task():
    outputs, targets = torch.randn(BATCH, 3), torch.randint(2, (BATCH, 3))
    losses = PerSampleLoss("", nn.BCEWithLogitsLoss())(outputs, targets)
    torch.testing.assert_close(losses, one_by_one(nn.BCEWithLogitsLoss(), outputs, targets.float()))


@pytest.mark.parametrize(
    "function",
    [F.cross_entropy, functools.partial(F.cross_entropy, label_smoothing=0.1), nn.CrossEntropyLoss(reduction="none")],
)
def test_functions_with_a_reduction_are_asked_not_to_reduce(function):
    outputs, targets = torch.randn(BATCH, CLASSES), indices()
    smoothing = 0.1 if isinstance(function, functools.partial) else 0.0
    expected = F.cross_entropy(outputs, targets, reduction="none", label_smoothing=smoothing)
    loss = PerSampleLoss("", function)
    torch.testing.assert_close(loss(outputs, targets), expected)
    torch.testing.assert_close(loss.batch_value(outputs, targets), expected.mean())


def test_functions_of_ones_own():
    def squared(outputs, targets):
        return (outputs[:, 0] - targets).square()

    outputs, targets = torch.randn(BATCH, 1), torch.randn(BATCH)
    losses = PerSampleLoss("", squared)(outputs, targets)
    torch.testing.assert_close(losses, (outputs[:, 0] - targets).square())


def test_modules_of_ones_own_without_a_reduction():
    class Focal(nn.Module):
        def forward(self, outputs, targets):
            losses = F.cross_entropy(outputs, targets, reduction="none")
            return (1 - (-losses).exp()).square() * losses

    outputs, targets = torch.randn(BATCH, CLASSES), indices()
    focal = Focal()
    torch.testing.assert_close(PerSampleLoss("", focal)(outputs, targets), focal(outputs, targets))


def test_a_graph_leads_to_the_outputs():
    outputs = torch.randn(BATCH, CLASSES, requires_grad=True)
    assert PerSampleLoss("", nn.CrossEntropyLoss())(outputs, indices()).requires_grad


@pytest.mark.parametrize("number", [0, 1])
def test_few_samples(number):
    losses = PerSampleLoss("", nn.CrossEntropyLoss())(torch.randn(number, CLASSES), torch.zeros(number).long())
    assert losses.shape == (number,)


def test_a_reduced_loss_is_refused_by_its_source():
    loss = PerSampleLoss("`loss_fn`", lambda outputs, targets: F.cross_entropy(outputs, targets))
    with pytest.raises(LossError, match=r"from `loss_fn` returned shape \(\) for 6 samples.*`loss_fn=`") as caught:
        loss(torch.randn(BATCH, CLASSES), indices())
    assert 'reduction="none"' in str(caught.value)


def test_a_loss_that_fails_names_shapes_and_dtypes():
    with pytest.raises(LossError, match=r"the thing failed on outputs of shape \(6, 4\).*\(6, 3\).*`loss_fn=`"):
        PerSampleLoss("the thing", nn.BCEWithLogitsLoss())(torch.randn(BATCH, 4), torch.rand(BATCH, 3))


class Model(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name, part in parts.items():
            setattr(self, name, part)


@pytest.mark.parametrize("criterion", [case[0] for case in CRITERIA.values()], ids=CRITERIA.keys())
def test_the_modules_criterion_is_found(criterion):
    loss = find_loss(Model(criterion=criterion))
    assert loss.criterion is criterion
    assert loss.source == f"`Model.criterion` ({type(criterion).__name__})"


def test_a_nested_criterion_is_found():
    assert find_loss(Model(parts=nn.ModuleDict({"loss": nn.MSELoss()}))).source == "`Model.parts.loss` (MSELoss)"


def test_loss_fn_takes_precedence():
    given = nn.MSELoss()
    loss = find_loss(Model(criterion=nn.CrossEntropyLoss(), other=nn.L1Loss()), given)
    assert loss.criterion is given
    assert loss.source == "`loss_fn`"


def test_no_criterion_no_loss():
    assert find_loss(Model()) is None
    assert "cross-entropy" in cross_entropy().source


def test_several_criteria_are_not_guessed_at():
    with pytest.raises(LossError, match=r"`Model` holds several criteria.*Pass it as `loss_fn=`") as caught:
        find_loss(Model(main=nn.CrossEntropyLoss(), auxiliary=nn.MSELoss()))
    assert "`main` (CrossEntropyLoss), `auxiliary` (MSELoss)" in str(caught.value)


def test_one_criterion_under_two_names_is_one():
    criterion = nn.CrossEntropyLoss()
    assert find_loss(Model(main=criterion, alias=criterion)).criterion is criterion


@pytest.mark.parametrize("criterion", [nn.TripletMarginLoss(), nn.CTCLoss(), nn.CosineEmbeddingLoss()])
def test_criteria_without_a_per_sample_form_are_named(criterion):
    with pytest.raises(LossError, match=rf"`criterion` \({type(criterion).__name__}\).*Pass `loss_fn=`"):
        find_loss(Model(criterion=criterion))


@pytest.mark.parametrize("loss_fn", [F.mse_loss, F.l1_loss, F.huber_loss])
def test_functions_that_compare_entries_do_not_broadcast(loss_fn):
    outputs, targets = torch.randn(5, 1), torch.randn(5)
    losses = PerSampleLoss("`loss_fn`", loss_fn)(outputs, targets)
    torch.testing.assert_close(losses, loss_fn(outputs[:, 0], targets, reduction="none"))
