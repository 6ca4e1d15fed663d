"""Class pairs as queries of their own, in training."""

from __future__ import annotations

import pytest
import torch

from lightning_gradsim.views import class_pairs_markdown
from tests.trainer.processes import ddp, run_processes
from tests.trainer.support import (
    NUM_TRAIN,
    Still,
    Truth,
    assert_list,
    fit,
    loader,
    make_trainer,
    read,
    similarities,
    strict,
    tolerances,
    train_data,
    val_data,
)


def assert_pairs(report, truth, similarity, number):
    """The lists are those of the mean gradient of all mistakes of a pair, by plain autograd."""
    train, val = train_data(), val_data()
    gradients = torch.stack([truth.gradient(sample, sample[1]) for sample in train])
    mistakes = truth.mistakes(val)
    for pair in report.error_pairs[:number]:
        own = [
            truth.gradient(val[i], val[i][1]) for i, each in mistakes.items() if each == (pair.label, pair.prediction)
        ]
        assert len(own) == pair.count
        mean = torch.stack(own).mean(0)
        expected = similarities(similarity, mean, gradients)
        assert_list(pair.harmful, expected, tolerances(similarity, mean, gradients), range(NUM_TRAIN), 8, -1)
    assert not any(pair.harmful for pair in report.error_pairs[number:])


@pytest.mark.parametrize("similarity", ["dot", "cosine", "asymmetric"])
def test_all_mistakes_count_not_only_queries(tmp_path, similarity):
    gradsim, module, _ = fit(tmp_path, strict(class_pairs=3, num_queries=1, similarity=similarity))
    report = read(gradsim)
    assert report.error_pairs[0].count > 1
    assert_pairs(report, Truth(module), similarity, 3)
    first = report.error_pairs[0].harmful[0]
    flagged = report.flagged_among([each.sample_id for each in report.error_pairs[0].harmful])
    assert [each.is_suspect for each in report.error_pairs[0].harmful] == [
        each.sample_id in flagged for each in report.error_pairs[0].harmful
    ]
    assert f"| {first.sample_id} ({first.label})" in class_pairs_markdown(report)


@pytest.mark.filterwarnings(
    "ignore:It is recommended to use .self.log:UserWarning:lightning",
    "ignore:Using `DistributedSampler` with the dataloaders:UserWarning:lightning",
)
def test_two_processes_find_what_one_finds(tmp_path):
    def job():
        return read(fit(tmp_path / "two", strict(class_pairs=3), Still(), **ddp())[0])

    expected = read(fit(tmp_path / "one", strict(class_pairs=3), Still())[0])
    for report in run_processes(job, tmp_path):
        for pair, one in zip(report.error_pairs, expected.error_pairs, strict=True):
            assert (pair.label, pair.prediction, pair.count) == (one.label, one.prediction, one.count)
            assert [each.sample_id for each in pair.harmful] == [each.sample_id for each in one.harmful]


@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled:UserWarning")
def test_mistakes_without_ids_are_not_read_again(tmp_path):
    report = read(fit(tmp_path, strict(class_pairs=3), val=loader(val_data(), shuffle=True))[0])
    assert not any(pair.harmful for pair in report.error_pairs)
    assert "mistakes without ids cannot be read again: `class_pairs=` has none of them" in report.notes


def test_in_validate(tmp_path):
    gradsim, module, _ = fit(tmp_path, strict(class_pairs=2))
    make_trainer(tmp_path, [gradsim]).validate(module, loader(val_data()), verbose=False)
    assert_pairs(read(gradsim), Truth(module), "dot", 2)
