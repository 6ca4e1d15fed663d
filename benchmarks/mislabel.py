"""Which scores find wrong labels: planted noise and real human mistakes, several seeds, paired on the same runs.

Trains plain networks, records what a tap would see of their training steps, and scores the records with the package.
Trainings and figures are kept in a folder, so that a run goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import mislabel_rivals
import torch
from mislabel_data import Data, UnavailableError, save
from mislabel_measure import ACTIONS, act, measure, rank_figures
from mislabel_train import SETTINGS, Record, Setting, train

SEEDS = (3, 4, 5, 6, 7)
"""None of them was used to choose the default."""
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""0.975 quantile of Student's distribution by degrees of freedom."""
DEFAULT, BASELINE = "margin_knn", "aum"
RIVALS = {"cleanlab": mislabel_rivals.cleanlab_scores, "captum": mislabel_rivals.captum_scores}
ACT = "act"
GAIN, WORST, TOP_SYNTHETIC, TOP_HUMAN, CLEAN_FLAGGED = 0.01, -0.01, 0.9, 0.8, 0.015
Results = dict[str, dict[int, dict[str, dict[str, float]]]]
"""Figures by setting, seed, score and name."""


def main(arguments: list[str] | None = None) -> None:
    """Train, measure, print, and say whether the targets are met."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    results: Results = {}
    for name, setting in SETTINGS.items():
        if any(fnmatch.fnmatch(name, pattern) for pattern in options.only):
            results |= run_all(setting, options)
    report(results)
    if options.json is not None:
        figures = {"setting": {"seeds": options.seeds, "torch": torch.__version__}, "results": results}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def run_all(setting: Setting, options: argparse.Namespace) -> Results:
    """Figures of all seeds; nothing where a setting cannot run here, and a line that says why."""
    try:
        return {setting.name: {seed: run(setting, seed, options) for seed in options.seeds}}
    except UnavailableError as error:
        print(f"{setting.name} is left out: {error}", flush=True)
        return {}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=os.environ.get("GRADSIM_CACHE"), help="or GRADSIM_CACHE")
    parser.add_argument("--only", nargs="+", default=["*"], help="settings, by pattern")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--rivals", nargs="*", choices=list(RIVALS), default=[])
    parser.add_argument("--act", action="store_true", help="train again without flagged samples, and with new labels")
    parser.add_argument("--rival-seeds", type=int, default=2, help="how many of the seeds these two are done for")
    parser.add_argument("--again", action="store_true", help="measure again what is trained already")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)
    if options.cache is None:
        parser.error("trainings are kept in a folder outside of the repository: pass --cache or set GRADSIM_CACHE")
    options.cache = Path(options.cache)
    return options


def run(setting: Setting, seed: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Figures of one training, from the folder as far as they are there."""
    path = options.cache / "figures" / f"{setting.name}-{seed}.json"
    figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    more = [*options.rivals, *([ACT] if options.act else [])]
    more = more if setting.kind != "clean" and seed in options.seeds[: options.rival_seeds] else []
    wanted = [name for name in more if not any(column.startswith(name) for column in figures)]
    if figures and not options.again and not wanted:
        return figures
    start = time.perf_counter()
    sets = setting.make_data(seed, options.cache)
    if not figures or options.again:
        figures |= measure(setting, sets, load_record(setting, sets, seed, options.cache))
    for name in wanted:
        if name == ACT:
            figures[ACT] = act(setting, sets, load_record(setting, sets, seed, options.cache), seed)
            continue
        for column, scores in RIVALS[name](setting, sets, seed).items():
            figures[column] = rank_figures(scores, sets.flipped)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    os.replace(path.with_suffix(".part"), path)
    print(f"{setting.name}, seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    return figures


def load_record(setting: Setting, sets: Data, seed: int, cache: Path) -> Record:
    """The record of a training, from the folder if it is there."""
    path = cache / "runs" / f"{setting.name}-{seed}.pt"
    if path.exists():
        return Record(**torch.load(path, weights_only=True))
    record = train(setting, sets, seed)
    save(vars(record), path)
    return record


def report(results: Results) -> None:
    """Tables, and the targets."""
    noisy = {name: runs for name, runs in results.items() if SETTINGS[name].kind != "clean"}
    if noisy:
        scores = sorted(
            {score for runs in noisy.values() for figures in runs.values() for score in figures} - {"run", ACT}
        )
        print_table(noisy, scores, "AP")
        for column in ("AUROC", "precision@n", "top 1 %", "top 5 %"):
            print_table(noisy, [score for score in (DEFAULT, BASELINE, "loss") if score in scores], column)
    columns: dict[str, None] = {}
    for runs in results.values():
        for figures in runs.values():
            columns.update(dict.fromkeys(figures["run"]))
    print_rows("of the runs", {name: {c: average(runs, "run", c) for c in columns} for name, runs in results.items()})
    acted = {name: {column: average(runs, ACT, column) for column in ACTIONS} for name, runs in noisy.items()}
    print_rows("test accuracy", {name: row for name, row in acted.items() if not math.isnan(row[ACTIONS[0]])})
    for text in targets(results):
        print(text)


def print_table(results: Results, scores: Sequence[str], column: str) -> None:
    """One figure of some scores over all settings, mean over the seeds."""
    rows = {name: {score: average(runs, score, column) for score in scores} for name, runs in results.items()}
    rows["mean"] = {
        score: statistics.fmean([row[score] for row in rows.values()])
        if not any(math.isnan(row[score]) for row in rows.values())
        else math.nan
        for score in scores
    }
    print_rows(column, rows)


def print_rows(title: str, rows: dict[str, dict[str, float]]) -> None:
    """A Markdown table; nothing without rows."""
    if not rows:
        return
    columns = list(next(iter(rows.values()), {}))
    print(f"\n| {title} | " + " | ".join(columns) + " |")
    print("| --- " * (len(columns) + 1) + "|")
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join("" if math.isnan(v) else f"{v:.3f}" for v in row.values()) + " |")
    print()


