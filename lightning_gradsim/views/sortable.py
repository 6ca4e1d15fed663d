"""Tables of a report with named columns: sortable ones for the page, and for loggers that keep tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_gradsim.records import lists_of
from lightning_gradsim.report import Report
from lightning_gradsim.suspects import Suspect
from lightning_gradsim.views.exhibits import Exhibit
from lightning_gradsim.views.pairs import find_pairs
from lightning_gradsim.views.tiles import TILES_PER_ROW, score_text, times_flagged

MAX_SUSPECT_ROWS = 200
MAX_PAIR_ROWS = 20
MAX_TEXT = 300
NOTHING = Exhibit()


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    is_number: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of a table; ``value`` sorts where the text would not."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Table:
    """A table."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def plain_rows(self) -> list[list[str | float | None]]:
        """Numbers where columns hold numbers, ``None`` where there is none, texts elsewhere."""
        return [
            [
                cell.text if not column.is_number else _number(cell.text) if cell.value is None else cell.value
                for column, cell in zip(self.columns, row, strict=True)
            ]
            for row in self.rows
        ]


def queries_table(report: Report) -> Table:
    """All mistakes that were studied.

    Args:
        report: What the validation showed.

    Returns:
        A row for each.
    """
    name = report.name_of
    rows = tuple(
        (
            Cell("" if query.sample_id is None else str(query.sample_id)),
            Cell(name(query.label)),
            Cell(name(query.prediction)),
            Cell(percent(query.probability), query.probability),
            Cell(score_text(query.loss), query.loss),
            Cell("yes" if query.label_looks_wrong else ""),
        )
        for query in report.queries
    )
    columns = ("sample", "label", "prediction", "probability", "loss", "label may be wrong")
    return Table(_columns(columns, {"sample", "probability", "loss"}), rows)


def influences_table(report: Report, queries: Sequence[Exhibit | None], train: Mapping[int, Exhibit]) -> Table:
    """The mistakes that are shown, each with the training samples of its lists that are shown, and what they hold.

    Args:
        report: What the validation showed.
        queries: What is shown of the first of ``report.queries``, in their order.
        train: What is shown of training samples, by sample id.

    Returns:
        A row for each mistake, and for each sample in one of its lists; columns for the text or the named values where
        there are any.
    """
    shown = [(query, each) for query, each in zip(report.queries, queries, strict=False) if each is not None]
    exhibits = [*(each for _, each in shown), *train.values()]
    has_text = any(each.text is not None for each in exhibits)
    names = next((tuple(name for name, _ in each.values) for each in exhibits if each.values is not None), ())

    def content(exhibit: Exhibit) -> list[Cell]:
        values = dict(exhibit.values or ())
        text = [Cell(cut(exhibit.text or ""))] if has_text else []
        return [*text, *(Cell("", values.get(name)) for name in names)]

    rows = []
    for number, (query, exhibit) in enumerate(shown, start=1):
        own, label = Cell("" if query.sample_id is None else str(query.sample_id)), report.name_of(query.label)
        answer = report.name_of(query.prediction)
        head = (Cell(str(number)), Cell("the mistake"), own, Cell(label), Cell(answer), Cell(""))
        rows.append((*head, *content(exhibit)))
        for title, samples in lists_of(query).items():
            for sample in samples:
                if sample.sample_id in train:
                    label, score = report.name_of(sample.label), Cell("", sample.score)
                    head = (Cell(str(number)), Cell(title), Cell(str(sample.sample_id)), Cell(label), Cell(""), score)
                    rows.append((*head, *content(train[sample.sample_id])))
    columns = ("mistake", "list", "sample", "label", "prediction", "score", *(["text"] if has_text else []))
    inputs = [f"{name} (input)" if name in columns else name for name in names]
    return Table(_columns((*columns, *inputs), {"mistake", "sample", "score", *inputs}), tuple(rows))


