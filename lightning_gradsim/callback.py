"""The callback: when to look, what to keep, what to do when something fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_gradsim import lightning_bridge as bridge
from lightning_gradsim.adapter import Adapter
from lightning_gradsim.arguments import check_choice, check_count, check_normalisation, check_type, is_list_of
from lightning_gradsim.batches import copy_batch
from lightning_gradsim.clock import Clock
from lightning_gradsim.engine import EngineSettings
from lightning_gradsim.explanation import AUGMENTED, Reference, collect_pictures, compute_report, make_reference
from lightning_gradsim.failures import MAX_FAILURES, Failures
from lightning_gradsim.guard import evaluating, is_compiled
from lightning_gradsim.layer_selection import LayerSpec, check_layer_spec, select_layers, trainable_layers
from lightning_gradsim.loss_check import UNCHECKED, LossCheck
from lightning_gradsim.losses import LossFunction
from lightning_gradsim.plan_record import Plan
from lightning_gradsim.planner import plan
from lightning_gradsim.queries import QUERY_POLICIES, Query, QueryPolicy, QuerySelection
from lightning_gradsim.report import Report
from lightning_gradsim.scores import SIMILARITIES, Similarity
from lightning_gradsim.sinks import save_png_atomically, write_report_files, write_tensorboard
from lightning_gradsim.train_pass import is_in_order, make_reader, sample_ids
from lightning_gradsim.views import mistake_panel

STATE_VERSION = 1
logger = logging.getLogger(__name__)


class GradSimCallback(Callback):
    """Explains misclassified validation samples by the training samples whose gradients push into the mistake.

    At the last validation of every ``every_n_epochs``-th epoch, and in ``trainer.validate``, misclassified validation
    samples become queries. One pass over the training samples compares per-sample gradients of the chosen layers,
    exactly. The result is ``report``, files in ``<log dir>/<name>/`` (``report.json``, ``suspects.csv``,
    ``influences.csv``, ``mistakes.png``) and, with a ``TensorBoardLogger``, under ``<name>/``: the image ``mistakes``,
    the text ``suspects``, and the scalars ``errors`` (count), ``suspects_flagged`` (count), ``overhead_seconds`` (s),
    ``overhead_share`` (time taken so far over the time of the run without it).

    The training run is left as it was, bit for bit: see ``docs/design.md``.

    Args:
        layers: ``"last"`` (the last layer called that has trainable parameters), ``"last:3"``, ``"all"``, a name of a
            layer or parameter, a glob, a layer type, several of these, or a predicate of (name, layer).
        similarity: Similarity of harmful samples and teachers: ``"dot"``, ``"cosine"`` or ``"asymmetric"``.
        num_queries: How many misclassified validation samples are studied at most.
        top_k: Length of the lists of each query.
        every_n_epochs: Look at the last validation of every n-th epoch.
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
        memory_budget: Bytes that a pass may take beside the module and the batch at hand; by default a quarter of what
            is free. Results do not depend on it.
        seed: Seed of random choices; they touch no global generator.
        name: Folder, tag prefix and state key.
        on_error: ``"warn"``: what fails inside is reported, training goes on, and after three failures in a row the
            callback stops. ``"raise"``: the exception arrives. Wrong arguments always raise; so does ``fast_dev_run``.

    Attributes:
        report: The latest report, or ``None`` before the first.

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
        every_n_epochs: int = 1,
        loss_fn: nn.Module | LossFunction | None = None,
        adapter: Adapter | None = None,
        train_data: Any = None,
        max_train_samples: int | None = None,
        query_policy: QueryPolicy = "highest_loss",
        class_names: Sequence[str] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        show_teachers: bool = False,
        memory_budget: int | None = None,
        seed: int = 0,
        name: str = "gradsim",
        on_error: Literal["warn", "raise"] = "warn",
    ) -> None:
        super().__init__()
        check_layer_spec(layers)
        check_choice("similarity", similarity, SIMILARITIES)
        check_choice("query_policy", query_policy, QUERY_POLICIES)
        check_choice("on_error", on_error, ("warn", "raise"))
        for argument, value in {
            "num_queries": num_queries,
            "top_k": top_k,
            "every_n_epochs": every_n_epochs,
            "max_train_samples": max_train_samples,
            "memory_budget": memory_budget,
        }.items():
            check_count(argument, value, optional=argument in ("max_train_samples", "memory_budget"))
        check_type("name", name, isinstance(name, str), "a string")
        check_type("seed", seed, isinstance(seed, int), "a whole number")
        check_type("loss_fn", loss_fn, loss_fn is None or callable(loss_fn), "a criterion or a function")
        check_type("class_names", class_names, is_list_of(class_names, str), "a list of strings")
        if name in {"", ".", ".."} or "/" in name or "\\" in name:
            raise ValueError(f"`name={name!r}` cannot name a folder. Expected a non-empty string without slashes.")
        check_normalisation(mean, std)
        if adapter is not None and not isinstance(adapter, Adapter):
            raise TypeError(f"`adapter` is a {type(adapter).__name__}. Expected an instance of an `Adapter` subclass.")
        self.settings = EngineSettings(layers, similarity, top_k, memory_budget=memory_budget)
        self.num_queries, self.every_n_epochs, self.query_policy = num_queries, every_n_epochs, query_policy
        self.loss_fn, self.adapter, self.train_data = loss_fn, adapter or Adapter(), train_data
        self.max_train_samples, self.seed = max_train_samples, seed
        self.class_names, self.mean, self.std, self.show_teachers = class_names, mean, std, show_teachers
        self.name, self.on_error = name, on_error
        self.report: Report | None = None
        self._clock, self._loss_check = Clock(), LossCheck()
        self._selection: QuerySelection | None = None
        self._source: Any = None
        self._reference: Reference | None = None
        self._loaders: list[Any] = []
        self._ids: dict[int, Tensor | None] = {}
        self._num_seen: dict[int, int] = {}
        self._batch_idx = -1
        self._logged_plan = ""
        self._failures = Failures(type(self).__name__)

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
        return {"version": STATE_VERSION, "seconds": self._clock.seconds, "failures": self._failures.in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what an earlier run saved; missing entries keep their values."""
        self._clock.carry_over(float(state_dict.get("seconds", 0.0)))
        self._failures.in_a_row = int(state_dict.get("failures", 0)) % MAX_FAILURES  # one that has stopped tries again

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that are not supported; a callback that has stopped tries again in a new run."""
        bridge.check_strategy(trainer, type(self).__name__)
        self._failures.in_a_row = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check what depends on the module."""
        self._check_module(pl_module)
        self._loss_check = LossCheck()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check what depends on the training data, before any time is spent on it."""
        self._clock.start_run()
        self._set_source(trainer.train_dataloader)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Remember the place in the epoch; on the first steps, watch the outputs for the loss check."""
        self._batch_idx = batch_idx
        if self._loss_check.is_open and not self._failures.are_too_many and self._may_watch(pl_module):
            with self._protected(trainer, "the loss check"):
                self._loss_check.begin_step(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """On the first steps, compare the loss with ours."""
        if not self._loss_check.is_watching:
            return
        with self._protected(trainer, "the loss check"):
            returned = bridge.loss_of_outputs(outputs, trainer.accumulate_grad_batches)
            self._loss_check.end_step(self.adapter, batch, returned)
        self._loss_check.remove()
        if self._loss_check.difference is not None:
            self._failures.warn_once(self._loss_check.difference)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to collect queries, if this validation is one to look at."""
        self._selection = None
        if not self._is_due(trainer):
            return
        if trainer.state.fn == "validate":
            self._check_module(pl_module)
        else:
            self._set_source(trainer.train_dataloader)
        if self._source is None:
            self._set_source(None)
        if self._source is None:
            self._failures.warn_once(
                "there is no training data to compare with in `trainer.validate`. Pass `train_data=`, or validate "
                "after `fit` with the same callback"
            )
            return
        self._clock.start_validation()
        self._loaders = bridge.flatten_loaders(trainer.val_dataloaders)
        self._ids = {i: sample_ids(each.dataset) if is_in_order(each) else None for i, each in enumerate(self._loaders)}
        self._num_seen = dict.fromkeys(self._ids, 0)
        self._selection = QuerySelection(self.num_queries, self.query_policy, self.seed)

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
        selection, self._selection = self._selection, None
        if selection is None:
            return
        with self._protected(trainer, "the choice of queries"):
            with evaluating(pl_module), bridge.silenced(pl_module), bridge.forward_context(trainer)():
                batch = copy_batch(batch)  # in `trainer.validate` it is made of inference tensors
                step = self.adapter.step(pl_module, batch)
            start = self._num_seen[dataloader_idx]
            self._num_seen[dataloader_idx] = start + len(step.losses)
            ids = self._ids[dataloader_idx]
            ids = None if ids is None else ids[start : start + len(step.losses)]
            selection.update(self.adapter, batch, step, ids, dataloader_idx)
            self._selection = selection

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score, draw, write."""
        selection, self._selection = self._selection, None
        if selection is None:
            return
        with self._protected(trainer, "the report"):
            run = bridge.run_context(trainer, pl_module)
            if self._reference is None:
                trial = bridge.num_trial_batches(trainer)
                self._reference = make_reference(self._source, self.adapter, self.max_train_samples, self.seed, trial)
                if self._reference.augmented:
                    self._failures.warn_once(AUGMENTED)
            with bridge.silenced(pl_module):
                report, kept = compute_report(pl_module, self.adapter, selection, self._reference, self.settings, run)
            own_notes = [note for note in (self._loss_check.difference, self._loss_check.gap) if note is not None]
            self.report = report = replace(
                report,
                epoch=trainer.current_epoch,
                step=trainer.global_step,
                class_names=tuple(self.class_names) if self.class_names is not None else report.class_names,
                notes=(*report.notes, *own_notes),
                seconds=self._clock.validation_seconds,
                time_share=self._clock.share,
            )
            self._log_plan(report)
            self._publish(trainer, report, kept)
            self._failures.in_a_row = 0

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing behind."""
        self._clear()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind."""
        self._clear()

    def _is_due(self, trainer: Trainer) -> bool:
        if trainer.sanity_checking or self._failures.are_too_many:
            return False
        if trainer.state.fn != "fit":
            return True
        is_epoch = (trainer.current_epoch + 1) % self.every_n_epochs == 0
        return is_epoch and bridge.is_last_validation_of_epoch(trainer, self._batch_idx)

    def _may_watch(self, module: LightningModule) -> bool:
        # A hook inside a compiled module would change what the compiler fuses, and with it the training.
        if is_compiled(module):
            self._loss_check.gap = f"{UNCHECKED}: the module is compiled"
        elif hasattr(module, "gradsim_step"):
            self._loss_check.gap = f"{UNCHECKED}: the module has a `gradsim_step` of its own"
        else:
            return True
        return False

    def _check_module(self, module: LightningModule) -> None:
        select_layers(module, self.settings.layers)
        if type(self.adapter).forward is Adapter.forward and type(self.adapter).step is Adapter.step:
            bridge.check_forward(module, type(self).__name__)
        self.adapter.bind(module, self.loss_fn)

    def _set_source(self, source: Any) -> None:
        source = source if self.train_data is None else self.train_data
        if source is not None and source is not self._source:
            make_reader(source)  # raises now for data that could not be read after a whole epoch
            self._source, self._reference = source, None

    def _log_plan(self, report: Report) -> None:
        """Once, and again where it is another one."""
        steps = "" if report.plan is None else str([(layer.name, layer.step) for layer in report.plan.layers])
        if steps != self._logged_plan:
            self._logged_plan = steps
            logger.info("the plan of `%s`:\n%s", self.name, report.plan)

    def _publish(self, trainer: Trainer, report: Report, kept: Sequence[Query]) -> None:
        assert self._reference is not None
        used = {query.dataloader_idx for query in report.queries}
        readers = {i: make_reader(self._loaders[i]) for i in used if self._ids[i] is not None}
        query_images, train_images = collect_pictures(report, kept, self._reference, readers)
        panel = mistake_panel(
            report, query_images, train_images, show_teachers=self.show_teachers, mean=self.mean, std=self.std
        )
        directory = bridge.output_directory(trainer, self.name)
        if bridge.is_trial_run(trainer):
            return
        seconds, share = self._clock.validation_seconds, self._clock.share  # now with what drawing took
        self.report = report = replace(report, seconds=seconds, time_share=share)
        write_report_files(report, directory)
        save_png_atomically(panel, directory / "mistakes.png")
        writers = bridge.tensorboard_writers(trainer)
        if not writers:
            self._failures.warn_once(
                f"no logger takes pictures: the report is in `{directory}` and in `callback.report`"
            )
        for writer in writers:
            write_tensorboard(writer, report, panel, self.name)

    @contextmanager
    def _protected(self, trainer: Trainer, what: str) -> Iterator[None]:
        """Keep the run as it is, random numbers included, and turn failures into warnings if they shall not raise."""
        try:
            # What is made in inference mode, as in `trainer.validate`, has no gradient ever after.
            with self._clock.working(), bridge.isolated_rng(trainer), torch.inference_mode(False), torch.no_grad():
                yield
        except Exception as error:
            if self.on_error == "raise" or bridge.is_trial_run(trainer):
                raise
            log = bridge.output_directory(trainer, self.name) / "errors.log"
            self._failures.record(f"{what} of epoch {trainer.current_epoch}", error, log)

    def _clear(self) -> None:
        self._selection = self._reference = None
        self._loaders = []
        self._loss_check.remove()
        self._clock.end_run()
