"""The training data of a run, and reports against it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.arguments import check_names
from lightning_gradsim.datasets import num_ids
from lightning_gradsim.engine import EngineSettings
from lightning_gradsim.explanation import make_report
from lightning_gradsim.head_features import head_features
from lightning_gradsim.history import History, TrendPoint, key_of
from lightning_gradsim.presentation import Drawing, Presentation, PresentationSettings
from lightning_gradsim.queries import Query, QuerySelection
from lightning_gradsim.reading import Part, Reading, RunContext, score_part
from lightning_gradsim.reference import AUGMENTED, Reference, make_reference
from lightning_gradsim.reference_choice import Choice
from lightning_gradsim.report import Report
from lightning_gradsim.sample_statistics import num_differing_labels
from lightning_gradsim.sinks import Sink
from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.tasks import Task
from lightning_gradsim.train_pass import SampleReader, make_reader
from lightning_gradsim.true_labels import TrueLabels
from lightning_gradsim.trusted_validation import fine_tune, trusted_notes, with_trusted
from lightning_gradsim.versions import installed_versions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ReporterSettings:
    """What reports are made of and look like; the attributes are arguments of the callback.

    Attributes:
        engine: What is computed.
        train_data: The training samples to compare with, instead of the trainer's own.
        choice: How many of them, and which.
        class_names: Names of the classes, instead of the dataset's own.
        presentation: What they look like and where they go.
        words: All arguments of the callback in words.
        true_labels: Known true labels of the training samples.

    Raises:
        TypeError: If a value has a wrong type.
        ValueError: If a value is out of range.
    """

    engine: EngineSettings
    train_data: Any
    choice: Choice
    class_names: Sequence[str] | None
    presentation: PresentationSettings
    words: Mapping[str, str] = field(default_factory=dict)
    true_labels: TrueLabels | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        check_names("class_names", self.class_names, "one name a class, or None for the dataset's own")


class Reporter:
    """Makes reports and writes them.

    Args:
        settings: What reports are made of and look like.
        warn: Tells the user of what limits them, once.
    """

    def __init__(self, settings: ReporterSettings, warn: Callable[[str], None]) -> None:
        self._settings = settings
        self._warn = warn
        self._presentation = Presentation(settings.presentation, warn)
        self._source: Any = None
        self._reference: Reference | None = None
        self._change: str | None = None
        self._logged_plan = ""
        self._history = History()
        self._chosen: Tensor | None = None  # by features, which are others by now

    @property
    def has_source(self) -> bool:
        """Whether there is anything to compare with."""
        return self._source is not None

    @property
    def top_k(self) -> int:
        """Length of the lists."""
        return self._settings.engine.top_k

    @property
    def num_ids(self) -> int:
        """Number of sample ids of the training data; they grow with the data."""
        return num_ids(getattr(self._source, "dataset", self._source))

    @property
    def follows_training(self) -> bool:
        """Whether the training data are the trainer's own."""
        return self._settings.train_data is None

    def set_source(self, source: Any) -> None:
        """Take the training data, unless the user has passed others.

        Args:
            source: A map-style dataset, a loader over one, or ``None`` for what is known.

        Raises:
            TrainingDataError: If they cannot be read by sample id.
            ValueError: If there is another number of true labels.
        """
        source = source if self._settings.train_data is None else self._settings.train_data
        if source is not None and source is not self._source:
            reader = make_reader(source)  # raises now for data that could not be read after a whole epoch
            if self._settings.true_labels is not None:
                self._settings.true_labels.check_count(num_ids(reader.dataset))
            if self._source is not None:
                self._chosen = None
            self._source, self._reference = source, None

    def forget_reference(self) -> None:
        """Look at the training data anew before the next report."""
        self._reference = None

    def score(
        self,
        module: nn.Module,
        adapter: Adapter,
        selection: QuerySelection,
        run: RunContext,
        reading: Reading,
        num_trial_batches: int | None,
    ) -> Part:
        """Score the queries against this process's share of the training data.

        Args:
            module: The user's module; it is left as found.
            adapter: Reads batches; bound to the module.
            selection: The queries, of all processes.
            run: How the run treats batches.
            reading: How much of the training data is read.
            num_trial_batches: Read the first batches only, for a trial run.

        Returns:
            What was found.
        """
        own = self._settings
        self._change = None if self._reference is None else self._reference.change
        if self._reference is None or self._change is not None:
            self._reference = make_reference(
                self._source,
                adapter,
                own.choice,
                num_trial_batches,
                features=partial(self._features, module, adapter, run),
                known=self._chosen if self._change is None else None,
            )
            self._chosen = self._reference.reader.ids if own.choice.needs_features else None
            if self._reference.augmented:
                self._warn(AUGMENTED)
        return score_part(module, adapter, selection, self._reference, own.engine, run, reading)

    def _features(
        self, module: nn.Module, adapter: Adapter, run: RunContext, reader: SampleReader
    ) -> tuple[Tensor, Tensor]:
        batches = ((ids, run.move(batch)) for ids, batch in reader.batches())
        return head_features(module, adapter, batches, run.forward_context, self._settings.engine.memory_budget)

    def make_report(self, parts: Sequence[Part], selection: QuerySelection) -> tuple[Report, tuple[Query, ...]]:
        """The report of what all processes found.

        Args:
            parts: What ``score`` gave on each of them.
            selection: The queries, of all processes.

        Returns:
            The report, without epoch, step and cost, and the kept copy of each of its queries.
        """
        own = self._settings
        assert self._reference is not None
        report, kept = make_report(parts, selection, self._reference, own.engine)
        if self._change is not None:
            report = replace(report, notes=(*report.notes, self._change))
        report = replace(report, settings=own.words, versions=installed_versions())
        if own.class_names is not None:
            report = replace(report, class_names=tuple(own.class_names))
        return report, kept

    def fine_tune(
        self, module: nn.Module, adapter: Adapter, report: Report, validation: Sequence[SampleReader], run: RunContext
    ) -> Tensor:
        """What training samples look like to a copy of the model that has learned the validation labels.

        Args:
            module: The user's module; it is left as found.
            adapter: Reads batches; bound to the module.
            report: The report of these weights.
            validation: Read the validation sets.
            run: How the run treats batches.

        Returns:
            F of ``mislabel.trusted_scores`` by sample id.
        """
        assert self._reference is not None
        reader, seed = self._reference.reader, self._settings.choice.seed
        return fine_tune(module, adapter, reader, validation, self.num_ids, Task(report.task), run, seed)

    def with_suspects(
        self, report: Report, table: SuspectTable | None, notes: Sequence[str], trusted: Tensor | None = None
    ) -> Report:
        """The report with what training steps say of its training samples.

        Args:
            report: The report, with the suspects of its pass.
            table: All samples that training has visited; ``None`` to leave those of the pass.
            notes: What limits them.
            trusted: What ``fine_tune`` says of them, by sample id, if it was asked.

        Returns:
            The report.
        """
        differing = 0 if table is None else num_differing_labels(table, report.suspects)
        if differing:
            table = None
            words = f"for {differing} sample ids, training saw other labels than `train_data=` holds"
            notes = (f"suspects are those of largest gradient in this pass: {words}",)
        table = report.suspects if table is None else table
        if trusted is not None:
            table, notes = with_trusted(table, trusted), [*notes, *trusted_notes(report.queries)]
        report = report.with_suspects(table)
        if self._settings.true_labels is not None:
            report = replace(report, suspect_quality=self._settings.true_labels.judge(report.suspects))
        return replace(report, notes=(*report.notes, *notes))

    def with_history(self, report: Report, selection: QuerySelection) -> Report:
        """The report beside the earlier ones of its run, which then remembers it.

        Args:
            report: The report, complete but for this.
            selection: The queries, of all processes.

        Returns:
            The report.
        """
        history = self._history
        if report.task != Task.REGRESSION.value:  # there, every sample counts as one to look at
            history.see(report.epoch, *selection.known_keys())
        keys = [None if q.sample_id is None else key_of(q.dataloader_idx, q.sample_id) for q in report.queries]
        shown = [(key, query) for key, query in zip(keys, report.queries, strict=True) if key is not None]
        history.follow(
            [(key, query.label, query.prediction) for key, query in shown[: self._settings.presentation.num_shown]]
        )
        history.count_flagged(report.suspects.sample_ids, report.suspects.flagged)
        report = self.with_flag_counts(report)
        harmful = [sample.label_is_prediction for query in report.queries for sample in query.harmful]
        point = TrendPoint(
            report.epoch,
            report.step,
            report.num_errors,
            report.suspects.num_flagged,
            history.overlap(report.suspects.sample_ids),
            sum(harmful) / len(harmful) if harmful else None,
        )
        history.add(point)
        queries = tuple(
            query if key is None else replace(query, wrong_since=history.wrong_since(key))
            for key, query in zip(keys, report.queries, strict=True)
        )
        return replace(report, queries=queries, trends=history.points, followed=history.followed)

    def with_flag_counts(self, report: Report) -> Report:
        """The report with what the reports of the run have said of its suspects; itself where they are not counted."""
        suspects = report.suspects
        counts = self._history.flag_counts(suspects.sample_ids)
        if counts is None:
            return report
        return replace(report, suspects=replace(suspects, reports_flagged=counts[0], reports_judged=counts[1]))

    def state_dict(self) -> dict[str, Any]:
        """What later reports of the run need of earlier ones, plain values and tensors."""
        chosen = {} if self._chosen is None else {"reference_ids": self._chosen}
        return {**self._history.state_dict(), **chosen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state: The state.
        """
        self._history.load_state_dict(state)
        self._chosen = state.get("reference_ids")

    def begin_run(self) -> None:
        """Forget earlier runs."""
        self._history = History()

    def draw(self, report: Report, kept: Sequence[Query], readers: Mapping[int, SampleReader]) -> Drawing:
        """The pictures of a report.

        Args:
            report: The report.
            kept: The copy of each of its queries.
            readers: Readers of the validation datasets by loader.

        Returns:
            Pictures, and what else is shown of samples.
        """
        assert self._reference is not None
        return self._presentation.draw(report, kept, self._reference.reader, readers)

    def write(self, report: Report, drawing: Drawing, directory: Path, sinks: Sequence[Sink]) -> None:
        """Write a report everywhere, also where one of the places fails.

        Args:
            report: The report.
            drawing: Its pictures.
            directory: Folder of the files.
            sinks: The loggers.
        """
        self._presentation.write(report, drawing, directory, sinks)

    def log_plan(self, report: Report) -> None:
        """Log the plan once, and again where it is another one.

        Args:
            report: The report.
        """
        steps = "" if report.plan is None else str([(layer.name, layer.step) for layer in report.plan.layers])
        if steps != self._logged_plan:
            self._logged_plan = steps
            logger.info("the plan of `%s`:\n%s", self._settings.presentation.name, report.plan)