def suspects_table(report: Report, train: Mapping[int, Exhibit]) -> Table:
    """The first suspects.

    Args:
        report: What the validation showed.
        train: What is shown of training samples, by sample id.

    Returns:
        A row for each; columns for visits, reports and texts where they are known.
    """
    suspects = report.suspects[:MAX_SUSPECT_ROWS]
    has_text = any(train.get(each.sample_id, NOTHING).text is not None for each in suspects)
    has_visits = report.suspects.visits is not None
    has_reports = report.suspects.reports_flagged is not None
    rows = []
    for rank, suspect in enumerate(suspects, start=1):
        cells = [
            Cell(str(rank)),
            Cell(str(suspect.sample_id)),
            Cell(report.name_of(suspect.label)),
            Cell(suggested_label(report, suspect)),
            Cell(percent(suspect.probability), suspect.probability),
            Cell(score_text(suspect.score), suspect.score),
            Cell("yes" if suspect.flagged else ""),
        ]
        if has_reports:
            cells.append(Cell(times_flagged(suspect), suspect.reports_flagged))
        if has_visits:
            cells.append(Cell(str(suspect.visits)))
        if has_text:
            cells.append(Cell(cut(train.get(suspect.sample_id, NOTHING).text or "")))
        rows.append(tuple(cells))
    columns = ["rank", "sample", "label", "suggested label", "probability", "score", "flagged"]
    columns += ["flagged in reports"] * has_reports + ["visits"] * has_visits + ["text"] * has_text
    numbers = {"rank", "sample", "probability", "score", "flagged in reports", "visits"}
    return Table(_columns(columns, numbers), tuple(rows))


def pairs_table(report: Report) -> Table:
    """The most frequent pairs of label and prediction.

    Args:
        report: What the validation showed.

    Returns:
        A row for each.
    """
    name = report.name_of
    rows = tuple(
        (
            Cell(name(each.pair.label)),
            Cell(name(each.pair.prediction)),
            Cell(str(each.pair.count)),
            Cell(", ".join(f"#{sample_id} ({name(label)})" for sample_id, label in each.culprits)),
        )
        for each in find_pairs(report, MAX_PAIR_ROWS)
    )
    return Table(
        _columns(("label", "prediction", "mistakes", "typical harmful samples (given label)"), {"mistakes"}), rows
    )


def followed_table(report: Report) -> Table:
    """Mistakes that are followed over the run.

    Args:
        report: What the validation showed.

    Returns:
        A row for each.
    """
    rows = tuple(
        (
            Cell(f"{each.sample_id}{f' of loader {each.dataloader_idx}' if each.dataloader_idx else ''}"),
            Cell(report.name_of(each.label)),
            Cell(report.name_of(each.prediction)),
            Cell(str(each.wrong_since)),
            Cell("" if each.fixed_at is None else str(each.fixed_at)),
        )
        for each in report.followed
    )
    columns = ("sample", "label", "last prediction", "wrong since epoch", "fixed at epoch")
    return Table(_columns(columns, {"sample", "wrong since epoch", "fixed at epoch"}), rows)


def along_run_table(report: Report) -> Table:
    """Validation samples whose similarities are summed over the run, with the first of their lists.

    Args:
        report: What the validation showed.

    Returns:
        A row for each.
    """
    name = report.name_of
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
        for each in report.along_run
    )
    columns = ("sample", "label", "prediction", "since epoch", "reports", "most harmful", "strongest proponents")
    return Table(_columns(columns, {"sample", "since epoch", "reports"}), rows)


def notes_table(report: Report) -> Table:
    """What limits the report, a row each."""
    return Table(_columns(("what limits this report",), set()), tuple((Cell(note),) for note in report.notes))


def suggested_label(report: Report, suspect: Suspect) -> str:
    """The suggested label of a suspect in words; empty where there is none."""
    return "" if suspect.suggested_label is None else report.name_of(suspect.suggested_label)


def percent(probability: float | None) -> str:
    """A probability in words; empty where there is none."""
    return "" if probability is None else f"{probability:.0%}"


def cut(text: str) -> str:
    """A text, or its beginning where it is long."""
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def _columns(names: Sequence[str], numbers: set[str]) -> tuple[Column, ...]:
    return tuple(Column(name, name in numbers) for name in names)


def _number(text: str) -> float | None:
    return float(text) if text else None
