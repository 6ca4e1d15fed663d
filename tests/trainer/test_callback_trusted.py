"""Suspects by a validation set whose labels are right."""

from __future__ import annotations

import csv

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from lightning_gradsim.mislabel import standardise, trusted_scores
from lightning_gradsim.trusted_validation import with_trusted
from tests.trainer.processes import ddp, run_processes
from tests.trainer.support import (
    NUM_TRAIN,
    NUM_VAL,
    Classifier,
    Still,
    collect_warnings,
    fit,
    loader,
    make_trainer,
    read,
    strict,
    train_data,
    val_data,
)
from tests.trainer.test_callback_in_run import assert_same_suspects

NOTE = "suspects are ranked with the help of the validation labels, which `trusted_val=True` says are right"


def trusting(**options):
    return strict(**{"mislabel_score": "margin_knn", "trusted_val": True, **options})


def expected_scores(module):
    """F, by the order that the callback learns the validation samples in."""

    def run(student, batch):
        logits = student(batch[0])
        return logits, batch[1], F.cross_entropy(logits, batch[1], reduction="none")

    x, y = val_data().tensors
    order = torch.randperm(NUM_VAL, generator=torch.Generator().manual_seed(0))
    validation = [(x[rows], y[rows]) for rows in order.split(32)]
    ids = torch.arange(NUM_TRAIN)
    return trusted_scores(module, run, lambda: validation, lambda: [(ids, train_data().tensors)], NUM_TRAIN)


@pytest.mark.parametrize("score", ["margin_knn", "aum"])
def test_the_last_report_adds_what_a_copy_has_learned(tmp_path, score):
    train = loader(train_data())
    plain, _, _ = fit(tmp_path, trusting(trusted_val=False, mislabel_score=score), train=train, max_epochs=3)
    gradsim, module, recorder = fit(tmp_path, trusting(mislabel_score=score), train=train, max_epochs=3)
    suspects, before = read(gradsim).suspects, read(plain).suspects
    own = expected_scores(module)
    assert [report.suspects.score_name for report in recorder.reports] == [score, score, f"{score}+trusted"]
    torch.testing.assert_close(suspects.parts["trusted"], own[suspects.sample_ids], rtol=1e-4, atol=1e-5)
    by_id = before.scores[before.sample_ids.argsort()]
    by_id = (by_id if score == "margin_knn" else standardise(by_id)) + 2 * standardise(own)
    torch.testing.assert_close(suspects.scores, by_id[suspects.sample_ids], rtol=1e-3, atol=1e-3)
    assert suspects.scores.diff().le(0).all()
    assert torch.equal(suspects.flagged[suspects.sample_ids.argsort()], before.flagged[before.sample_ids.argsort()])
    assert NOTE in read(gradsim).notes
    [path] = tmp_path.glob("**/suspects.csv")
    row = next(csv.DictReader(path.read_text().splitlines()))
    assert float(row["trusted"]) == pytest.approx(suspects[0].parts["trusted"])


def test_true_labels_judge_that_ranking(tmp_path):
    true = torch.where(torch.arange(NUM_TRAIN) % 6 == 0, 0, train_data().tensors[1])
    gradsim, _, _ = fit(tmp_path, trusting(true_labels=true))
    other, _, _ = fit(tmp_path, trusting(true_labels=true, trusted_val=False))
    assert read(gradsim).suspect_quality.auroc != read(other).suspect_quality.auroc