def average(runs: dict[int, dict[str, dict[str, float]]], score: str, column: str) -> float:
    """Mean over the seeds that have it; NaN if none has."""
    values = [figures[score][column] for figures in runs.values() if column in figures.get(score, {})]
    return statistics.fmean(values) if values else math.nan


def gains(results: Results, score: str = DEFAULT, baseline: str = BASELINE) -> dict[int, float]:
    """By seed, how much higher the AP of one score is than another's, averaged over the settings."""
    seeds = sorted({seed for runs in results.values() for seed in runs})
    found = {}
    for seed in seeds:
        pairs = [
            runs[seed] for runs in results.values() if seed in runs and score in runs[seed] and baseline in runs[seed]
        ]
        if pairs:
            found[seed] = statistics.fmean(pair[score]["AP"] - pair[baseline]["AP"] for pair in pairs)
    return found


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the 95 % interval of it by Student's distribution."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = T_975[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def targets(results: Results) -> list[str]:
    """Each target with its figure, and whether it is met."""
    noisy = {name: runs for name, runs in results.items() if SETTINGS[name].kind != "clean"}
    found: list[tuple[bool, str]] = []
    if noisy:
        mean, low, high = interval(list(gains(noisy).values()))
        found.append((mean >= GAIN and low > 0, f"AP {mean:+.4f} [{low:+.4f}, {high:+.4f}] over AUM, wanted {GAIN:+}"))
        differences = {n: average(r, DEFAULT, "AP") - average(r, BASELINE, "AP") for n, r in noisy.items()}
        worst = min(differences, key=lambda name: differences[name])
        found.append(
            (differences[worst] >= WORST, f"worst setting {worst}: {differences[worst]:+.4f}, wanted {WORST:+}")
        )
        rival = list(gains(noisy, DEFAULT, "cleanlab self_confidence").values())
        if rival:
            mean = statistics.fmean(rival)
            found.append((mean > 0, f"AP {mean:+.4f} over cleanlab's out-of-fold self-confidence, wanted above 0"))
    for kind, bound in (("synthetic", TOP_SYNTHETIC), ("human", TOP_HUMAN)):
        tops = {n: average(r, DEFAULT, "top 1 %") for n, r in noisy.items() if SETTINGS[n].kind == kind}
        if tops:
            name = min(tops, key=lambda name: tops[name])
            mean = statistics.fmean(tops.values())
            text = f"precision of the top 1 %, {kind}: {mean:.3f}, lowest {tops[name]:.3f} ({name}), wanted {bound}"
            found.append((tops[name] >= bound, text))
    for name, runs in results.items():
        if SETTINGS[name].kind == "clean":
            flagged = average(runs, "run", "flagged")
            found.append(
                (flagged <= CLEAN_FLAGGED, f"{name}: {flagged:.2%} flagged, wanted at most {CLEAN_FLAGGED:.1%}")
            )
    return [f"target {'met' if met else 'MISSED'}: {text}" for met, text in found]


if __name__ == "__main__":
    main()
