"""The same engine offline: any samples, a trained module, and none, one or several checkpoints of its training."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.arguments import check_choice, check_count, check_positive, in_words
from lightning_gradsim.batches import map_tensors
from lightning_gradsim.class_pairs import Mistakes
from lightning_gradsim.engine import EngineSettings, ShardResult, score_shard
from lightning_gradsim.errors import CheckpointError, LossError
from lightning_gradsim.explanation import make_report, names_note
from lightning_gradsim.guard import evaluating
from lightning_gradsim.head_features import head_features
from lightning_gradsim.layer_selection import LayerSpec
from lightning_gradsim.losses import LossFunction
from lightning_gradsim.memory import default_budget
from lightning_gradsim.queries import QuerySelection
from lightning_gradsim.query_side import NUM_WITNESSES, QueryBatch
from lightning_gradsim.reading import Part
from lightning_gradsim.reference import Reference, make_reference
from lightning_gradsim.reference_choice import Choice, ReferenceWay
from lightning_gradsim.report import Report
from lightning_gradsim.scores import Similarity
from lightning_gradsim.topk import ScoreSums
from lightning_gradsim.train_pass import make_reader
from lightning_gradsim.versions import installed_versions

Checkpoint = str | Path | Mapping[str, Any]
Target = Literal["true", "predicted"]
MAX_NAMED = 5
"""Keys that a message names."""


def explain(
    model: nn.Module,
    queries: Any,
    train_data: Any,
    checkpoints: Sequence[Checkpoint] | None = None,
    *,
    learning_rates: Sequence[float] | None = None,
    layers: LayerSpec = "last",
    similarity: Similarity = "dot",
    top_k: int = 8,
    damping: float = 1.0,
    target: Target = "true",
    class_pairs: int | None = None,
    loss_fn: nn.Module | LossFunction | None = None,
    adapter: Adapter | None = None,
    max_train_samples: int | None = None,
    reference: ReferenceWay = "stratified",
    memory_budget: int | None = None,
    seed: int = 0,
) -> Report:
    """Which training samples are behind what a trained module makes of some samples.

    Args:
        model: A module or LightningModule, on any device, in any mode; it is left as found. Batches are moved to its
            device; hooks of a LightningModule around that are not called.
        queries: The samples to explain, right or wrong: a map-style dataset or a ``DataLoader`` over one.
        train_data: The training samples, in the same form.
        checkpoints: State dicts, files of them or of a Lightning checkpoint, in the order of training: scores are
            summed over them, cosines averaged. Each is loaded once. By default the weights that the module has.
        learning_rates: Weight of each checkpoint, above 0, by default 1.
        layers: As for ``GradSimCallback``.
        similarity: As for ``GradSimCallback``.
        top_k: Length of the lists of each query.
        damping: As for ``GradSimCallback``.
        target: Whose gradient harmful samples and look-alikes are found for: ``"true"``, the query's own label, or
            ``"predicted"``. Teachers are always for the predicted one. Predictions are those of the last checkpoint.
        class_pairs: As for ``GradSimCallback``; the mistakes are those of the last checkpoint.
        loss_fn: As for ``GradSimCallback``.
        adapter: As for ``GradSimCallback``.
        max_train_samples: As for ``GradSimCallback``.
        reference: As for ``GradSimCallback``; features are those of the weights that the module has.
        memory_budget: As for ``GradSimCallback``. With several checkpoints, sums for every pair must fit, too.
        seed: Seed of random choices.

    Returns:
        The report, its queries in the order of their ids. Suspects are training samples of large gradient in the last
        checkpoint.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range.
        CheckpointError: If a checkpoint cannot be read, does not fit the module, or there are too many sums.
        GradSimError: If data cannot be read, or gradients cannot be exact.

    Example::

        report = explain(model, test_set, train_set, sorted(Path("checkpoints").glob("*.ckpt")), similarity="influence")
        report.queries[0].harmful

    Source:
        Sums over checkpoints, weighted by learning rates: Pruthi et al. (2020), TracIn, arXiv:2002.08484.
    """
    words = {argument: in_words(value) for argument, value in locals().items() if argument != "checkpoints"}
    words["checkpoints"] = in_words(checkpoints and [_name_of(checkpoint) for checkpoint in checkpoints], longest=1000)
    begin = time.perf_counter()
    settings = EngineSettings(layers, similarity, top_k, memory_budget=memory_budget, damping=damping, keep_right=True)
    check_choice("target", target, ("true", "predicted"))
    check_count("class_pairs", class_pairs, optional=True)
    choice = Choice(max_train_samples, reference, seed)
    weights = _weights(checkpoints, learning_rates)
    adapter = adapter or Adapter()
    adapter.bind(model, loss_fn)
    chosen = make_reference(
        train_data,
        adapter,
        choice,
        pass_as="`train_data` to `explain`",
        features=lambda reader: head_features(
            model, adapter, _moved(reader.batches(), model), nullcontext, memory_budget
        ),
    )
    if memory_budget is None:
        settings = replace(settings, memory_budget=default_budget(_device(model)))
    with _keeping_weights(model) if checkpoints else nullcontext():
        selection, shard = _score_all(
            model, adapter, queries, chosen, settings, target, checkpoints or (), weights, class_pairs or 0
        )
    report, _ = make_report([Part(shard, len(chosen.reader))], selection, chosen, settings)
    report = report.with_suspects(report.suspects)
    report = replace(report, notes=(*report.notes, *names_note(report, selection)))
    if len(weights) > 1:
        how = "" if learning_rates is None else ", weighted by learning rates"
        note = f"scores are sums over {len(weights)} checkpoints{how}, look-alikes averages"
        report = replace(report, notes=(*report.notes, note))
    number = "its present weights" if checkpoints is None else f"{len(weights)} checkpoint{'s' * (len(weights) > 1)}"
    return replace(
        report,
        occasion=f"{type(model).__name__}, {number}",
        settings=words,
        versions=installed_versions(),
        seconds=time.perf_counter() - begin,
    )


def _weights(checkpoints: Sequence[Checkpoint] | None, learning_rates: Sequence[float] | None) -> list[float]:
    """Weight of each checkpoint; of the module's own weights, where there is none."""
    if checkpoints is not None and (isinstance(checkpoints, (str, Path, Mapping)) or not len(checkpoints)):
        raise TypeError(f"`checkpoints` is {checkpoints!r:.80}. Expected a list of at least one, or None.")
    number = 1 if checkpoints is None else len(checkpoints)
    if learning_rates is None:
        return [1.0] * number
    if checkpoints is None or len(learning_rates) != number:
        given = "no checkpoints" if checkpoints is None else f"{number} checkpoints"
        raise ValueError(
            f"`learning_rates` has {len(learning_rates)} values for {given}. Expected one a checkpoint, in their order."
        )
    for index, rate in enumerate(learning_rates):
        check_positive(f"learning_rates[{index}]", rate)
    return [float(rate) for rate in learning_rates]


