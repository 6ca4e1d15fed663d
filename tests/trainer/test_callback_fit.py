from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, random_split

import lightning_gradsim.presentation
import lightning_gradsim.reporter
from tests.noninterference.cases import averaging
from tests.reference import one_sample_gradients, preconditioned
from tests.trainer.support import (
    NUM_CLASSES,
    NUM_TRAIN,
    NUM_VAL,
    Classifier,
    Truth,
    assert_exact,
    assert_list,
    collect_warnings,
    fit,
    loader,
    make_data,
    read,
    strict,
    train_data,
    val_data,
)


class TestQueries:
    @pytest.mark.parametrize("batch_size", [7, 40])
    def test_all_mistakes_are_found(self, tmp_path, batch_size):
        gradsim, module, _ = fit(tmp_path, strict(num_queries=NUM_VAL), val=loader(val_data(), batch_size=batch_size))
        report, truth, val = read(gradsim), Truth(module), val_data()
        mistakes = truth.mistakes(val)
        assert {query.sample_id: (query.label, query.prediction) for query in report.queries} == mistakes
        assert (report.num_errors, report.num_validation_samples) == (len(mistakes), NUM_VAL)
        assert report.errors_per_class == Counter(label for label, _ in mistakes.values())
        for query in report.queries:
            x, y = val[query.sample_id]
            probabilities = truth.logits((x, y)).softmax(0)
            assert query.probability == pytest.approx(float(probabilities.max()), rel=1e-5)
            assert query.loss == pytest.approx(-float(probabilities[y].log()), rel=1e-4)

    def test_several_validation_loaders(self, tmp_path):
        parts = [make_data(13, seed=5), make_data(20, seed=6)]
        gradsim, module, _ = fit(tmp_path, strict(num_queries=99), val=[loader(part, batch_size=6) for part in parts])
        report, truth = read(gradsim), Truth(module)
        expected = {(i, sample_id) for i, part in enumerate(parts) for sample_id in truth.mistakes(part)}
        assert {(query.dataloader_idx, query.sample_id) for query in report.queries} == expected
        assert report.num_validation_samples == 33
        for query in report.queries:
            assert query.label == int(parts[query.dataloader_idx][query.sample_id][1])

    def test_ids_of_a_validation_subset_are_those_of_the_dataset_beneath(self, tmp_path):
        indices = list(range(39, 4, -2))
        gradsim, module, _ = fit(tmp_path, strict(num_queries=99), val=loader(Subset(val_data(), indices)))
        expected = {i for i in Truth(module).mistakes(val_data()) if i in indices}
        assert {query.sample_id for query in read(gradsim).queries} == expected

    def test_validation_loaders_in_a_mapping(self, tmp_path):
        parts = {"a": loader(make_data(13, seed=5)), "b": loader(make_data(20, seed=6))}
        gradsim, module, _ = fit(tmp_path, strict(num_queries=99), val=parts)
        expected = {
            (i, sample_id)
            for i, part in enumerate(parts.values())
            for sample_id in Truth(module).mistakes(part.dataset)
        }
        assert {(query.dataloader_idx, query.sample_id) for query in read(gradsim).queries} == expected

    def test_an_iterable_validation_set_gives_no_ids(self, tmp_path):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(list(val_data()))

        gradsim, module, _ = fit(tmp_path, strict(num_queries=99), val=loader(Stream()))
        assert [query.sample_id for query in read(gradsim).queries] == [None] * len(Truth(module).mistakes(val_data()))

    @pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled:UserWarning")
    def test_a_shuffled_validation_loader_gives_no_ids(self, tmp_path):
        gradsim, module, _ = fit(tmp_path, strict(num_queries=99), val=loader(val_data(), shuffle=True))
        report = read(gradsim)
        assert len(report.queries) == len(Truth(module).mistakes(val_data()))
        assert {query.sample_id for query in report.queries} == {None}
        assert any("no id" in note for note in report.notes)

    def test_highest_loss_is_balanced_over_classes(self, tmp_path):
        gradsim, module, _ = fit(tmp_path, strict(num_queries=6), val=loader(val_data(), batch_size=3))
        truth, val = Truth(module), val_data()
        by_class: dict[int, list[tuple[float, int]]] = {}
        for i, (label, _) in truth.mistakes(val).items():
            by_class.setdefault(label, []).append((-float(F.cross_entropy(truth.logits(val[i]), val[i][1])), i))
        ranked = [(rank, loss, i) for each in by_class.values() for rank, (loss, i) in enumerate(sorted(each))]
        expected = [i for _, _, i in sorted(ranked)[:6]]
        assert [query.sample_id for query in read(gradsim).queries] == expected

    def test_random_policy_is_seeded_and_independent_of_batches(self, tmp_path):
        def chosen(seed, batch_size):
            gradsim = strict(num_queries=5, query_policy="random", seed=seed)
            gradsim, module, _ = fit(tmp_path, gradsim, val=loader(val_data(), batch_size=batch_size))
            ids = [query.sample_id for query in read(gradsim).queries]
            assert len(set(ids)) == 5
            assert set(ids) <= set(Truth(module).mistakes(val_data()))
            return ids

        first = chosen(0, 9)
        assert chosen(0, 4) == first
        assert set(chosen(1, 9)) != set(first)


