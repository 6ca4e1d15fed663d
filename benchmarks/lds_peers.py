"""What other packages' scores say of the truth of `lds.py`: kronfluence's EK-FAC, dattri's TracIn and TRAK.

    GRADSIM_DATA=FOLDER GRADSIM_CACHE=FOLDER python benchmarks/lds_peers.py [--only kronfluence] [--epochs 3 50]

The same truth, training runs and checkpoints, kept in GRADSIM_CACHE, and the same choices on one half of queries and
halves and figures on the other. Needs the environment of `peers/requirements-lds.txt`, and nothing of this package.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from lds_tables import CHOICE, REPORT, SUMS, lds, summary, ways
from lds_truth import LEARNING_RATE, MLP, Mnist, checkpoints, halves, load_mnist, save, truth
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EKFAC_DAMPINGS = (0.1, 1.0, 10.0)
"""Times the mean eigenvalue; kronfluence has the first when it is asked for its heuristic."""
LAST_EPOCH = MLP.epochs
EPOCHS = (1, 2, 3, 4, 6, 8, 10, LAST_EPOCH)
"""Those of the best sums of `lds.py`, and the last; a minute each."""
TRAK_RUNS = tuple(range(10))

ByDamping = dict[float, Tensor]


def loaders(data: Mnist, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Training samples and queries in their order."""
    return tuple(  # type: ignore[return-value]
        DataLoader(TensorDataset(*part), batch_size=batch_size) for part in (data.train, data.queries)
    )


