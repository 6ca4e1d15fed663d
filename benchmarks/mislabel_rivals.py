"""What others make of the same data: cleanlab's out-of-sample ranking, and captum's self-influence."""

from __future__ import annotations

import numpy as np
import torch
from mislabel_data import Data, UnavailableError
from mislabel_train import Network, Setting, predict, train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

FOLDS = 3


def cleanlab_scores(setting: Setting, sets: Data, seed: int) -> dict[str, Tensor]:
    """Label quality from three-fold out-of-sample probabilities of the same network, trained in the same way."""
    try:
        from cleanlab.rank import get_label_quality_scores
    except ImportError as error:
        raise UnavailableError("needs the package cleanlab (benchmarks/peers/requirements-mislabel.txt)") from error
    number = len(sets.train_y)
    order = torch.from_numpy(np.random.default_rng(seed + 2000).permutation(number))
    probabilities = torch.zeros(number, sets.num_classes)
    for fold in range(FOLDS):
        held_out = order[fold::FOLDS]
        kept = torch.ones(number, dtype=torch.bool)
        kept[held_out] = False
        record = train(setting, sets, seed, keep=kept.nonzero()[:, 0])
        network = setting.make_network()
        network.load_state_dict(record.weights)
        probabilities[held_out] = predict(network, sets.train_x[held_out])[0].softmax(1)
    found = {}
    for method in ("self_confidence", "normalized_margin"):
        quality = get_label_quality_scores(sets.train_y.numpy(), probabilities.numpy(), method=method)
        found[f"cleanlab {method}"] = -torch.from_numpy(quality)
    return found


def captum_scores(setting: Setting, sets: Data, seed: int) -> dict[str, Tensor]:
    """TracIn self-influence of the last layer, summed over the checkpoints of the same training."""
    try:
        from captum.influence import TracInCPFast
    except ImportError as error:
        raise UnavailableError("needs the package captum (benchmarks/peers/requirements-mislabel.txt)") from error
    checkpoints: list[tuple[dict[str, Tensor], float]] = []
    train(setting, sets, seed, checkpoints=checkpoints)
    network = Logits(setting.make_network()).eval()

    def load(module: nn.Module, checkpoint: tuple[dict[str, Tensor], float]) -> float:
        module.network.load_state_dict(checkpoint[0])
        return checkpoint[1]

    tracin = TracInCPFast(
        network,
        network.network.head,
        TensorDataset(sets.train_x, sets.train_y),
        checkpoints,
        load,
        loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        batch_size=500,
    )
    return {"captum self-influence": tracin.self_influence(show_progress=False)}


class Logits(nn.Module):
    """A network that gives nothing but logits."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of a batch."""
        return self.network(inputs)[0]