class TestSimilarities:
    @pytest.mark.parametrize("similarity", ["dot", "cosine", "asymmetric"])
    def test_equal_one_sample_autograd(self, tmp_path, similarity):
        gradsim, module, _ = fit(tmp_path, strict(similarity=similarity), max_epochs=2)
        report = read(gradsim)
        assert (report.similarity, report.layers, report.num_train_samples) == (similarity, ("head",), NUM_TRAIN)
        assert report.notes == ()
        assert_exact(report, Truth(module), train_data(), val_data())

    @pytest.mark.parametrize("options", [{"damping": 0.1}, {"damping": 2.0, "layers": "all"}], ids=str)
    def test_influence_equals_the_dense_inverse(self, tmp_path, options):
        gradsim, module, _ = fit(tmp_path, strict(similarity="influence", top_k=NUM_TRAIN, **options), max_epochs=2)
        report, train, val = read(gradsim), train_data().tensors, val_data().tensors
        state, module = module.state_dict(), Classifier()  # one without a trainer can be copied
        module.load_state_dict(state)
        assert (report.similarity, report.notes) == ("influence", ())
        assert report.queries
        layers, criterion = dict.fromkeys(report.layers, ("weight", "bias")), nn.CrossEntropyLoss(reduction="none")
        rows = [query.sample_id for query in report.queries]
        gradients = one_sample_gradients(module, layers, *train, criterion)
        for name in ("harmful", "teachers"):
            labels = val[1][rows] if name == "harmful" else torch.tensor([query.prediction for query in report.queries])
            pairs = (val[0][rows], labels), train
            solved = preconditioned(module, layers, layers, *pairs, criterion, options["damping"])
            expected, tolerance = solved @ gradients.joined.T, solved.norm(dim=1)[:, None] * gradients.norms * 1e-4
            for row, query in enumerate(report.queries):
                sign = -1 if name == "harmful" else 1
                lists = getattr(query, name), expected[row], tolerance[row], range(NUM_TRAIN), NUM_TRAIN, sign
                assert_list(*lists)

    @pytest.mark.parametrize(
        ("layers", "names"),
        [
            ("all", ("body.0", "head")),
            ("body", ("body.0",)),
            ("h*d", ("head",)),
            (nn.Linear, ("body.0", "head")),
            (lambda name, layer: layer.out_features == 12, ("body.0",)),
        ],
    )
    def test_of_other_layers(self, tmp_path, layers, names):
        gradsim, module, _ = fit(tmp_path, strict(layers=layers, top_k=5))
        assert read(gradsim).layers == names
        parameters = [p for name in names for p in module.get_submodule(name).parameters()]
        assert_exact(read(gradsim), Truth(module, parameters), train_data(), val_data(), top_k=5)

    def test_of_a_partly_frozen_layer(self, tmp_path):
        module = Classifier()
        module.head.weight.requires_grad_(False)
        gradsim, module, _ = fit(tmp_path, module=module)
        assert_exact(read(gradsim), Truth(module, [module.head.bias]), train_data(), val_data())

    def test_harmful_has_the_lowest_dots_of_all(self, tmp_path):
        gradsim, module, _ = fit(tmp_path, strict(num_queries=1, top_k=3))
        (query,) = read(gradsim).queries
        truth, train, val = Truth(module), train_data(), val_data()
        own = truth.gradient(val[query.sample_id], val[query.sample_id][1])
        dots = torch.stack([truth.gradient(train[i], train[i][1]) @ own for i in range(NUM_TRAIN)])
        assert [sample.sample_id for sample in query.harmful] == dots.argsort()[:3].tolist()

    def test_top_k_larger_than_the_training_set(self, tmp_path):
        gradsim, module, _ = fit(tmp_path, strict(top_k=1000))
        assert_exact(read(gradsim), Truth(module), train_data(), val_data(), top_k=1000)

    @pytest.mark.parametrize("batch_size", [1, 17, 60])
    def test_do_not_depend_on_the_batch_size_of_the_reference(self, tmp_path, batch_size):
        gradsim = strict(train_data=loader(train_data(), batch_size=batch_size))
        gradsim, module, _ = fit(tmp_path, gradsim)
        assert_exact(read(gradsim), Truth(module), train_data(), val_data())

    def test_class_weights(self, tmp_path):
        weights = torch.tensor([0.2, 1.0, 3.0, 0.7])
        gradsim, module, _ = fit(tmp_path, module=Classifier(nn.CrossEntropyLoss(weights)))
        loss = nn.CrossEntropyLoss(weights, reduction="sum")
        assert_exact(read(gradsim), Truth(module, loss=loss), train_data(), val_data())
        assert read(gradsim).notes == ()

    def test_loss_fn_takes_precedence(self, tmp_path):
        class TwoCriteria(Classifier):
            def __init__(self):
                super().__init__()
                self.other = nn.MSELoss()

        gradsim, module, _ = fit(tmp_path, strict(loss_fn=F.cross_entropy), TwoCriteria())
        assert_exact(read(gradsim), Truth(module), train_data(), val_data())

    def test_gradsim_step(self, tmp_path):
        class OwnStep(Classifier):
            def gradsim_step(self, batch):
                x, y = batch
                logits = self(x)
                return logits, y, 2 * F.cross_entropy(logits, y, reduction="none")

        gradsim, module, _ = fit(tmp_path, module=OwnStep())
        double = Truth(module, loss=lambda logits, targets: 2 * F.cross_entropy(logits, targets))
        assert_exact(read(gradsim), double, train_data(), val_data(), has_classes=False)
        assert any("there are no teachers" in note for note in read(gradsim).notes)


