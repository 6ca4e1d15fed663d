"""From a first batch to the plan of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any

from torch import nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.batch_runner import BatchRunner, ForwardContext
from lightning_gradsim.factors import Factors, IndexedFactors, OuterFactors, count_inputs, is_flat, product_cost
from lightning_gradsim.guard import evaluating
from lightning_gradsim.layer_selection import LayerSpec, trainable_layers
from lightning_gradsim.losses import LossFunction
from lightning_gradsim.plan_record import LayerPlan, Plan
from lightning_gradsim.query_side import QuerySide, gradient_bytes
from lightning_gradsim.scores import Similarity
from lightning_gradsim.wrapper import PerSampleGradients


def plan(
    module: nn.Module,
    batch: Any,
    layers: LayerSpec = "last",
    *,
    num_queries: int = 32,
    similarity: Similarity = "dot",
    teachers: bool = True,
    memory_budget: int | None = None,
    loss_fn: nn.Module | LossFunction | None = None,
    adapter: Adapter | None = None,
    forward_context: ForwardContext = nullcontext,
    show: bool = True,
) -> Plan:
    """What a pass over such batches would compute, and what it would cost; runs on a few samples of the batch.

    Args:
        module: A module in whatever mode; it is left as found.
        batch: A training batch, on the module's device.
        layers: The choice of layers.
        num_queries: Queries of a pass.
        similarity: As for ``GradSimCallback``; for ``"influence"``, preconditioned gradients are compared, too. A pass
            leaves out plain ones for predicted labels where the given label is not in doubt.
        teachers: Whether gradients for the queries' predicted labels are compared, too.
        memory_budget: Bytes that a pass may take; ``None`` for a share of the free memory.
        loss_fn: As for ``GradSimCallback``.
        adapter: As for ``GradSimCallback``.
        forward_context: The precision context of the run, for instance ``lambda: torch.autocast("cuda")``.
        show: Whether the table is printed.

    Returns:
        The plan; ``print`` shows its table.

    Raises:
        GradSimError: If the gradients of the chosen layers cannot be exact, or the batch cannot be read.

    Example::

        plan(model, next(iter(train_loader)), layers="all")
    """
    adapter = adapter or Adapter()
    adapter.bind(module, loss_fn)
    with evaluating(module), PerSampleGradients(module, layers) as gradients:
        with forward_context():
            number = len(adapter.step(module, batch).losses)
        runner = BatchRunner(module, adapter, gradients, forward_context, memory_budget)
        # The first portion settles, the second measures.
        *_, last = islice(runner.run(batch, number), 2)
        runner.batch_size = number
        num_gradients = num_queries * (1 + teachers) * (2 if similarity == "influence" else 1)
        result = make_plan(module, gradients, runner, last.factors, num_gradients, labels_per_query=1 + teachers)
    if show:
        print(result)  # noqa: T201 -- it is what was asked for
    return result


def make_plan(
    module: nn.Module,
    gradients: PerSampleGradients,
    runner: BatchRunner,
    train: Mapping[str, Factors],
    num_query_gradients: int,
    queries: QuerySide | None = None,
    *,
    labels_per_query: int = 1,
) -> Plan:
    """The plan of a pass whose first batch has run.

    Args:
        module: The user's module.
        gradients: Watches it; its layers are settled.
        runner: Has run the batch.
        train: Factors of some training samples, at least one.
        num_query_gradients: Gradients that each training sample is compared with.
        queries: The queries, where they are known; else they are taken to be as large as the training samples.
        labels_per_query: Where they are not known: how many of their gradients share inputs.

    Returns:
        The plan.
    """
    layers, steps, names = trainable_layers(module), gradients.steps, gradients.names_by_layer()
    plans = []
    for name, factors in train.items():
        of_queries = None if queries is None else queries.factors.get(name)
        # Preconditioned queries may be materialised where their training samples are not.
        materialised = of_queries is not None and is_flat(of_queries) and not is_flat(factors)
        positions = None if materialised else (of_queries or factors).num_positions
        if of_queries is not None:
            num_inputs, query_bytes = count_inputs(of_queries), _num_bytes(of_queries)
        else:
            num_inputs, query_bytes = _of_queries_like(factors, num_query_gradients, labels_per_query)
        kind, flops = product_cost(factors, num_query_gradients, num_inputs, positions)
        if kind == "materialise" and not materialised and (queries is None or name in queries.kept):
            query_bytes += gradient_bytes(factors) // factors.num_samples * num_query_gradients
        plans.append(
            LayerPlan(
                name=", ".join(names[name]),
                kind=type(layers[name]).__name__,
                num_parameters=factors.num_parameters,
                step=steps[name],
                product=kind,
                flops=flops // factors.num_samples,
                num_bytes=_num_bytes(factors) // factors.num_samples,
                query_bytes=query_bytes,
                reason=_first_sentence(gradients.reasons.get(name, "")),
            )
        )
    rows = min(runner.portions.size, runner.batch_size)
    return Plan(tuple(plans), num_query_gradients, runner.batch_size, rows, runner.memory_budget, runner.forward_flops)


def _of_queries_like(train: Factors, num_gradients: int, labels_per_query: int) -> tuple[int, int]:
    """Inputs, and bytes of the factors, of queries that are as large as some training samples."""
    num_bytes = _num_bytes(train) // train.num_samples * num_gradients
    if not isinstance(train, OuterFactors) or train.activations is None:
        return num_gradients, num_bytes
    num_inputs = num_gradients // labels_per_query
    return num_inputs, num_bytes - (num_gradients - num_inputs) * train.activations.nbytes // train.num_samples


def _num_bytes(factors: Factors) -> int:
    """Bytes of the factors of all samples."""
    size = factors.num_elements * factors.output_grads.element_size()
    if isinstance(factors, IndexedFactors):
        size += factors.indices.numel() * (factors.indices.element_size() - factors.output_grads.element_size())
    return size


def _first_sentence(error: object) -> str:
    """What is wrong, without what to do: that is done already."""
    sentence, end, _ = str(error).partition(". ")
    return sentence + end.rstrip()
