"""alibi's `GradientSimilarity`: one sample at a time, through NumPy."""

from __future__ import annotations

import torch
from alibi.explainers import GradientSimilarity
from engine_models import Work
from peer import run
from torch import Tensor, nn


class Alibi:
    """Stored training gradients, then the products with those of the queries."""

    package = "alibi"
    way = "GradientSimilarity"
    has_head_bias = True
    pays_once = True
    unit = 16

    def __init__(self, work: Work, batch_size: int) -> None:
        work.freeze_others()  # its way of choosing parameters
        self.work = work
        self.inputs, self.labels = work.inputs.numpy(), work.labels.numpy()
        self.explainer = GradientSimilarity(
            work.model, nn.CrossEntropyLoss(), "grad_dot", "classification", precompute_grads=True, backend="pytorch"
        )

    def products(self, num_samples: int) -> Tensor:
        """Fit on the samples, explain the queries, and put the sorted scores back in order."""
        self.explainer.fit(self.inputs[:num_samples], self.labels[:num_samples])
        found = self.explainer.explain(self.work.query_inputs.numpy(), self.work.query_labels.numpy())
        order, scores = torch.tensor(found.ordered_indices.copy()), torch.tensor(found.scores)
        return torch.zeros_like(scores).scatter_(1, order, scores)


if __name__ == "__main__":
    run(Alibi)