class TestIds:
    """Each split trains on samples whose ids the report must name; ``truth`` maps an id to its sample."""

    def check(self, tmp_path, dataset, ids, **options):
        gradsim, module, _ = fit(tmp_path, train=loader(dataset, **options))
        assert_exact(read(gradsim), Truth(module), dataset, val_data(), ids=ids)

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_of_a_plain_dataset(self, tmp_path, shuffle):
        self.check(tmp_path, train_data(), range(NUM_TRAIN), shuffle=shuffle)

    def test_of_a_dropped_last_batch(self, tmp_path):
        self.check(tmp_path, train_data(), range(NUM_TRAIN), batch_size=25, drop_last=True)

    def test_of_a_random_split(self, tmp_path):
        part, _ = random_split(train_data(), [45, 15], generator=torch.Generator().manual_seed(8))
        self.check(tmp_path, part, list(part.indices), shuffle=True)

    def test_of_a_subset_of_a_subset(self, tmp_path):
        inner = Subset(train_data(), range(50, 10, -1))
        self.check(tmp_path, Subset(inner, range(5, 35)), [50 - i for i in range(5, 35)])

    def test_of_a_concatenation(self, tmp_path):
        first, second = make_data(30, seed=5), make_data(25, seed=6)
        dataset = ConcatDataset([Subset(first, range(20, 8, -1)), second])
        self.check(tmp_path, dataset, [*range(20, 8, -1), *range(30, 55)], shuffle=True)

    def test_a_sample_named_twice_is_scored_once(self, tmp_path):
        gradsim, module, _ = fit(tmp_path, train=loader(Subset(train_data(), [4, 9, 4, 1, 9, *range(20, 50)])))
        ids = [4, 9, 1, *range(20, 50)]
        assert_exact(read(gradsim), Truth(module), Subset(train_data(), ids), val_data(), ids=ids)


