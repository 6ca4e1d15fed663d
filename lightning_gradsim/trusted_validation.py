"""Suspects by a validation set whose labels are right: a copy of the model learns from it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.errors import TrainingDataError
from lightning_gradsim.explanation import NOISY_VALIDATION
from lightning_gradsim.guard import preserving
from lightning_gradsim.mislabel import DEFAULT_SCORE, add_trusted, standardise, trusted_scores
from lightning_gradsim.reading import RunContext
from lightning_gradsim.records import QueryReport
from lightning_gradsim.suspects import TRUSTED, SuspectTable
from lightning_gradsim.tasks import Task
from lightning_gradsim.train_pass import WAY_OUT, SampleReader, make_reader

VALIDATION_BATCH = 32
"""Samples of a step of the copy: what was measured."""
SMALLEST_PROBABILITY = 1e-7
"""Where models give probabilities, those that a logit is finite for."""


def validation_readers(loaders: Sequence[Any]) -> list[SampleReader]:
    """Readers of validation sets that a copy can learn from.

    Args:
        loaders: The validation loaders.

    Returns:
        The readers.

    Raises:
        TrainingDataError: If one of them cannot be read by index.
    """
    try:
        return [make_reader(loader, "the validation data", VALIDATION_BATCH) for loader in loaders]
    except TrainingDataError as error:
        raise TrainingDataError(
            f"`trusted_val=True` reads the validation data anew. {str(error).removesuffix(WAY_OUT)}Give the trainer "
            "`DataLoader`s over map-style datasets for validation, or leave out `trusted_val`."
        ) from error


def fine_tune(
    module: nn.Module,
    adapter: Adapter,
    train: SampleReader,
    validation: Sequence[SampleReader],
    num_samples: int,
    task: Task,
    run: RunContext,
    seed: int,
) -> Tensor:
    """What the margins of the training samples become when a copy of the model learns the validation labels.

    Args:
        module: The user's module; it is left as found.
        adapter: Reads batches; bound to the module.
        train: Reads the training samples.
        validation: Read the validation sets.
        num_samples: One more than the largest id of a training sample.
        task: Kind of task.
        run: How the run treats batches.
        seed: Seed of the order in which the validation samples are learned.

    Returns:
        F of ``mislabel.trusted_scores``, float32 ``[N]``; NaN for samples that were not read.
    """
    own = copy.deepcopy(adapter)  # a loss may keep a state
    generator = torch.Generator().manual_seed(seed)
    shuffled = [reader.choose(torch.randperm(len(reader), generator=generator)) for reader in validation]

    def forward(student: nn.Module, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        with run.forward_context():
            step = own.step(student, batch)
        logits = torch.logit(step.logits, SMALLEST_PROBABILITY) if step.are_probabilities else step.logits
        return logits, step.targets, step.losses

    def validation_batches() -> Iterable[Any]:
        return (run.move(batch) for reader in shuffled for _, batch in reader.batches())

    def train_batches() -> Iterable[tuple[Tensor, Any]]:
        batches = run.show_progress(train.batches(), -(-len(train) // train.batch_size), "trusted validation")
        return ((ids, run.move(batch)) for ids, batch in batches)

    with preserving(module):
        return trusted_scores(module, forward, validation_batches, train_batches, num_samples, task)


def with_trusted(table: SuspectTable, trusted: Tensor) -> SuspectTable:
    """Suspects ranked by what a trusted validation set says, too.

    Args:
        table: The suspects.
        trusted: F by sample id, ``[N]``.

    Returns:
        The table by ``S + 2 z(F)``, where ``S`` is the default score, or another one standardised.
    """
    order = table.sample_ids.argsort()  # ties by the smaller id
    scores, own = table.scores[order], trusted[table.sample_ids[order]]
    scores = add_trusted(scores if table.score_name == DEFAULT_SCORE else standardise(scores), own)
    ranking = scores.argsort(descending=True, stable=True)
    rows = order[ranking]
    columns: dict[str, Any] = {name: value[rows] for name, value in vars(table).items() if isinstance(value, Tensor)}
    parts = {name: values[rows] for name, values in table.parts.items()}
    columns |= {"scores": scores[ranking], "upper_estimate": None}  # that was one of other scores
    name = f"{table.score_name}+{TRUSTED}"
    return replace(table, **columns, parts={**parts, TRUSTED: own[ranking]}, score_name=name)


def trusted_notes(queries: Sequence[QueryReport]) -> list[str]:
    """What is to be said of a ranking that counts on right validation labels.

    Args:
        queries: The studied validation mistakes.

    Returns:
        Sentences.
    """
    notes = ["suspects are ranked with the help of the validation labels, which `trusted_val=True` says are right"]
    doubtful = sum(query.label_looks_wrong for query in queries)
    if len(queries) > 2 and doubtful > NOISY_VALIDATION * len(queries):
        notes.append(
            f"`trusted_val=True` is doubtful here: the label of {doubtful} of {len(queries)} studied validation "
            "mistakes may be wrong, and wrong validation labels mislead the ranking. Leave it out, or correct them"
        )
    return notes
