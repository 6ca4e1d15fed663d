"""Is our loss the user's loss? Compared on the first training steps, from the logits of those very steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from lightning_gradsim.adapter import Adapter, find_logits
from lightning_gradsim.guard import is_compiled

NUM_STEPS = 3
TOLERANCE = 0.01
UNCHECKED = "whether the loss compared is the loss trained with could not be checked"


class LossCheck:
    """Watches the outputs of a few training steps and compares the adapter's loss with what the step returned.

    The outputs are those of the module itself where ``training_step`` calls it, else of the child it called last. They
    are seen by a hook on all modules, not on this one: a step may copy or save its module, and would take ours along.

    Attributes:
        difference: How the two losses differ, as a sentence; ``None`` while they agree.
        gap: Why they could not be compared, as a sentence; ``None`` if they could.
    """

    def __init__(self) -> None:
        self.difference: str | None = None
        self.gap: str | None = None
        self._num_left = NUM_STEPS
        self._handle: RemovableHandle | None = None
        self._module: nn.Module | None = None
        self._children: list[nn.Module] = []
        self._outputs: list[Any] = []  # the last two
        self._is_wrapped = False
        self._child_output: Any = None
        self._has_own_hooks = False

    @property
    def is_open(self) -> bool:
        """Whether more steps are to be compared."""
        return self._num_left > 0 and self.difference is None

    @property
    def is_watching(self) -> bool:
        """Whether a step is being watched."""
        return self._handle is not None

    def may_watch(self, module: nn.Module) -> bool:
        """Whether steps of a module can be watched; if not, the check is given up.

        Args:
            module: The user's module.

        Returns:
            The answer.
        """
        # A hook inside a compiled module would change what the compiler fuses, and with it the training.
        if is_compiled(module):
            self.give_up("the module is compiled")
        elif hasattr(module, "gradsim_step"):
            self.give_up("the module has a `gradsim_step` of its own")
        else:
            return True
        return False

    def begin_step(self, module: nn.Module, *, is_wrapped: bool = False) -> None:
        """Watch the module's outputs until ``end_step``.

        Args:
            module: The user's module.
            is_wrapped: Whether the step itself is a call of the module, as under ``DistributedDataParallel``.
        """
        self.remove()
        self._is_wrapped = is_wrapped
        self._module, self._children = module, list(module.children())
        self._handle = register_module_forward_hook(self._keep_output)

    def end_step(self, adapter: Adapter, batch: Any, returned: Tensor | None) -> None:
        """Compare the losses of the step that just ended.

        Args:
            adapter: The adapter, bound to the module.
            batch: The training batch.
            returned: The loss that ``training_step`` returned, before any division for accumulation; ``None`` if it
                returned none.
        """
        outputs = self._outputs[:-1] if self._is_wrapped else self._outputs  # the last to end is the step
        output = outputs[-1] if outputs else None
        child_output, has_own_hooks = self._child_output, self._has_own_hooks
        self.remove()
        self._num_left -= 1
        if returned is None or (output is None and child_output is None):
            self.gap = f"{UNCHECKED}: the training step showed no outputs or returned no loss"
            return
        if has_own_hooks:
            self.gap = f"{UNCHECKED}: the module has forward hooks, which may change its outputs"
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

    def give_up(self, why: str) -> None:
        """Watch no further steps.

        Args:
            why: What makes it impossible.
        """
        self.remove()
        self._num_left, self.gap = 0, f"{UNCHECKED}: {why}"

    def remove(self) -> None:
        """Remove the hooks and forget the outputs."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._module = None
        self._children = []
        self._outputs, self._child_output = [], None
        self._has_own_hooks = False

    def _keep_output(self, module: nn.Module, _: Any, output: Any) -> None:
        if module is self._module:
            self._outputs, self._has_own_hooks = [*self._outputs[-1:], output], bool(module._forward_hooks)
        elif not self._outputs and any(module is child for child in self._children):
            # Criteria and metrics are children too; their outputs have no batch dimension.
            logits = find_logits(output)
            if logits is not None and logits.ndim and logits.is_floating_point():
                self._child_output, self._has_own_hooks = output, bool(module._forward_hooks)
