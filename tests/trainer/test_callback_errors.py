from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.strategies.xla import XLAStrategy
from torch.utils.data import TensorDataset

import lightning_gradsim.reporter
from lightning_gradsim import GradSimCallback, lightning_bridge
from lightning_gradsim.errors import (
    NonFiniteError,
)
from tests.trainer.support import (
    Classifier,
    Truth,
    assert_exact,
    collect_warnings,
    fit,
    loader,
    make_trainer,
    read,
    strict,
    train_data,
    val_data,
)


def with_value(dataset, value, *ids):
    x, y = (tensor.clone() for tensor in dataset.tensors)
    x[list(ids)] = value
    return TensorDataset(x, y)


class TestNonFinite:
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_validation_samples(self, tmp_path, value):
        with collect_warnings() as texts:
            gradsim, module, _ = fit(tmp_path, GradSimCallback(), val=loader(with_value(val_data(), value, 3, 17)))
        (text,) = texts
        # The first batch settles it: the second is not looked at.
        assert "NonFiniteError: Validation losses are not finite for 1 samples of loader 0 (sample ids [3])" in text
        assert "Training goes on without it." in text
        assert gradsim.report is None
        assert module.trainer.global_step == 6

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_training_samples(self, tmp_path, value):
        gradsim = GradSimCallback(train_data=with_value(train_data(), value, 41, 7))
        with collect_warnings() as texts:
            fit(tmp_path, gradsim)
        (text,) = texts
        assert "NonFiniteError: Losses or gradients of training samples are not finite (sample ids [7, 41])" in text
        assert gradsim.report is None

    def test_three_validations_in_a_row(self, tmp_path):
        val = loader(with_value(val_data(), float("nan"), 3))
        with collect_warnings() as texts:
            gradsim, module, _ = fit(tmp_path, GradSimCallback(time_budget=None), val=val, max_epochs=5)
        assert gradsim.report is None
        assert module.trainer.global_step == 30
        assert len(texts) == 3
        assert "NonFiniteError: Validation losses are not finite for 1 samples of loader 0 (sample ids [3])" in texts[2]
        assert texts[2].endswith("Training goes on; after 3 failures in a row the callback stops.")

    def test_raise(self, tmp_path):
        with pytest.raises(NonFiniteError, match=r"\[3\]"):
            fit(tmp_path, strict(), val=loader(with_value(val_data(), float("nan"), 3)))

    def test_an_earlier_report_is_kept(self, tmp_path):
        class Breaks(Callback):
            def on_train_epoch_start(self, trainer, pl_module):
                if trainer.current_epoch == 1:
                    val.tensors[0][5] = float("nan")

        val = val_data()
        with collect_warnings() as texts:
            gradsim, _, _ = fit(tmp_path, GradSimCallback(), val=loader(val), callbacks=[Breaks()], max_epochs=2)
        assert len(texts) == 1
        assert read(gradsim).epoch == 0


