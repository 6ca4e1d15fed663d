"""Record everything that a callback must not change in a training run, and name what differs between two runs."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from tests.noninterference.cases import Case

OWN_PREFIX = "gradsim/"
"""What the callback under test logs under its own name is no interference."""

OWN_WATCH = "LossCheck._keep_output"
"""The one hook of the callback that may be there at the start of a training step: it goes at the end of that step."""

SEED = 20
_MODULE_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("hooks"))
_GLOBAL_HOOKS = tuple(name for name in vars(nn_module) if name.startswith("_global_") and name.endswith("hooks"))
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_IDENTITIES = ("_torchdynamo_wrapper_id",)
"""Attributes that hold the address of an object: they differ between any two runs."""
_PLAIN = (bool, int, float, str, bytes, type(None))

Fact = tuple[str, str]
"""Kind and name of one recorded thing, such as ``("weights", "net.1.weight")``."""

Facts = dict[Fact, Any]


@dataclass(frozen=True)
class RunRecord:
    """All that was seen of one run: facts by the point in time at which they were read, in order of time."""

    points: dict[str, Facts] = field(default_factory=dict)


def record_run(case: Case, callbacks: Sequence[Callback]) -> RunRecord:
    """Train the case from its seed with these callbacks and record what they must not change."""
    record = RunRecord()
    with tempfile.TemporaryDirectory() as root, isolate_rng(), _one_thread():
        _seed(SEED)
        module, data = case.module(), case.data()
        logger = RecordingLogger(root)
        observer = Observer(record, _flat(data.get("train_dataloaders")))
        beside = list(case.companions())
        saver = ModelCheckpoint(f"{root}/saved", "{step}", save_top_k=-1, save_on_train_epoch_end=False)
        ordered = [*beside, *callbacks] if case.companions_first else [*callbacks, *beside]
        trainer = Trainer(
            accelerator="cpu",
            logger=logger,
            default_root_dir=root,
            callbacks=[*ordered, observer, saver],  # the observer looks after the callback, the saver comes last anyway
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            **{"devices": 1, "max_epochs": 2, **case.trainer},
        )
        trainer = case.run(trainer, module, data) or trainer
        observer.record_end(trainer, module)
        trainer.save_checkpoint(f"{root}/saved/final.ckpt")
        record.points["log"] = _logged_rows(logger)
        own_keys = {callback.state_key for callback in callbacks}
        record.points["files"] = _checkpoints(Path(root), own_keys)
    return record


@functools.cache
def record_baseline(case: Case) -> RunRecord:
    """The run of the case without any callback under test, trained once a session."""
    return record_run(case, [])


def differences(with_record: RunRecord, without_record: RunRecord) -> list[str]:
    """Each thing that differs, bit for bit, named once: at the first point where it does."""
    found: dict[Fact, str] = {}
    for point in {**without_record.points, **with_record.points}:
        if point not in with_record.points or point not in without_record.points:
            found[("point", point)] = f"point: {_only_in(point in with_record.points)} ({point})"
            continue
        ours, theirs = with_record.points[point], without_record.points[point]
        for fact in {**theirs, **ours}:
            if fact in found:
                continue
            if fact not in ours or fact not in theirs:
                what: str | None = _only_in(fact in ours)
            else:
                what = _difference(ours[fact], theirs[fact])
            if what is not None:
                found[fact] = f"{fact[0]}: {fact[1]} {what} ({point})"
    return list(found.values())


class RecordingLogger(TensorBoardLogger):
    """A TensorBoard logger, so that the callback draws as in real use, that keeps every row of metrics."""

    def __init__(self, save_dir: str) -> None:
        """Log below this directory."""
        super().__init__(save_dir, name="run", version=0)
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Keep the row and write it."""
        self.rows.append((step, dict(metrics)))
        super().log_metrics(metrics, step)  # pyright: ignore[reportArgumentType]


