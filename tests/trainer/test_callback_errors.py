from __future__ import annotations

import re
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
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
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import lightning_gradsim.reporter
from lightning_gradsim import Adapter, GradSimCallback, lightning_bridge
from lightning_gradsim.errors import (
    BatchFormatError,
    LabelRangeError,
    LayerSelectionError,
    LossError,
    NonFiniteError,
    TrainingDataError,
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


class TestArguments:
    @pytest.mark.parametrize("argument", ["num_queries", "top_k", "every_n_epochs", "max_train_samples"])
    @pytest.mark.parametrize(
        ("value", "error"), [(0, ValueError), (-3, ValueError), (2.5, TypeError), ("8", TypeError), (True, TypeError)]
    )
    def test_counts(self, argument, value, error):
        with pytest.raises(error, match=re.escape(f"`{argument}={value!r}`") + ".*at least 1"):
            GradSimCallback(**{argument: value})

    @pytest.mark.parametrize("argument", ["num_queries", "top_k", "warmup_epochs"])
    def test_counts_that_are_not_optional(self, argument):
        with pytest.raises(TypeError, match=f"`{argument}=None`"):
            GradSimCallback(**{argument: None})

    @pytest.mark.parametrize(
        ("argument", "choices"),
        [
            ("similarity", ["dot", "cosine", "asymmetric"]),
            ("query_policy", ["highest_loss", "random"]),
            ("on_error", ["warn", "raise"]),
        ],
    )
    @pytest.mark.parametrize("value", ["dott", "", None, 3, ["dot"]], ids=repr)
    def test_choices(self, argument, choices, value):
        with pytest.raises(ValueError, match=re.escape(f"`{argument}={value!r}`")) as caught:
            GradSimCallback(**{argument: value})
        assert all(repr(choice) in str(caught.value) for choice in choices)

    @pytest.mark.parametrize(
        ("value", "error"),
        [
            (3, TypeError),
            (None, TypeError),
            (int, TypeError),
            (["head", 3], TypeError),
            ([], ValueError),
            (nn.Linear(2, 2), TypeError),
        ],
        ids=repr,
    )
    def test_layers(self, value, error):
        with pytest.raises(error, match="`layers="):
            GradSimCallback(layers=value)

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"name": ""}, ValueError, "`name=''`"),
            ({"name": "a/b"}, ValueError, "`name='a/b'`"),
            ({"name": "a\\b"}, ValueError, "name="),
            ({"name": ".."}, ValueError, r"`name='\.\.'`"),
            ({"name": 3}, TypeError, "`name=3`"),
            ({"seed": "one"}, TypeError, "`seed='one'`"),
            ({"seed": 1.5}, TypeError, r"`seed=1\.5`"),
            ({"loss_fn": 3}, TypeError, "`loss_fn=3`"),
            ({"adapter": object()}, TypeError, "`adapter` is a object.*`Adapter` subclass"),
            ({"adapter": Adapter}, TypeError, "`adapter` is a type.*instance"),
            ({"mean": [0.5]}, ValueError, "`mean` and `std`"),
            ({"std": [0.5]}, ValueError, "`mean` and `std`"),
            ({"mean": [0.5, 0.5], "std": [0.2]}, ValueError, r"`mean=\[0\.5, 0\.5\]` and `std=\[0\.2\]`"),
            ({"mean": 0.5, "std": 0.2}, TypeError, r"`mean=0\.5`"),
            ({"mean": [0.5], "std": [0.0]}, ValueError, r"`std=\[0\.0\]`.*above 0"),
            ({"mean": "ab", "std": [0.1, 0.2]}, TypeError, "`mean='ab'`"),
            ({"class_names": "cat"}, TypeError, "`class_names='cat'`"),
            ({"class_names": 4}, TypeError, "`class_names=4`"),
        ],
        ids=str,
    )
    def test_others(self, options, error, words):
        with pytest.raises(error, match=words):
            GradSimCallback(**options)

    def test_arrays_are_lists(self):
        GradSimCallback(class_names=np.array(["a", "b"]), mean=np.float32([0.5]), std=(1,))


class Untouched(Callback):
    """Fails if a training step is reached."""

    def on_train_batch_start(self, *_):
        pytest.fail("training has started")


