"""A report as one self-contained page: pictures inside, no network, readable without script."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, Template

from lightning_gradsim.records import InfluentialSample, QueryReport
from lightning_gradsim.report import Report
from lightning_gradsim.views.charts import draw_histogram, draw_line
from lightning_gradsim.views.exhibits import Exhibit
from lightning_gradsim.views.images import RgbImage, picture_notes, to_jpeg, to_png
from lightning_gradsim.views.pairs import make_matrix
from lightning_gradsim.views.sortable import (
    NOTHING,
    along_run_table,
    cut,
    followed_table,
    pairs_table,
    percent,
    queries_table,
    suggested_label,
    suspects_table,
)
from lightning_gradsim.views.tiles import (
    doubt_of,
    doubted_label,
    is_mistake,
    origin,
    query_name,
    rows_of,
    score_text,
    suspects_title,
    times_flagged,
)
from lightning_gradsim.views.values import ValueScale, make_scale

MAX_GALLERY = 24
MAX_UNSEEN = 6
"""Queries that are shown where nothing is known of their inputs."""
SMALL = 100
"""Pictures with fewer pixels a side are drawn with hard pixel edges."""


def report_page(
    report: Report,
    query_exhibits: Sequence[Exhibit | None] = (),
    train_exhibits: Mapping[int, Exhibit] | None = None,
    *,
    show_teachers: bool = False,
    near_duplicates: Sequence[tuple[int, int]] = (),
) -> str:
    """Compose the page of a report.

    Args:
        report: What the validation showed.
        query_exhibits: What is shown of the first of ``report.queries``, in their order.
        train_exhibits: What is shown of training samples, by sample id.
        show_teachers: Whether to add a row of teachers to each mistake.
        near_duplicates: Places of queries in the report, and training samples that are all but equal to them.

    Returns:
        HTML; texts and names are escaped.
    """
    train = {} if train_exhibits is None else train_exhibits
    maker = _PageMaker(report, list(query_exhibits), train, show_teachers, near_duplicates)
    return _template().render(maker.context())


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("lightning_gradsim.views"), autoescape=True, trim_blocks=False, lstrip_blocks=False
    )
    return environment.get_template("report.html")


class _PageMaker:
    """From a report to the plain values that the template writes."""

    def __init__(
        self,
        report: Report,
        queries: Sequence[Exhibit | None],
        train: Mapping[int, Exhibit],
        show_teachers: bool,
        near_duplicates: Sequence[tuple[int, int]],
    ) -> None:
        self.report = report
        # Whoever has only the report, as after `explain`, gets its samples by their ids and labels.
        self.queries = queries or [NOTHING] * min(len(report.queries), MAX_UNSEEN)
        self.heading, self.studied, self.kind = ("Mistakes", "studied mistakes", "validation ")
        if report.occasion:
            self.heading, self.studied, self.kind = ("Explained samples", "explained samples", "")
        self.train = train
        self.show_teachers = show_teachers
        self.near_duplicates = near_duplicates
        self.exhibits = [*(each for each in queries if each is not None), *train.values()]
        self.scale: ValueScale = make_scale([each.values for each in self.exhibits if each.values is not None])
        accused = [sample.sample_id for query in report.queries for sample in (*query.harmful, *query.teachers)]
        self.doubts = report.flagged_among(accused)

    def context(self) -> dict[str, Any]:
        report = self.report
        pictures = [exhibit.picture for exhibit in self.exhibits]
        return {
            "title": f"{report.errors_in_words} · {report.when_in_words}",
            "headline": report.errors_in_words,
            "heading": self.heading,
            "studied": self.studied,
            "origin": origin(report),
            "reference": report.reference,
            "similarity": report.similarity,
            "numbers": self._numbers(),
            "sections": self._sections(),
            "notes": [note.split("`") for note in report.notes],  # every second part is code
            "nothing": report.nothing_in_words,
            "picture_notes": picture_notes(pictures),
            "has_pictures": any(picture is not None for picture in pictures),
            "has_texts": any(exhibit.text is not None for exhibit in self.exhibits),
            "has_values": bool(self.scale.names),
            "feature_names": self.scale.names,
            "mistakes": [
                self._mistake(place, query)
                for place, query in enumerate(report.queries[: len(self.queries)])
                if self.queries[place] is not None
            ],
            "all_queries": queries_table(report),
            "has_mistakes": any(map(is_mistake, report.queries[: len(self.queries)])),
            "hints": review_hints(report),
            "suspects_title": suspects_title(report).capitalize(),
            "gallery": self._gallery(),
            "suspects": suspects_table(report, self.train),
            "matrix": self._matrix(),
            "pairs": pairs_table(report),
            "trends": self._trends(),
            "histogram": None if report.self_influence is None else draw_histogram(report.self_influence),
            "followed": followed_table(report),
            "along_run": along_run_table(report),
            "plan": "" if report.plan is None else str(report.plan),
            "cost": report.cost_in_words,
            "settings": list(report.settings.items()),
            "versions": list(report.versions.items()),
        }

    def _sections(self) -> list[tuple[str, str]]:
        report = self.report
        sections = [(self.heading, "mistakes"), ("Suspects", "suspects")]
        sections += [("Class pairs", "pairs")] if report.error_pairs else []
        sections += [("Trends", "trends")] if report.trends else []
        sections += [("Followed mistakes", "followed")] if report.followed else []
        sections += [("Along the run", "along")] if report.along_run else []
        return [*sections, ("This run", "run")]

    def _matrix(self) -> dict[str, Any]:
        matrix = make_matrix(self.report)
        highest = max(map(max, matrix.counts), default=0)
        return {
            "names": [self.report.name_of(index) for index in matrix.classes],
            "rows": [[(count, round(count / highest, 2) if highest else 0) for count in row] for row in matrix.counts],
            "num_left_out": matrix.num_left_out,
        }

    def _trends(self) -> list[dict[str, Any]]:
        points = self.report.trends
        series: list[tuple[str, str, list[float | None]]] = [
            ("mistakes", ",.0f", [point.errors for point in points]),
            ("flagged labels", ",.0f", [point.suspects_flagged for point in points]),
            ("of harmful samples have the predicted label", ".0%", [point.harmful_with_prediction for point in points]),
            ("of the first suspects were there last time", ".0%", [point.suspects_overlap for point in points]),
        ]
        epochs = [point.epoch for point in points]
        charts = [draw_line(name, form, epochs, values) for name, form, values in series]
        return [chart for chart in charts if chart is not None]

    def _numbers(self) -> list[tuple[str, str, str]]:
        report, suspects = self.report, self.report.suspects
        return [
            ("mistakes", f"{report.num_errors:,}", f"of {report.num_validation_samples:,} {self.kind}samples"),
            ("flagged labels", f"{suspects.num_flagged:,}", f"of {len(suspects):,} training samples"),
            (
                f"doubtful {self.kind}labels",
                f"{len(report.suspect_queries)}",
                f"of {len(report.queries)} {self.studied}",
            ),
            ("cost", f"{report.seconds:.2f} s", report.share_in_words),
        ]

    def _mistake(self, place: int, query: QueryReport) -> dict[str, Any]:
        exhibit = self.queries[place] or NOTHING
        return {
            "exhibit": self._exhibit(exhibit, query_name(self.report, query)),
            "label": self.report.name_of(query.label),
            "prediction": self.report.name_of(query.prediction),
            "probability": percent(query.probability),
            "facts": " · ".join([f"loss {score_text(query.loss)}", _query_name(self.report, query), *_since(query)]),
            "is_mistake": is_mistake(query),
            "doubt": doubt_of(self.report) if query.label_looks_wrong else "",
            "duplicates": [sample_id for own, sample_id in self.near_duplicates if own == place],
            "rows": [
                {
                    "title": title,
                    "short": short,
                    "measure": measure,
                    "tiles": self._tiles(samples, exhibit, accuses=short != "look-alike"),
                }
                for title, short, measure, samples in rows_of(
                    query, self.report.similarity, show_teachers=self.show_teachers
                )
            ],
        }

    def _tiles(self, samples: Sequence[InfluentialSample], query: Exhibit, *, accuses: bool) -> list[dict[str, Any]]:
        full = _full_bar([sample.score for sample in samples])
        tiles = []
        for sample in samples:
            suspect = self.doubts.get(sample.sample_id) if accuses else None
            doubt = None if suspect is None else doubted_label(self.report, suspect)
            exhibit = self.train.get(sample.sample_id, NOTHING)
            tiles.append(
                {
                    "exhibit": self._exhibit(exhibit, f"training sample {sample.sample_id}", query),
                    "label": self.report.name_of(sample.label),
                    "name": f"#{sample.sample_id}",
                    "score": score_text(sample.score),
                    "share": _share(sample.score, full),
                    "marked": sample.label_is_prediction,
                    "doubt": doubt,
                }
            )
        return tiles

    def _exhibit(self, exhibit: Exhibit, alt: str, query: Exhibit | None = None) -> dict[str, Any]:
        text = None if exhibit.text is None else cut(exhibit.text)
        return {
            "uri": None if exhibit.picture is None else _data_uri(exhibit.picture),
            "is_small": exhibit.picture is not None and max(exhibit.picture.pixels.shape[:2]) < SMALL,
            "alt": alt,
            "text": text,
            "cells": self.scale.cells(exhibit.values, None if query is None else query.values),
        }

    def _gallery(self) -> list[dict[str, Any]]:
        shown = self.report.suspects[:MAX_GALLERY]
        if not any(self.train.get(suspect.sample_id, NOTHING).picture is not None for suspect in shown):
            return []
        full, report = _full_bar([suspect.score for suspect in shown]), self.report
        return [
            {
                "exhibit": self._exhibit(
                    self.train.get(suspect.sample_id, NOTHING), f"training sample {suspect.sample_id}"
                ),
                "label": self.report.name_of(suspect.label),
                "suggested": suggested_label(report, suspect) if suspect.flagged else "",
                "name": f"#{suspect.sample_id}",
                "score": score_text(suspect.score),
                "share": _share(suspect.score, full),
                "flagged": times_flagged(suspect),
            }
            for suspect in shown
        ]


def review_hints(report: Report) -> list[str]:
    """How far to read the list of suspects, a sentence each; none where there are no suspects."""
    suspects = report.suspects
    if not len(suspects):
        return []
    flagged = f"{suspects.num_flagged:,} are flagged: the model holds another label for more probable."
    if not suspects.num_flagged:
        flagged = "None is flagged: every ranking has first samples, one of clean labels, too."
    first, more = (max(1, math.ceil(len(suspects) * share)) for share in (0.01, 0.05))
    hints = [
        f"Ranked by {suspects.score_name}. Review the first {first:,} (1 %) by hand; where most of them are wrong, go "
        f"on to {more:,} (5 %). {flagged}"
    ]
    if suspects.upper_estimate is not None:
        hints.append(
            f"Otsu's threshold parts the scores at {suspects.upper_estimate:,} samples: take it as an upper estimate "
            "of the number of wrong labels, since it parts a clean list in two as well."
        )
    return hints


def _query_name(report: Report, query: QueryReport) -> str:
    name = query_name(report, query)
    return f"{name} of loader {query.dataloader_idx}" if query.dataloader_idx else name


def _since(query: QueryReport) -> list[str]:
    return [] if query.wrong_since is None else [f"wrong since epoch {query.wrong_since}"]


def _data_uri(picture: RgbImage) -> str:
    # A photograph takes five times as long as PNG, and three times the room; small pictures are drawn pixel by pixel.
    kind, encode = ("png", to_png) if max(picture.pixels.shape[:2]) < SMALL else ("jpeg", to_jpeg)
    return f"data:image/{kind};base64,{base64.b64encode(encode(picture.pixels)).decode('ascii')}"


def _full_bar(scores: Sequence[float]) -> float:
    return max((abs(score) for score in scores if math.isfinite(score)), default=0.0)


def _share(score: float, full: float) -> int:
    return round(100 * min(abs(score) / full, 1.0)) if full and math.isfinite(score) else 0