class TestTrainingSamples:
    @pytest.mark.parametrize("wrap", [lambda dataset: dataset, loader], ids=["dataset", "loader"])
    def test_train_data_replaces_the_trainers_own(self, tmp_path, wrap):
        other = make_data(35, seed=9)
        gradsim, module, _ = fit(tmp_path, strict(train_data=wrap(other)))
        assert_exact(read(gradsim), Truth(module), other, val_data())

    def test_max_train_samples_keeps_the_share_of_every_class(self, tmp_path):
        labels = torch.tensor([0] * 30 + [1] * 18 + [2] * 12)
        dataset = TensorDataset(torch.randn(60, 8), labels)
        gradsim, module, _ = fit(tmp_path, strict(max_train_samples=20), train=loader(dataset, shuffle=True))
        report = read(gradsim)
        ids = sorted(report.suspects.sample_ids.tolist())
        assert Counter(labels[ids].tolist()) == {0: 10, 1: 6, 2: 4}
        assert report.num_train_samples == 20
        assert report.reference == "20 of 60 training samples, chosen by class"
        assert_exact(report, Truth(module), Subset(dataset, ids), val_data(), ids=ids)

    def test_the_choice_is_seeded(self, tmp_path):
        def chosen(seed):
            gradsim, _, _ = fit(tmp_path, strict(max_train_samples=20, seed=seed))
            return set(read(gradsim).suspects.sample_ids.tolist())

        assert chosen(0) == chosen(0) != chosen(1)

    def test_max_train_samples_larger_than_the_training_set(self, tmp_path):
        gradsim, _, _ = fit(tmp_path, strict(max_train_samples=1000))
        assert read(gradsim).reference == f"all {NUM_TRAIN} training samples"

    def test_labels_are_read_where_the_dataset_does_not_hold_them(self, tmp_path):
        gradsim = strict(max_train_samples=20)
        gradsim, _, _ = fit(tmp_path, gradsim, Images(), loader(Mappings(train_data())), loader(Mappings(val_data())))
        assert read(gradsim).reference == f"20 of {NUM_TRAIN} training samples, chosen by class"

    @pytest.mark.filterwarnings("ignore:.*augmented at random")
    def test_augmented_samples_are_noticed(self, tmp_path):
        gradsim, _, _ = fit(tmp_path, train=loader(Augmented()))
        assert read(gradsim).augmented
        assert any("augmented at random" in note and "`train_data=`" in note for note in read(gradsim).notes)

    def test_class_names_of_the_dataset(self, tmp_path):
        dataset = train_data()
        dataset.classes = ["ant", "bee", "cat", "dog"]
        gradsim, _, _ = fit(tmp_path, train=loader(Subset(dataset, range(40))))
        assert read(gradsim).class_names == ("ant", "bee", "cat", "dog")
        assert "ant" in read(gradsim).summary()

    def test_class_names_given_win(self, tmp_path):
        gradsim, _, _ = fit(tmp_path, strict(class_names=["k", "l", "m", "n"]))
        assert read(gradsim).class_names == ("k", "l", "m", "n")
        assert not any("class names" in note for note in read(gradsim).notes)

    @pytest.mark.parametrize("number", [2, 5])
    def test_another_number_of_class_names_is_noted(self, tmp_path, number):
        gradsim, _, _ = fit(tmp_path, strict(class_names=["k", "l", "m", "n", "o"][:number]))
        assert any(f"{number} class names and 4 classes of the model" in note for note in read(gradsim).notes)

    def test_loaders_reloaded_every_epoch(self, tmp_path):
        data = DataModule()
        gradsim, module, recorder = fit(tmp_path, train=data, max_epochs=2, reload_dataloaders_every_n_epochs=1)
        assert len(recorder.reports) == 2
        assert_exact(read(gradsim), Truth(module), train_data(), val_data())

    def test_augmented_samples_are_warned_of_once(self, tmp_path):
        with collect_warnings() as texts:
            fit(tmp_path, train=loader(Augmented()), max_epochs=2)
        assert len(texts) == 1
        assert "`train_data=`" in texts[0]