def _score_all(
    model: nn.Module,
    adapter: Adapter,
    queries: Any,
    reference: Reference,
    settings: EngineSettings,
    target: Target,
    checkpoints: Sequence[Checkpoint],
    weights: Sequence[float],
    class_pairs: int,
) -> tuple[QuerySelection, ShardResult]:
    """The queries, and what all checkpoints found together; beside scores, what the last one did."""
    if checkpoints:
        _load(model, checkpoints[-1])
    selection, batches = _choose(model, adapter, queries, target)
    num_queries, has_teachers = len(selection.queries), batches[0].predicted is not None
    pairs = list(selection.pair_counts())[:class_pairs]
    sums, last = None, None
    pair_sums = ScoreSums(reference.reader.ids, settings.top_k) if pairs and len(weights) > 1 else None
    if len(weights) > 1:
        sums = _make_sums(reference, settings, num_queries * (4 if has_teachers else 2), len(pairs))
    for index in reversed(range(len(weights))):  # the last one is there already
        if last is not None:
            _load(model, checkpoints[index])
        if sums is not None:
            share = weights[index] / sum(weights)
            of_scores = share if settings.similarity == "cosine" else weights[index]
            pair = torch.tensor([of_scores, share], dtype=torch.float64).repeat_interleave(num_queries)
            sums.weights = pair.repeat(2 if has_teachers else 1)
        if pair_sums is not None:
            pair_sums.weights = weights[index] / (sum(weights) if settings.similarity == "cosine" else 1)
        mistakes = ((len(each.positions), each.batch, each.predicted) for each in batches)
        curvature_batches = _moved(reference.for_curvature().batches(), model)
        train_batches = _moved(reference.reader.batches(), model)
        shard = score_shard(
            model,
            adapter,
            batches,
            train_batches,
            settings,
            curvature_batches=curvature_batches,
            top=sums,
            mistakes=Mistakes(pairs, mistakes, pair_sums) if pairs else None,
        )
        last = shard if last is None else last
    assert last is not None
    if sums is not None:
        scores, ids = (values.cpu() for values in sums.compute())
        last = replace(last, best_scores=scores, best_ids=ids)
        if pair_sums is not None and last.pairs is not None:
            scores, ids = (values.cpu() for values in pair_sums.compute())
            last = replace(last, pairs=replace(last.pairs, best_scores=scores, best_ids=ids))
    return selection, last