class TestLayers:
    """Wrong layers raise at the start of fit, whatever ``on_error`` says."""

    @pytest.mark.parametrize(
        ("layers", "error", "words"),
        [
            (
                "head.fcc",
                LayerSelectionError,
                r"`layers='head\.fcc'` matches no layer of `Classifier`.*available_layers",
            ),
            ("heed", LayerSelectionError, "Closest: `head`"),
            (["head", "boody.0"], LayerSelectionError, r"Closest: `body\.0`"),
            (nn.Conv2d, LayerSelectionError, r"`Conv2d`.*`body\.0`, `head`"),
            ("body.1", LayerSelectionError, r"Layer `body\.1` \(`ReLU`\) has no trainable parameter.*`head`"),
            (lambda name, layer: False, LayerSelectionError, "none of the 2 trainable layers"),
        ],
        ids=str,
    )
    def test_unknown(self, tmp_path, layers, error, words):
        with pytest.raises(error, match=words):
            fit(tmp_path, GradSimCallback(layers=layers), callbacks=[Untouched()])

    def test_frozen(self, tmp_path):
        module = Classifier()
        module.head.requires_grad_(False)
        with pytest.raises(LayerSelectionError, match=r"Layer `head`.*no trainable parameter.*`requires_grad`"):
            fit(tmp_path, GradSimCallback(layers="head"), module, callbacks=[Untouched()])

    def test_several_criteria(self, tmp_path):
        module = Classifier()
        module.other = nn.MSELoss()
        with pytest.raises(LossError, match=r"`criterion` \(CrossEntropyLoss\), `other` \(MSELoss\).*`loss_fn=`"):
            fit(tmp_path, GradSimCallback(), module, callbacks=[Untouched()])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(list(train_data()))


class FirstOfSeveral(Classifier):
    def training_step(self, batch, batch_idx):
        batch = batch["a"] if isinstance(batch, dict) else batch[0]
        return super().training_step(batch, batch_idx)


SEVERAL = {
    "iterable": (Classifier, lambda: loader(Stream()), "iterable dataset \\(`Stream`\\)"),
    "mapping": (FirstOfSeveral, lambda: {"a": loader(train_data()), "b": loader(val_data())}, "is a `dict`"),
    "list": (FirstOfSeveral, lambda: [loader(train_data()), loader(val_data())], "is a `list`"),
    "combined": (FirstOfSeveral, lambda: CombinedLoader({"a": loader(train_data())}, "max_size_cycle"), "is a `dict`"),
    "unbatched": (Classifier, lambda: loader(BatchesOfTen(), batch_size=None), "batch_size=None"),
}


