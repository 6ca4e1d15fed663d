"""Time to draw and write a report: six queries with twelve tiles each, and the page.

Run from the root of the repository: ``python benchmarks/views.py``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from lightning_gradsim.queries import Query
from lightning_gradsim.records import ErrorPair, Histogram, InfluentialSample, QueryReport
from lightning_gradsim.report import Report
from lightning_gradsim.shown_samples import collect_shown_samples
from lightning_gradsim.sinks import write_report_files, write_text_atomically
from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.train_pass import make_reader
from lightning_gradsim.views import (
    ExhibitMaker,
    class_pairs_picture,
    mistake_panel,
    mistakes_markdown,
    report_page,
    suspects_gallery,
    suspects_markdown,
)
from lightning_gradsim.views.images import to_png

NUM_TRAIN, NUM_QUERIES, NUM_CLASSES = 5000, 6, 10
TARGETS = {32: 0.5, 224: 2.0}
"""Seconds at most for the panel and the page, by side of the pictures."""
TARGETED = ("read", "panel", "page")


def make_report() -> Report:
    """A report whose lists name other samples in every query, as many as can be shown."""
    ids = torch.arange(NUM_TRAIN)
    suspects = SuspectTable(
        ids,
        -ids.float(),
        (ids % NUM_CLASSES).int(),
        ((ids + 1) % NUM_CLASSES).int(),
        torch.rand(NUM_TRAIN),
        ids % 3 == 0,
        "margin_knn",
        visits=ids * 0 + 5,
        upper_estimate=300,
    )

    def samples(start: int) -> tuple[InfluentialSample, ...]:
        return tuple(InfluentialSample(start + i, i % NUM_CLASSES, -1.0 / (i + 1), i % 2 == 0) for i in range(8))

    queries = tuple(
        QueryReport(
            i, 0, i, i + 1, 0.9, 3.0, samples(100 * i), samples(100 * i + 30), samples(100 * i + 60), i % 2 == 0
        )
        for i in range(NUM_QUERIES)
    )
    return Report(
        epoch=4,
        step=1000,
        layers=("head",),
        similarity="dot",
        reference=f"all {NUM_TRAIN:,} training samples",
        num_train_samples=NUM_TRAIN,
        num_validation_samples=1000,
        num_errors=60,
        queries=queries,
        suspects=suspects,
        class_names=tuple(f"class {i}" for i in range(NUM_CLASSES)),
        error_pairs=tuple(ErrorPair(i, (i + 3) % NUM_CLASSES, 10 - i) for i in range(NUM_CLASSES)),
        self_influence=Histogram.of(torch.rand(NUM_TRAIN)),
        time_share=0.05,
    )


def steps(report: Report, side: int, folder: Path) -> dict[str, Callable[[], object]]:
    """What a report takes, by name, in order; each step uses what the one before has made."""
    images = torch.rand(700, 3, side, side)
    train = make_reader(TensorDataset(images, torch.zeros(700)))
    validation = {0: make_reader(TensorDataset(images[:20], torch.zeros(20)))}
    kept = [Query(None, query.sample_id, 0, i, query.label, query.loss) for i, query in enumerate(report.queries)]
    made: dict[str, object] = {}

    def read() -> None:
        maker = ExhibitMaker([0.5] * 3, [0.5] * 3)
        made["shown"] = collect_shown_samples(report, kept, train, validation, maker)

    def panel() -> None:
        shown = made["shown"]
        to_png(mistake_panel(report, shown.queries, shown.train, show_teachers=True))

    def page() -> None:
        shown = made["shown"]
        html = report_page(
            report, shown.queries, shown.train, show_teachers=True, near_duplicates=shown.near_duplicates(report)
        )
        write_text_atomically(html, folder / "report.html")

    def others() -> None:
        for pixels in (suspects_gallery(report, made["shown"].train), class_pairs_picture(report)):
            to_png(pixels)
        mistakes_markdown(report)
        suspects_markdown(report)

    def files() -> None:
        write_report_files(report, folder)

    return {"read": read, "panel": panel, "page": page, "gallery, class pairs, tables": others, "CSV, JSON": files}


def measure(report: Report, side: int, repeats: int) -> dict[str, float]:
    """Median CPU seconds of each step, on one thread; the first run, which loads fonts, is left out."""
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        todo = steps(report, side, Path(folder))
        for number in range(repeats + 1):
            for name, step in todo.items():
                begin = time.process_time()
                step()
                if number:
                    seconds.setdefault(name, []).append(time.process_time() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main(arguments: list[str] | None = None) -> dict[int, float]:
    """Measure and print; return the seconds by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sides", type=int, nargs="+", default=list(TARGETS))
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    report, totals = make_report(), {}
    for side in options.sides:
        seconds = measure(report, side, options.repeats)
        totals[side] = sum(seconds.values())
        parts = ", ".join(f"{name} {value:.3f}" for name, value in seconds.items())
        target = f" (target {TARGETS[side]:.1f})" if side in TARGETS else ""
        targeted = sum(seconds[name] for name in TARGETED)
        print(f"{side} x {side}: panel and page {targeted:.3f} s{target}, all {totals[side]:.3f} s: {parts}")
    return totals


if __name__ == "__main__":
    main()
