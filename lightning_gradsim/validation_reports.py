"""The report of one validation: made by all processes, judged by what training has shown, drawn and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_gradsim import lightning_bridge as bridge
from lightning_gradsim.adapter import Adapter
from lightning_gradsim.along_run import AlongRun
from lightning_gradsim.budget import TimeBudget
from lightning_gradsim.clock import Clock
from lightning_gradsim.explanation import names_note
from lightning_gradsim.failures import Failures
from lightning_gradsim.guard import with_buffers
from lightning_gradsim.queries import Query, QuerySelection, merge_selections
from lightning_gradsim.query_collector import QueryCollector
from lightning_gradsim.reading import Part, Reading
from lightning_gradsim.report import Report
from lightning_gradsim.reporter import Reporter
from lightning_gradsim.schedule import Moment
from lightning_gradsim.supervision import Supervisor
from lightning_gradsim.training_watch import FIRST_EPOCH, TrainingWatch
from lightning_gradsim.trusted_validation import validation_readers

Mode = Literal["auto", "in_run", "pass"]


class ValidationReports:
    """Makes the reports of a run, one a validation that is looked at.

    Args:
        adapter: Reads batches.
        reporter: Knows the training data, and where reports go.
        watch: Knows what training steps have shown.
        supervisor: Keeps the run as it is.
        clock: Counts the time.
        failures: Counts failures in a row.
        mode: How training samples are found.
        trusted_val: Whether a copy learns the validation labels at the end.
        time_budget: Share of the training time, or ``None`` for no limit.
        name: Folder of the files.
        along_run: Sums similarities over the reports, if that is asked for.
        class_pairs: Class pairs that count as queries of their own.

    Attributes:
        latest: The latest report, or ``None`` before the first.
        num_read: Training samples that passes have read, of the process that has read least.
        last_step: Step of the latest report.
        num_passed_over: Validations since then that were passed over to keep within the budget.
        budget: What is left of the time.
        along_run: As given.
    """

    def __init__(
        self,
        adapter: Adapter,
        reporter: Reporter,
        watch: TrainingWatch,
        supervisor: Supervisor,
        clock: Clock,
        failures: Failures,
        *,
        mode: Mode,
        trusted_val: bool,
        time_budget: float | None,
        name: str,
        along_run: AlongRun | None = None,
        class_pairs: int = 0,
    ) -> None:
        self._class_pairs = class_pairs
        self.along_run = along_run
        self.latest: Report | None = None
        self.num_read = self.last_step = self.num_passed_over = 0
        self.budget = TimeBudget(None, clock)
        self._adapter = adapter
        self._reporter = reporter
        self._watch = watch
        self._supervisor = supervisor
        self._clock = clock
        self._failures = failures
        self._mode, self._trusted_val, self._time_budget, self._name = mode, trusted_val, time_budget, name
        self._moment = Moment(0, 0, ends_epoch=False, ends_run=False)

    def begin_run(self) -> None:
        """Forget what earlier runs have read; the latest report stays."""
        self.num_read = self.last_step = self.num_passed_over = 0
        if self.along_run is not None:
            self.along_run.begin_run()

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for the checkpoint."""
        along_run = {} if self.along_run is None else self.along_run.state_dict()
        return {
            "num_read": self.num_read,
            "last_step": self.last_step,
            "passed_over": self.num_passed_over,
            **({"along_run": along_run} if along_run else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; missing entries count as zero.

        Args:
            state: The state.
        """
        self.num_read = int(state.get("num_read", 0))
        self.last_step = int(state.get("last_step", 0))
        self.num_passed_over = int(state.get("passed_over", 0))
        if self.along_run is not None:
            self.along_run.load_state_dict(state.get("along_run", {}))

    def start_training(self, trainer: Trainer) -> None:
        """Begin to count the time of a run against the budget, and find what a checkpoint names.

        Args:
            trainer: The trainer.
        """
        self.budget = TimeBudget(self._time_budget, self._clock)
        along_run = self.along_run
        if along_run is None:
            return
        along_run.folder = bridge.checkpoint_directory(trainer, self._name)
        resumed_from = bridge.resumed_from(trainer)
        found = self._supervisor.on_rank_zero(
            trainer, lambda: along_run.restore(resumed_from) if trainer.is_global_zero else None
        )
        assert found is not None
        along_run.resume(found[0])
        if found[1] is not None:
            self._failures.warn_once(found[1])

    def save(self, trainer: Trainer) -> None:
        """Write what the state only names; a failure becomes a warning.

        Args:
            trainer: The trainer.
        """
        if self.along_run is None or not trainer.is_global_zero:
            return
        self._supervisor.stage = "writing the sums along the run"
        with self._supervisor.optional(trainer, lambda _: None):
            self.along_run.save()

    def make(
        self,
        trainer: Trainer,
        module: LightningModule,
        collector: QueryCollector,
        moment: Moment,
        *,
        in_full: bool,
    ) -> None:
        """Score, draw, write; a failure becomes a warning, and the latest report stays.

        Args:
            trainer: The trainer.
            module: The user's module; it is left as found.
            collector: The queries of the validation.
            moment: When it took place.
            in_full: Read all training samples, whatever the budget says.
        """
        self._moment = moment
        directory = bridge.output_directory(trainer, self._name)
        with self._supervisor.protected(trainer, self._moment.epoch, directory):
            self._supervisor.stage = "the choice of queries"
            found = self._supervisor.on_all_ranks(
                trainer,
                lambda: (
                    collector.result(),
                    bridge.buffers_to_share(trainer, module),
                    None if self._mode == "pass" else self._watch.why_not_tapped(self._moment.epoch),
                ),
            )
            selection, (_, buffers, reason) = merge_selections([each for each, *_ in found]), found[0]
            if self.along_run is not None and self._sums(trainer):
                self.along_run.choose(selection)
            self._supervisor.stage = "the report"
            begin = self._clock.seconds
            scored = self._supervisor.on_all_ranks(
                trainer,
                lambda: (
                    self._score(
                        trainer,
                        module,
                        selection,
                        buffers,
                        self._with_pairs(self._reading(trainer, reason, in_full=in_full), selection, collector),
                    ),
                    self._watch.visits_of_pass(),
                ),
            )
            parts, visits = [part for part, _ in scored], [shown for _, shown in scored]
            reading_seconds = self._clock.seconds - begin
            made: list[tuple[Report, tuple[Query, ...]]] = []  # on every rank alike: no need to send it
            self._supervisor.on_all_ranks(trainer, lambda: made.append(self._make_report(trainer, selection, parts)))
            report, kept = made[0]
            report = self._sum(trainer, report, parts)
            judged = self._supervisor.on_all_ranks(
                trainer, lambda: self._watch.suspects(report, visits) if trainer.is_global_zero else None
            )[0]
            assert judged is not None
            trusted, problems = self._fine_tune(trainer, module, report, buffers)
            report = replace(
                self._reporter.with_suspects(report, judged[0], [*judged[1], *problems], trusted),
                seconds=self._clock.validation_seconds,
                time_share=self._clock.share,
            )
            in_run = trainer.state.fn == "fit"
            report = (
                self._reporter.with_history(report, selection) if in_run else self._reporter.with_flag_counts(report)
            )
            self.latest = report
            self.num_read += min(part.reached for part in parts)
            self.last_step, self.num_passed_over = self._moment.step, 0
            self._supervisor.on_all_ranks(
                trainer,
                lambda: self._publish(trainer, collector, report, kept, directory) if trainer.is_global_zero else None,
            )
            # Where all is read at each report, reading is what has to be left for the next one.
            budgeted = 0.0 if self._sums(trainer) else reading_seconds
            self.budget.end_report(self._clock.validation_seconds, budgeted)
            self._failures.in_a_row = 0

    def _sums(self, trainer: Trainer) -> bool:
        return self.along_run is not None and trainer.state.fn == "fit"

    def _sum(self, trainer: Trainer, report: Report, parts: Sequence[Part]) -> Report:
        """The report with what it and earlier ones say together of the samples along the run."""
        along_run = self.along_run
        if along_run is None or not self._sums(trainer):
            return report
        rows, top_k = [part.rows for part in parts], self._reporter.top_k
        summed = self._supervisor.on_all_ranks(
            trainer, lambda: along_run.add(report, rows, top_k) if trainer.is_global_zero else None
        )[0]
        assert summed is not None
        return along_run.settle(report, summed)

    def _score(
        self,
        trainer: Trainer,
        module: LightningModule,
        selection: QuerySelection,
        buffers: Mapping[str, Tensor],
        reading: Reading,
    ) -> Part:
        with bridge.silenced(module), with_buffers(module, buffers):
            return self._reporter.score(
                module,
                self._adapter,
                selection,
                replace(
                    bridge.run_context(trainer, module), observe=self._watch.observer(trainer, self._reporter.num_ids)
                ),
                reading,
                bridge.num_trial_batches(trainer),
            )

    def _fine_tune(
        self, trainer: Trainer, module: LightningModule, report: Report, buffers: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, list[str]]:
        """What a copy finds that has learned the validation labels, and what has failed; of rank zero, on all ranks."""
        if not (self._trusted_val and self._moment.ends_run and trainer.state.fn == "fit"):
            return None, []

        def work() -> tuple[Tensor | None, list[str]]:
            found, problems = None, list[str]()
            if trainer.is_global_zero:
                self._supervisor.stage = "fine-tuning a copy on the validation labels"
                readers = validation_readers(bridge.flatten_loaders(trainer.val_dataloaders))
                run = bridge.run_context(trainer, module)
                with (
                    self._supervisor.optional(trainer, problems.append),
                    bridge.silenced(module),
                    with_buffers(module, buffers),
                ):
                    found = self._reporter.fine_tune(module, self._adapter, report, readers, run)
                self._supervisor.stage = "the report"
            return found, [f"suspects are ranked without the validation labels: {problem}" for problem in problems]

        return self._supervisor.on_all_ranks(trainer, work)[0]

    def _reading(self, trainer: Trainer, reason: str | None, *, in_full: bool) -> Reading:
        is_free = in_full or bridge.is_trial_run(trainer) or self._sums(trainer)
        seconds = None if is_free else self.budget.reading_seconds(is_last=self._moment.ends_run)
        reading = Reading(seconds, self.num_read, trainer.global_rank, trainer.world_size)
        if self.along_run is not None and self._sums(trainer):
            reading = replace(reading, make_rows=self.along_run.make_rows)
        if is_free or self._mode == "pass":
            return reading
        tapped = None if reason is not None else self._watch.tapped()
        return replace(reading, tapped=tapped, reason=reason, is_first=reason == FIRST_EPOCH)

    def _with_pairs(self, reading: Reading, selection: QuerySelection, collector: QueryCollector) -> Reading:
        """With the most frequent class pairs, and readers of their mistakes."""
        pairs = list(selection.pair_counts())[: self._class_pairs]
        ids = selection.mistakes(frozenset(pairs))
        if not ids:
            return reading
        readers = collector.readers(ids)
        return replace(reading, pairs=pairs, mistakes=[readers[i].only(ids[i]) for i in sorted(ids)])

    def _make_report(
        self, trainer: Trainer, selection: QuerySelection, parts: Sequence[Part]
    ) -> tuple[Report, tuple[Query, ...]]:
        report, kept = self._reporter.make_report(parts, selection)
        notes = [*report.notes, *names_note(report, selection), *self._watch.notes]
        if self._class_pairs and report.error_pairs and not selection.mistakes({*selection.pair_counts()}):
            notes.append("mistakes without ids cannot be read again: `class_pairs=` has none of them")
        unseen = bridge.unseen_note(trainer) if self._reporter.follows_training else None
        if unseen is not None:
            notes.append(unseen)
        if self.num_passed_over:
            number = f"{self.num_passed_over} earlier validation{'s were' if self.num_passed_over > 1 else ' was'}"
            notes.append(f"{number} passed over to keep within `time_budget={self._time_budget}`")
        return replace(report, epoch=self._moment.epoch, step=self._moment.step, notes=tuple(notes)), kept

    def _publish(
        self, trainer: Trainer, collector: QueryCollector, report: Report, kept: Sequence[Query], directory: Path
    ) -> None:
        self._reporter.log_plan(report)
        readers = collector.readers({query.dataloader_idx for query in report.queries})
        drawing = self._reporter.draw(report, kept, readers)
        if bridge.is_trial_run(trainer):
            return
        seconds, share = self._clock.validation_seconds, self._clock.share  # now with what drawing took
        notes = report.notes if drawing.shown.note is None else (*report.notes, drawing.shown.note)
        self.latest = report = replace(report, seconds=seconds, time_share=share, notes=notes)
        self._reporter.write(report, drawing, directory, bridge.sinks_of(trainer))