class TestFailures:
    @pytest.fixture
    def fail(self, monkeypatch):
        """Makes the report fail at the validations with these numbers, counted from 0."""
        score_part = lightning_gradsim.reporter.score_part

        def fail(*numbers):
            calls = iter(range(100))

            def compute(*args, **kwargs):
                number = next(calls)
                if number in numbers:
                    raise RuntimeError(f"boom {number}")
                return score_part(*args, **kwargs)

            monkeypatch.setattr(lightning_gradsim.reporter, "score_part", compute)

        return fail

    def log(self, tmp_path):
        return (tmp_path / "run" / "version_0" / "gradsim" / "errors.log").read_text()

    def test_one_leaves_a_warning_and_a_traceback(self, tmp_path, fail):
        fail(0)
        with collect_warnings() as texts:
            fit(tmp_path, GradSimCallback())
        (text,) = texts
        assert text.startswith("`GradSimCallback` failed in the report of epoch 0: RuntimeError: boom 0")
        assert str(tmp_path / "run" / "version_0" / "gradsim" / "errors.log") in text
        assert "Training goes on without it." in text
        log = self.log(tmp_path)
        assert log.startswith("the report of epoch 0:\nTraceback")
        assert 'raise RuntimeError(f"boom {number}")' in log
        assert log.rstrip().endswith("RuntimeError: boom 0")

    def test_three_in_a_row_stop_the_callback_and_training_goes_on(self, tmp_path, fail):
        fail(0, 1, 2)
        with collect_warnings() as texts:
            gradsim, module, recorder = fit(tmp_path, GradSimCallback(time_budget=None), max_epochs=5)
        assert len(texts) == 3
        assert [("the callback stops" in text) for text in texts] == [False, False, True]
        assert "RuntimeError: boom 2" in texts[2]
        assert "after 3 failures in a row" in texts[2]
        assert (recorder.reports, gradsim.report) == ([], None)
        assert module.trainer.global_step == 30
        assert self.log(tmp_path).count("Traceback") == 3

    def test_a_success_resets_the_count(self, tmp_path, fail):
        fail(0, 1, 3, 4)
        with collect_warnings() as texts:
            _, _, recorder = fit(tmp_path, GradSimCallback(time_budget=None), max_epochs=6)
        assert len(texts) == 4
        assert not any("the callback stops" in text for text in texts)
        assert [report.epoch for report in recorder.reports] == [2, 5]

    def test_the_next_fit_tries_again(self, tmp_path, fail):
        fail(0, 1, 2)
        gradsim = GradSimCallback()
        with collect_warnings() as texts:
            fit(tmp_path, gradsim, max_epochs=3)
        assert len(texts) == 3
        fit(tmp_path, gradsim)
        assert gradsim.report is not None

    def test_raise(self, tmp_path, fail):
        fail(0)
        with pytest.raises(RuntimeError, match="boom 0"):
            fit(tmp_path, strict())

    def test_a_log_that_cannot_be_written(self, tmp_path, fail):
        fail(0)
        (tmp_path / "run" / "version_0").mkdir(parents=True)
        (tmp_path / "run" / "version_0" / "gradsim").write_text("a file is in the way")
        with collect_warnings() as texts:
            fit(tmp_path, GradSimCallback())
        (text,) = texts
        assert "boom 0" in text
        assert "could not be written" in text


def num_hooks(module):
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules())


class TestTrialRun:
    def test_goes_the_whole_way_and_writes_nothing(self, tmp_path):
        gradsim, _, recorder = fit(tmp_path, GradSimCallback(), fast_dev_run=True)
        assert len(recorder.reports) == 1
        assert read(gradsim).num_validation_samples == 10
        assert read(gradsim).queries
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("batches", [1, 2])
    def test_reads_as_many_training_batches_as_it_trains_on(self, tmp_path, batches):
        gradsim, _, _ = fit(tmp_path, GradSimCallback(), fast_dev_run=batches)
        assert read(gradsim).num_train_samples == 10 * batches

    def test_the_next_run_reads_all_again(self, tmp_path):
        gradsim, train = strict(), loader(train_data())
        fit(tmp_path, gradsim, train=train, fast_dev_run=True)
        fit(tmp_path, gradsim, train=train)
        assert read(gradsim).num_train_samples == 60

    def test_raises(self, tmp_path):
        val = loader(with_value(val_data(), float("nan"), 3))
        with pytest.raises(NonFiniteError, match=r"\[3\]"):
            fit(tmp_path, GradSimCallback(on_error="warn"), val=val, fast_dev_run=True)


def test_the_sanity_check_is_skipped_silently(tmp_path):
    class Looks(Callback):
        def __init__(self):
            self.seen = []

        def on_sanity_check_end(self, trainer, pl_module):
            self.seen.append(gradsim.report)

    gradsim, looks, module = strict(), Looks(), Classifier()
    trainer = make_trainer(tmp_path, [gradsim, looks], num_sanity_val_steps=-1)
    trainer.fit(module, loader(train_data()), loader(val_data()))
    first = gradsim.report
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(train_data()), loader(val_data()))  # it remembers the end of an epoch
    assert looks.seen == [None, first]
    assert gradsim.report not in (None, first)


class OwnStrategy(Strategy):
    """Of the user's own; nobody knows what a process holds."""


