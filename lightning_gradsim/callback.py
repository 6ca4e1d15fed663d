"""The callback: when to look, what to keep, what to do when something fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lightning_gradsim import lightning_bridge as bridge
from lightning_gradsim.adapter import Adapter
from lightning_gradsim.along_run import AlongRun
from lightning_gradsim.arguments import check_choice, check_count, check_share, check_type, in_words
from lightning_gradsim.clock import Clock
from lightning_gradsim.engine import EngineSettings
from lightning_gradsim.failures import MAX_FAILURES, Failures
from lightning_gradsim.in_run import InRun
from lightning_gradsim.layer_selection import LayerSpec, select_layers, trainable_layers
from lightning_gradsim.losses import LossFunction
from lightning_gradsim.plan_record import Plan
from lightning_gradsim.planner import plan
from lightning_gradsim.presentation import PresentationSettings
from lightning_gradsim.queries import QUERY_POLICIES, QueryPolicy, QuerySelection
from lightning_gradsim.query_collector import QueryCollector
from lightning_gradsim.report import Report
from lightning_gradsim.reporter import Reporter, ReporterSettings
from lightning_gradsim.schedule import Moment, Schedule
from lightning_gradsim.scores import Similarity
from lightning_gradsim.sinks import Sink
from lightning_gradsim.supervision import Supervisor
from lightning_gradsim.training_watch import TrainingWatch
from lightning_gradsim.true_labels import TrueLabels
from lightning_gradsim.trusted_validation import validation_readers
from lightning_gradsim.validation_reports import Mode, ValidationReports
from lightning_gradsim.visit_statistics import InRunSettings

STATE_VERSION = 2
MODES = ("auto", "in_run", "pass")
NO_ARGUMENTS = frozenset({"self", "__class__"})
logger = logging.getLogger(__name__)


class GradSimCallback(Callback):
    """Explains misclassified validation samples by the training samples whose gradients push into the mistake.

    At the last validation of every ``every_n_epochs``-th epoch, and in ``trainer.validate``, misclassified validation
    samples become queries. One pass over the training samples compares per-sample gradients of the chosen layers,
    exactly. The result is ``report``, files in ``<log dir>/<name>/`` (``report.json``, ``suspects.csv``,
    ``influences.csv``, ``report.html`` and pictures) and, with a ``TensorBoardLogger`` or a ``WandbLogger``, under
    ``<name>/``: images and texts ``mistakes`` and ``suspects``, and the scalars ``errors`` (count),
    ``suspects_flagged`` (count), ``overhead_seconds`` (s), ``overhead_share`` (time taken so far over the time of the
    run without it); with ``true_labels=`` also
    ``suspects_auroc``, ``suspects_average_precision`` and further figures of ``SuspectQuality``.

    The training run is left as it was, bit for bit: see ``docs/design.md``.

    Args:
        layers: ``"last"`` (the last layer called that has trainable parameters), ``"last:3"``, ``"all"``, a name of a
            layer or parameter, a glob, a layer type, several of these, or a predicate of (name, layer).
        similarity: Similarity of harmful samples and teachers: ``"dot"``, ``"cosine"``, ``"asymmetric"``, or
            ``"influence"``, for which the query's gradient is multiplied by the inverse of each layer's damped
            curvature.
        num_queries: How many misclassified validation samples are studied at most.
        top_k: Length of the lists of each query.
        damping: For ``"influence"``: what is added to the curvature, as a share of its mean eigenvalue.
        every_n_epochs: Look at the last validation of every n-th epoch; by default of every epoch.
        every_n_steps: Instead, look at each validation at least that many steps after the last one looked at.
        warmup_epochs: Look at none in that many first epochs.
        last_epoch_only: Instead, look at the last validation of the run only, early stopping included.
        time_budget: Share of the training time that the callback may take; ``None`` for no limit: then nothing depends
            on the speed of the machine. Under a budget, a pass reads as many training samples as fit, taking turns
            until all were read, and a validation for which too little is left is passed over. The first and the last
            report may read for a second in any case. Neighbours, too, are looked for among as many samples as fit.
        final_pass: Whether the last report of a run is against all training samples, beyond the budget if need be.
        mode: ``"pass"``: a report is of one pass over the training data. ``"in_run"``: from the second epoch on, what
            training steps have shown of the head tells which training samples may be in a list; those are read again
            and scored exactly, and ``report.recall`` estimates what is missed; where steps tell nothing, it is a pass
            again. ``"auto"``: the same, and the last report is of a pass over all of them.
        along_run: How many queries, from the first report on that has them, or ids of samples of the first validation
            loader, right or wrong: for each of them similarities are summed over the reports of the run
            (``report.along_run``), four bytes for every pair. Every report then reads all training samples, and a
            budget decides which validations are passed over.
        loss_fn: A criterion, or a function of (outputs, targets) that gives one loss a sample. By default the module's
            one criterion attribute, else cross-entropy for integer targets.
        adapter: Reads batches of an unusual form; by default pairs and mappings are read.
        train_data: The training samples to compare with: a map-style dataset or a ``DataLoader`` over one, for instance
            without augmentation. By default the trainer's own.
        max_train_samples: Compare with a seeded choice of at most that many, every class keeping its share.
        query_policy: ``"highest_loss"``, balanced over classes, or ``"random"``.
        class_names: Names of the classes; by default the ``classes`` of the training dataset, if it has any.
        mean: Mean of the images' normalisation, a value a channel, undone on panels.
        std: Standard deviation of the images' normalisation, undone on panels.
        show_teachers: Whether panels show who taught the wrong prediction, too.
        panel_pages: How many panels of six mistakes are drawn at most: ``mistakes``, ``mistakes_2`` and so on.
        describe: What is shown of samples that are no pictures: a function from a sample of the dataset to words, or a
            tokenizer, whose ``decode`` gets token ids. It never stops a report.
        feature_names: Names of the numbers of an input, which are then shown as a table.
        sinks: Further places for reports, beside files and the trainer's own loggers: objects with the methods of
            ``Sink``.
        mislabel_score: What suspects are ranked by, from the logits and features of all training steps:
            ``"margin_knn"``, ``"log_margin"``, ``"knn"``, ``"aum"``, ``"loss"``, ``"el2n"``, ``"self_influence"`` or
            ``"influence"`` (on the classes of the latest validation that was looked at). ``None`` watches no training
            steps: suspects are those of largest gradient in one pass.
        true_labels: True labels of the training samples where they are known, as in a benchmark, one a sample by sample
            id: reports then say how well the suspects find the wrong ones.
        trusted_val: Whether the validation labels are known to be right. At the end a copy of the model then learns
            them, which takes four passes over validation and training data, beyond any budget, and suspects are ranked
            by what becomes of the training samples, too.
        max_state_mb: MiB that statistics and features of the training samples may take, here and in checkpoints.
            Sums of ``along_run`` that take more lie in a file here, and in one beside each checkpoint.
        id_key: Where training batches carry sample ids, a key or a place; needed only for loaders that make batches of
            their own.
        memory_budget: Bytes that a pass may take beside the module and the batch at hand; by default a quarter of what
            is free. Results do not depend on it.
        seed: Seed of random choices; they touch no global generator.
        name: Folder, tag prefix and state key.
        on_error: ``"warn"``: what fails inside is reported, training goes on, and after three failures in a row the
            callback stops. ``"raise"``: the exception arrives. Wrong arguments always raise; so does ``fast_dev_run``.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range.

    Example::

        gradsim = GradSimCallback()
        Trainer(callbacks=[gradsim]).fit(model, train_loader, val_loader)
        gradsim.report.suspects[:20]
    """

    def __init__(
        self,
        layers: LayerSpec = "last",
        similarity: Similarity = "dot",
        num_queries: int = 32,
        top_k: int = 8,
        damping: float = 1.0,
        every_n_epochs: int | None = None,
        every_n_steps: int | None = None,
        warmup_epochs: int = 0,
        last_epoch_only: bool = False,
        time_budget: float | None = 0.1,
        final_pass: bool = False,
        mode: Mode = "pass",
        along_run: int | Sequence[int] | None = None,
        loss_fn: nn.Module | LossFunction | None = None,
        adapter: Adapter | None = None,
        train_data: Any = None,
        max_train_samples: int | None = None,
        query_policy: QueryPolicy = "highest_loss",
        class_names: Sequence[str] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        show_teachers: bool = False,
        panel_pages: int = 1,
        describe: Any = None,
        feature_names: Sequence[str] | None = None,
        sinks: Sequence[Sink] = (),
        mislabel_score: str | None = "margin_knn",
        true_labels: Any = None,
        trusted_val: bool = False,
        max_state_mb: float = 256.0,
        id_key: str | int | None = None,
        memory_budget: int | None = None,
        seed: int = 0,
        name: str = "gradsim",
        on_error: Literal["warn", "raise"] = "warn",
    ) -> None:
        words = {argument: in_words(value) for argument, value in locals().items() if argument not in NO_ARGUMENTS}
        super().__init__()
        check_choice("on_error", on_error, ("warn", "raise"))
        check_choice("query_policy", query_policy, QUERY_POLICIES)
        check_count("num_queries", num_queries, optional=False)
        check_share("time_budget", time_budget)
        check_type("final_pass", final_pass, isinstance(final_pass, bool), "True or False")
        check_type("trusted_val", trusted_val, isinstance(trusted_val, bool), "True or False")
        if trusted_val and mislabel_score is None:
            raise ValueError(
                "`trusted_val=True` and `mislabel_score=None` contradict each other: the first adds to the score of "
                "training steps. Leave one of them out."
            )
        is_loss = loss_fn is None or (callable(loss_fn) and not isinstance(loss_fn, type))
        check_choice("mode", mode, MODES)
        if mode == "in_run" and mislabel_score is None:
            raise ValueError(
                "`mode='in_run'` and `mislabel_score=None` contradict each other: the first needs training steps to be "
                "watched. Leave one of them out."
            )
        if along_run is not None and mode != "pass":
            raise ValueError(
                f"`mode={mode!r}` and `along_run={along_run!r}` contradict each other: the first reads some of the "
                "training samples, the second sums over all of them. Leave one of them out."
            )
        check_type("loss_fn", loss_fn, is_loss, "an instance of a criterion, or a function")
        is_adapter = adapter is None or isinstance(adapter, Adapter)
        check_type("adapter", adapter, is_adapter, "an instance of an `Adapter` subclass")
        is_key = id_key is None or type(id_key) in {str, int}
        check_type("id_key", id_key, is_key, "a key or a place in batches")
        self.name, self.on_error = name, on_error
        self.num_queries, self.query_policy, self.seed = num_queries, query_policy, seed
        self.loss_fn, self.adapter = loss_fn, adapter or Adapter()
        self.time_budget, self.mode, self.trusted_val = time_budget, mode, trusted_val
        self.final_pass = final_pass or mode == "auto"
        self.settings = EngineSettings(layers, similarity, top_k, memory_budget=memory_budget, damping=damping)
        self._schedule = Schedule(every_n_epochs, every_n_steps, warmup_epochs, last_epoch_only)
        self._failures = Failures(type(self).__name__)
        truth = None if true_labels is None else TrueLabels(true_labels)
        contents = ReporterSettings(
            self.settings,
            train_data,
            max_train_samples,
            seed,
            class_names,
            PresentationSettings(name, mean, std, show_teachers, panel_pages, describe, feature_names, sinks),
            words,
            truth,
        )
        self._reporter = Reporter(contents, self._failures.warn_once)
        self._clock = Clock()
        self._supervisor = Supervisor(self._clock, self._failures, raises=on_error == "raise")
        watched = None if mislabel_score is None else InRunSettings(mislabel_score, max_state_mb, seed)
        sums = None if along_run is None else AlongRun(along_run, max_state_mb, name)
        in_run = None if watched is None else InRun(self.adapter, watched)
        self._watch = TrainingWatch(
            self.adapter,
            in_run,
            id_key,
            self._supervisor,
            self._clock,
            self._failures,
            truth,
            trusted_val=trusted_val,
            has_budget=time_budget is not None,
        )
        self._reports = ValidationReports(
            self.adapter,
            self._reporter,
            self._watch,
            self._supervisor,
            self._clock,
            self._failures,
            mode=mode,
            trusted_val=trusted_val,
            time_budget=time_budget,
            name=name,
            along_run=sums,
        )
        self._moment = Moment(0, 0, ends_epoch=False, ends_run=False)
        self._collector: QueryCollector | None = None
        self._waiting: QueryCollector | None = None  # of the latest validation, in case it turns out to be the last
        self._batch_idx = -1
        self._is_over_budget = False
        self._num_due = 0

    @property
    def report(self) -> Report | None:
        """The latest report, or ``None`` before the first."""
        return self._reports.latest

    @staticmethod
    def available_layers(module: nn.Module) -> list[str]:
        """Names of all layers with trainable parameters, in the order of registration.

        Args:
            module: The user's module.

        Returns:
            The names.
        """
        return list(trainable_layers(module))

    def plan(self, module: nn.Module, batch: Any, *, show: bool = True) -> Plan:
        """What a pass with these settings would compute on such batches, and what it would cost.

        Args:
            module: The user's module; it is left as found.
            batch: A training batch, on the module's device.
            show: Whether the table is printed.

        Returns:
            The plan.
        """
        return plan(
            module,
            batch,
            self.settings.layers,
            num_queries=self.num_queries,
            similarity=self.settings.similarity,
            memory_budget=self.settings.memory_budget,
            loss_fn=self.loss_fn,
            adapter=self.adapter,
            show=show,
        )

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints: two callbacks need two names."""
        return self._generate_state_key(name=self.name)

    def state_dict(self) -> dict[str, Any]:
        """Plain values only."""
        return {
            "version": STATE_VERSION,
            "seconds": self._clock.seconds,
            "failures": self._failures.in_a_row,
            **self._reports.state_dict(),
            "in_run": self._watch.state_dict(),
            "history": self._reporter.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what an earlier run saved; missing entries keep their values."""
        version = state_dict.get("version", STATE_VERSION)
        if version > STATE_VERSION:
            self._failures.warn_once(
                f"the checkpoint holds a state of version {version}, this release knows version {STATE_VERSION}: what "
                "it does not know is left out. Resume with the release that wrote the checkpoint to keep all of it"
            )
        self._clock.carry_over(float(state_dict.get("seconds", 0.0)))
        self._failures.in_a_row = int(state_dict.get("failures", 0)) % MAX_FAILURES  # one that has stopped tries again
        self._reports.load_state_dict(state_dict)
        self._watch.load_state_dict(state_dict.get("in_run", {}))
        self._reporter.load_state_dict(state_dict.get("history", {}))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write what is too large for the state beside the checkpoint."""
        self._reports.save(trainer)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that are not supported; a callback that has stopped tries again in a new run."""
        bridge.check_strategy(trainer, type(self).__name__)
        self._failures.in_a_row, self._failures.aloud = 0, trainer.is_global_zero
        if stage == "fit":
            # Before a resume loads its state.
            self._reports.begin_run()
            self._batch_idx = -1
            self._reporter.begin_run()
            self._watch.attach(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check what depends on the module."""
        self._check_module(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check what depends on the training data, before any time is spent on it."""
        self._clock.start_run()
        self._num_due = 0
        self._reports.start_training(trainer)
        self._reporter.set_source(trainer.train_dataloader)
        self._watch.start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Remember the place in the epoch, and watch the step."""
        self._batch_idx, self._waiting = batch_idx, None
        if not self._failures.are_too_many:
            self._watch.begin_step(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take in what the step has shown."""
        self._watch.end_step(trainer, batch, outputs)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the epoch, if no validation did."""
        self._watch.remove()  # of a step that was skipped
        if not self._failures.are_too_many:
            self._watch.end_epoch(trainer, trainer.current_epoch, is_last=trainer.should_stop)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to collect queries, if this validation is one to look at."""
        self._collector = self._waiting = None
        if not self._is_due(trainer):
            return
        self._num_due += 1
        if trainer.state.fn == "validate":
            self._check_module(pl_module)
        else:
            self._reporter.set_source(trainer.train_dataloader)
        if not self._reporter.has_source:
            self._reporter.set_source(None)
        if not self._reporter.has_source:
            self._failures.warn_once(
                "there is no training data to compare with in `trainer.validate`. Pass `train_data=`, or validate "
                "after `fit` with the same callback"
            )
            return
        if self.trusted_val:
            validation_readers(bridge.flatten_loaders(trainer.val_dataloaders))  # raises now for what cannot be read
        self._clock.start_validation()
        selection = QuerySelection(
            self.num_queries,
            self.query_policy,
            self.seed,
            trainer.global_rank,
            trainer.world_size,
            self._keys_along_run(trainer),
        )
        self._collector = QueryCollector(bridge.flatten_loaders(trainer.val_dataloaders), selection)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep copies of misclassified samples."""
        if self._collector is not None:
            with (
                self._supervisor.isolated(trainer),
                bridge.silenced(pl_module),
                self._watch.watching_validation(trainer, batch),
            ):
                self._collector.collect(self.adapter, pl_module, batch, dataloader_idx, bridge.forward_context(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score, draw, write."""
        collector, self._collector = self._collector, None
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not self._failures.are_too_many:
            self._watch.share(trainer)
            if self._moment.ends_epoch:
                self._watch.end_epoch(trainer, self._moment.epoch, is_last=self._moment.ends_run)
            if collector is not None:
                self._watch.end_validation(trainer)
        if collector is None:
            return
        in_full = trainer.state.fn != "fit" or (self.final_pass and self._moment.ends_run)
        is_wanted = not (self._schedule.last_epoch_only or self._is_over_budget)
        if in_full or self._moment.ends_run or is_wanted:
            self._reports.make(trainer, pl_module, collector, self._moment, in_full=in_full)
        if not self._moment.ends_run and self._wants_last:
            self._waiting = collector

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last validation, where only now it is known that it was the last (early stopping)."""
        collector, self._waiting = self._waiting, None
        if not self._num_due and not self._reports.last_step:  # a run that is resumed may have looked before
            self._failures.warn_once(
                "no validation of this run was one to look at, so nothing was explained. Check that `fit` has "
                "validation data, and that the schedule (`every_n_epochs=`, `every_n_steps=`, `warmup_epochs=`) meets "
                "one"
            )
        if collector is not None:
            self._clock.start_validation()
            self._moment = replace(self._moment, ends_run=True)
            self._reports.make(trainer, pl_module, collector, self._moment, in_full=self.final_pass)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing behind."""
        self._clear()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind."""
        self._clear()

    @property
    def _wants_last(self) -> bool:
        """Whether there is a report of the last validation, whatever the schedule says."""
        return self.final_pass or self._schedule.last_epoch_only or self.trusted_val

    def _is_due(self, trainer: Trainer) -> bool:
        if trainer.sanity_checking or self._failures.are_too_many:
            return False
        if trainer.state.fn != "fit":
            self._moment = Moment(trainer.current_epoch, trainer.global_step, ends_epoch=True, ends_run=True)
            return True
        self._moment = moment = bridge.moment_of(trainer, self._batch_idx)
        self._is_over_budget = False
        is_last = moment.ends_run and self._wants_last
        if is_last or not self._schedule.is_due(moment, moment.step - self._reports.last_step):
            return is_last
        if moment.ends_run or self._supervisor.on_rank_zero(trainer, self._reports.budget.allows_report):
            return True
        self._is_over_budget = True
        self._reports.num_passed_over += 1
        if self._reports.num_passed_over == 1 and trainer.is_global_zero:
            logger.info("`%s` passes over validations to keep within `time_budget=%s`", self.name, self.time_budget)
        return self.final_pass or self.trusted_val  # it may turn out to be the last: its queries are kept

    def _keys_along_run(self, trainer: Trainer) -> frozenset[int]:
        along_run = self._reports.along_run
        if along_run is None or trainer.state.fn != "fit":
            return frozenset()
        problem = along_run.check(bridge.flatten_loaders(trainer.val_dataloaders))
        if problem is not None:
            self._failures.warn_once(problem)
        return along_run.keys

    def _check_module(self, module: LightningModule) -> None:
        select_layers(module, self.settings.layers)
        if type(self.adapter).forward is Adapter.forward and type(self.adapter).step is Adapter.step:
            bridge.check_forward(module, type(self).__name__)
        self.adapter.bind(module, self.loss_fn)

    def _clear(self) -> None:
        self._collector = self._waiting = None
        self._reporter.forget_reference()
        self._watch.detach()
        self._clock.end_run()
