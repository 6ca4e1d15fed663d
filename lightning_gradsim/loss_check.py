"""Is our loss the user's loss? Compared on the first training steps, from the logits of those very steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_gradsim.adapter import Adapter, find_logits

NUM_STEPS = 3
TOLERANCE = 0.01
UNCHECKED = "whether the loss compared is the loss trained with could not be checked"


class LossCheck:
    """Watches the outputs of a few training steps and compares the adapter's loss with what the step returned.

    The outputs are those of the module itself where ``training_step`` calls it, else of the child it called last.

    Attributes:
        difference: How the two losses differ, as a sentence; ``None`` while they agree.
        gap: Why they could not be compared, as a sentence; ``None`` if they could.
    """

    def __init__(self) -> None:
        self.difference: str | None = None
        self.gap: str | None = None
        self._num_left = NUM_STEPS
        self._handles: list[RemovableHandle] = []
        self._output: Any = None
        self._child_output: Any = None

    @property
    def is_open(self) -> bool:
        """Whether more steps are to be compared."""
        return self._num_left > 0 and self.difference is None

    @property
    def is_watching(self) -> bool:
        """Whether a step is being watched."""
        return bool(self._handles)

    def begin_step(self, module: nn.Module) -> None:
        """Watch the module's outputs until ``end_step``.

        Args:
            module: The user's module.
        """
        self.remove()
        self._handles.append(module.register_forward_hook(self._keep_output))
        for child in module.children():
            if not isinstance(child, torch.jit.ScriptModule):  # takes no hooks
                self._handles.append(child.register_forward_hook(self._keep_child_output))

    def end_step(self, adapter: Adapter, batch: Any, returned: Tensor | None) -> None:
        """Compare the losses of the step that just ended.

        Args:
            adapter: The adapter, bound to the module.
            batch: The training batch.
            returned: The loss that ``training_step`` returned, before any division for accumulation; ``None`` if it
                returned none.
        """
        output, child_output = self._output, self._child_output
        self.remove()
        self._num_left -= 1
        if returned is None or (output is None and child_output is None):
            self.gap = f"{UNCHECKED}: the training step showed no outputs or returned no loss"
            return
        logits = find_logits(child_output if output is None else output)
        try:
            _, targets = adapter.split(batch)
            if logits is None or logits.shape[:1] != targets.shape[:1]:
                self.gap = f"{UNCHECKED}: the outputs of the training step do not fit its targets"
                return
            with torch.no_grad():
                ours = float(adapter.batch_loss(adapter.step_from_logits(logits.detach(), targets)))
        except Exception as error:  # training batches need not be readable: `train_data` may take their place
            self.gap = f"{UNCHECKED}: {type(error).__name__}: {error}"
            return
        self.gap = None
        theirs = float(returned.detach())
        difference = abs(ours - theirs)
        if difference > TOLERANCE * max(abs(ours), abs(theirs)):
            self.difference = (
                f"`training_step` returned a loss of {theirs:.4g}, but {adapter.loss_source} gives {ours:.4g} for the "
                "same outputs. The gradients compared are those of the latter. Pass the loss of a sample as "
                "`loss_fn=`, or define `gradsim_step(batch)`"
            )

    def remove(self) -> None:
        """Remove the hooks and forget the outputs."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._output = self._child_output = None

    def _keep_output(self, _: nn.Module, __: Any, output: Any) -> None:
        self._output = output

    def _keep_child_output(self, _: nn.Module, __: Any, output: Any) -> None:
        # Criteria and metrics are children too; their outputs have no batch dimension.
        logits = find_logits(output)
        if logits is not None and logits.ndim and logits.is_floating_point():
            self._child_output = output