class Augmented(Dataset):
    """Another view of a sample at every read."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        x, y = train_data()[index]
        return x + torch.randn(8), y


class Mappings(Dataset):
    """Samples as mappings."""

    def __init__(self, dataset, x="image", y="label"):
        self.dataset, self.x, self.y = dataset, x, y

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        x, y = self.dataset[index]
        return {self.x: x, self.y: y, "path": f"{index}.png"}


class Images(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch["image"], batch["label"]), batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step((batch["image"], batch["label"]), batch_idx)


class HuggingFaceStyle(Classifier):
    def forward(self, pixel_values, labels=None):
        logits = super().forward(pixel_values)
        return SimpleNamespace(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)

    def training_step(self, batch, batch_idx):
        return self(batch["pixel_values"], batch["labels"]).loss

    def validation_step(self, batch, batch_idx):
        self(batch["pixel_values"], batch["labels"])


class ModelInside(Classifier):
    """The step calls a child, not the module."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(self.body, self.head)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.criterion(self.model(x), y)


class DataModule(LightningDataModule):
    def train_dataloader(self):
        return loader(train_data(), shuffle=True)

    def val_dataloader(self):
        return loader(val_data())


class TestBatches:
    def test_of_mappings(self, tmp_path):
        train, val = loader(Mappings(train_data())), loader(Mappings(val_data()))
        gradsim, module, _ = fit(tmp_path, module=Images(), train=train, val=val)
        assert_exact(read(gradsim), Truth(module), train_data(), val_data())

    def test_of_hugging_face_style(self, tmp_path):
        train, val = (loader(Mappings(each, "pixel_values", "labels")) for each in (train_data(), val_data()))
        gradsim, module, _ = fit(tmp_path, module=HuggingFaceStyle(), train=train, val=val)

        class Logits(nn.Module):
            def forward(self, x):
                return module(x).logits

        assert_exact(read(gradsim), Truth(Logits(), list(module.head.parameters())), train_data(), val_data())
        assert read(gradsim).notes == ()

    def test_of_a_module_that_steps_through_a_child(self, tmp_path):
        gradsim, module, _ = fit(tmp_path, module=ModelInside())
        assert_exact(read(gradsim), Truth(module), train_data(), val_data())
        assert read(gradsim).notes == ()

    def test_of_a_datamodule(self, tmp_path):
        gradsim, module, _ = fit(tmp_path, train=DataModule())
        assert_exact(read(gradsim), Truth(module), train_data(), val_data())

    @pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_after_batch_transfer"])
    @pytest.mark.parametrize("owner", [Classifier, DataModule])
    def test_through_transfer_hooks(self, tmp_path, hook, owner):
        def normalise(self, batch, dataloader_idx):
            return 0.3 * (batch[0] - 1), batch[1]

        changed = type("Changed", (owner,), {hook: normalise})()
        module, data = (changed, None) if owner is Classifier else (Classifier(), changed)
        gradsim, module, _ = fit(tmp_path, strict(num_queries=99), module, data)
        truth = Truth(module, inputs=lambda sample: 0.3 * (sample[0] - 1))
        assert {query.sample_id for query in read(gradsim).queries} == set(truth.mistakes(val_data()))
        assert_exact(read(gradsim), truth, train_data(), val_data())


