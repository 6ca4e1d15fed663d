"""From the record of a run to scores, by the package's own statistics, and how well they find the wrong labels."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from mislabel_data import Data
from mislabel_train import Network, Record, Setting, knn_epochs, train
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from torch import Tensor

from lightning_gradsim.mislabel import (
    SCORES,
    Judgement,
    MislabelStatistics,
    RunAverages,
    add_trusted,
    class_gradients,
    find_cautions,
    judge,
    mislabel_score,
    trusted_scores,
)
from lightning_gradsim.mislabel.visits import COLUMNS
from lightning_gradsim.neighbours import neighbour_votes

REPLAY_BATCH = 1024
VALIDATION_BATCH = 32
Measures = dict[str, dict[str, float]]
ACTIONS = ("as is", "dropped", "as many dropped at random", "relabelled", "wrong ones dropped")
"""What is done before a second training: with flagged samples, and, as a bound, with the truth."""


def replay(record: Record, sets: Data) -> RunAverages:
    """Feed the statistics with the visits of a run, and with neighbours after epochs 2, 4, 8, ... and the last."""
    labels, epochs = sets.train_y, len(record.logits)
    statistics = MislabelStatistics(len(labels), sets.num_classes, columns=COLUMNS)
    ids, last_round, votes = torch.arange(len(labels)), 0, None
    gradients = torch.zeros(sets.num_classes, sets.num_classes, record.features[0].shape[1] + 1)
    for epoch in range(1, epochs + 1):
        features = _at(record.features, epoch)
        for rows in ids.split(REPLAY_BATCH):
            _feed(statistics, record, epoch, rows, labels, features, gradients)
        gradients = _validation_gradients(record, sets, epoch)
        if epoch in knn_epochs(epochs) or epoch == epochs:
            if votes is None or len(record.features) > 1:  # those of a frozen trunk stay the same
                votes = neighbour_votes(features, labels)
            statistics.add_neighbours(ids, votes, weight=epoch - last_round)
            last_round = epoch
    return statistics.compute()


def measure(setting: Setting, sets: Data, record: Record) -> Measures:
    """Every figure of a run, by score; ``run`` holds what belongs to none of them."""
    averages = replay(record, sets)
    wrong = sets.flipped
    judgement = judge(averages)
    train_accuracy = _accuracy(record.logits[-1], sets.train_y)
    validation_accuracy = _accuracy(record.validation_logits[-1], sets.validation_y)
    cautions = find_cautions(averages, train_accuracy=train_accuracy, validation_accuracy=validation_accuracy)
    found: Measures = {
        "run": {
            "noise": float(wrong.float().mean()),
            "flagged": float(judgement.flagged.float().mean()),
            "train_accuracy": train_accuracy,
            "validation_accuracy": validation_accuracy,
            "test_accuracy": record.test_accuracy,
            "upper_estimate": judgement.upper_estimate / len(wrong),
            "memorising": float(any(text.startswith("Memorising") for text in cautions)),
            "underfitting": float(any(text.startswith("Underfitting") for text in cautions)),
        }
    }
    if setting.kind == "clean":
        return found
    found["run"] |= judge_flags(judgement, sets)
    for name in SCORES:
        found[name] = rank_figures(mislabel_score(name, averages), wrong)
    found["margin_only"] = rank_figures(_without_prediction(averages), wrong)
    trusted = fine_tune(setting, sets, record)
    found["trusted"] = rank_figures(trusted, wrong)
    found["margin_knn + trusted"] = rank_figures(add_trusted(mislabel_score("margin_knn", averages), trusted), wrong)
    return found


def rank_figures(scores: Tensor, wrong: Tensor) -> dict[str, float]:
    """How well a score ranks wrong labels first."""
    truth = wrong.numpy()
    ranked = wrong[scores.argsort(descending=True, stable=True)].float()
    number = len(ranked)
    return {
        "AP": float(average_precision_score(truth, scores.numpy())),
        "AUROC": float(roc_auc_score(truth, scores.numpy())),
        "precision@n": float(ranked[: int(wrong.sum())].mean()),
        "top 1 %": float(ranked[: math.ceil(0.01 * number)].mean()),
        "top 5 %": float(ranked[: math.ceil(0.05 * number)].mean()),
    }


def judge_flags(judgement: Judgement, sets: Data) -> dict[str, float]:
    """Figures of flags and suggested labels."""
    ids, wrong = judgement.sample_ids, sets.flipped[judgement.sample_ids]
    assert judgement.suggested is not None
    right = judgement.suggested == sets.true_y[ids]
    flagged = judgement.flagged
    return {
        "F1": float(f1_score(wrong.numpy(), flagged.numpy())),
        "flag precision": float(wrong[flagged].float().mean()),
        "flag recall": float(flagged[wrong].float().mean()),
        "suggestion": float(right[wrong].float().mean()),
        "suggestion of flagged": float(right[flagged].float().mean()),
    }


def fine_tune(setting: Setting, sets: Data, record: Record) -> Tensor:
    """The score of a validation set whose labels are right."""
    network = load_network(setting, record)

    def run(module: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits = module(batch[0])[0]
        return logits, batch[1], F.cross_entropy(logits, batch[1], reduction="none")

    validation = torch.arange(len(sets.validation_x)).split(VALIDATION_BATCH)
    train = torch.arange(len(sets.train_x)).split(500)
    return trusted_scores(
        network,
        run,
        lambda: [(sets.validation_x[rows], sets.validation_true[rows]) for rows in validation],
        lambda: ((rows, (sets.train_x[rows], sets.train_y[rows])) for rows in train),
        len(sets.train_x),
    )


def act(setting: Setting, sets: Data, record: Record, seed: int) -> dict[str, float]:
    """Test accuracy after training again, by what was done with the flagged samples."""
    judgement = judge(replay(record, sets))
    assert judgement.suggested is not None
    flagged, number = judgement.sample_ids[judgement.flagged], len(sets.train_y)
    labels = sets.train_y.clone()
    labels[flagged] = judgement.suggested[judgement.flagged]
    drawn = torch.randperm(number, generator=torch.Generator().manual_seed(seed))[: len(flagged)]

    def without(rows: Tensor) -> float:
        kept = torch.ones(number, dtype=torch.bool)
        kept[rows] = False
        return train(setting, sets, seed, keep=kept.nonzero()[:, 0]).test_accuracy

    return {
        "as is": record.test_accuracy,
        "dropped": without(flagged),
        "as many dropped at random": without(drawn),
        "relabelled": train(setting, sets, seed, labels=labels).test_accuracy,
        "wrong ones dropped": without(sets.flipped.nonzero()[:, 0]),
    }


def load_network(setting: Setting, record: Record) -> Network:
    """The network after the last epoch."""
    network = setting.make_network()
    network.load_state_dict(record.weights)
    return network


def _feed(
    statistics: MislabelStatistics,
    record: Record,
    epoch: int,
    rows: Tensor,
    labels: Tensor,
    features: Tensor,
    gradients: Tensor,
) -> None:
    rates = record.rates[epoch - 1][rows]
    for rate in rates.unique():  # a batch of the statistics has one learning rate, steps of a schedule differ
        part = rows[rates == rate]
        statistics.update(
            part,
            record.logits[epoch - 1][part],
            labels[part],
            features=features[part],
            learning_rate=float(rate),
            class_gradients=gradients,
        )


def _validation_gradients(record: Record, sets: Data, epoch: int) -> Tensor:
    logits, features = record.validation_logits[epoch - 1], _at(record.validation_features, epoch)
    errors = logits.softmax(1) - F.one_hot(sets.validation_y, sets.num_classes)
    return class_gradients(features.float(), errors, sets.validation_y, sets.num_classes)


def _without_prediction(averages: RunAverages) -> Tensor:
    means = {name: mean for name, mean in averages.means.items() if name != "prediction"}
    small = RunAverages(
        averages.task, averages.sample_ids, averages.visits, averages.labels, means, averages.neighbours, {}
    )
    return mislabel_score("margin_knn", small)


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(1) == labels).float().mean())


def _at(values: list[Tensor], epoch: int) -> Tensor:
    return values[min(epoch, len(values)) - 1]
