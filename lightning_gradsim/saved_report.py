"""Reports read back from the files of a run."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_gradsim.errors import SavedReportError
from lightning_gradsim.history import FollowedQuery, TrendPoint
from lightning_gradsim.plain_values import Label
from lightning_gradsim.plan_record import LayerPlan, Plan
from lightning_gradsim.records import ErrorPair, Histogram, InfluentialSample, QueryAlongRun, QueryReport
from lightning_gradsim.report import REPORT_VERSION, Report
from lightning_gradsim.suspects import SUSPECT_COLUMNS, SUSPECT_PARTS, SuspectTable
from lightning_gradsim.true_labels import SuspectQuality

T = TypeVar("T")
REPORT_FILE, SUSPECTS_FILE = "report.json", "suspects.csv"


def load_report(directory: str | Path) -> Report:
    """Read a report back from its files.

    Args:
        directory: The folder with ``report.json`` and ``suspects.csv``, or one above it: of several reports beneath,
            the newest.

    Returns:
        The report, with the suspects that ``suspects.csv`` holds: the first 10,000.

    Raises:
        FileNotFoundError: If there is no report.
        SavedReportError: If the files are of another version, or no report.
    """
    folder = _find_folder(Path(directory))
    try:
        values = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
        version = values.pop("version")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SavedReportError(f"`{folder / REPORT_FILE}` holds no report. Expected one of this package.") from error
    if version != REPORT_VERSION:
        raise SavedReportError(
            f"`{folder / REPORT_FILE}` is of version {version}, this release reads version {REPORT_VERSION}. Read it "
            "with the release that wrote it."
        )
    try:
        return _to_report(values, _read_suspects(folder / SUSPECTS_FILE))
    except (ValueError, LookupError, TypeError) as error:
        raise SavedReportError(
            f"The files in `{folder}` do not fit each other, with {type(error).__name__}: {error}. Expected "
            f"`{REPORT_FILE}` and `{SUSPECTS_FILE}` as one report left them."
        ) from error


def _find_folder(directory: Path) -> Path:
    found = [directory / REPORT_FILE] if (directory / REPORT_FILE).exists() else list(directory.rglob(REPORT_FILE))
    if not found:
        raise FileNotFoundError(
            f"There is no `{REPORT_FILE}` in `{directory}` or beneath it. Expected the log folder of a run with the "
            "callback, such as `lightning_logs/version_0`."
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent


def _to_report(values: Mapping[str, Any], suspects: Sequence[Mapping[str, str]]) -> Report:
    own = {name: value for name, value in values.items() if name in Report.__dataclass_fields__}
    names = values["class_names"]
    return Report(
        **{
            **own,
            "layers": tuple(values["layers"]),
            "errors_per_class": {int(label): count for label, count in values["errors_per_class"].items()},
            "queries": tuple(map(_to_query, values["queries"])),
            "suspects": replace(
                _to_table(suspects, values["task"], None if names is None else len(names)),
                score_name=values["suspect_score"],
                upper_estimate=values["suspect_upper_estimate"],
            ),
            "class_names": None if names is None else tuple(names),
            "notes": tuple(values["notes"]),
            "plan": _if_there(_to_plan, values["plan"]),
            "suspect_quality": _if_there(lambda found: SuspectQuality(**found), values["suspect_quality"]),
            "error_pairs": tuple(ErrorPair(**pair) for pair in values["error_pairs"]),
            "self_influence": _if_there(_to_histogram, values["self_influence"]),
            "trends": tuple(TrendPoint(**point) for point in values["trends"]),
            "followed": tuple(FollowedQuery(**{**each, **_labels_of(each)}) for each in values["followed"]),
            "along_run": tuple(map(_to_query_along_run, values.get("along_run", ()))),  # of earlier releases: none
        }
    )


def _to_query(values: Mapping[str, Any]) -> QueryReport:
    lists = {name: _to_samples(values[name]) for name in ("harmful", "teachers", "look_alikes")}
    return QueryReport(**{**values, **_labels_of(values), **lists, "loss": _to_number(values["loss"])})


def _to_query_along_run(values: Mapping[str, Any]) -> QueryAlongRun:
    lists = {name: _to_samples(values[name]) for name in ("harmful", "proponents")}
    return QueryAlongRun(**{**values, **_labels_of(values), **lists, "loss": _to_number(values["loss"])})


def _to_samples(values: Sequence[Mapping[str, Any]]) -> tuple[InfluentialSample, ...]:
    return tuple(
        InfluentialSample(**{**sample, "label": _to_label(sample["label"]), "score": _to_number(sample["score"])})
        for sample in values
    )


def _to_plan(values: Mapping[str, Any]) -> Plan:
    return Plan(**{**values, "layers": tuple(LayerPlan(**layer) for layer in values["layers"])})


def _to_histogram(values: Mapping[str, Any]) -> Histogram:
    return Histogram(tuple(values["edges"]), tuple(values["counts"]), values["num_zero"])


def _labels_of(values: Mapping[str, Any]) -> dict[str, Label]:
    return {name: _to_label(values[name]) for name in ("label", "prediction")}


def _if_there(make: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else make(value)


def _to_label(value: Any) -> Label:
    return tuple(value) if isinstance(value, list) else value


def _to_number(value: float | None) -> float:
    return math.nan if value is None else value


def _read_suspects(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != SUSPECT_COLUMNS:
            raise ValueError(f"`{path.name}` has the columns {reader.fieldnames}")
        return list(reader)


def _to_table(rows: Sequence[Mapping[str, str]], task: str, num_classes: int | None) -> SuspectTable:
    if not rows:
        return SuspectTable.empty()

    def column(name: str, dtype: torch.dtype) -> Tensor | None:
        values = [row[name] for row in rows]
        return torch.tensor([float(value or "nan") for value in values]).to(dtype) if any(values) else None

    ids, visits = (
        torch.tensor([int(row[name] or -1) for row in rows], dtype=torch.long) for name in ("sample_id", "visits")
    )
    scores = column("score", torch.float32)
    parts = {name: values for name in SUSPECT_PARTS if (values := column(name, torch.float32)) is not None}
    return SuspectTable(
        ids,
        torch.full(ids.shape, math.nan) if scores is None else scores,
        _to_labels([row["label"] for row in rows], task, num_classes),
        column("suggested_label", torch.int32),
        column("probability", torch.float32),
        torch.tensor([row["flagged"] == "True" for row in rows]),
        parts=parts,
        visits=None if bool((visits < 0).any()) else visits,
    )


def _to_labels(words: Sequence[str], task: str, num_classes: int | None) -> Tensor:
    if task == "regression":
        return torch.tensor([float(word) for word in words])
    if task != "multilabel":
        return torch.tensor([int(float(word)) for word in words], dtype=torch.int32)
    active = [json.loads(word.replace("(", "[").replace(",)", "]").replace(")", "]")) for word in words]
    width = num_classes or 1 + max((index for each in active for index in each), default=0)
    labels = torch.zeros(len(words), width, dtype=torch.int8)
    for row, indices in enumerate(active):
        labels[row, indices] = 1
    return labels