def _choose(
    model: nn.Module, adapter: Adapter, queries: Any, target: Target
) -> tuple[QuerySelection, list[QueryBatch]]:
    """All queries, with what the module predicts for them."""
    reader = make_reader(queries, "the data of `queries`", pass_as="`queries` to `explain`")
    batches, start = [], 0
    selection = QuerySelection(len(reader), "all")
    for ids, batch in _moved(reader.batches(), model):
        with evaluating(model), torch.no_grad():
            step = adapter.step(model, batch)
        selection.update(adapter, batch, step, ids, 0)
        predicted = adapter.predicted_targets(step)
        if predicted is None and target == "predicted":
            raise LossError(
                '`target="predicted"` needs a loss for what is predicted, and there is none for this task or module. '
                'Pass `target="true"`.'
            )
        positions = range(start, start + len(ids))
        batches.append(QueryBatch(positions, batch, predicted, for_prediction=target == "predicted"))
        start += len(ids)
    return selection, batches


def _make_sums(reference: Reference, settings: EngineSettings, num_rows: int, num_pairs: int) -> ScoreSums:
    num_rows += num_pairs  # their sums are others, in the same memory
    number, budget = len(reference.reader), settings.memory_budget
    num_bytes = 4 * num_rows * number
    if budget is not None and num_bytes > budget:
        raise CheckpointError(
            f"Sums over checkpoints of {num_rows:,} rows of scores for {number:,} training samples take {num_bytes:,} "
            f"bytes, more than `memory_budget={budget}`. Pass fewer queries at a time, `max_train_samples=`, or a "
            "larger `memory_budget`."
        )
    return ScoreSums(reference.reader.ids, max(settings.top_k, NUM_WITNESSES))


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _moved(batches: Iterator[tuple[Tensor, Any]], model: nn.Module) -> Iterator[tuple[Tensor, Any]]:
    device = _device(model)
    for ids, batch in batches:
        yield ids, map_tensors(batch, lambda tensor: tensor.to(device))


@contextmanager
def _keeping_weights(model: nn.Module) -> Iterator[None]:
    saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
    try:
        yield
    finally:
        model.load_state_dict(saved)


def _load(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Put the weights of a checkpoint into the module, all or none."""
    name, state = "A checkpoint", checkpoint
    if not isinstance(state, Mapping):
        name = f"Checkpoint `{checkpoint}`"
        try:
            state = torch.load(state, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{name} cannot be read: {str(error).splitlines()[0].rstrip('.')}. Pass a file that `torch.load` reads "
                "with `weights_only=True`, or its state dict."
            ) from error
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{name} holds a {type(state).__name__}. Expected a state dict.")
    own = model.state_dict()
    wrong = {
        "misses": [key for key in own if key not in state],
        "has besides": [key for key in state if key not in own],
        "has in another shape": [key for key in own if key in state and state[key].shape != own[key].shape],
    }
    problems = [f"{what} {_named(keys)}" for what, keys in wrong.items() if keys]
    if problems:
        raise CheckpointError(
            f"{name} does not fit `{type(model).__name__}`: it {', '.join(problems)}. Pass checkpoints of this module."
        )
    model.load_state_dict(state)


def _name_of(checkpoint: Checkpoint) -> str:
    return "a state dict" if isinstance(checkpoint, Mapping) else str(checkpoint)


def _named(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else ""
    return ", ".join(f"`{key}`" for key in keys[:MAX_NAMED]) + more
