"""Whether our ProtoSelect and alibi's choose the same prototypes.

    python benchmarks/alibi_prototypes.py [--peers .bench]

Standardised features of three data sets of scikit-learn in double precision, Euclidean distances, three radii each
(quantiles of all distances), a penalty of 1/N, at most a fifth of the samples. Needs alibi's environment
(`make bench-peers`).
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine

from lightning_gradsim.prototypes import select_prototypes

HERE = Path(__file__).parent
DATASETS = {"digits": load_digits, "breast cancer": load_breast_cancer, "wine": load_wine}
QUANTILES = (0.01, 0.05, 0.2)


def make_tasks() -> list[tuple[str, float, dict]]:
    """Name, quantile and task."""
    tasks = []
    for name, load in DATASETS.items():
        values, labels = load(return_X_y=True)
        features = torch.tensor(values, dtype=torch.float64)
        features = (features - features.mean(0)) / features.std(0).clamp(min=1e-9)
        distances = torch.pdist(features)
        for quantile in QUANTILES:
            eps = float(distances.kthvalue(int(quantile * len(distances)) + 1).values)
            task = {"features": features, "labels": torch.tensor(labels), "eps": eps, "number": len(features) // 5}
            tasks.append((name, quantile, task))
    return tasks


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask both, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(".bench"), help="folder of the peers' environments")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tasks = make_tasks()
    with tempfile.TemporaryDirectory() as folder:
        torch.save([task for _, _, task in tasks], Path(folder) / "tasks.pt")
        python = options.peers / "alibi" / "bin" / "python"
        subprocess.run([str(python.absolute()), str(HERE / "peers" / "run_alibi_prototypes.py"), folder], check=True)
        found = torch.load(Path(folder) / "found.pt", weights_only=True)
    print("| data | samples | radius | prototypes | of them alibi's | same order within classes | alibi s | ours s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    is_equal = True
    for (name, quantile, task), theirs in zip(tasks, found, strict=True):
        begin = time.process_time()
        ours = select_prototypes(task["features"], task["labels"], task["number"], task["eps"])
        seconds = time.process_time() - begin
        places = list(dict.fromkeys(theirs["places"].tolist()))
        common = len(set(places) & set(ours.tolist()))
        by_class = task["labels"][ours].argsort(stable=True)  # alibi lists them class by class
        same = places == ours[by_class].tolist()
        is_equal &= common == len(ours) == len(places)
        print(f"| {name} | {len(task['labels'])} | quantile {quantile} | {len(ours)} | {common} | {same} |", end="")
        print(f" {theirs['seconds']:.2f} | {seconds:.2f} |", flush=True)
    if not is_equal:
        raise SystemExit("They do not agree.")


if __name__ == "__main__":
    main()