class BatchesOfTen(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return train_data()[10 * index : 10 * index + 10]


@pytest.mark.filterwarnings("ignore:You are using a CombinedLoader:UserWarning")
@pytest.mark.parametrize("kind", SEVERAL)
class TestTrainingData:
    def test_that_has_no_index_is_refused_before_training(self, tmp_path, kind):
        module, make, words = SEVERAL[kind]
        with pytest.raises(TrainingDataError, match=words) as caught:
            fit(tmp_path, GradSimCallback(), module(), make(), callbacks=[Untouched()])
        assert "as `train_data=` to `GradSimCallback`" in str(caught.value)

    @pytest.mark.parametrize("on_error", ["warn", "raise"])
    def test_train_data_is_the_way_out(self, tmp_path, kind, on_error):
        module, make, _ = SEVERAL[kind]
        gradsim = GradSimCallback(train_data=train_data(), on_error=on_error)
        gradsim, module, recorder = fit(tmp_path, gradsim, module(), make(), max_epochs=2)
        assert len(recorder.reports) == 2
        assert_exact(read(gradsim), Truth(module), train_data(), val_data())


class TestOtherTrainingData:
    @pytest.mark.parametrize(
        "value", [3, "data", object(), [loader(val_data())], Stream()], ids=lambda v: type(v).__name__
    )
    def test_wrong_train_data_raises(self, tmp_path, value):
        with pytest.raises(TrainingDataError, match=f"`{type(value).__name__}`"):
            fit(tmp_path, GradSimCallback(train_data=value), callbacks=[Untouched()])

    def test_empty_train_data_raises(self, tmp_path):
        with pytest.raises(TrainingDataError, match="no samples"):
            fit(tmp_path, GradSimCallback(train_data=TensorDataset(torch.empty(0, 8))), callbacks=[Untouched()])

    @pytest.mark.filterwarnings("ignore:Total length of `.*` across ranks is zero:UserWarning")
    def test_empty_train_loader(self, tmp_path):
        gradsim, _, _ = fit(tmp_path, strict(), train=loader(TensorDataset(torch.empty(0, 8), torch.empty(0).long())))
        assert gradsim.report is None  # Lightning trains nothing and validates nothing

    @pytest.mark.filterwarnings("ignore:Total length of `.*` across ranks is zero:UserWarning")
    def test_empty_val_loader(self, tmp_path):
        gradsim, _, _ = fit(tmp_path, strict(), val=loader(TensorDataset(torch.empty(0, 8), torch.empty(0).long())))
        assert gradsim.report is None

    @pytest.mark.filterwarnings("ignore:Total length of `.*` across ranks is zero:UserWarning")
    def test_one_of_two_val_loaders_is_empty(self, tmp_path):
        empty = loader(TensorDataset(torch.empty(0, 8), torch.empty(0).long()))
        gradsim, _, _ = fit(tmp_path, strict(), val=[empty, loader(val_data())])
        assert {query.dataloader_idx for query in read(gradsim).queries} == {1}


class Weighted(Classifier):
    """Batches of three."""

    def training_step(self, batch, batch_idx):
        x, y, weight = batch
        return (F.cross_entropy(self(x), y, reduction="none") * weight).mean()

    validation_step = training_step


class WeightedAdapter(Adapter):
    def split(self, batch):
        x, y, _ = batch
        return x, y


def with_weights(dataset):
    return TensorDataset(*dataset.tensors, torch.ones(len(dataset)))


class TestBatches:
    def fit(self, tmp_path, gradsim, **options):
        train, val = loader(with_weights(train_data())), loader(with_weights(val_data()))
        return fit(tmp_path, gradsim, Weighted(), train, val, **options)

    def test_of_unknown_form_warn(self, tmp_path):
        with collect_warnings() as texts:
            gradsim, module, _ = self.fit(tmp_path, GradSimCallback())
        assert gradsim.report is None
        assert module.trainer.global_step == 6
        (text,) = texts
        assert "failed in the choice of queries of epoch 0: BatchFormatError: A batch is a list of 3" in text
        assert "Pass an `Adapter` subclass as `adapter=`" in text
        assert "Training goes on" in text

    def test_of_unknown_form_raise(self, tmp_path):
        with pytest.raises(BatchFormatError, match="A batch is a list of 3"):
            self.fit(tmp_path, strict())

    def test_an_adapter_is_the_way_out(self, tmp_path):
        gradsim, module, _ = self.fit(tmp_path, strict(adapter=WeightedAdapter()))
        assert_exact(read(gradsim), Truth(module), with_weights(train_data()), with_weights(val_data()))

    def test_outputs_without_logits(self, tmp_path):
        class Pairs(Classifier):
            def forward(self, x):
                return super().forward(x), x

            def training_step(self, batch, batch_idx):
                x, y = batch
                return F.cross_entropy(self(x)[0], y)

            validation_step = training_step

        with collect_warnings() as texts:
            fit(tmp_path, GradSimCallback(), Pairs())
        (text,) = texts
        assert "`Pairs` returned a tuple" in text
        assert "`adapter=`" in text

    def test_no_loss_is_known(self, tmp_path):
        values = TensorDataset(val_data().tensors[0], F.one_hot(val_data().tensors[1], 4).float())

        class OnOneHot(Classifier):
            def __init__(self):
                super().__init__()
                del self.criterion

            def training_step(self, batch, batch_idx):
                return F.mse_loss(self(batch[0]), batch[1])

            validation_step = training_step

        with collect_warnings() as texts:
            fit(tmp_path, GradSimCallback(), OnOneHot(), loader(values), loader(values))
        (text,) = texts
        assert "LossError: No loss is known for outputs of shape (10, 4) and targets of shape (10, 4)" in text
        assert "Pass `loss_fn=`" in text


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


class Tolerant(Classifier):
    """Trains on labels outside its classes."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.criterion(self(x), y.clamp(0, 3))

    validation_step = training_step


def with_label(dataset, label, *ids):
    x, y = (tensor.clone() for tensor in dataset.tensors)
    y[list(ids)] = label
    return TensorDataset(x, y)


class TestLabels:
    @pytest.mark.parametrize("label", [7, -1])
    def test_outside_the_classes_in_validation(self, tmp_path, label):
        with collect_warnings() as texts:
            gradsim, _, _ = fit(tmp_path, GradSimCallback(), Tolerant(), val=loader(with_label(val_data(), label, 3)))
        (text,) = texts
        assert f"LabelRangeError: Labels [{label}] lie outside the model's 4 classes (0 to 3)" in text
        assert gradsim.report is None

    @pytest.mark.parametrize("label", [7, -1])
    def test_outside_the_classes_in_training(self, tmp_path, label):
        gradsim = GradSimCallback(train_data=with_label(train_data(), label, 33))
        with collect_warnings() as texts:
            fit(tmp_path, gradsim)
        (text,) = texts
        assert f"Labels [{label}] lie outside the model's 4 classes" in text
        assert "33" in text.partition("Labels")[0]

    def test_raise(self, tmp_path):
        with pytest.raises(LabelRangeError, match=r"Labels \[7\]"):
            fit(tmp_path, strict(), Tolerant(), val=loader(with_label(val_data(), 7, 3)))

    def test_ignored_labels_are_no_queries(self, tmp_path):
        train, val = with_label(train_data(), -1, 3, 30), with_label(val_data(), -1, 2, 12, 31)
        module = Classifier(nn.CrossEntropyLoss(ignore_index=-1))
        gradsim, module, _ = fit(tmp_path, strict(num_queries=99), module, loader(train), loader(val))
        mistakes = {i for i in Truth(module).mistakes(val) if i not in {2, 12, 31}}
        assert {query.sample_id for query in read(gradsim).queries} == mistakes
        scores = {suspect.sample_id: suspect.score for suspect in read(gradsim).suspects}
        assert scores[3] == scores[30] == 0


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

    def test_a_full_disk_costs_the_files_only(self, tmp_path, monkeypatch):
        def refuse(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(lightning_gradsim.reporter, "write_report_files", refuse)
        with collect_warnings() as texts:
            gradsim, _, _ = fit(tmp_path, GradSimCallback())
        assert len(texts) == 1
        assert "No space left on device" in texts[0]
        assert read(gradsim).queries


class Draws(Adapter):
    """Draws random numbers, then fails, on a training batch in the middle of the pass."""

    def __init__(self, error):
        super().__init__()
        self.error, self.steps = error, 0

    def step(self, module, batch):
        step = super().step(module, batch)
        if torch.is_grad_enabled():  # the pass, not the choice of queries
            self.steps += 1
            if self.steps == 4:
                torch.rand(3), np.random.rand(3)
                raise self.error
        return step


def facts(module):
    """What a failure must not change."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "modes": [each.training for each in module.modules()],
        "hooks": [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules()],
        "grads": [parameter.grad is None for parameter in module.parameters()],
    }