class TestTasks:
    @pytest.mark.parametrize("shape", [(-1,), (-1, 1)], ids=["flat", "column"])
    def test_binary(self, tmp_path, shape):
        class Binary(Classifier):
            def forward(self, x):
                return super().forward(x).reshape(shape)

            def training_step(self, batch, batch_idx):
                x, y = batch
                return self.criterion(self(x).flatten(), y)

            validation_step = training_step

        def halve(dataset):
            x, y = dataset.tensors
            return TensorDataset(x, (y % 2).float())

        train, val = halve(train_data()), halve(val_data())
        module = Binary(nn.BCEWithLogitsLoss(), num_outputs=1)
        gradsim, module, _ = fit(tmp_path, strict(num_queries=99), module, loader(train), loader(val))
        report, wrong = read(gradsim), {}
        truth = Truth(module, loss=lambda z, y: F.binary_cross_entropy_with_logits(z.flatten(), y))
        for i in range(NUM_VAL):
            prediction = int(truth.logits(val[i]) > 0)
            if prediction != int(val[i][1]):
                wrong[i] = prediction
        assert report.task == "binary"
        assert {query.sample_id: query.prediction for query in report.queries} == wrong
        assert sum(report.errors_per_class.values()) == report.num_errors == len(wrong)
        assert_exact(report, truth, train, val)
        assert report.notes == ()

    def test_multi_label(self, tmp_path):
        def several(dataset):
            x, y = dataset.tensors
            return TensorDataset(x, F.one_hot(y, NUM_CLASSES).float() + F.one_hot((y + 1) % 4, NUM_CLASSES).float())

        train, val = several(train_data()), several(val_data())
        gradsim, module, _ = fit(
            tmp_path, strict(num_queries=99), Classifier(nn.BCEWithLogitsLoss()), loader(train), loader(val)
        )
        report, truth = read(gradsim), Truth(module, loss=F.binary_cross_entropy_with_logits)
        assert report.task == "multilabel"
        for query in report.queries:
            x, y = val[query.sample_id]
            assert query.label == tuple(y.nonzero().flatten().tolist())
            assert query.prediction == tuple((truth.logits((x, y)) > 0).nonzero().flatten().tolist())
            assert query.prediction != query.label
        assert_exact(report, truth, train, val, has_classes=False)

    def test_regression(self, tmp_path):
        class Regressor(Classifier):
            def forward(self, x):
                return super().forward(x).flatten()

        def to_values(dataset):
            return TensorDataset(dataset.tensors[0], dataset.tensors[1].float())

        train, val = to_values(train_data()), to_values(val_data())
        module = Regressor(nn.MSELoss(), num_outputs=1)
        gradsim, module, _ = fit(tmp_path, strict(num_queries=5), module, loader(train), loader(val))
        report, truth = read(gradsim), Truth(module, loss=F.mse_loss)
        losses = torch.stack([(truth.logits(val[i]) - val[i][1]).square().squeeze() for i in range(NUM_VAL)])
        assert report.task == "regression"
        assert [query.sample_id for query in report.queries] == losses.argsort(descending=True)[:5].tolist()
        assert [query.probability for query in report.queries] == [None] * 5
        assert [query.prediction for query in report.queries] == [
            pytest.approx(float(truth.logits(val[query.sample_id])), rel=1e-5) for query in report.queries
        ]
        assert_exact(report, truth, train, val, has_classes=False)
        assert any("highest loss" in note for note in report.notes)


