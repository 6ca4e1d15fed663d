"""From batches to steps and factors, so many samples at a time that memory suffices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter, Step
from lightning_gradsim.batches import join_batches, take_rows, tensors_of
from lightning_gradsim.errors import BatchFormatError, LabelRangeError
from lightning_gradsim.factors import Factors
from lightning_gradsim.flops import count_flops
from lightning_gradsim.head_shortcut import HeadOutput, HeadShortcut
from lightning_gradsim.memory import GraphMeter, Portions, default_budget
from lightning_gradsim.whole_module import Recompute
from lightning_gradsim.wrapper import PerSampleGradients

ForwardContext = Callable[[], AbstractContextManager[Any]]

PROBE_ROWS = 8
"""Samples of the first two runs, which settle how layers are served and measure what a sample takes."""
UNLIMITED = 2**31
NUM_MEASURED = 2
"""Runs that are measured."""
JOINED_SAMPLES = 512
"""Samples that small batches are joined to."""
JOINED_BYTES = 2**24
"""Size of the largest output of a layer, for so many samples, up to which they are joined: for wider models, calls cost
little beside what they compute, and larger outputs leave the caches (measured: an MLP and a small convolutional network
gain a third and more, a ResNet and a transformer lose a fifth)."""
BATCH_SHARE = 0.5
"""Share of the memory budget for the samples at hand; the rest is for queries, groups and products."""

HELD_SAMPLES = 4096
"""Samples whose losses are computed together where the head is served the short way."""
HELD_ELEMENTS = 2**23
"""Elements of features and logits (32 MiB in float32) that wait for it at most."""
HELD_SHARE = 0.125
"""Share of the memory budget for them."""

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Portion:
    """Some samples of a batch.

    Attributes:
        rows: Which.
        step: Their step.
        factors: Factors of their gradients by layer.
        predicted: The same for predicted labels; ``None`` where they were not asked for, or have no loss.
    """

    rows: slice
    step: Step
    factors: dict[str, Factors]
    predicted: dict[str, Factors] | None


class BatchRunner:
    """Runs batches in portions that fit into memory, and measures on the first ones what fits.

    Args:
        module: The user's module.
        adapter: Reads batches; bound to the module.
        gradients: Watches the module.
        forward_context: The precision context of the run.
        memory_budget: Bytes that the pass may take; ``None`` for a share of the free memory.

    Attributes:
        memory_budget: The same, settled.
        portions: How many samples are worked on together.
        forward_flops: Floating-point operations of a plain forward of one sample; ``None`` before the first batch, and
            where they cannot be counted.
        batch_size: Samples of the largest training batch so far.
        needed_bytes: What one sample takes where that is more than the budget has for it, else ``None``.
    """

    def __init__(
        self,
        module: nn.Module,
        adapter: Adapter,
        gradients: PerSampleGradients,
        forward_context: ForwardContext = nullcontext,
        memory_budget: int | None = None,
    ) -> None:
        self._module = module
        self._adapter = adapter
        self._gradients = gradients
        self._context = forward_context
        self._shortcut = HeadShortcut(module, adapter, gradients)
        self._parameters = list(module.parameters())
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._num_measured = 0
        self._largest = 0.0
        self.memory_budget = default_budget(device) if memory_budget is None else memory_budget
        self.portions = Portions(PROBE_ROWS)
        self.forward_flops: int | None = None
        self.batch_size = 0
        self.needed_bytes: int | None = None

    def run(self, batch: Any, num_samples: int, *, predicted: bool | Tensor = False) -> Iterator[Portion]:
        """Steps and factors of a batch.

        Args:
            batch: The batch, on the module's device.
            num_samples: Number of samples ``B``.
            predicted: Whether gradients for the predicted labels are wanted, too; or the targets to take for those.

        Yields:
            Portions of the batch, in order.

        Raises:
            LabelRangeError: If a label lies outside the classes; the rows count from the batch's first sample.
        """

        def work(rows: slice) -> Portion:
            try:
                return self._run_rows(batch, num_samples, rows, predicted=predicted)
            except LabelRangeError as error:
                raise LabelRangeError(str(error), [rows.start + row for row in error.rows]) from error
            except RuntimeError as error:
                if self._num_measured >= NUM_MEASURED or "saved tensor hooks" not in str(error):
                    raise
            # A forward that takes gradients itself, by `torch.func`, cannot be measured: halving is left.
            self._num_measured, self.portions.size = NUM_MEASURED, UNLIMITED
            return self._run_rows(batch, num_samples, rows, predicted=predicted)

        yield from self._in_portions(batch, num_samples, work)

    def run_all(self, batches: Iterable[tuple[Tensor, Any]]) -> Iterator[tuple[Tensor, Step, dict[str, Factors]]]:
        """Steps and factors of training samples, several batches at a time where the head is all that is asked for.

        Args:
            batches: Sample ids ``[B]`` and batch, on the module's device.

        Yields:
            Sample ids, their step, and factors of their gradients by layer.

        Raises:
            LabelRangeError: If a label lies outside the classes; the samples are named.
        """
        held: list[tuple[Tensor, HeadOutput]] = []
        for ids, batch in self._widened(batches):
            outputs = self._head_outputs(batch, len(ids)) if self._shortcut.is_open else None
            if held and (outputs is None or not self._fits(held, outputs)):
                yield self._finish(held)
                held = []
            if outputs is not None:
                held += zip(ids.split([len(output.logits) for output in outputs]), outputs, strict=True)
                continue
            with _naming(ids):
                for portion in self.run(batch, len(ids)):
                    # Without the graph, which would live on while further batches only run forward.
                    yield ids[portion.rows], portion.step.detached(), portion.factors
                    del portion
        if held:
            yield self._finish(held)

    def _widened(self, batches: Iterable[tuple[Tensor, Any]]) -> Iterator[tuple[Tensor, Any]]:
        """Batches, several as one where a model is so narrow that calls cost more than what they compute."""
        waiting: list[tuple[Tensor, Any]] = []
        for ids, batch in batches:
            self.batch_size = max(self.batch_size, len(ids))
            if waiting and sum(len(part) for part, _ in waiting) + len(ids) > self._joined_rows:
                yield from _joined(waiting)
                waiting = []
            waiting.append((ids, batch))
            if 2 * len(ids) > self._joined_rows:
                yield from _joined(waiting)
                waiting = []
        yield from _joined(waiting)

    @property
    def _joined_rows(self) -> int:
        if self._num_measured < NUM_MEASURED or JOINED_SAMPLES * self._largest > JOINED_BYTES:
            return 0
        return min(JOINED_SAMPLES, self.portions.size)

    def _head_outputs(self, batch: Any, num_samples: int) -> list[HeadOutput] | None:
        def work(rows: slice) -> HeadOutput | None:
            number = rows.stop - rows.start
            part = batch if number == num_samples else take_rows(batch, rows, num_samples)
            with self._context():
                return self._shortcut.forward(part, number)

        outputs: list[HeadOutput] = []
        for output in self._in_portions(batch, num_samples, work):
            if output is None:
                return None
            outputs.append(output)
        return outputs

    def _fits(self, held: Sequence[tuple[Tensor, HeadOutput]], more: Sequence[HeadOutput]) -> bool:
        """Whether outputs may be joined with those that wait."""
        form, waiting = held[0][1].form, [output for _, output in held]
        num_elements = sum(output.num_elements for output in (*waiting, *more))
        num_samples = sum(len(output.logits) for output in (*waiting, *more))
        return (
            all(output.form == form for output in more)
            and num_samples <= HELD_SAMPLES
            and num_elements <= min(HELD_ELEMENTS, HELD_SHARE * self.memory_budget / 4)
        )

    def _finish(self, held: Sequence[tuple[Tensor, HeadOutput]]) -> tuple[Tensor, Step, dict[str, Factors]]:
        ids = torch.cat([part for part, _ in held])
        with _naming(ids):
            return (ids, *self._shortcut.finish([output for _, output in held]))

    def _in_portions(self, batch: Any, num_samples: int, work: Callable[[slice], Result]) -> Iterator[Result]:
        if num_samples <= self.portions.size or _can_be_cut(batch, num_samples):
            yield from self.portions.split(num_samples, work)
        else:
            yield work(slice(0, num_samples))

    def _run_rows(self, batch: Any, num_samples: int, rows: slice, *, predicted: bool | Tensor) -> Portion:
        number = rows.stop - rows.start
        part = batch if number == num_samples else take_rows(batch, rows, num_samples)
        if self._num_measured == 0:
            self.forward_flops = self._count_flops(part, number)
        meter = GraphMeter() if self._num_measured < NUM_MEASURED else None
        with self._gradients.recording(), self._context():
            # The batch exists anyway; where it is a part of a larger one, its storage would count as a whole.
            with nullcontext() if meter is None else meter.watching(*self._parameters, *tensors_of(part)):
                step = self._adapter.step(self._module, part)
            if isinstance(predicted, Tensor):
                targets: Tensor | None = predicted[rows]
            else:
                targets = self._adapter.predicted_targets(step) if predicted else None
            relabelled = None if targets is None else self._adapter.losses(step.logits, targets)
        short = self._shortcut.serves(step)
        again = self._recompute(part, None)
        factors = self._gradients.factors(step.losses, retain=relabelled is not None, recompute=again)
        if meter is not None:
            self._measure(meter, factors, number)
        if short:
            self._shortcut.compare(step, factors)
        of_predictions = None
        if relabelled is not None:
            of_predictions = self._gradients.factors(relabelled, recompute=self._recompute(part, targets))
        return Portion(rows, step, factors, of_predictions)

    def _recompute(self, batch: Any, targets: Tensor | None) -> Recompute:
        def losses(pair: tuple[Any, Tensor | None]) -> Tensor:
            return self._adapter.sample_losses(self._module, *pair)

        return Recompute(losses, (batch, targets), self._context)

    def _count_flops(self, batch: Any, number: int) -> int | None:
        try:
            with torch.no_grad(), self._context():
                flops = count_flops(lambda: self._adapter.sample_losses(self._module, batch))
        except Exception:  # only the plan's last column depends on it; what is wrong with the batch shows in its step
            return None
        return flops // max(1, number)

    def _measure(self, meter: GraphMeter, factors: dict[str, Factors], number: int) -> None:
        """Learn from the first run, which keeps its whole graph, and from the second, which is like all others."""
        self._num_measured += 1
        number = max(1, number)
        if self._num_measured == 1:
            self._largest = meter.largest / number
            return
        # What a layer puts out is there twice while the next one works, without being kept.
        elements = sum(part.num_elements for part in factors.values()) / number
        per_sample = meter.num_bytes / number + 2 * self._largest + 2 * 4 * elements
        fitting = int(BATCH_SHARE * self.memory_budget / max(1.0, per_sample))
        self.needed_bytes = None if fitting else int(per_sample / BATCH_SHARE)
        if not self.portions.was_halved:
            self.portions.size = max(1, fitting)


def _joined(waiting: Sequence[tuple[Tensor, Any]]) -> Iterator[tuple[Tensor, Any]]:
    if len(waiting) > 1:
        batch = join_batches([part for _, part in waiting], [len(ids) for ids, _ in waiting])
        if batch is not None:
            yield torch.cat([ids for ids, _ in waiting]), batch
            return
    yield from waiting


def _can_be_cut(batch: Any, num_samples: int) -> bool:
    try:
        take_rows(batch, slice(0, 1), num_samples)
    except BatchFormatError:
        return False
    return True


@contextmanager
def _naming(ids: Tensor) -> Iterator[None]:
    """Name the samples whose labels lie outside the classes, by their ids."""
    try:
        yield
    except LabelRangeError as error:
        named = ids[list(error.rows)].tolist() if error.rows else ids.tolist()
        raise LabelRangeError(f"Training samples {named[:10]}: {error}", error.rows) from error
