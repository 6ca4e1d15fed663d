"""Whether `explain` and alibi's `GradientSimilarity` agree: values, order, and how long each takes.

    python benchmarks/alibi_parity.py [--peers .bench]

A small MLP on scikit-learn's digits, trained a little, all layers, in double precision: in single precision both round
the small gradients of confident samples. Lists of `explain` are as long as there are training samples, so that harmful
samples are all opponents, and teachers all proponents; look-alikes are all proponents by cosine. Each is held against
alibi's scores. alibi adds 1e-7 to what it divides `cosine` and `asymmetric` by, which is taken out of its scores first;
"in another place" counts places where its own order, with it, is another one. Times are processor seconds for all
queries, ours with lists of five. Needs alibi's environment (`make bench-peers`).
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_gradsim import explain
from lightning_gradsim.report import InfluentialSample, Report

HERE = Path(__file__).parent
NUM_TRAIN, NUM_QUERIES, EPOCHS = 1200, 200, 3
TOLERANCE = 1e-10
"""Of both gradient norms, for float64."""
ALIBI_EPS = 1e-7
SIMILARITIES, TARGETS = ("dot", "cosine", "asymmetric"), ("true", "predicted")


def make_task() -> dict[str, nn.Module | Tensor]:
    """The network and its data, from a seed."""
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(pixels, dtype=torch.float64) / 16, torch.tensor(digits)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for rows in torch.randperm(NUM_TRAIN).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimizer.step()
    end = NUM_TRAIN + NUM_QUERIES
    return {
        "model": model.eval(),
        **{"inputs": inputs[:NUM_TRAIN], "labels": labels[:NUM_TRAIN]},
        **{"query_inputs": inputs[NUM_TRAIN:end], "query_labels": labels[NUM_TRAIN:end]},
    }


def gradient_norms(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Norm of each sample's gradient, by autograd."""
    parameters, norms = list(model.parameters()), []
    for sample, label in zip(inputs, labels, strict=True):
        grads = torch.autograd.grad(F.cross_entropy(model(sample[None]), label[None]), parameters)
        norms.append(torch.cat([grad.flatten() for grad in grads]).norm())
    return torch.stack(norms)


class Comparison:
    """Lists against rows of alibi's scores.

    Args:
        scores: alibi's without what it adds, ``[m, N]``.
        order: Its own order, best first, ``[m, N]``.
        scale: What errors are measured in, ``[m, N]``.
    """

    def __init__(self, scores: Tensor, order: Tensor, scale: Tensor) -> None:
        self._scores, self._order, self._scale = scores, order, scale
        self.error, self.num_scores, self.num_swapped, self.is_order_equal = 0.0, 0, 0, True

    def add(self, row: int, entries: Iterable[InfluentialSample], *, best_first: bool) -> None:
        """One list: every score within the tolerance, and the same order but for pairs that are closer than that."""
        ids = torch.tensor([entry.sample_id for entry in entries])
        ours = torch.tensor([entry.score for entry in entries], dtype=torch.float64)
        theirs, scale = self._scores[row], self._scale[row]
        there = theirs.argsort(descending=best_first)[: len(ids)]
        its_own = (self._order[row] if best_first else self._order[row].flip(0))[: len(ids)]
        self.num_swapped += int((ids != its_own).sum())
        self.error = max(self.error, float(((ours - theirs[ids]).abs() / scale[ids]).max()))
        self.num_scores += len(ids)
        gap = (theirs[ids] - theirs[there]).abs() / torch.maximum(scale[ids], scale[there])
        self.is_order_equal &= bool((gap <= TOLERANCE).all())


def compare(found: dict, norms: dict, report: Report, similarity: str, target: str) -> tuple[Comparison, ...]:
    """The lists of one report with alibi's scores for the same label."""
    true, predicted = found[similarity, "true"], found[similarity, "predicted"]
    train_norms = norms["train"]

    def against(answer: dict, whose: str) -> Comparison:
        products = norms[whose][:, None] * train_norms
        scale, denominator = {
            "dot": (products, torch.inf),
            "cosine": (torch.ones_like(products), products),
            "asymmetric": (norms[whose][:, None] / train_norms, train_norms.square()),
        }[similarity]
        return Comparison(answer["scores"] * (1 + ALIBI_EPS / denominator), answer["order"], scale)

    opponents, proponents = against(true if target == "true" else predicted, target), against(predicted, "predicted")
    for row, query in enumerate(report.queries):
        assert query.sample_id == row
        opponents.add(row, query.harmful, best_first=False)
        proponents.add(row, query.teachers, best_first=True)
        if similarity == "cosine":
            opponents.add(row, query.look_alikes, best_first=True)
    return opponents, proponents


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask both, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(".bench"), help="folder of the peers' environments")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    task = make_task()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(task, Path(folder) / "task.pt")
        python = options.peers / "alibi" / "bin" / "python"
        subprocess.run([str(python.absolute()), str(HERE / "peers" / "run_alibi_parity.py"), folder], check=True)
        found = torch.load(Path(folder) / "scores.pt", weights_only=True)
    train, queries = (TensorDataset(task[f"{part}inputs"], task[f"{part}labels"]) for part in ("", "query_"))
    print("| similarity | target | scores | largest error | in another place | order equal | alibi s | ours s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    model, query_inputs = task["model"], task["query_inputs"]
    norms = {
        "train": gradient_norms(model, task["inputs"], task["labels"]),
        "true": gradient_norms(model, query_inputs, task["query_labels"]),
        "predicted": gradient_norms(model, query_inputs, model(query_inputs).argmax(1)),
    }
    is_equal = True
    for similarity, target in product(SIMILARITIES, TARGETS):
        settings = {"layers": "all", "similarity": similarity, "target": target, "loss_fn": nn.CrossEntropyLoss()}
        begin = time.process_time()
        explain(model, queries, train, top_k=5, **settings)
        seconds = time.process_time() - begin
        report = explain(model, queries, train, top_k=NUM_TRAIN, **settings)
        parts = compare(found, norms, report, similarity, target)
        error, same = max(part.error for part in parts), all(part.is_order_equal for part in parts)
        counts = [sum(getattr(part, name) for part in parts) for name in ("num_scores", "num_swapped")]
        is_equal &= same and error <= TOLERANCE
        theirs = found[similarity, target]["seconds"]
        print(f"| {similarity} | {target} | {counts[0]} | {error:.1e} | {counts[1]} | {same} |", end="")
        print(f" {theirs:.2f} | {seconds:.2f} |", flush=True)
    if not is_equal:
        raise SystemExit("They do not agree.")


if __name__ == "__main__":
    main()