class Observer(Callback):
    """Looks at the run from the last place in the list of callbacks; draws nothing, changes nothing."""

    def __init__(self, record: RunRecord, train_loaders: Sequence[Any]) -> None:
        """Write into this record; the user's own loaders are watched too."""
        self.record = record
        self.train_loaders = train_loaders
        self.validations = 0
        self.after_validation = False
        self.handlers = _handlers()
        self.environment = set(os.environ)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the loaders, where they come from a datamodule or the module."""
        self.train_loaders = self.train_loaders or _flat(trainer.train_dataloader)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record the batch, and the state that the first step after a validation finds."""
        self._record_batch("train", f"epoch {trainer.current_epoch} batch {batch_idx}", batch)
        if self.after_validation:
            self.after_validation = False
            point = f"batch after validation {self.validations}"
            self._record_state(point, trainer, pl_module)
            hooks = self.record.points[point]["hooks", "torch.nn _global_forward_hooks"]
            hooks[:] = [name for name in hooks if name != OWN_WATCH]

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Record the batch."""
        number = "sanity check" if trainer.sanity_checking else f"validation {self.validations + 1}"
        self._record_batch("val", f"{number} loader {dataloader_idx} batch {batch_idx}", batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the state that the callback left at the end of its own hook."""
        if trainer.sanity_checking:
            self._record_state("sanity check end", trainer, pl_module)
            return
        self.validations += 1
        self.after_validation = True
        self._record_state(f"validation {self.validations} end", trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the state at the end of the epoch."""
        self._record_state(f"epoch {trainer.current_epoch} end", trainer, pl_module)

    def record_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Record the state after ``fit`` returned, with what the callback may wrap only while it runs."""
        self._record_state("after fit", trainer, module)
        facts = self.record.points["after fit"]
        _record_names(facts, "attributes", "trainer", vars(trainer))
        _record_names(facts, "attributes", "trainer.strategy", vars(trainer.strategy))
        for name, loader in _named(self.train_loaders):
            for path in ("sampler", "batch_sampler", "batch_sampler.sampler", "collate_fn", "worker_init_fn"):
                value = functools.reduce(lambda thing, name: getattr(thing, name, None), path.split("."), loader)
                facts[("loader", f"{name} {path}")] = _qualname(value)

    def _record_batch(self, kind: str, name: str, batch: Any) -> None:
        facts = self.record.points.setdefault(f"{kind} batches", {})
        tensors = [leaf.detach().clone() for leaf in _flatten(batch).values() if isinstance(leaf, Tensor)]
        facts[(f"{kind} ids", name)] = tensors[0].flatten(1)[:, 0].long()
        facts[(f"{kind} batch contents", name)] = torch.cat([tensor.flatten().double() for tensor in tensors])

    def _record_state(self, point: str, trainer: Trainer, module: LightningModule) -> None:
        facts = self.record.points.setdefault(point, {})
        _record_module(facts, module)
        _record_optimizers(facts, trainer)
        _record_rng(facts, self.train_loaders)
        for name, submodule in module.named_modules(prefix="module"):
            _record_generators(facts, name, submodule)
        _record_generators(facts, "datamodule", getattr(trainer, "datamodule", None))
        _record_metrics(facts, trainer.callback_metrics)
        for name, loader in _named(self.train_loaders):
            _record_attributes(facts, f"{name} dataset", _attributes(getattr(loader, "dataset", None)))
            _record_attributes(facts, name, _attributes(loader))
        facts[("globals", "gradient mode")] = torch.is_grad_enabled()
        facts[("globals", "inference mode")] = torch.is_inference_mode_enabled()
        facts[("globals", "autocast")] = torch.is_autocast_enabled("cpu")
        facts[("globals", "fused attention")] = torch.backends.mha.get_fastpath_enabled()
        facts[("globals", "default dtype")] = str(torch.get_default_dtype())
        facts[("globals", "deterministic algorithms")] = torch.are_deterministic_algorithms_enabled()
        facts[("globals", "threads")] = torch.get_num_threads()
        facts[("globals", "root log handlers")] = sorted(_handlers() - self.handlers)
        facts[("globals", "environment")] = sorted(set(os.environ) - self.environment)


def _record_module(facts: Facts, module: nn.Module) -> None:
    """Weights, buffers, gradients, flags, hooks, attributes and names of a module and of all its submodules."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        facts[("weights", name)] = parameter.detach().clone()
        facts[("grad", name)] = None if parameter.grad is None else parameter.grad.detach().clone()
        facts[("requires_grad", name)] = parameter.requires_grad
        _record_attributes(facts, name, vars(parameter))
        for kind in _TENSOR_HOOKS:
            facts[("hooks", f"{name} {kind}")] = _hooks(parameter, kind)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        facts[("buffers", name)] = buffer.detach().clone()
    for name, submodule in module.named_modules(prefix="module"):
        facts[("mode", name)] = "train" if submodule.training else "eval"
        _record_attributes(facts, name, {key: value for key, value in vars(submodule).items() if key != "training"})
        facts[("forward", name)] = _qualname(type(submodule)), _qualname(submodule.forward)
        for kind in _MODULE_HOOKS:
            facts[("hooks", f"{name} {kind}")] = _hooks(submodule, kind)
    for kind in _GLOBAL_HOOKS:
        facts[("hooks", f"torch.nn {kind}")] = _hooks(nn_module, kind)
    _record_names(facts, "state_dict keys", "module", module.state_dict())


def _record_optimizers(facts: Facts, trainer: Trainer) -> None:
    """State of each optimizer and scheduler."""
    for index, optimizer in enumerate(trainer.optimizers):
        for path, value in _flatten(optimizer.state_dict(), f"{index}").items():
            facts[("optimizer", path)] = value
        _record_attributes(facts, f"optimizer {index}", vars(optimizer))
        for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            facts[("hooks", f"optimizer {index} {kind}")] = _hooks(optimizer, kind)
    for index, config in enumerate(trainer.lr_scheduler_configs):
        for path, value in _flatten(config.scheduler.state_dict(), f"{index}").items():
            facts[("scheduler", path)] = value


def _record_rng(facts: Facts, train_loaders: Sequence[Any]) -> None:
    """The three global random states, and every generator that the user's loaders, samplers and datasets own."""
    facts[("rng", "torch")] = torch.get_rng_state()
    facts[("rng", "numpy")] = _digest(repr([np.asarray(part).tolist() for part in np.random.get_state()]))
    facts[("rng", "python")] = _digest(repr(random.getstate()))
    for name, loader in _named(train_loaders):
        _record_generators(facts, name, loader)
        for owner in ("dataset", "sampler", "batch_sampler"):
            _record_generators(facts, f"{name} {owner}", getattr(loader, owner, None))
            _record_generators(
                facts, f"{name} {owner} transform", getattr(getattr(loader, owner, None), "transform", None)
            )


def _record_generators(facts: Facts, owner_name: str, owner: Any) -> None:
    for name, value in _attributes(owner).items():
        if isinstance(value, torch.Generator):
            facts[("rng", f"{owner_name} {name}")] = value.get_state()
        elif isinstance(value, np.random.Generator):
            facts[("rng", f"{owner_name} {name}")] = _digest(repr(value.bit_generator.state))
        elif isinstance(value, random.Random):
            facts[("rng", f"{owner_name} {name}")] = _digest(repr(value.getstate()))


def _record_metrics(facts: Facts, metrics: Mapping[str, Any]) -> None:
    """What the user's callbacks can monitor."""
    for name, value in metrics.items():
        if not name.startswith(OWN_PREFIX):
            facts[("metrics", name)] = _leaf(value)


def _record_attributes(facts: Facts, name: str, attributes: Mapping[str, Any]) -> None:
    """The names of all attributes, and the values of the plain ones: numbers, flags, strings."""
    _record_names(facts, "attributes", name, attributes)
    for key, value in attributes.items():
        if isinstance(value, _PLAIN) and key not in _IDENTITIES:
            facts[("values", f"{name} {key}")] = value


def _record_names(facts: Facts, kind: str, name: str, names: Mapping[str, Any]) -> None:
    facts[(kind, name)] = frozenset(names)


def _logged_rows(logger: RecordingLogger) -> Facts:
    """Every value handed to the logger, by step and by how often this step had logged this name before."""
    facts: Facts = {}
    repeats: dict[tuple[int | None, str], Iterator[int]] = {}
    for step, row in logger.rows:
        own = any(name.startswith(OWN_PREFIX) for name in row)
        for name, value in row.items():
            # Lightning adds "epoch" to its own rows only: a row of the callback may carry it, or not
            if name.startswith(OWN_PREFIX) or (own and name == "epoch"):
                continue
            repeat = next(repeats.setdefault((step, name), itertools.count()))
            facts[("logged", f"step {step} {name}" + (f" #{repeat}" if repeat else ""))] = _leaf(value)
    return facts


def _checkpoints(root: Path, own_keys: set[str]) -> Facts:
    """Content of every checkpoint file, less the entries of the callbacks under test."""
    facts: Facts = {}
    for path in sorted(root.rglob("*.ckpt")):
        content = torch.load(path, weights_only=False)
        content["callbacks"] = {key: value for key, value in content["callbacks"].items() if key not in own_keys}
        for name, value in _flatten(content).items():
            shown = value.replace(str(root), "<root>") if isinstance(value, str) else value
            facts[("checkpoint", f"{path.relative_to(root)} {name}".replace(str(root), "<root>"))] = shown
    return facts


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested mappings and sequences by their path; tensors are cloned."""
    if isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        return {path: _leaf(value)}
    leaves: dict[str, Any] = {f"{path}()": len(items)}
    for key, inner in items:
        leaves |= _flatten(inner, f"{path}.{key}" if path else str(key))
    return leaves


def _leaf(value: Any) -> Any:
    """A value that later changes can't reach: tensors cloned, plain values kept, other objects by their type."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if isinstance(value, _PLAIN) else type(value).__qualname__


def _difference(ours: Any, theirs: Any) -> str | None:
    """How two recorded values differ; None where they are equal bit for bit (NaN equals the same NaN)."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return _tensor_difference(ours, theirs)
    if isinstance(ours, frozenset) and isinstance(theirs, frozenset):
        gained, lost = sorted(ours - theirs), sorted(theirs - ours)
        parts = [f"gained {gained}" if gained else "", f"lost {lost}" if lost else ""]
        return " and ".join(filter(None, parts)) or None
    if type(ours) is type(theirs) and repr(ours) == repr(theirs):
        return None
    return f"with {_show(ours)}, without {_show(theirs)}"


def _tensor_difference(ours: Tensor, theirs: Tensor) -> str | None:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"with {_show(ours)}, without {_show(theirs)}"
    if torch.equal(_as_bytes(ours), _as_bytes(theirs)):
        return None
    if ours.is_floating_point():
        return f"differ, max {(ours.double() - theirs.double()).abs().max().item():.1e}"
    return f"with {ours.tolist()}, without {theirs.tolist()}" if ours.numel() <= 16 else "differ"


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return repr(value)


def _only_in(with_callback: bool) -> str:
    return "only with the callback" if with_callback else "only without the callback"


def _qualname(thing: Any) -> str:
    return getattr(thing, "__qualname__", type(thing).__qualname__)


def _hooks(owner: Any, kind: str) -> list[str]:
    return [_qualname(hook) for hook in (getattr(owner, kind, None) or {}).values()]


def _flat(loaders: Any) -> list[Any]:
    """All loaders of a collection."""
    if hasattr(loaders, "flattened"):
        return list(loaders.flattened)
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders] if loaders is not None else []


def _named(loaders: Sequence[Any]) -> list[tuple[str, Any]]:
    return [("train loader" if index == 0 else f"train loader {index}", each) for index, each in enumerate(loaders)]


def _attributes(thing: Any) -> Mapping[str, Any]:
    return getattr(thing, "__dict__", {})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _handlers() -> set[str]:
    return {repr(handler) for handler in logging.getLogger().handlers}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads make runs of this size slower, and several times so where other processes want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _seed(seed: int) -> None:
    """Seed the three generators; Lightning's ``seed_everything`` would leave environment variables behind."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
