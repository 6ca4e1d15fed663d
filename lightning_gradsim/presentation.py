"""What is shown of a report, and where it goes: pictures, tables and numbers for files and sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_gradsim.arguments import (
    check_count,
    check_folder_name,
    check_names,
    check_normalisation,
    check_sinks,
    check_type,
)
from lightning_gradsim.queries import Query
from lightning_gradsim.report import Report
from lightning_gradsim.shown_samples import ShownSamples, collect_shown_samples
from lightning_gradsim.sinks import (
    Publication,
    Sink,
    write_bytes_atomically,
    write_everywhere,
    write_report_files,
    write_text_atomically,
)
from lightning_gradsim.train_pass import SampleReader
from lightning_gradsim.views import (
    QUERIES_PER_PAGE,
    ExhibitMaker,
    Pixels,
    class_pairs_markdown,
    class_pairs_picture,
    mistake_panel,
    mistakes_markdown,
    report_page,
    suspects_gallery,
    suspects_markdown,
)

MISTAKES, SUSPECTS, CLASS_PAIRS = "mistakes", "suspects", "class_pairs"


@dataclass(frozen=True, eq=False)
class PresentationSettings:
    """What reports look like and where they go; the attributes are arguments of the callback.

    Attributes:
        name: Tag prefix, and name of a folder.
        mean: Mean of the images' normalisation.
        std: Standard deviation of the images' normalisation.
        show_teachers: Whether panels show teachers.
        panel_pages: How many panels of mistakes are drawn at most.
        describe: From a sample of the dataset to words, or a tokenizer.
        feature_names: Names of the numbers of an input.
        sinks: Further places for reports.

    Raises:
        TypeError: If a value has a wrong type.
        ValueError: If a value is out of range.
    """

    name: str
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    show_teachers: bool = False
    panel_pages: int = 1
    describe: Any = None
    feature_names: Sequence[str] | None = None
    sinks: Sequence[Sink] = ()

    def __post_init__(self) -> None:
        """Check the values."""
        check_normalisation(self.mean, self.std)
        check_type("show_teachers", self.show_teachers, isinstance(self.show_teachers, bool), "True or False")
        check_count("panel_pages", self.panel_pages, optional=False)
        check_folder_name("name", self.name)
        is_describer = self.describe is None or callable(self.describe) or hasattr(self.describe, "decode")
        check_type("describe", self.describe, is_describer, "a function of a sample, or a tokenizer with `decode`")
        check_names("feature_names", self.feature_names, "one name a number, or None")
        check_sinks(self.sinks)

    @property
    def num_shown(self) -> int:
        """How many mistakes are shown at most."""
        return QUERIES_PER_PAGE * self.panel_pages


@dataclass(frozen=True, eq=False)
class Drawing:
    """What is shown of a report.

    Attributes:
        pictures: By name.
        shown: Pictures, texts and values of the samples that the report names.
    """

    pictures: Mapping[str, Pixels]
    shown: ShownSamples


class Presentation:
    """Draws reports and writes them.

    Args:
        settings: What they look like and where they go.
        warn: Tells the user of what limits them, once.
    """

    def __init__(self, settings: PresentationSettings, warn: Callable[[str], None]) -> None:
        self._settings = settings
        self._warn = warn

    def draw(
        self, report: Report, kept: Sequence[Query], train: SampleReader, validation: Mapping[int, SampleReader]
    ) -> Drawing:
        """The pictures of a report.

        Args:
            report: The report.
            kept: The copy of each of its queries.
            train: Reads the training samples.
            validation: Readers of the validation datasets by loader.

        Returns:
            Pictures, and what else is shown of samples.
        """
        own = self._settings
        maker = ExhibitMaker(own.mean, own.std, own.describe, own.feature_names)
        shown = collect_shown_samples(report, kept, train, validation, maker, num_queries=own.num_shown)
        if shown.failure is not None:
            self._warn(f"`describe=` failed on a sample, which is shown without its text. {shown.failure.rstrip('.')}")
        pictures = {}
        if shown.have_pictures or not shown.have_words or (own.feature_names is None and not shown.have_texts):
            num_pages = -(-min(len(report.queries), own.num_shown) // QUERIES_PER_PAGE)
            for page in range(1, max(1, num_pages) + 1):
                pictures[MISTAKES if page == 1 else f"{MISTAKES}_{page}"] = mistake_panel(
                    report, shown.queries, shown.train, show_teachers=own.show_teachers, page=page
                )
        if shown.have_pictures:
            pictures[SUSPECTS] = suspects_gallery(report, shown.train)
        if report.error_pairs:
            pictures[CLASS_PAIRS] = class_pairs_picture(report)
        return Drawing(pictures, shown)

    def write(self, report: Report, drawing: Drawing, directory: Path, sinks: Sequence[Sink]) -> None:
        """Write a report everywhere, also where one of the places fails.

        Args:
            report: The report.
            drawing: Its pictures.
            directory: Folder of the files.
            sinks: The loggers.
        """
        sinks = [*sinks, *self._settings.sinks]
        if not sinks:
            self._warn(f"no logger takes pictures: the report is in `{directory}` and in `callback.report`")
        publication = self._publication(report, drawing)
        write_everywhere(
            [
                ("files", lambda: self._write_files(report, drawing.shown, publication.pngs, directory)),
                *((type(sink).__name__, partial(publication.write_to, sink)) for sink in sinks),
            ]
        )

    def _write_files(self, report: Report, shown: ShownSamples, pngs: Mapping[str, bytes], directory: Path) -> None:
        write_report_files(report, directory)
        pictures = {f"{tag.removeprefix(f'{self._settings.name}/')}.png": png for tag, png in pngs.items()}
        for name, png in pictures.items():
            write_bytes_atomically(png, directory / name)
        page = report_page(
            report,
            shown.queries,
            shown.train,
            show_teachers=self._settings.show_teachers,
            near_duplicates=shown.near_duplicates(report),
        )
        write_text_atomically(page, directory / "report.html")
        for pattern in (MISTAKES, f"{MISTAKES}_[0-9]*", SUSPECTS, CLASS_PAIRS):
            for path in directory.glob(f"{pattern}.png"):
                if path.name not in pictures:  # that of an earlier report, perhaps of a run that this one resumes
                    path.unlink(missing_ok=True)

    def _publication(self, report: Report, drawing: Drawing) -> Publication:
        name, shown = self._settings.name, drawing.shown
        scalars: dict[str, float | None] = {
            "errors": float(report.num_errors),
            "suspects_flagged": float(report.suspects.num_flagged),
            "overhead_seconds": report.seconds,
            "overhead_share": report.time_share,
        }
        if report.trends:
            newest = report.trends[-1]
            scalars["suspects_overlap"] = newest.suspects_overlap
            scalars["harmful_with_prediction"] = newest.harmful_with_prediction
        if report.suspect_quality is not None:
            scalars |= {f"suspects_{figure}": share for figure, share in report.suspect_quality.shares()}
        texts = {
            MISTAKES: mistakes_markdown(report, shown.queries, shown.train),
            SUSPECTS: suspects_markdown(report, shown.train),
            **({CLASS_PAIRS: class_pairs_markdown(report)} if report.error_pairs else {}),
        }
        histogram = report.self_influence
        histograms = {} if histogram is None else {"self_influence_log10": histogram.values()}
        return Publication(
            report.step,
            images={f"{name}/{tag}": pixels for tag, pixels in drawing.pictures.items()},
            texts={f"{name}/{tag}": text for tag, text in texts.items()},
            scalars={f"{name}/{tag}": value for tag, value in scalars.items() if value is not None},
            histograms={f"{name}/{tag}": values for tag, values in histograms.items()},
        )
