"""A report as one self-contained page: pictures inside, no network, readable without script."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, Template

from lightning_gradsim.records import InfluentialSample, QueryReport
from lightning_gradsim.report import Report
from lightning_gradsim.suspects import Suspect
from lightning_gradsim.views.charts import draw_histogram, draw_line
from lightning_gradsim.views.exhibits import Exhibit
from lightning_gradsim.views.images import RgbImage, picture_notes, to_jpeg, to_png
from lightning_gradsim.views.pairs import find_pairs, make_matrix
from lightning_gradsim.views.tiles import doubted_label, origin, score_text, suspects_title
from lightning_gradsim.views.values import ValueScale, make_scale

MAX_SUSPECT_ROWS = 200
MAX_GALLERY = 24
MAX_PAIR_ROWS = 20
TILES_PER_ROW = 4
MAX_TEXT = 300
SMALL = 100
"""Pictures with fewer pixels a side are drawn with hard pixel edges."""
NOTHING = Exhibit()


@dataclass(frozen=True)
class Column:
    """A column of a sortable table."""

    name: str
    is_number: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of a sortable table; ``value`` sorts where the text would not."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Table:
    """A sortable table."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


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
        self.queries = queries
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
            "title": f"{report.errors_in_words} · epoch {report.epoch}, step {report.step}",
            "headline": report.errors_in_words,
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
            "all_queries": self._all_queries(),
            "hints": review_hints(report),
            "suspects_title": suspects_title(report).capitalize(),
            "gallery": self._gallery(),
            "suspects": self._suspects(),
            "matrix": self._matrix(),
            "pairs": self._pairs(),
            "trends": self._trends(),
            "histogram": None if report.self_influence is None else draw_histogram(report.self_influence),
            "followed": self._followed(),
            "along_run": self._along_run(),
            "plan": "" if report.plan is None else str(report.plan),
            "cost": report.cost_in_words,
            "settings": list(report.settings.items()),
            "versions": list(report.versions.items()),
        }

    def _sections(self) -> list[tuple[str, str]]:
        report = self.report
        sections = [("Mistakes", "mistakes"), ("Suspects", "suspects")]
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

    def _pairs(self) -> Table:
        name = self.report.name_of
        rows = tuple(
            (
                Cell(name(each.pair.label)),
                Cell(name(each.pair.prediction)),
                Cell(str(each.pair.count)),
                Cell(", ".join(f"#{sample_id} ({name(label)})" for sample_id, label in each.culprits)),
            )
            for each in find_pairs(self.report, MAX_PAIR_ROWS)
        )
        columns = (
            Column("label"),
            Column("prediction"),
            Column("mistakes", True),
            Column("typical harmful samples (given label)"),
        )
        return Table(columns, rows)

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

    def _followed(self) -> Table:
        name = self.report.name_of
        columns = ("sample", "label", "last prediction", "wrong since epoch", "fixed at epoch")
        numbers = {"sample", "wrong since epoch", "fixed at epoch"}
        rows = tuple(
            (
                Cell(f"{each.sample_id}{f' of loader {each.dataloader_idx}' if each.dataloader_idx else ''}"),
                Cell(name(each.label)),
                Cell(name(each.prediction)),
                Cell(str(each.wrong_since)),
                Cell("" if each.fixed_at is None else str(each.fixed_at)),
            )
            for each in self.report.followed
        )
        return Table(tuple(Column(column, column in numbers) for column in columns), rows)

    def _along_run(self) -> Table:
        columns = ("sample", "label", "prediction", "since epoch", "reports", "most harmful", "strongest proponents")
        numbers = {"sample", "since epoch", "reports"}
        name = self.report.name_of
        rows = tuple(
            (
                Cell(f"{each.sample_id}{f' of loader {each.dataloader_idx}' if each.dataloader_idx else ''}"),
                Cell(name(each.label)),
                Cell(name(each.prediction)),
                Cell(str(each.since_epoch)),
                Cell(str(each.num_reports)),
                *(
                    Cell(", ".join(f"#{one.sample_id} ({name(one.label)})" for one in samples[:TILES_PER_ROW]))
                    for samples in (each.harmful, each.proponents)
                ),
            )
            for each in self.report.along_run
        )
        return Table(tuple(Column(column, column in numbers) for column in columns), rows)

    def _numbers(self) -> list[tuple[str, str, str]]:
        report, suspects = self.report, self.report.suspects
        doubtful = len(report.suspect_queries)
        return [
            ("mistakes", f"{report.num_errors:,}", f"of {report.num_validation_samples:,} validation samples"),
            ("flagged labels", f"{suspects.num_flagged:,}", f"of {len(suspects):,} training samples"),
            ("doubtful validation labels", f"{doubtful}", f"of {len(report.queries)} mistakes studied"),
            ("cost", f"{report.seconds:.2f} s", report.share_in_words),
        ]

    def _lists(self, query: QueryReport) -> list[tuple[str, str, str, tuple[InfluentialSample, ...]]]:
        measure = self.report.similarity
        lists = [
            ("harmful: pushed towards this mistake", "harmful", measure, query.harmful[:TILES_PER_ROW]),
            ("look-alikes: alike in the model's eyes", "look-alike", "cosine", query.look_alikes[:TILES_PER_ROW]),
        ]
        if self.show_teachers:
            teachers = query.teachers[:TILES_PER_ROW]
            lists.append(("teachers: taught this prediction", "teacher", measure, teachers))
        return lists

    def _mistake(self, place: int, query: QueryReport) -> dict[str, Any]:
        exhibit = self.queries[place] or NOTHING
        return {
            "exhibit": self._exhibit(exhibit, "the validation sample"),
            "label": self.report.name_of(query.label),
            "prediction": self.report.name_of(query.prediction),
            "probability": _percent(query.probability),
            "facts": " · ".join([f"loss {score_text(query.loss)}", _query_name(query), *_since(query)]),
            "label_looks_wrong": query.label_looks_wrong,
            "duplicates": [sample_id for own, sample_id in self.near_duplicates if own == place],
            "rows": [
                {
                    "title": title,
                    "short": short,
                    "measure": measure,
                    "tiles": self._tiles(samples, exhibit, accuses=short != "look-alike"),
                }
                for title, short, measure, samples in self._lists(query)
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
        text = exhibit.text if exhibit.text is None or len(exhibit.text) <= MAX_TEXT else exhibit.text[:MAX_TEXT] + "…"
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
        full = _full_bar([suspect.score for suspect in shown])
        return [
            {
                "exhibit": self._exhibit(
                    self.train.get(suspect.sample_id, NOTHING), f"training sample {suspect.sample_id}"
                ),
                "label": self.report.name_of(suspect.label),
                "suggested": self._suggested(suspect) if suspect.flagged else "",
                "name": f"#{suspect.sample_id}",
                "score": score_text(suspect.score),
                "share": _share(suspect.score, full),
            }
            for suspect in shown
        ]

    def _suggested(self, suspect: Suspect) -> str:
        return "" if suspect.suggested_label is None else self.report.name_of(suspect.suggested_label)

    def _all_queries(self) -> Table:
        columns = ("sample", "label", "prediction", "probability", "loss", "label looks wrong")
        numbers = {"sample", "probability", "loss"}
        name = self.report.name_of
        rows = tuple(
            (
                Cell("" if query.sample_id is None else str(query.sample_id)),
                Cell(name(query.label)),
                Cell(name(query.prediction)),
                Cell(_percent(query.probability), query.probability),
                Cell(score_text(query.loss), query.loss),
                Cell("yes" if query.label_looks_wrong else ""),
            )
            for query in self.report.queries
        )
        return Table(tuple(Column(column, column in numbers) for column in columns), rows)

    def _suspects(self) -> Table:
        suspects = self.report.suspects[:MAX_SUSPECT_ROWS]
        has_text = any(self.train.get(each.sample_id, NOTHING).text is not None for each in suspects)
        has_visits = self.report.suspects.visits is not None
        numbers = {"rank", "sample", "probability", "score", "visits"}
        columns = ["rank", "sample", "label", "suggested label", "probability", "score", "flagged"]
        columns += [*(["visits"] if has_visits else []), *(["text"] if has_text else [])]
        rows = []
        for rank, suspect in enumerate(suspects, start=1):
            cells = [
                Cell(str(rank)),
                Cell(str(suspect.sample_id)),
                Cell(self.report.name_of(suspect.label)),
                Cell(self._suggested(suspect)),
                Cell(_percent(suspect.probability), suspect.probability),
                Cell(score_text(suspect.score), suspect.score),
                Cell("yes" if suspect.flagged else ""),
            ]
            if has_visits:
                cells.append(Cell(str(suspect.visits)))
            if has_text:
                text = self.train.get(suspect.sample_id, NOTHING).text or ""
                cells.append(Cell(text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"))
            rows.append(tuple(cells))
        return Table(tuple(Column(column, column in numbers) for column in columns), tuple(rows))


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


def _query_name(query: QueryReport) -> str:
    name = "validation sample" if query.sample_id is None else f"validation sample #{query.sample_id}"
    return f"{name} of loader {query.dataloader_idx}" if query.dataloader_idx else name


def _since(query: QueryReport) -> list[str]:
    return [] if query.wrong_since is None else [f"wrong since epoch {query.wrong_since}"]


def _data_uri(picture: RgbImage) -> str:
    # A photograph takes five times as long as PNG, and three times the room; small pictures are drawn pixel by pixel.
    kind, encode = ("png", to_png) if max(picture.pixels.shape[:2]) < SMALL else ("jpeg", to_jpeg)
    return f"data:image/{kind};base64,{base64.b64encode(encode(picture.pixels)).decode('ascii')}"


def _percent(probability: float | None) -> str:
    return "" if probability is None else f"{probability:.0%}"


def _full_bar(scores: Sequence[float]) -> float:
    return max((abs(score) for score in scores if math.isfinite(score)), default=0.0)


def _share(score: float, full: float) -> int:
    return round(100 * min(abs(score) / full, 1.0)) if full and math.isfinite(score) else 0
