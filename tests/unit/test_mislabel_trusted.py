import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_gradsim.errors import LossError, NonFiniteError
from lightning_gradsim.mislabel.trusted import add_trusted, trusted_scores
from lightning_gradsim.tasks import Task

NUM = 30


def run(module, batch):
    inputs, targets = batch
    logits = module(inputs)
    return logits, targets, F.cross_entropy(logits, targets, reduction="none")


def make():
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))
    module.train()
    module[0].weight.requires_grad_(False)
    train = torch.randn(NUM, 4), torch.randint(3, (NUM,))
    validation = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(3)]
    return module, train, validation


def batches(train, rows=None):
    for ids in (torch.arange(NUM) if rows is None else rows).split(7):
        yield ids, (train[0][ids], train[1][ids])


def score(module, train, validation, **keywords):
    return trusted_scores(module, run, lambda: validation, lambda: batches(train), NUM, **keywords)


def test_fine_tunes_and_averages():
    module, train, validation = make()
    expected = torch.zeros(NUM)
    student = copy.deepcopy(module).eval()
    velocity = {}
    for _ in range(3):
        for batch in validation:
            trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
            gradients = torch.autograd.grad(run(student, batch)[2].mean(), list(trained.values()))
            with torch.no_grad():
                for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
                    velocity[name] = 0.9 * velocity.get(name, 0) + gradient
                    parameter -= 0.1 * velocity[name]
        with torch.no_grad():
            for i in range(NUM):
                logits = student(train[0][i : i + 1])[0].tolist()
                own = logits.pop(int(train[1][i]))
                expected[i] += (max(logits) - own) / 3
    found = score(module, train, validation, epochs=3, learning_rate=0.1)
    torch.testing.assert_close(found, expected)


def test_the_module_is_left_alone():
    module, train, validation = make()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    with torch.no_grad():
        score(module, train, validation)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(part.training for part in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_compiled_parts_of_a_copy_have_its_own_weights():
    module, train, validation = make()
    expected = score(module, train, validation)
    module[0].compile(backend="eager")
    module[3] = torch.compile(module[3], backend="eager")
    module[4] = torch.compile(module[4], backend="eager")
    module.compile(backend="eager")
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(score(module, train, validation), expected)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_copy_bound_to_the_original_is_refused():
    module, train, validation = make()
    layers = list(module)

    def forward(inputs):
        for layer in layers:
            inputs = layer(inputs)
        return inputs

    module.forward = forward
    with pytest.raises(LossError, match="does not depend on the copy's weights"):
        score(module, train, validation)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_samples_that_are_not_read_are_unknown():
    module, train, validation = make()
    found = trusted_scores(module, run, lambda: validation, lambda: batches(train, torch.arange(3, 20)), NUM)
    assert found.isnan().tolist() == [i not in range(3, 20) for i in range(NUM)]


def test_the_worst_label_counts():
    module, inputs, targets = nn.Linear(2, 3), torch.randn(6, 2), torch.randint(2, (6, 3)).float()

    def labelled(module, batch):
        logits = module(batch[0])
        return logits, batch[1], F.binary_cross_entropy_with_logits(logits, batch[1], reduction="none").mean(1)

    found = trusted_scores(
        module, labelled, lambda: [], lambda: [(torch.arange(6), (inputs, targets))], 6, Task.MULTILABEL, epochs=2
    )
    logits = module(inputs).detach()
    torch.testing.assert_close(found, torch.where(targets == 1, -logits, logits).amax(1))


def test_weights_twice():
    found = add_trusted(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 6.0, torch.nan]))
    assert found.tolist() == [-1.0, 4.0, 3.0]


def test_a_loss_that_is_not_finite():
    module, train, validation = make()
    validation[1][0][0] = torch.nan
    with pytest.raises(NonFiniteError, match="The loss of a validation batch became NaN or infinite"):
        score(module, train, validation)


def test_a_regression():
    module, train, validation = make()
    with pytest.raises(ValueError, match="`trusted_val=True` needs classes"):
        score(module, train, validation, task=Task.REGRESSION)
