"""Features and logits of the head, taken from the user's own training steps before each update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.errors import BatchFormatError, LossError
from lightning_gradsim.guard import is_compiled
from lightning_gradsim.head_gradients import output_grads
from lightning_gradsim.head_search import HeadSearch, Seen, has_row_a_sample, take_copies
from lightning_gradsim.tapped_samples import TappedBlock
from lightning_gradsim.tasks import Task

MAX_WAITING_STEPS = 128
"""Steps whose outputs are looked at together: calls for a few dozen samples cost more than what they compute."""
MAX_WAITING_ELEMENTS = 2**20
"""Elements of features and logits that wait for it at most."""
MAX_MISSES = 8
"""Steps in a row that show nothing before the tap is closed."""
MAX_USELESS = 32
"""Steps in a row of which nothing can be taken before it is."""
MIN_COSINE = 0.99
"""Cosine of a step's gradient by the logits with ours, above which it has trained on its batch's own labels."""
LOSS_TOLERANCE = 0.01
"""Relative difference of losses below which it has, where that gradient is not seen. Alone it would not do: before the
model has learned anything, all labels have about the same loss."""

SOFT = "the labels are soft"
MIXED = "the step trained on something else than the batch's own labels (mixed inputs or labels, another loss?)"
NOT_FINITE = "features or logits are not finite in half precision"
UNSEEN = "the head was not called with the samples of the batch"


@dataclass(frozen=True, eq=False)
class _Visit:
    """One step: ``B`` samples before the update."""

    ids: Tensor
    step: int
    features: Tensor  # [B, i], float16
    logits: Tensor  # [B, o]
    targets: Tensor
    loss: Tensor | None
    grads: Sequence[Tensor]  # by the logits, [B, o], if there was a backward


class Tap:
    """Watches the head in training steps, through a hook that is there for the time of a step only.

    The head is the last called layer with trainable parameters; the tap is open to models where it is a ``Linear``
    whose output, one row a sample, is the logits. It is found on the first step. Of several calls in a step the first
    one with gradients counts, so that neither recomputed nor further forwards matter.

    Nothing is drawn at random, and nothing stays on the user's objects. Where a step copies or saves its module, the
    hook in the copy is one of the standard library that does nothing.

    Args:
        adapter: Reads batches; bound to the module.
        consume: Takes what was tapped, some steps at a time and in order.

    Attributes:
        reason: Why there is no tap, in words; ``None`` while there is one.
        left_out: Numbers of samples that were not taken, by reason in words.
        num_tapped: Number of samples that were.
        is_unchecked: Whether some steps returned no loss, so that mixed labels would go unnoticed.
    """

    def __init__(self, adapter: Adapter, consume: Callable[[TappedBlock], None]) -> None:
        self.reason: str | None = None
        self.left_out: Counter[str] = Counter()
        self.num_tapped = 0
        self.is_unchecked = False
        self._adapter = adapter
        self._consume = consume
        self._head: tuple[str, nn.Linear] | None = None
        self._search: HeadSearch | None = None
        self._handle: RemovableHandle | None = None
        self._batch: tuple[Tensor, Tensor, int] | None = None
        self._seen: Seen | None = None
        self._seen_with_grad = False
        self._waiting: list[_Visit] = []
        self._num_misses = self._num_useless = self._num_elements = 0

    @property
    def head(self) -> tuple[str, nn.Linear] | None:
        """Name of the head and the layer; ``None`` before it is found."""
        return self._head

    def begin_step(self, module: nn.Module, batch: Any, ids: Tensor, step: int) -> None:
        """Watch the head until ``end_step``.

        Args:
            module: The user's module.
            batch: The training batch.
            ids: Its sample ids, int64 ``[B]`` on the CPU.
            step: Number of updates so far.
        """
        self.remove()
        if self.reason is not None:
            return
        try:
            _, targets = self._adapter.split(batch)
        except BatchFormatError as error:
            self._close(str(error))
            return
        if len(targets) != len(ids):
            self._close(f"a batch holds {len(ids)} samples and {len(targets)} targets")
            return
        if self._head is None:
            if is_compiled(module):
                self._close("the module is compiled, and a hook would change what the compiler fuses")
                return
            self._search = HeadSearch(module, len(ids))
            self._handle = register_module_forward_hook(self._search.see)
        else:
            self._handle = self._head[1].register_forward_hook(_HeadHook(self._see))
        self._batch = ids, targets, step

    def end_step(self, returned: Tensor | None) -> None:
        """Take in what the step has shown.

        Args:
            returned: The loss that the step returned, before any division for accumulation; ``None`` if it returned
                none.
        """
        if self._batch is None:
            return
        (ids, targets, step), search = self._batch, self._search
        if search is not None:
            self._head = search.find(lambda logits: self._explains(logits, targets, returned))
            self._seen = search.seen
        seen = self._seen
        self.remove()
        if seen is None:
            self._miss(search, len(ids))
            return
        self._num_misses = 0
        features, logits, grads = seen
        loss = None if returned is None else returned.detach()
        # A step may write into its batch later on.
        self._waiting.append(_Visit(ids, step, features, logits, targets.detach().clone(), loss, grads))
        self._num_elements += features.numel() + logits.numel()
        is_first = self.num_tapped == 0
        if is_first or len(self._waiting) >= MAX_WAITING_STEPS or self._num_elements >= MAX_WAITING_ELEMENTS:
            self.flush()

    def flush(self) -> None:
        """Hand on what waits."""
        visits, self._waiting = self._waiting, []
        self._num_elements = 0
        for group in _alike(visits):
            self._hand_on(group)

    def remove(self) -> None:
        """Remove the hook; a step under way is forgotten."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._search = self._batch = self._seen = None
        self._seen_with_grad = False

    def _see(self, args: Sequence[Any], output: Any) -> None:
        if self._batch is None or self._seen_with_grad or not has_row_a_sample(args, output, len(self._batch[0])):
            return
        if self._seen is None or output.requires_grad:
            self._seen = take_copies(args[0], output)
            self._seen_with_grad = output.requires_grad

    def _miss(self, search: HeadSearch | None, num_samples: int) -> None:
        self.left_out[UNSEEN] += num_samples
        self._num_misses += 1
        self._head = None  # another layer may have taken its place
        problem = None if search is None else search.problem
        if problem is not None or self._num_misses >= MAX_MISSES:
            self._close(problem or UNSEEN)

    def _close(self, reason: str) -> None:
        self.remove()
        self.reason = reason

    def _explains(self, logits: Tensor, targets: Tensor, returned: Tensor | None) -> bool:
        """Whether the adapter finds the loss that the step returned."""
        if returned is None:
            return False
        try:
            with torch.no_grad():
                ours = self._adapter.batch_loss(self._adapter.step_from_logits(logits, targets))
        except (LossError, ValueError, RuntimeError):  # logits of something else
            return False
        return bool(_agree(ours, returned.detach()))

    def _hand_on(self, visits: Sequence[_Visit]) -> None:
        logits, targets = torch.cat([v.logits for v in visits]), torch.cat([v.targets for v in visits])
        sizes = torch.tensor([len(visit.ids) for visit in visits])
        visit_of = torch.arange(len(visits)).repeat_interleave(sizes)
        try:
            own = self._trained_on_own_labels(visits, logits, targets, visit_of)[visit_of]
        except LossError as error:
            self._close(str(error))
            return
        features = torch.cat([visit.features for visit in visits]).cpu()
        logits, targets = logits.cpu(), targets.cpu()
        finite = features.isfinite().all(1) & logits.half().isfinite().all(1)
        hard = _are_hard(targets) if self._are_labels(logits, targets) else torch.ones_like(finite)
        rows = hard & own & finite
        number = int(rows.sum())
        self.num_tapped += number
        if number < len(rows):
            for reason, others in ((SOFT, ~hard), (MIXED, hard & ~own), (NOT_FINITE, hard & own & ~finite)):
                self.left_out += Counter({reason: int(others.sum())})
        self._num_useless = 0 if number else self._num_useless + len(visits)
        if self._num_useless >= MAX_USELESS:
            self._close(max((SOFT, MIXED, NOT_FINITE), key=lambda reason: self.left_out[reason]))
        if not number:
            return
        steps = torch.tensor([visit.step for visit in visits])[visit_of]
        block = TappedBlock(torch.cat([visit.ids for visit in visits]), features, logits, targets, steps, features)
        self._consume(block if number == len(rows) else block.rows(rows))

    def _are_labels(self, logits: Tensor, targets: Tensor) -> bool:
        """Whether targets are a probability for each output, and no value of a regression."""
        if targets.ndim != 2 or targets.shape != logits.shape:
            return False
        is_single = targets.shape[1] == 1
        return not is_single or self._adapter.step_from_logits(logits[:1], targets[:1]).task is not Task.REGRESSION

    def _trained_on_own_labels(
        self, visits: Sequence[_Visit], logits: Tensor, targets: Tensor, visit_of: Tensor
    ) -> Tensor:
        """Which visits, bool ``[visits]`` on the CPU."""
        ours = output_grads(self._adapter, logits, targets)
        missing = logits.new_zeros(1, logits.shape[1])
        theirs = torch.cat([v.grads[0] if v.grads else missing.expand(len(v.ids), -1) for v in visits])
        products = torch.stack([(ours * theirs).sum(1), ours.square().sum(1), theirs.square().sum(1)], dim=1).cpu()
        dots, squares, other_squares = products.new_zeros(len(visits), 3).index_add_(0, visit_of, products).T
        # Not a number where there is no gradient, or one that vanishes or overflows.
        cosines = dots * (squares * other_squares).rsqrt()
        is_own: Tensor = cosines > MIN_COSINE
        for index in (~cosines.isfinite()).nonzero().flatten().tolist():
            visit = visits[index]
            self.is_unchecked |= visit.loss is None
            is_own[index] = visit.loss is None or self._explains(visit.logits, visit.targets, visit.loss)
        return is_own