def kronfluence_scores(network: nn.Sequential, data: Mnist) -> ByDamping:
    """EK-FAC influence ``[queries, N]`` by damping, all layers, labels drawn from the model, moments of all samples."""
    import kronfluence.factor.config as factor_config
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import ScoreArguments
    from kronfluence.task import Task

    class Classification(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits, labels = model(batch[0]), batch[1]
            if sample:
                labels = torch.multinomial(logits.detach().softmax(1), 1)[:, 0]
            return F.cross_entropy(logits, labels, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    torch.manual_seed(0)
    train, queries = (TensorDataset(*part) for part in (data.train, data.queries))
    task, found = Classification(), {}
    with TemporaryDirectory() as folder:
        analyzer = Analyzer(
            "lds", prepare_model(network, task), task, cpu=True, disable_tqdm=True, output_dir=folder, log_level=40
        )
        analyzer.fit_all_factors("ekfac", train, per_device_batch_size=500)
        for damping in EKFAC_DAMPINGS:
            factor_config.HEURISTIC_DAMPING_SCALE = damping  # an argument would be the same number for all layers
            name = f"damping {damping}"
            analyzer.compute_pairwise_scores(
                name,
                "ekfac",
                queries,
                train,
                per_device_query_batch_size=500,
                per_device_train_batch_size=500,
                score_args=ScoreArguments(damping_factor=None),
            )
            found[damping] = analyzer.load_pairwise_scores(name)["all_modules"]
    return found


def tracin_scores(network: nn.Sequential, data: Mnist) -> ByDamping:
    """Dattri's TracIn of one checkpoint, ``[queries, N]``, without projection; a sum over checkpoints is theirs."""
    from dattri.algorithm.tracin import TracInAttributor
    from dattri.task import AttributionTask

    def loss(parameters: Mapping[str, Tensor], sample: tuple[Tensor, Tensor]) -> Tensor:
        logits = torch.func.functional_call(network, dict(parameters), (sample[0][None],))
        return F.cross_entropy(logits, sample[1][None])

    task = AttributionTask(loss, network, network.state_dict())
    attributor = TracInAttributor(task, torch.tensor([LEARNING_RATE]), normalized_grad=False)
    attributor.projector_kwargs = None  # its default is inexact; `None` to the constructor means the default
    return {0.0: attributor.attribute(*loaders(data, 1000)).T}


def trak_parts(network: nn.Sequential, data: Mnist, size: int, ensemble: int) -> tuple[Tensor, Tensor]:
    """What dattri's TRAK averages over checkpoints before it multiplies: ``[queries, N]`` and ``[N]``."""
    from dattri.algorithm.trak import TRAKAttributor
    from dattri.task import AttributionTask

    def margin(parameters: Mapping[str, Tensor], sample: tuple[Tensor, Tensor]) -> Tensor:
        logits = torch.func.functional_call(network, dict(parameters), (sample[0][None],))[0]
        is_label = torch.arange(len(logits)) == sample[1]
        # log(p / (1 - p)), without the rounding to infinity that the usual form has.
        return torch.where(is_label, logits, 0.0).sum() - torch.where(is_label, -torch.inf, logits).logsumexp(0)

    def probability(parameters: Mapping[str, Tensor], sample: tuple[Tensor, Tensor]) -> Tensor:
        logits = torch.func.functional_call(network, dict(parameters), (sample[0][None],))
        return torch.exp(-F.cross_entropy(logits, sample[1][None]))

    # The seed of checkpoint number `ensemble` of one attributor.
    projection = {"proj_dim": size, "proj_max_batch_size": 32, "proj_seed": 100_000 * ensemble, "device": "cpu"}
    task = AttributionTask(margin, network, network.state_dict())
    attributor = TRAKAttributor(task, probability, projector_kwargs=projection)
    train, queries = loaders(data, 2500)
    attributor.cache(train)
    weights = attributor.Q
    attributor.Q = torch.ones_like(weights)
    return attributor.attribute(queries).T, weights


class Cache:
    """Results of networks of the training runs, kept in a folder."""

    def __init__(self, data: Mnist, folder: Path) -> None:
        self._data, self._folder = data, folder
        self._runs: dict[int, list] = {}

    def get(self, name: str, seed: int, epoch: int, compute: Callable[[nn.Sequential, Mnist], Any]) -> Any:
        """Compute once."""
        path = self._folder / f"mlp_run{seed}_epoch{epoch}_{name}.pt"
        if not path.exists():
            if seed not in self._runs:
                self._runs[seed] = checkpoints(MLP, self._data, [seed], self._folder)[seed]
            begin = time.perf_counter()
            save(compute(MLP.build(self._runs[seed][epoch - 1]), self._data), path)
            print(f"{name}: run {seed}, epoch {epoch}: {time.perf_counter() - begin:.0f} s", flush=True)
        return torch.load(path, weights_only=True)


class Comparison:
    """Rows of the table.

    Args:
        losses: Of the queries after training on each half, ``[halves, queries]``.
        members: Which samples are in a half, bool ``[halves, N]``.
    """

    def __init__(self, losses: Tensor, members: Tensor) -> None:
        self._losses, self._indicators = losses, members.float().T
        self.rows: list[dict[str, Any]] = []

    def add(self, score: str, moments: str, damping: float, way: str, of_runs: Sequence[Tensor]) -> None:
        """Compare predictions ``[queries, halves]`` of some runs with the truth."""
        row: dict[str, Any] = {"score": score, "moments": moments, "damping": damping, "layers": "all", "way": way}
        row["choice"] = statistics.mean(lds(run, self._losses, CHOICE) for run in of_runs)
        self.rows.append({**row, "report": [lds(run, self._losses, REPORT) for run in of_runs]})

    def predict(self, scores: Tensor) -> Tensor:
        """Sums over the samples of each half."""
        return scores @ self._indicators

    def add_by_epoch(self, score: str, moments: str, runs: Sequence[Mapping[int, ByDamping]]) -> None:
        """All ways to make one prediction of those at each checkpoint."""
        epochs = list(runs[0])
        for damping in runs[0][epochs[0]]:
            by_epoch = [{epoch: self.predict(found[damping]) for epoch, found in run.items()} for run in runs]
            for way, combine in ways(epochs, sums_of(epochs)).items():
                self.add(score, moments, damping, way, [combine(run) for run in by_epoch])


def sums_of(epochs: Sequence[int]) -> dict[str, Sequence[int]]:
    """Sums that need no other checkpoints."""
    return {name: chosen for name, chosen in SUMS.items() if set(chosen) <= set(epochs)}


class Trak:
    """TRAK with a projection to some dimensions.

    Args:
        cache: Where the parts are.
        comparison: Where the rows go.
        size: Dimensions.
    """

    def __init__(self, cache: Cache, comparison: Comparison, size: int) -> None:
        self._cache, self._comparison, self._size = cache, comparison, size

    def add(self, seeds: Sequence[int], epochs: Sequence[int], is_with_all_runs: bool) -> None:
        """One training run: single checkpoints, or several; and the last one of ten runs."""
        name = f"dattri TRAK, {self._size} dimensions"
        for epoch in epochs:
            self._add(name, f"epoch {epoch}", [[(seed, epoch, 0)] for seed in seeds])
        for label, chosen in sums_of(epochs).items():
            self._add(name, f"sum {label}", [[(seed, epoch, epoch) for epoch in chosen] for seed in seeds])
        if is_with_all_runs:
            several = [(seed, LAST_EPOCH, LAST_EPOCH + seed if seed else 0) for seed in TRAK_RUNS]
            self._add(f"{name}, {len(TRAK_RUNS)} runs", f"epoch {LAST_EPOCH}", [several])

    def _add(self, score: str, way: str, runs: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        of_runs = []
        for networks in runs:
            products, weights = zip(*(self._parts(*network) for network in networks), strict=True)
            scores = torch.stack(products).mean(0) * torch.stack(weights).mean(0)
            of_runs.append(self._comparison.predict(scores))
        self._comparison.add(score, "", 0.0, way, of_runs)

    def _parts(self, seed: int, epoch: int, ensemble: int) -> tuple[Tensor, Tensor]:
        name = f"trak{self._size}" + (f"_{ensemble}" if ensemble else "")
        found: tuple[Tensor, Tensor] = self._cache.get(
            name, seed, epoch, lambda network, data: trak_parts(network, data, self._size, ensemble)
        )
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask each package, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("kronfluence", "tracin", "trak512", "trak2048")  # dattri's default dimensions, and those of its examples
    parser.add_argument("--only", nargs="*", choices=names, default=list(names))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", nargs="*", type=int, default=list(EPOCHS))
    parser.add_argument("--trak-runs", action="store_true", help="also TRAK with the last checkpoints of ten runs")
    parser.add_argument("--json", type=Path, help="where to write all variants")
    options = parser.parse_args(arguments)
    folder = os.environ.get("GRADSIM_CACHE")
    if not folder:
        raise SystemExit("Set GRADSIM_CACHE to the folder of lds.py (1 GB more).")
    data = load_mnist()
    cache = Cache(data, Path(folder))
    comparison = Comparison(truth(MLP, data, Path(folder))[0], halves())
    by_epoch = {
        "kronfluence": ("kronfluence EK-FAC", "sampled, all", kronfluence_scores),
        "tracin": ("dattri TracIn", "", tracin_scores),
    }
    for name in options.only:
        if name in by_epoch:
            score, moments, compute = by_epoch[name]
            runs = [
                {epoch: cache.get(name, seed, epoch, compute) for epoch in options.epochs} for seed in options.seeds
            ]
            comparison.add_by_epoch(score, moments, runs)
        else:
            trak = Trak(cache, comparison, int(name.removeprefix("trak")))
            trak.add(options.seeds, options.epochs, options.trak_runs)
    print(", ".join(f"{package} {version(package)}" for package in ("kronfluence", "dattri", "torch")))
    print("\n".join(summary(comparison.rows, LAST_EPOCH)), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(comparison.rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