class Random(Classifier):
    """With a state, and random numbers of its own."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*self.body, nn.BatchNorm1d(12), nn.Dropout(0.2))
        self.head.weight.requires_grad_(False)

    def forward(self, x):
        self.log("seen", 1.0)
        return super().forward(x)


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}, {"precision": "bf16-mixed"}], ids=str)
def test_training_and_module_stay_as_they_are(tmp_path, options):
    states = []
    for callbacks in ([trusting()], []):
        module = Random()
        torch.manual_seed(7)
        make_trainer(tmp_path, callbacks, max_epochs=2, **options).fit(
            module, loader(train_data(), shuffle=True), loader(val_data())
        )
        states.append((module.state_dict(), torch.get_rng_state(), [part.training for part in module.modules()]))
        assert all(parameter.grad is None or parameter.requires_grad for parameter in module.parameters())
    for name, value in states[0][0].items():
        assert torch.equal(value, states[1][0][name]), name
    assert torch.equal(states[0][1], states[1][1])
    assert states[0][2] == states[1][2]


class Counting:
    """A loss that knows how often it was asked."""

    calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        return F.cross_entropy(outputs, targets, reduction="none")


def test_a_loss_with_a_state_is_left_alone(tmp_path):
    calls = []
    for trusted_val in (False, True):
        loss = Counting()
        fit(tmp_path, trusting(trusted_val=trusted_val, loss_fn=loss), train=loader(train_data()))
        calls.append(loss.calls)
    assert calls[0] == calls[1] > 0


class StopsEarly(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch == 1


def test_after_early_stopping(tmp_path):
    gradsim, module, _ = fit(tmp_path, trusting(), callbacks=[StopsEarly()], max_epochs=9)
    suspects = read(gradsim).suspects
    assert (read(gradsim).epoch, suspects.score_name) == (1, "margin_knn+trusted")
    torch.testing.assert_close(
        suspects.parts["trusted"], expected_scores(module)[suspects.sample_ids], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("options", [{"every_n_epochs": 2}, {"last_epoch_only": True}, {"every_n_steps": 100}], ids=str)
def test_whatever_the_schedule(tmp_path, options):
    gradsim, _, _ = fit(tmp_path, trusting(**options), max_epochs=3)
    assert (read(gradsim).epoch, read(gradsim).suspects.score_name) == (2, "margin_knn+trusted")


def test_where_suspects_rest_on_passes(tmp_path):
    module = Classifier()
    module.compile(backend="eager")
    gradsim, _, _ = fit(tmp_path, trusting(), module)
    assert read(gradsim).suspects.score_name == "margin_knn+trusted"


def test_not_in_validate(tmp_path):
    gradsim = trusting(train_data=train_data())
    make_trainer(tmp_path, [gradsim]).validate(Classifier(), loader(val_data()), verbose=False)
    assert read(gradsim).suspects.score_name == "margin_knn"


@pytest.mark.filterwarnings(
    "ignore:It is recommended to use .self.log:UserWarning:lightning",
    "ignore:Using `DistributedSampler` with the dataloaders:UserWarning:lightning",
)
def test_two_processes_find_what_one_finds(tmp_path):
    def job():
        return read(fit(tmp_path / "two", trusting(), Still(), max_epochs=2, **ddp())[0])

    expected = read(fit(tmp_path / "one", trusting(), Still(), max_epochs=2)[0])
    assert "trusted" in expected.suspects.parts
    for report in run_processes(job, tmp_path):
        assert_same_suspects(report.suspects, expected.suspects)
        assert NOTE in report.notes


def test_doubtful_validation_labels_are_said(tmp_path):
    x, y = train_data(400).tensors
    clean = Classifier()
    with torch.no_grad():
        y = clean(3 * x).argmax(1)
    noisy = torch.where(torch.arange(400) % 3 == 0, (y + 1) % 4, y)
    module = Classifier()
    module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), lr=0.05)
    gradsim, _, _ = fit(
        tmp_path,
        trusting(),
        module,
        loader(TensorDataset(5 * x, y), shuffle=True),
        loader(TensorDataset(5 * x, noisy)),
        max_epochs=8,
    )
    assert len(read(gradsim).suspect_queries) > 2
    words = f"`trusted_val=True` is doubtful here: the label of {len(read(gradsim).suspect_queries)} of 8"
    assert any(note.startswith(words) for note in read(gradsim).notes)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(list(val_data()))


def test_validation_data_without_an_index_are_refused(tmp_path):
    words = r"^`trusted_val=True` reads the validation data anew. The validation data is an iterable dataset "
    with pytest.raises(ValueError, match=words + r"\(`Stream`\), .* no index. Give the trainer `DataLoader`s over"):
        fit(tmp_path, trusting(on_error="warn"), val=loader(Stream()))


class Values(Classifier):
    def forward(self, x):
        return super().forward(x).squeeze(1)


def test_a_regression_is_refused_in_the_first_step(tmp_path):
    def values(data):
        return TensorDataset(data.tensors[0], data.tensors[0][:, 0])

    module = Values(nn.MSELoss(), num_outputs=1)
    with pytest.raises(ValueError, match=r"^`trusted_val=True` needs classes, and the task is a regression"):
        fit(tmp_path, trusting(on_error="warn"), module, loader(values(train_data())), loader(values(val_data())))
    assert module.trainer.global_step == 1


class AsksTheTrainer(Classifier):
    """A copy has none."""

    def forward(self, x):
        assert self.trainer is not None
        return super().forward(x)


def test_what_fails_leaves_the_report(tmp_path):
    with collect_warnings() as texts:
        gradsim, _, _ = fit(tmp_path, trusting(on_error="warn"), AsksTheTrainer())
    [text] = texts
    assert "fine-tuning a copy on the validation labels was given up. RuntimeError: " in text
    assert read(gradsim).suspects.score_name == "margin_knn"
    [note] = [note for note in read(gradsim).notes if note.startswith("suspects are ranked without the validation")]
    assert "RuntimeError: " in note


def test_ties_go_to_the_smaller_id():
    from tests.unit.test_report import table

    merged = with_trusted(table(5), torch.full((20,), torch.nan))
    assert merged.sample_ids.tolist() == [10, 11, 12, 13, 14]
    reversed_table = with_trusted(table(5), torch.arange(20.0))
    assert reversed_table.scores.diff().le(0).all()
    assert reversed_table.labels.tolist() == [int(i - 10) % 3 for i in reversed_table.sample_ids]
