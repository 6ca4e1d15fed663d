"""What is left after a run, from a terminal: ``lightning-gradsim report DIR`` and ``lightning-gradsim export DIR``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_gradsim.plain_values import write_csv
from lightning_gradsim.report import Report
from lightning_gradsim.saved_report import load_report
from lightning_gradsim.suspects import SUSPECT_COLUMNS

EXPORT_COLUMNS = (*SUSPECT_COLUMNS, "label_name", "suggested_name")
CLEANLAB_COLUMNS = ("sample_id", "is_label_issue", "label_quality", "given_label", "predicted_label")
DESCRIPTION = """\
Reads what GradSimCallback has written. DIR is the log folder of a run, such as
lightning_logs/version_0, or any folder above it: of several reports, the newest."""
EXAMPLES = """\
examples:
  lightning-gradsim report lightning_logs/version_0
  lightning-gradsim report lightning_logs --suspects 50
  lightning-gradsim export lightning_logs/version_0 --to csv > suspects.csv
  lightning-gradsim export lightning_logs/version_0 --to cleanlab --output issues.csv"""
FORMATS = """\
formats:
  csv       a line for each suspect, the most suspect first: the columns of
            suspects.csv and the names of both labels
  jsonl     the same, an object a line
  cleanlab  a line for each training sample, by sample id, with the columns
            is_label_issue, label_quality (0 is the most suspect), given_label and
            predicted_label: read with pandas.read_csv(FILE, index_col="sample_id"),
            it is what cleanlab's CleanLearning.fit(..., label_issues=) takes"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says.

    Args:
        arguments: The words behind the command; by default those of the process.

    Returns:
        Exit status: 0, or 2 for what cannot be read.
    """
    options = _parser().parse_args(arguments)
    try:
        report = load_report(options.directory)
        text = options.work(report, options)
        if options.output is None:
            sys.stdout.write(text)
        else:
            Path(options.output).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"lightning-gradsim: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-gradsim",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = _add_command(commands, "report", "print mistakes, the samples behind them, and suspects", EXAMPLES, _show)
    show.add_argument("--mistakes", type=_count, default=6, metavar="N", help="how many mistakes (default: 6)")
    show.add_argument("--suspects", type=_count, default=20, metavar="N", help="how many suspects (default: 20)")
    export = _add_command(commands, "export", "write suspects for other tools", FORMATS, _export)
    export.add_argument("--to", choices=list(_FORMATS), default="csv", help="the format (default: csv)")
    export.add_argument("--flagged", action="store_true", help="only samples whose labels look wrong; not for cleanlab")
    return parser


def _add_command(
    commands: Any, name: str, words: str, epilog: str, work: Callable[[Report, argparse.Namespace], str]
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=words,
        description=f"{words[0].upper()}{words[1:]}. {DESCRIPTION}",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("directory", metavar="DIR", help="log folder of a run, or one above it")
    command.add_argument("--output", metavar="FILE", help="write there instead of to the terminal")
    command.set_defaults(work=work)
    return command


def _count(word: str) -> int:
    number = int(word)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{word} is below 0")
    return number


def _show(report: Report, options: argparse.Namespace) -> str:
    return report.summary(options.mistakes, options.suspects) + "\n"


def _export(report: Report, options: argparse.Namespace) -> str:
    if options.flagged and options.to == "cleanlab":
        raise ValueError("`--flagged` leaves samples out, and cleanlab needs a line for each. Pass one of the two.")
    rows = [
        {
            **row,
            "label_name": report.name_of(row["label"]),
            "suggested_name": None if row["suggested_label"] is None else report.name_of(row["suggested_label"]),
        }
        for row in report.suspects.to_rows()
        if row["flagged"] or not options.flagged
    ]
    return _FORMATS[options.to](rows, report)


def _to_csv(rows: Sequence[dict[str, Any]], report: Report) -> str:
    return write_csv(rows, EXPORT_COLUMNS)


def _to_json_lines(rows: Sequence[dict[str, Any]], report: Report) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _to_cleanlab(rows: Sequence[dict[str, Any]], report: Report) -> str:
    if report.suspects.suggested_labels is None or report.suspects.labels.ndim > 1:
        raise ValueError(f"cleanlab's format is for classes, and the task is {report.task}. Use csv or jsonl.")
    issues = [
        {
            "sample_id": row["sample_id"],
            "is_label_issue": row["flagged"],
            "label_quality": place / len(rows),
            "given_label": row["label"],
            "predicted_label": row["suggested_label"] if row["flagged"] else row["label"],
        }
        for place, row in enumerate(rows)
    ]
    return write_csv(sorted(issues, key=lambda issue: int(issue["sample_id"])), CLEANLAB_COLUMNS)


_FORMATS = {"csv": _to_csv, "jsonl": _to_json_lines, "cleanlab": _to_cleanlab}


if __name__ == "__main__":
    sys.exit(main())
