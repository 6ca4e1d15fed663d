"""What the tap takes from training steps is what a forward of the head before the update would give."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.head_gradients import class_gradients, output_grads
from lightning_gradsim.tap import (
    MAX_MISSES,
    MAX_USELESS,
    MAX_WAITING_STEPS,
    MIXED,
    NOT_FINITE,
    SOFT,
    UNSEEN,
    Tap,
)

BATCH, WIDTH, CLASSES = 6, 5, 3


class Net(nn.Module):
    def __init__(self, criterion=None):
        super().__init__()
        self.body = nn.Linear(4, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.unused = nn.Linear(2, 2)  # registered last, but not called
        self.criterion = criterion or nn.CrossEntropyLoss()

    def features(self, x):
        return self.body(x).tanh()

    def forward(self, x):
        return self.head(self.features(x))


def plain_step(net, batch, optimizer):
    optimizer.zero_grad()
    loss = net.criterion(net(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def make_batch(step, targets=None):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 4, generator=generator)
    return x, torch.randint(CLASSES, (BATCH,), generator=generator) if targets is None else targets(x)


class Run:
    """Some steps with the tap, and what was there before each of them."""

    def __init__(self, net, training_step=plain_step, number=3, batch=make_batch, loss_fn=None, flush=True):
        adapter = Adapter()
        adapter.bind(net, loss_fn)
        self.blocks, self.features, self.logits, self.targets, self.steps = [], [], [], [], []
        self.net, self.tap = net, Tap(adapter, self.blocks.append)
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5)
        hooks_before = count_hooks(net)
        for step in range(number):
            x, y = batch(step)
            if hasattr(net, "features"):
                with torch.no_grad():
                    self.features.append(net.features(x).clone())
                    self.logits.append(net.head(self.features[-1]))
            self.targets.append(y)
            self.steps.append(step)
            self.tap.begin_step(net, (x, y), torch.arange(BATCH) + 100 * step, step)
            returned = training_step(net, (x, y), optimizer)
            self.tap.end_step(returned)
            assert count_hooks(net) == hooks_before
        if flush:
            self.tap.flush()

    def joined(self, name):
        return torch.cat([getattr(block, name) for block in self.blocks])


def count_hooks(net):
    own = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in net.modules())
    return own + len(nn_module._global_forward_hooks)


def assert_taken(run, steps=None):
    """All samples of the given steps were taken as they were before the update."""
    steps = run.steps if steps is None else steps
    assert run.tap.reason is None
    assert run.tap.head == ("head", run.net.head)
    assert run.joined("steps").tolist() == [step for step in steps for _ in range(BATCH)]
    assert run.joined("ids").tolist() == [100 * step + row for step in steps for row in range(BATCH)]
    assert torch.equal(run.joined("targets"), torch.cat([run.targets[step] for step in steps]))
    assert run.joined("features").dtype == torch.float16
    features, logits = (torch.cat([part[step] for step in steps]) for part in (run.features, run.logits))
    torch.testing.assert_close(run.joined("features").to(features.dtype), features, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(run.joined("logits").to(logits.dtype), logits, rtol=1e-5, atol=1e-6)
    assert run.tap.num_tapped == len(steps) * BATCH


def test_features_and_logits_are_those_before_the_update():
    run = Run(Net())
    assert_taken(run)
    assert not run.tap.left_out
    assert not run.tap.is_unchecked
    assert (run.logits[0] - run.net.head(run.features[0])).abs().max() > 0.01  # the update does matter


def test_several_steps_are_handed_on_together():
    run = Run(Net(), number=MAX_WAITING_STEPS + 2, flush=False)
    assert [len(block) for block in run.blocks] == [BATCH, BATCH * MAX_WAITING_STEPS]
    run.tap.flush()
    assert_taken(run)


def recomputing(reentrant, whole):
    class Recomputing(Net):
        def forward(self, x):
            if whole:
                return checkpoint(super().forward, x.requires_grad_(), use_reentrant=reentrant)
            return self.head(checkpoint(self.features, x.requires_grad_(), use_reentrant=reentrant))

    return Recomputing()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_recomputed_forwards_do_not_matter(reentrant, whole):
    assert_taken(Run(recomputing(reentrant, whole)))


def with_forwards_beside(net, batch, optimizer):
    with torch.no_grad():
        net(batch[0] + 1)  # pseudo-labels, say
    logits = net(batch[0])
    loss = net.criterion(logits, batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    net(batch[0])  # for a metric, after the update
    return loss


def accumulating(net, batch, optimizer):
    loss = net.criterion(net(batch[0]), batch[1])
    (loss / 4).backward()
    return loss


def with_two_optimizers(net, batch, optimizer):
    body, head = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (net.body, net.head))
    for each in (body, head):
        loss = net.criterion(net(batch[0]), batch[1])
        each.zero_grad()
        loss.backward()
        each.step()


def with_more_than_the_criterion(net, batch, optimizer):
    optimizer.zero_grad()
    loss = net.criterion(net(batch[0]), batch[1]) + 1.0 + net.body.weight.square().sum()
    loss.backward()
    optimizer.step()
    return loss


def writing_into_its_tensors(net, batch, optimizer):
    features = net.features(batch[0])
    logits = net(batch[0])
    loss = net.criterion(logits, batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        logits.zero_()
        features.zero_()
    return loss


def calling_parts(net, batch, optimizer):
    optimizer.zero_grad()
    features = net.body(batch[0])
    loss = net.criterion(net.head(features.tanh()), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def scaled(net, batch, optimizer):
    optimizer.zero_grad()
    loss = net.criterion(net(batch[0]), batch[1])
    (1024 * loss).backward()
    return loss


def under_sharpness_aware(net, batch, optimizer):
    first = plain_step(net, batch, optimizer)
    plain_step(net, batch, optimizer)
    return first


@pytest.mark.parametrize(
    "training_step",
    [
        with_forwards_beside,
        accumulating,
        writing_into_its_tensors,
        calling_parts,
        scaled,
        under_sharpness_aware,
        with_two_optimizers,
    ],
)
def test_the_way_a_step_works_does_not_matter(training_step):
    run = Run(Net(), training_step)
    assert_taken(run)
    assert not run.tap.left_out


@pytest.mark.parametrize("returned", [True, False])
def test_without_a_backward_the_loss_tells_or_nothing_does(returned):
    def step(net, batch, optimizer):
        loss = net.criterion(net(batch[0]), batch[1])
        return loss if returned else None

    run = Run(Net(), step)
    assert_taken(run)
    assert run.tap.is_unchecked is not returned


def test_a_loss_that_is_another_one_is_told_without_a_backward():
    run = Run(Net(), lambda net, batch, optimizer: 2 * net.criterion(net(batch[0]), batch[1]))
    assert run.tap.left_out == {MIXED: 3 * BATCH}


def test_a_loss_that_holds_more_is_told_from_mixed_labels_by_its_gradient():
    assert_taken(Run(Net(), with_more_than_the_criterion, number=5))


@pytest.mark.parametrize(
    "criterion", [nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 3.0])), nn.CrossEntropyLoss(reduction="sum")]
)
def test_the_criterion_may_reduce_as_it_likes(criterion):
    assert_taken(Run(Net(criterion)))


def test_label_smoothing_is_no_mixing():
    assert_taken(Run(Net(nn.CrossEntropyLoss(label_smoothing=0.1))))


def mixup(net, batch, optimizer):
    x, y = batch
    order = torch.arange(BATCH - 1, -1, -1)
    logits = net(0.6 * x + 0.4 * x[order])
    loss = 0.6 * net.criterion(logits, y) + 0.4 * net.criterion(logits, y[order])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def test_steps_that_mix_labels_are_left_out_and_counted():
    calls = []

    def every_other(net, batch, optimizer):
        calls.append(1)
        return (mixup if len(calls) % 2 == 0 else plain_step)(net, batch, optimizer)

    run = Run(Net(), every_other, number=8)
    assert_taken(run, steps=[0, 2, 4, 6])
    assert run.tap.left_out == {MIXED: 4 * BATCH}


def test_where_all_steps_mix_labels_there_is_no_tap():
    run = Run(Net(), mixup, number=MAX_USELESS + 2)
    assert run.tap.reason == MIXED
    assert not run.blocks


def test_soft_labels_are_left_out_row_by_row():
    def targets(x):
        rows = F.one_hot(torch.arange(BATCH) % CLASSES, CLASSES).float()
        rows[1] = torch.tensor([0.3, 0.7, 0.0])
        return rows

    run = Run(Net(), batch=lambda step: make_batch(step, targets))
    assert run.tap.left_out == {SOFT: 3}
    assert run.joined("ids").tolist() == [100 * step + row for step in range(3) for row in range(BATCH) if row != 1]


def test_soft_labels_throughout_close_the_tap():
    run = Run(Net(), batch=lambda step: make_batch(step, lambda x: torch.full((BATCH, CLASSES), 1 / 3)), number=40)
    assert run.tap.reason == SOFT


class OneOutput(Net):
    def __init__(self, criterion):
        super().__init__(criterion)
        self.head = nn.Linear(WIDTH, 1)


def test_values_of_a_regression_in_a_column_are_no_soft_labels():
    run = Run(OneOutput(nn.MSELoss()), batch=lambda step: make_batch(step, lambda x: x[:, :1] + x[:, 1:2]), number=40)
    assert_taken(run)
    assert not run.tap.left_out


def test_soft_labels_in_a_column_are():
    run = Run(OneOutput(nn.BCEWithLogitsLoss()), batch=lambda step: make_batch(step, lambda x: x[:, :1].sigmoid()))
    assert run.tap.left_out == {SOFT: 3 * BATCH}


def test_what_half_precision_cannot_hold_is_left_out():
    class Large(Net):
        def features(self, x):
            return torch.where(x[:, :1] > 0, 1e6, 1.0) * torch.ones(1, WIDTH)

    run = Run(Large(), number=1)
    large = run.features[0][:, 0] > 1
    assert run.tap.left_out == {NOT_FINITE: int(large.sum())}
    assert run.joined("ids").tolist() == (~large).nonzero().flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    def step(net, batch, optimizer):
        with torch.autocast("cpu", dtype=dtype):
            loss = net.criterion(net(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = Run(Net(), step)
    assert run.tap.num_tapped == 3 * BATCH
    assert run.joined("logits").dtype == torch.float32
    torch.testing.assert_close(run.joined("logits"), torch.cat(run.logits), rtol=0.05, atol=0.02)


def test_double_precision():
    net = Net().double()
    run = Run(net, batch=lambda step: (make_batch(step)[0].double(), make_batch(step)[1]))
    assert_taken(run)
    assert run.joined("logits").dtype == torch.float64


@pytest.mark.parametrize(
    "layer", [nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)), nn.Linear(4, 1)], ids=["deep", "flat"]
)
def test_binary_logits_may_be_reshaped(layer):
    class Binary(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.criterion = layer, nn.BCEWithLogitsLoss()

        def forward(self, x):
            return self.net(x).squeeze(1)

    run = Run(Binary(), batch=lambda step: (make_batch(step)[0], (make_batch(step)[1] > 0).float()))
    assert run.tap.num_tapped == 3 * BATCH
    assert run.joined("logits").shape == (3 * BATCH, 1)


class Scaling(Net):
    def forward(self, x):
        return 2 * super().forward(x)


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 0


def of_positions(net, batch, optimizer):
    return net(batch[0]).sum()


def refused(name):
    net = Net()
    if name == "own":
        net.head = Own(WIDTH, CLASSES)
    elif name == "parametrized":
        net.head = parametrizations.weight_norm(net.head)
    elif name == "frozen head":
        net.head.requires_grad_(False)
    elif name == "frozen weight":
        net.head.weight.requires_grad_(False)
    elif name == "scaled":
        net = Scaling()
    elif name == "convolution":
        net.head = nn.Conv1d(1, CLASSES, WIDTH)
        net.features = lambda x: net.body(x)[:, None]
    elif name == "two positions":
        net.features = lambda x: net.body(x)[:, None].expand(-1, 2, -1)
    elif name == "compiled":
        net.body.compile(backend="eager")
    return net


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own", "`head` (`Own`) is no plain `Linear`"),
        ("parametrized", "`head` (`ParametrizedLinear`) is no plain `Linear`"),
        ("frozen head", "the logits are not the output of one layer (the last one called is `body`)"),
        ("frozen weight", "the weight of the head `head` is frozen"),
        ("scaled", "the logits are not the output of one layer (the last one called is `head`)"),
        ("convolution", "`head` (`Conv1d`) is no plain `Linear`"),
        ("two positions", "`head` gives (6, 2, 3) for 6 samples"),
        ("compiled", "compiled"),
    ],
)
def test_where_there_is_no_tap_the_reason_is_said(name, words):
    net = refused(name)
    before = count_hooks(net)
    tap = Tap(Adapter(), lambda block: None)
    batch = make_batch(0)
    tap.begin_step(net, batch, torch.arange(BATCH), 0)
    of_positions(net, batch, None)
    tap.end_step(None)
    assert words in tap.reason
    tap.begin_step(net, batch, torch.arange(BATCH), 1)
    assert count_hooks(net) == before


def test_batches_that_cannot_be_read_close_the_tap():
    tap = Tap(Adapter(), lambda block: None)
    tap.begin_step(Net(), {"x": torch.zeros(2, 4)}, torch.arange(2), 0)
    assert "known target keys" in tap.reason


def test_a_head_that_is_replaced_is_found_again():
    def replacing(net, batch, optimizer):
        if int(batch[0][0, 0] * 0) == 0 and len(calls) == 2:
            net.head = nn.Linear(WIDTH, CLASSES)
        calls.append(1)
        return net.criterion(net(batch[0]), batch[1])

    calls = []
    run = Run(Net(), replacing, number=5)
    assert run.tap.left_out == {UNSEEN: BATCH}
    assert run.tap.head == ("head", run.net.head)
    assert run.joined("steps").unique().tolist() == [0, 1, 3, 4]


def test_a_head_that_is_never_called_closes_the_tap():
    run = Run(Net(), lambda net, batch, optimizer: None, number=MAX_MISSES + 1)
    assert run.tap.reason == UNSEEN
    assert run.tap.left_out == {UNSEEN: MAX_MISSES * BATCH}


def test_copies_made_within_a_step_work_on_their_own():
    saved = []

    def copying(net, batch, optimizer):
        file = io.BytesIO()
        torch.save(net.head, file)
        saved.extend([copy.deepcopy(net.head), torch.load(io.BytesIO(file.getvalue()), weights_only=False)])
        saved[-2](torch.zeros(BATCH, WIDTH))
        assert b"lightning_gradsim" not in file.getvalue()
        return plain_step(net, batch, optimizer)

    assert_taken(Run(Net(), copying))
    for head in saved:
        assert head(torch.zeros(2, WIDTH)).shape == (2, CLASSES)


def test_a_step_that_fails_leaves_no_hook():
    net, tap = Net(), Tap(Adapter(), lambda block: None)
    before = count_hooks(net)
    for _ in range(2):
        tap.begin_step(net, make_batch(0), torch.arange(BATCH), 0)
        assert count_hooks(net) == before + 1
    tap.remove()
    assert count_hooks(net) == before
    tap.end_step(None)
    assert not tap.left_out


def test_no_random_number_is_drawn_and_weights_stay():
    def train(tapped):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, WIDTH), nn.Dropout(), nn.Linear(WIDTH, CLASSES))
        adapter, optimizer = Adapter(), torch.optim.Adam(net.parameters())
        tap = Tap(adapter, lambda block: None)
        for step in range(4):
            batch = make_batch(step)
            if tapped:
                tap.begin_step(net, batch, torch.arange(BATCH), step)
            loss = F.cross_entropy(net(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            if tapped:
                tap.end_step(loss)
        return [*net.state_dict().values(), torch.get_rng_state()]

    for ours, theirs in zip(train(True), train(False), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("criterion", "targets"),
    [
        (nn.CrossEntropyLoss(), torch.tensor([0, 2, 1])),
        (nn.CrossEntropyLoss(label_smoothing=0.2), torch.tensor([0, 2, 1])),
        (nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5])), torch.tensor([0, 2, 1])),
        (nn.BCEWithLogitsLoss(), torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0]])),
        (nn.MSELoss(), torch.randn(3, 3)),
    ],
)
def test_output_gradients_are_those_of_one_sample_at_a_time(criterion, targets):
    adapter, logits = Adapter(), torch.randn(3, 3)
    adapter.bind(nn.Module(), criterion)
    found = output_grads(adapter, logits, targets)
    unreduced = copy.copy(criterion)
    unreduced.reduction = "none"
    for row in range(3):
        leaf = logits[row : row + 1].clone().requires_grad_()
        expected = torch.autograd.grad(unreduced(leaf, targets[row : row + 1]).mean(), leaf)[0]
        torch.testing.assert_close(found[row], expected[0])
    assert not logits.requires_grad


@pytest.mark.parametrize("bias", [True, False])
def test_class_gradients_are_means_of_the_heads_gradients(bias):
    head = nn.Linear(WIDTH, CLASSES, bias=bias)
    features, labels = torch.randn(8, WIDTH), torch.tensor([0, 2, 2, 0, 2, 0, -100, 0])
    adapter = Adapter()
    grads = output_grads(adapter, head(features), labels.clamp(min=0))
    found = class_gradients(features.double(), grads.double(), labels, CLASSES, bias=bias)
    for label in range(CLASSES):
        rows = labels == label
        expected = torch.zeros(CLASSES, WIDTH + bias)
        if rows.any():
            loss = F.cross_entropy(head(features[rows]), labels[rows])
            parts = torch.autograd.grad(loss, list(head.parameters()))
            expected = torch.cat([part.reshape(CLASSES, -1) for part in parts], dim=1)
        torch.testing.assert_close(found[label].float(), expected)
