"""alibi's `ProtoSelect` for `alibi_prototypes.py`.

    python run_alibi_prototypes.py FOLDER

Reads `tasks.pt` in the folder, a list of features ``[N, d]``, labels ``[N]``, radius and number of prototypes; writes
`found.pt`: places of the prototypes and their labels, in alibi's order, and seconds, for each.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
from alibi.prototypes import ProtoSelect


def distances(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Euclidean distances, as torch computes them."""
    return torch.cdist(torch.as_tensor(left), torch.as_tensor(right)).numpy()


def main(folder: Path) -> None:
    """Answer the tasks."""
    torch.set_num_threads(1)
    found = []
    for task in torch.load(folder / "tasks.pt", weights_only=True):
        begin = time.process_time()
        selector = ProtoSelect(distances, eps=task["eps"])
        selector.fit(task["features"].numpy(), task["labels"].numpy())
        answer = selector.summarise(num_prototypes=task["number"])
        found.append(
            {
                "places": torch.tensor(np.asarray(answer.prototype_indices).copy()),
                "labels": torch.tensor(np.asarray(answer.prototype_labels).copy()),
                "seconds": time.process_time() - begin,
            }
        )
    torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
