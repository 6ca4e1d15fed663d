"""How well scores predict what retraining on half of the training data does to a query (linear datamodelling score).

    GRADSIM_DATA=FOLDER GRADSIM_CACHE=FOLDER python benchmarks/lds.py [--only mlp] [--seeds 0 1 2] [--json FILE]

Truth: networks retrained on 100 random halves of 5,000 MNIST images, each from weights, in an order and with dropout of
its own; their losses of 500 test images. A score predicts for each half the sum over the samples in it. The linear
datamodelling score is the rank correlation over halves, averaged over queries. Choices are made on queries 0 to 249 and
halves 1 to 50; what is reported is of queries 250 to 499 and halves 51 to 100, the mean over training runs and their
standard deviation. Networks and predictions are kept in GRADSIM_CACHE.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lds_scores import Variant, predictions
from lds_tables import CHOICE, EPOCHS, REPORT, SUMS, lds, tables, ways
from lds_truth import LOGISTIC, MLP, Kind, Mnist, checkpoints, halves, load_mnist, save, truth
from torch import Tensor

KINDS = {"mlp": (MLP, {"last": 1, "last two": 2, "all": 3}), "logistic": (LOGISTIC, {"all": 1})}

Keyed = dict[tuple[Variant, str], Tensor]


def measure(kind: Kind, sets: Mapping[str, int], data: Mnist, seeds: Sequence[int], folder: Path) -> dict[str, Any]:
    """Scores of all variants: on the choice split the mean over runs, on the report split each run."""
    first, second = truth(kind, data, folder)
    by_seed = {seed: _predictions(kind, sets, data, seed, folder) for seed in seeds}
    rows = []
    for variant, layers in next(iter(by_seed.values()))[EPOCHS[0]]:
        for way, combine in ways(EPOCHS, SUMS).items():
            of_runs = [
                combine({epoch: keyed[variant, layers] for epoch, keyed in run.items()}) for run in by_seed.values()
            ]
            row = {"score": variant[0], "moments": variant[1], "damping": variant[2], "layers": layers, "way": way}
            row["choice"] = statistics.mean(lds(run, first, CHOICE) for run in of_runs)
            row["report"] = [lds(run, first, REPORT) for run in of_runs]
            row["all runs"] = lds(torch.stack(of_runs).sum(0), first, REPORT)
            rows.append(row)
    again, queries = slice(0, len(second)), REPORT[0]
    ceiling = lds(-second.T, first[again], (queries, again))
    return {"ceiling": ceiling, "rows": rows}


def _predictions(kind: Kind, sets: Mapping[str, int], data: Mnist, seed: int, folder: Path) -> dict[int, Keyed]:
    networks, members, result = checkpoints(kind, data, [seed], folder)[seed], halves(), {}
    for epoch in EPOCHS:
        path = folder / f"{kind.name}_run{seed}_epoch{epoch}_predictions.pt"
        if not path.exists():
            begin = time.perf_counter()
            save(predictions(kind.build(networks[epoch - 1]), data, members, sets), path)
            print(f"{kind.name}: run {seed}, epoch {epoch}: {time.perf_counter() - begin:.0f} s", flush=True)
        result[epoch] = torch.load(path, weights_only=True)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Retrain, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="where to write all variants")
    options = parser.parse_args(arguments)
    folder = os.environ.get("GRADSIM_CACHE")
    if not folder:
        raise SystemExit("Set GRADSIM_CACHE to a folder for networks and predictions (about 1 GB).")
    data, results = load_mnist(), {}
    for name in options.only:
        kind, sets = KINDS[name]
        results[name] = measure(kind, sets, data, options.seeds, Path(folder))
        print(f"\n## {name}\n\n{tables(results[name], EPOCHS[-1])}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
