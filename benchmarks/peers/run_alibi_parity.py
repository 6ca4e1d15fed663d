"""alibi's `GradientSimilarity` for `alibi_parity.py`: all of its similarities, true and predicted labels.

    python run_alibi_parity.py FOLDER

Reads `task.pt` in the folder, writes `scores.pt`: by similarity and target scores ``[m, N]`` and the order that alibi
gives them, and the seconds of a fit and an explanation.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from alibi.explainers import GradientSimilarity
from torch import Tensor, nn

SIMILARITIES = {"dot": "grad_dot", "cosine": "grad_cos", "asymmetric": "grad_asym_dot"}


def main(folder: Path) -> None:
    """Answer the task."""
    torch.set_num_threads(1)
    task = torch.load(folder / "task.pt", weights_only=False)
    found: dict[tuple[str, str], dict[str, Tensor | float]] = {}
    for similarity, name in SIMILARITIES.items():
        for target in ("true", "predicted"):
            explainer = GradientSimilarity(
                task["model"], nn.CrossEntropyLoss(), name, "classification", precompute_grads=True, backend="pytorch"
            )
            begin = time.process_time()
            explainer.fit(task["inputs"].numpy(), task["labels"].numpy())
            labels = task["query_labels"].numpy() if target == "true" else None  # its default is the prediction
            answer = explainer.explain(task["query_inputs"].numpy(), labels)
            seconds = time.process_time() - begin
            order, scores = torch.tensor(answer.ordered_indices.copy()), torch.tensor(answer.scores)
            in_place = torch.zeros_like(scores).scatter_(1, order, scores)
            found[similarity, target] = {"scores": in_place, "order": order, "seconds": seconds}
    torch.save(found, folder / "scores.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