OwnStrategy.__abstractmethods__ = frozenset()


class OwnDDP(DDPStrategy):
    """A few options more."""


class TestStrategies:
    @pytest.mark.parametrize("fn", ["fit", "validate"])
    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize(
        "strategy", [FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, XLAStrategy, OwnStrategy]
    )
    def test_strategies_that_cut_the_module_or_that_nobody_knows(self, strategy, rank, fn):
        trainer = SimpleNamespace(world_size=2, global_rank=rank, strategy=object.__new__(strategy))
        words = rf"`GradSimCallback` does not support `{strategy.__name__}`.*SingleDeviceStrategy.*DDPStrategy.*\"ddp\""
        with pytest.raises(MisconfigurationException, match=words):
            GradSimCallback().setup(trainer, Classifier(), fn)

    @pytest.mark.parametrize("strategy", [SingleDeviceStrategy, DDPStrategy, OwnDDP])
    def test_strategies_that_are_supported(self, strategy):
        lightning_bridge.check_strategy(SimpleNamespace(strategy=object.__new__(strategy)), "GradSimCallback")


class Regularised(Classifier):
    def training_step(self, batch, batch_idx):
        return 2 * super().training_step(batch, batch_idx)


class Mixup(Classifier):
    def training_step(self, batch, batch_idx):
        x, y = batch
        other = y.roll(1)
        logits = self(0.7 * x + 0.3 * x.roll(1, 0))
        return 0.7 * self.criterion(logits, y) + 0.3 * self.criterion(logits, other)


class Smoothed(Classifier):
    def __init__(self):
        super().__init__()
        del self.criterion

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y, label_smoothing=0.5)

    validation_step = training_step


class Dropout(Classifier):
    def forward(self, x):
        return self.head(F.dropout(self.body(x), 0.5, self.training))


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.criterion(self(x), y))
        optimizer.step()


class TestLossCheck:
    @pytest.mark.parametrize("module", [Regularised, Mixup, Smoothed])
    @pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4}], ids=str)
    def test_another_loss_gives_one_warning_and_a_note(self, tmp_path, module, options):
        with collect_warnings() as texts:
            _, _, recorder = fit(tmp_path, GradSimCallback(), module(), max_epochs=2, **options)
        (text,) = texts
        assert "Pass the loss of a sample as `loss_fn=`, or define `gradsim_step(batch)`" in text
        for report in recorder.reports:
            assert [note for note in report.notes if note in text]

    def test_both_values_are_named(self, tmp_path):
        with collect_warnings() as texts:
            fit(tmp_path, GradSimCallback(), Regularised(), train=loader(train_data()))
        x, y = train_data()[:10]
        ours = float(F.cross_entropy(Classifier()(x), y).detach())
        assert f"`training_step` returned a loss of {2 * ours:.4g}" in texts[0]
        assert f"`Regularised.criterion` (CrossEntropyLoss) gives {ours:.4g}" in texts[0]

    def test_loss_fn_is_the_way_out(self, tmp_path):
        def smoothed(logits, targets):
            return F.cross_entropy(logits, targets, label_smoothing=0.5, reduction="none")

        gradsim, module, _ = fit(tmp_path, strict(loss_fn=smoothed), Smoothed())
        assert read(gradsim).notes == ()
        assert_exact(read(gradsim), Truth(module, loss=smoothed), train_data(), val_data())

    @pytest.mark.parametrize("module", [Classifier, Dropout])
    @pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4}, {"precision": "bf16-mixed"}], ids=str)
    def test_the_same_loss_gives_no_note(self, tmp_path, module, options):
        gradsim, _, _ = fit(tmp_path, module=module(), **options)
        assert read(gradsim).notes == ()

    def test_a_loss_that_is_not_shown_is_noted(self, tmp_path):
        gradsim, _, _ = fit(tmp_path, module=Manual())
        assert any("could not be checked" in note for note in read(gradsim).notes)

    def test_leaves_no_hooks_on_the_module(self, tmp_path):
        _, module, _ = fit(tmp_path, limit_train_batches=1)
        assert num_hooks(module) == 0
