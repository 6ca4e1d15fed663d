"""Data, batches and labels that cannot be read: refused by name, with the way out."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from lightning_gradsim import Adapter, GradSimCallback
from lightning_gradsim.errors import (
    BatchFormatError,
    LabelRangeError,
    TrainingDataError,
)
from tests.trainer.support import (
    NOTHING,
    Classifier,
    Truth,
    Untouched,
    assert_exact,
    collect_warnings,
    fit,
    loader,
    read,
    strict,
    train_data,
    val_data,
)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(list(train_data()))


class FirstOfSeveral(Classifier):
    def training_step(self, batch, batch_idx):
        batch = batch["a"] if isinstance(batch, dict) else batch[0]
        return super().training_step(batch, batch_idx)


TRAIN_DATA = "Pass a map-style dataset or a `DataLoader` over one as `train_data=` to `GradSimCallback`."
STREAM = "The training data is an iterable dataset (`Stream`), whose samples have no index."
NO_DATASET = "The training data is {}. Expected one `DataLoader` or map-style dataset."
NO_BATCHES = (
    "The training data is a `DataLoader` with `batch_size=None`, whose batches are made by the dataset, so single "
    "samples cannot be read."
)
DICT, LIST = NO_DATASET.format("a `dict`"), NO_DATASET.format("a `list`")
SEVERAL = {
    "iterable": (Classifier, lambda: loader(Stream()), STREAM),
    "mapping": (FirstOfSeveral, lambda: {"a": loader(train_data()), "b": loader(val_data())}, DICT),
    "list": (FirstOfSeveral, lambda: [loader(train_data()), loader(val_data())], LIST),
    "combined": (FirstOfSeveral, lambda: CombinedLoader({"a": loader(train_data())}, "max_size_cycle"), DICT),
    "unbatched": (Classifier, lambda: loader(BatchesOfTen(), batch_size=None), NO_BATCHES),
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
        module, make, message = SEVERAL[kind]
        with pytest.raises(TrainingDataError, match=f"^{re.escape(message)} {re.escape(TRAIN_DATA)}$"):
            fit(tmp_path, GradSimCallback(), module(), make(), callbacks=[Untouched()])

    @pytest.mark.parametrize("on_error", ["warn", "raise"])
    def test_train_data_is_the_way_out(self, tmp_path, kind, on_error):
        module, make, _ = SEVERAL[kind]
        options = {"on_error": on_error, "time_budget": None, "mislabel_score": "self_influence"}
        gradsim = GradSimCallback(train_data=train_data(), **options)
        gradsim, module, recorder = fit(tmp_path, gradsim, module(), make(), max_epochs=2)
        assert len(recorder.reports) == 2
        assert_exact(read(gradsim), Truth(module), train_data(), val_data())


class TestPartOfTheTrainingData:
    @pytest.mark.filterwarnings("ignore:You requested to overfit:UserWarning")
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"limit_train_batches": 2}, "`limit_train_batches` lets training see 2 of 6 batches an epoch: "),
            ({"limit_train_batches": 0.5}, "`limit_train_batches` lets training see 3 of 6 batches an epoch: "),
            ({"overfit_batches": 2}, "`overfit_batches` lets training see 2 of 6 batches an epoch: "),
            ({}, None),
        ],
        ids=str,
    )
    def test_is_noted(self, tmp_path, options, words):
        gradsim, _, _ = fit(tmp_path, strict(), **options)
        rest = "samples that it does not see are compared with all the same; pass `train_data=` with those that it sees"
        assert read(gradsim).notes == (() if words is None else (words + rest,))

    def test_is_not_noted_of_other_data(self, tmp_path):
        gradsim, _, _ = fit(tmp_path, strict(train_data=train_data(20)), limit_train_batches=2)
        assert read(gradsim).notes == ()


class TestOtherTrainingData:
    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (3, NO_DATASET.format("an `int`")),
            ("data", NO_DATASET.format("a `str`")),
            (object(), NO_DATASET.format("an `object`")),
            ([loader(val_data())], LIST),
            (Stream(), STREAM),
            (TensorDataset(torch.empty(0, 8)), "The training data has no samples."),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_wrong_train_data_raises(self, tmp_path, value, message):
        with pytest.raises(TrainingDataError, match=f"^{re.escape(message)} {re.escape(TRAIN_DATA)}$"):
            fit(tmp_path, GradSimCallback(train_data=value), callbacks=[Untouched()])

    @pytest.mark.filterwarnings("ignore:Total length of `.*` across ranks is zero:UserWarning")
    def test_empty_train_loader(self, tmp_path):
        gradsim, _, _ = fit(tmp_path, strict(), train=loader(TensorDataset(torch.empty(0, 8), torch.empty(0).long())))
        assert gradsim.report is None  # Lightning trains nothing and validates nothing

    @pytest.mark.filterwarnings("ignore:Total length of `.*` across ranks is zero:UserWarning")
    def test_empty_val_loader(self, tmp_path):
        empty = loader(TensorDataset(torch.empty(0, 8), torch.empty(0).long()))
        with collect_warnings() as texts:
            gradsim, _, _ = fit(tmp_path, strict(), val=empty)
        assert gradsim.report is None
        assert texts == [NOTHING]

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
        assert (
            "failed in the choice of queries of epoch 0: BatchFormatError: A batch is a list of 3. Expected (inputs, "
            "targets) with a tensor of targets, or a mapping with a target key. Pass an `Adapter` subclass as "
            "`adapter=`, or define `gradsim_step(batch)` on the module. "
        ) in text
        assert text.endswith("Training goes on without it.")

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
        assert (
            "BatchFormatError: `Pairs` returned a tuple. Expected a tensor of logits, or an object or mapping with "
            "`logits`. Pass an `Adapter` subclass as `adapter=` that overrides `forward`. "
        ) in text

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
        assert (
            "LossError: No loss is known for outputs of shape (10, 4) and targets of shape (10, 4) (torch.float32): "
            "the module has no criterion attribute, and cross-entropy is the default for integer targets [B] and "
            "logits [B, C] only. Pass `loss_fn=` to `GradSimCallback`, a function of (outputs, targets) that returns "
            "one loss a sample. "
        ) in text


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


def outside(label):
    return (
        f"Labels [{label}] lie outside the model's 4 classes (0 to 3). Check the targets, or pass "
        "`loss_fn=nn.CrossEntropyLoss(ignore_index=...)` if such samples are to be ignored."
    )


class TestLabels:
    @pytest.mark.parametrize("label", [7, -1])
    def test_outside_the_classes_in_validation(self, tmp_path, label):
        with collect_warnings() as texts:
            gradsim, _, _ = fit(tmp_path, GradSimCallback(), Tolerant(), val=loader(with_label(val_data(), label, 3)))
        (text,) = texts
        assert f"LabelRangeError: Validation samples [3] of loader 0: {outside(label)} " in text
        assert gradsim.report is None

    @pytest.mark.parametrize("label", [7, -1])
    def test_outside_the_classes_in_training(self, tmp_path, label):
        gradsim = GradSimCallback(train_data=with_label(train_data(), label, 33))
        with collect_warnings() as texts:
            fit(tmp_path, gradsim)
        (text,) = texts
        assert f"LabelRangeError: Training samples [33]: {outside(label)} " in text

    @pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled:UserWarning")
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_raise(self, tmp_path, shuffle):
        where = "samples at places [" if shuffle else "samples [13"
        with pytest.raises(
            LabelRangeError, match=re.escape(f"Validation {where}") + r"\d*\] of loader 0: Labels \[7\]"
        ):
            fit(tmp_path, strict(), Tolerant(), val=loader(with_label(val_data(), 7, 13), shuffle=shuffle))

    def test_ignored_labels_are_no_queries(self, tmp_path):
        train, val = with_label(train_data(), -1, 3, 30), with_label(val_data(), -1, 2, 12, 31)
        module = Classifier(nn.CrossEntropyLoss(ignore_index=-1))
        gradsim, module, _ = fit(tmp_path, strict(num_queries=99), module, loader(train), loader(val))
        mistakes = {i for i in Truth(module).mistakes(val) if i not in {2, 12, 31}}
        assert {query.sample_id for query in read(gradsim).queries} == mistakes
        scores = {suspect.sample_id: suspect.score for suspect in read(gradsim).suspects}
        assert scores[3] == scores[30] == 0
