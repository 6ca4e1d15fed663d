"""Which part of the training samples queries are compared with."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Subset

from lightning_gradsim import explain
from lightning_gradsim.errors import TrainingDataError
from lightning_gradsim.prototypes import select_prototypes
from lightning_gradsim.train_pass import stratified_indices
from tests.trainer.processes import ddp, run_processes
from tests.trainer.support import (
    NUM_TRAIN,
    Classifier,
    Recorder,
    Still,
    Truth,
    assert_exact,
    fit,
    loader,
    make_trainer,
    read,
    strict,
    train_data,
    val_data,
)


def ids_of(report):
    return sorted(report.suspects.sample_ids.tolist())


def assert_exact_part(report, module, train=None):
    ids = ids_of(report)
    assert_exact(report, Truth(module), Subset(train or train_data(), ids), val_data(), ids=ids)


def largest_norm(features, labels, number):
    """The samples of largest features."""
    assert (features.shape, labels.shape, number) == ((NUM_TRAIN, 12), (NUM_TRAIN,), 15)
    return features.norm(dim=1).topk(number).indices


def features_of(module):
    with torch.no_grad():
        return module.body(train_data().tensors[0])


class TestWays:
    def test_prototypes_cover_their_class_by_the_input_of_the_head(self, tmp_path):
        gradsim, module, _ = fit(tmp_path, strict(max_train_samples=15, reference="prototypes"))
        features, labels = features_of(module), train_data().tensors[1]
        best = select_prototypes(features, labels, 15).tolist()
        report = read(gradsim)
        assert 0 < len(best) <= 15
        assert set(best) <= set(ids_of(report))
        assert report.num_train_samples == 15
        assert report.reference == "15 of 60 training samples, chosen as prototypes"
        assert_exact_part(report, module)

    def test_a_function(self, tmp_path):
        gradsim, module, _ = fit(tmp_path, strict(max_train_samples=15, reference=largest_norm))
        expected = features_of(module).norm(dim=1).topk(15).indices
        report = read(gradsim)
        assert ids_of(report) == expected.sort().values.tolist()
        assert report.reference == "15 of 60 training samples, chosen by `reference=`"
        assert_exact_part(report, module)

    @pytest.mark.parametrize("ids", [[5, 3, 44], torch.tensor([5, 3, 44]).numpy(), range(3, 9)], ids=str)
    def test_ids(self, tmp_path, ids):
        gradsim, module, _ = fit(tmp_path, strict(reference=ids))
        report = read(gradsim)
        assert ids_of(report) == sorted(int(each) for each in ids)
        assert report.reference == f"{len(ids)} of 60 training samples, chosen by their ids"
        assert_exact_part(report, module)

    @pytest.mark.parametrize(("way", "how"), [("random", "at random"), ("stratified", "by class")])
    def test_by_chance(self, tmp_path, way, how):
        report = read(fit(tmp_path, strict(max_train_samples=15, reference=way, seed=4))[0])
        labels = train_data().tensors[1] if way == "stratified" else None
        assert ids_of(report) == stratified_indices(labels, NUM_TRAIN, 15, 4).tolist()
        assert report.reference == f"15 of 60 training samples, chosen {how}"

    @pytest.mark.parametrize("way", ["random", "prototypes"])
    def test_more_than_there_are(self, tmp_path, way):
        report = read(fit(tmp_path, strict(max_train_samples=1000, reference=way))[0])
        assert report.reference == "all 60 training samples"

    def test_offline(self):
        module = Classifier()
        options = {"max_train_samples": 15, "reference": "prototypes"}
        report = explain(module, val_data(), train_data(), **options)
        assert report.num_train_samples == 15
        best = select_prototypes(features_of(module), train_data().tensors[1], 15)
        assert set(best.tolist()) <= set(ids_of(report))


PROTOTYPES = {"max_train_samples": 15, "reference": "prototypes"}


class TestOneChoiceARun:
    def test_all_reports_have_the_same(self, tmp_path):
        gradsim, module, recorder = fit(tmp_path, strict(**PROTOTYPES), max_epochs=3)
        first, *others = [ids_of(report) for report in recorder.reports]
        assert others == [first] * 2
        make_trainer(tmp_path, [gradsim]).validate(module, loader(val_data()), verbose=False)
        assert ids_of(read(gradsim)) == first

    def test_so_has_a_run_that_is_resumed(self, tmp_path):
        recorder = Recorder(strict(**PROTOTYPES))
        trainer = make_trainer(tmp_path, [recorder.gradsim, recorder], max_epochs=2)
        trainer.fit(Classifier(), loader(train_data()), loader(val_data()))
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
        torch.load(tmp_path / "saved.ckpt", weights_only=True)
        resumed = strict(**PROTOTYPES)
        trainer = make_trainer(tmp_path, [resumed], max_epochs=3)
        trainer.fit(Classifier(), loader(train_data()), loader(val_data()), ckpt_path=tmp_path / "saved.ckpt")
        assert ids_of(read(resumed)) == ids_of(recorder.reports[0])

    def test_a_second_run_chooses_anew(self, tmp_path):
        calls = []

        def choose(features, labels, number):
            calls.append(number)
            return range(number)

        gradsim, _, _ = fit(tmp_path, strict(max_train_samples=5, reference=choose), max_epochs=2)
        assert calls == [5]
        fit(tmp_path, gradsim)
        assert calls == [5, 5]


@pytest.mark.filterwarnings(
    "ignore:It is recommended to use .self.log:UserWarning:lightning",
    "ignore:Using `DistributedSampler` with the dataloaders:UserWarning:lightning",
)
def test_two_processes_choose_what_one_chooses(tmp_path):
    def job():
        return ids_of(read(fit(tmp_path / "two", strict(**PROTOTYPES), Still(), **ddp())[0]))

    expected = ids_of(read(fit(tmp_path / "one", strict(**PROTOTYPES), Still())[0]))
    assert run_processes(job, tmp_path) == [expected] * 2


class TestBadInput:
    def test_ids_that_are_not_there(self, tmp_path):
        words = r"^`reference` names training samples \[60, 99\], which the training data do not have\. Expected ids fr"
        with pytest.raises(TrainingDataError, match=words):
            fit(tmp_path, strict(reference=[3, 60, 99]))

    @pytest.mark.parametrize("places", [[], [1, 1], [60], [-1], [0.5], [[1]]], ids=str)
    def test_what_is_no_place(self, tmp_path, places):
        with pytest.raises(
            TrainingDataError, match=r"^`reference=` returned .*\. Expected different places of samples"
        ):
            fit(tmp_path, strict(reference=lambda features, labels, number: places))

    def test_prototypes_without_classes(self):
        module = Classifier(torch.nn.MSELoss(), num_outputs=1)

        def values(data):
            return torch.utils.data.TensorDataset(data.tensors[0], data.tensors[1].float()[:, None])

        with pytest.raises(TrainingDataError, match=r'^`reference="prototypes"` needs exclusive classes'):
            explain(module, values(val_data()), values(train_data()), max_train_samples=9, reference="prototypes")