class TestPrecision:
    def test_bf16_mixed(self, tmp_path):
        gradsim, module, _ = fit(tmp_path, precision="bf16-mixed")
        report, truth = read(gradsim), Truth(module)
        gradients = torch.stack([truth.gradient(sample, sample[1]) for sample in train_data()])
        expected = gradients[report.suspects.sample_ids].norm(dim=1)
        assert report.suspects.scores.dtype == torch.float32
        torch.testing.assert_close(report.suspects.scores.sqrt(), expected, rtol=0.05, atol=0.05)
        assert not torch.allclose(report.suspects.scores.sqrt(), expected, rtol=1e-5)  # it ran in half precision

    @pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
    def test_true_precision(self, tmp_path, precision):
        gradsim, _, _ = fit(tmp_path, precision=precision)
        assert read(gradsim).queries
        assert len(read(gradsim).suspects) == NUM_TRAIN


class TestWeightAveraging:
    def test_queries_that_are_right_by_now_are_dropped_and_counted(self, tmp_path):
        class Weights(Callback):
            """Keeps the weights that validation ran with and those present at scoring."""

            def on_validation_batch_end(self, trainer, pl_module, *_):
                self.validated = {name: value.clone() for name, value in pl_module.state_dict().items()}

            def on_validation_end(self, trainer, pl_module):
                self.present = {name: value.clone() for name, value in pl_module.state_dict().items()}

        weights = Weights()
        gradsim, module, _ = fit(tmp_path, strict(num_queries=99), callbacks=[averaging(0.95), weights], max_epochs=2)
        module.load_state_dict(weights.validated)
        at_validation = Truth(module).mistakes(val_data())
        module.load_state_dict(weights.present)
        at_scoring = Truth(module).mistakes(val_data())
        still_wrong = {i: mistake for i, mistake in at_scoring.items() if i in at_validation}
        report = read(gradsim)
        assert len(still_wrong) < len(at_validation)
        assert {query.sample_id: (query.label, query.prediction) for query in report.queries} == still_wrong
        assert report.num_dropped_queries == len(at_validation) - len(still_wrong)
        assert report.num_errors == len(at_validation)
        assert_exact(report, Truth(module), train_data(), val_data())


class TestCost:
    def test_seconds_hold_the_pass_of_this_report(self, tmp_path, monkeypatch):
        """On a clock of our own: a pass takes 3 s, a panel 1 s, a training batch 1 s, and nothing else any time."""
        now = [0.0]
        monkeypatch.setattr("lightning_gradsim.clock.time", SimpleNamespace(perf_counter=lambda: now[0]))

        def slow(owner, name, seconds):
            function = getattr(owner, name)

            def take_time(*args, **kwargs):
                now[0] += seconds
                return function(*args, **kwargs)

            monkeypatch.setattr(owner, name, take_time)

        class Training(Callback):
            def on_train_batch_end(self, *_):
                now[0] += 1.0

        slow(lightning_gradsim.reporter, "score_part", 3.0)
        slow(lightning_gradsim.presentation, "mistake_panel", 1.0)
        _, _, recorder = fit(tmp_path, callbacks=[Training()], max_epochs=2)
        assert [report.seconds for report in recorder.reports] == [4.0, 4.0]
        assert [report.time_share for report in recorder.reports] == [pytest.approx(4 / 6), pytest.approx(8 / 12)]


def test_without_mistakes_the_report_says_so(tmp_path):
    x = torch.eye(8)[:4].repeat(10, 1)
    easy = TensorDataset(x, torch.arange(4).repeat(10))
    gradsim, _, _ = fit(tmp_path, train=loader(easy), val=loader(easy), max_epochs=40, check_val_every_n_epoch=40)
    report = read(gradsim)
    assert (report.num_errors, report.queries) == (0, ())
    assert "no validation sample is misclassified" in report.summary()
    assert len(report.suspects) == 40