class Before(Callback):
    def on_validation_end(self, trainer, pl_module):
        pl_module.body.train()  # a mode of its own
        self.facts = facts(pl_module)


class After(Callback):
    facts = None

    def on_validation_end(self, trainer, pl_module):
        self.facts = facts(pl_module)

    def on_exception(self, trainer, pl_module, exception):
        self.exception, self.facts = exception, facts(pl_module)


class TestAnExceptionInTheMiddleOfThePass:
    def run(self, tmp_path, error, on_error):
        before, after = Before(), After()
        gradsim = GradSimCallback(adapter=Draws(error), on_error=on_error)
        trainer = make_trainer(tmp_path, [before, gradsim, after])
        return before, after, trainer, gradsim

    def test_leaves_the_run_as_it_was(self, tmp_path):
        before, after, trainer, gradsim = self.run(tmp_path, ValueError("no"), "warn")
        with collect_warnings() as texts:
            trainer.fit(Classifier(), loader(train_data()), loader(val_data()))
        assert len(texts) == 1
        assert gradsim.adapter.steps == 4
        assert after.facts == before.facts

    def test_leaves_the_process_as_it_was_when_it_raises(self, tmp_path):
        before, after, trainer, _ = self.run(tmp_path, ValueError("no"), "raise")
        with pytest.raises(ValueError, match="no"):
            trainer.fit(Classifier(), loader(train_data()), loader(val_data()))
        assert {**after.facts, "grad": None} == {**before.facts, "grad": None}  # Lightning has left its no_grad
        assert torch.is_grad_enabled()

    @pytest.mark.parametrize("on_error", ["warn", "raise"])
    def test_an_interrupt_passes_through(self, tmp_path, on_error):
        before, after, trainer, _ = self.run(tmp_path, KeyboardInterrupt(), on_error)
        handler = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(SystemExit):  # Lightning's answer to an interrupt
                trainer.fit(Classifier(), loader(train_data()), loader(val_data()))
        finally:
            signal.signal(signal.SIGINT, handler)
        assert isinstance(after.exception, KeyboardInterrupt)
        assert {**after.facts, "grad": None} == {**before.facts, "grad": None}
        assert not (tmp_path / "run" / "version_0" / "gradsim").exists()


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
        assert sum(facts(module)["hooks"]) == 0


class TestTwoCallbacks:
    def test_of_different_names(self, tmp_path):
        other = strict(name="layers", layers="all", similarity="cosine")
        gradsim, module, _ = fit(tmp_path, strict(), callbacks=[other])
        assert_exact(read(gradsim), Truth(module), train_data(), val_data())
        assert_exact(read(other), Truth(module, list(module.parameters())), train_data(), val_data())
        for name in ("gradsim", "layers"):
            assert (tmp_path / "run" / "version_0" / name / "report.json").exists()

    def test_of_one_name(self, tmp_path):
        with pytest.raises(RuntimeError, match="more than one stateful callback"):
            fit(tmp_path, GradSimCallback(), callbacks=[GradSimCallback(layers="all")])