class _HeadHook:
    """A forward hook, of which copies and pickles hold nothing of ours."""

    def __init__(self, see: Callable[[Sequence[Any], Any], None]) -> None:
        self._see = see

    def __call__(self, layer: nn.Module, args: Sequence[Any], output: Any) -> None:
        self._see(args, output)

    def __reduce__(self) -> tuple[Any, ...]:
        # A callable that takes whatever a hook takes, and returns `None`.
        return getattr, (nullcontext(), "__exit__")


def _agree(ours: Tensor, theirs: Tensor) -> Tensor:
    theirs = theirs.to(ours.dtype)
    return (ours - theirs).abs() <= LOSS_TOLERANCE * torch.maximum(ours.abs(), theirs.abs())


def _are_hard(targets: Tensor) -> Tensor:
    return ((targets == 0) | (targets == 1)).all(1)


def _alike(visits: Sequence[_Visit]) -> list[list[_Visit]]:
    """Runs of visits that can be joined."""
    groups: list[list[_Visit]] = []
    form: Any = None
    for visit in visits:
        parts = (visit.features, visit.logits, visit.targets)
        own = [(part.shape[1:], part.dtype, part.device) for part in parts], visit.loss is None
        if own != form:
            groups.append([])
            form = own
        groups[-1].append(visit)
    return groups
