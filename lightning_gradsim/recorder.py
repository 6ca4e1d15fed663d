"""Hooks that record how a forward calls layers, and where their outputs sit in the graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_gradsim.batches import map_tensors, tensors_of
from lightning_gradsim.guard import without_fast_attention
from lightning_gradsim.precision import find_scales, largest_by_sample


class Call:
    """One call of a layer: its inputs, and where its output sits in the graph.

    Attributes:
        activations: The first tensor among the inputs.
        inputs: All of them, as positional and keyword arguments, where the call may run again; else ``None``.
        autocast: Dtype of autocast during the call; ``None`` without it.
        edge: The output's place in the graph.
        output_shape: Its shape.
        output_dtype: Its dtype.
    """

    __slots__ = ("activations", "autocast", "edge", "inputs", "output_dtype", "output_shape", "version")

    def __init__(self, activations: Tensor, output: Tensor, inputs: Any) -> None:
        self.activations = activations.detach()
        self.version = activations._version
        self.inputs = None if inputs is None else map_tensors(inputs, Tensor.detach)
        device = activations.device.type
        self.autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self.output_shape = output.shape
        self.output_dtype = output.dtype
        # Taken inside the hook: an in-place activation that follows would move the saved output's place in the graph.
        # Linear returns a view for inputs of rank 3 and more, and an in-place operation takes the node of a view out of
        # the graph, but not that of its base.
        self.edge: GradientEdge = get_gradient_edge(output if output._base is None else output._base)


class Output:
    """What a layer has put out in a forward without gradients.

    Attributes:
        activations: Its only input, or an empty tensor if it had others.
        output: The very tensor that it returned.
    """

    __slots__ = ("_versions", "activations", "output")

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        is_plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and isinstance(output, Tensor)
        self.activations: Tensor = args[0] if is_plain else torch.empty(0)
        self.output: Tensor = output if is_plain else torch.empty(0)
        self._versions = (self.activations._version, self.output._version)

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing has written into input or output since."""
        return self._versions == (self.activations._version, self.output._version)


class Recorder:
    """Watches layers through hooks, and keeps what one forward did.

    Attributes:
        calls: Calls by name of the layer, in order.
        order: Names of all watched layers in the order in which the forward began them, while the whole graph is kept.
        without_grad: Names of layers that ran without gradients.
    """

    def __init__(self) -> None:
        self.calls: dict[str, list[Call]] = {}
        self.order: list[str] = []
        self.without_grad: set[str] = set()
        self._handles: list[RemovableHandle] = []
        self._keeps_whole_graph = True
        self._is_recording = False
        self._replayed: frozenset[str] = frozenset()
        self._outputs: list[Output] | None = None

    def watch(self, layers: Mapping[str, nn.Module], *, replayed: Collection[str], whole_graph: bool) -> None:
        """Register hooks on layers, instead of those on others.

        Args:
            layers: The layers by name.
            replayed: Names of those whose calls may run again: all their inputs are kept.
            whole_graph: Whether the forward keeps its whole graph, or only what lies above the first of the layers.
        """
        self.unwatch()
        self._replayed = frozenset(replayed)
        self._keeps_whole_graph = whole_graph
        for name, layer in layers.items():
            if isinstance(layer, torch.jit.ScriptModule):
                continue  # takes no hooks: counts as a layer that is not called

            def before(_: nn.Module, __: Any, name: str = name) -> None:
                self._before(name)

            def after(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> Any:
                return self._after(name, args, kwargs, output)

            self._handles.append(layer.register_forward_pre_hook(before))
            # First in line: a user's own forward hook may replace the output.
            self._handles.append(layer.register_forward_hook(after, with_kwargs=True, prepend=True))

    def unwatch(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward that runs inside; the grad mode is restored afterwards.

        Yields:
            Nothing.
        """
        self.calls.clear()
        self.without_grad.clear()
        self.order.clear()
        with torch.inference_mode(False), torch.set_grad_enabled(self._keeps_whole_graph), without_fast_attention():
            self._is_recording = True
            try:
                yield
            finally:
                self._is_recording = False

    @contextmanager
    def outputs(self) -> Iterator[list[Output]]:
        """Collect what the watched layers put out in the forward that runs inside, without gradients.

        Yields:
            A list, filled meanwhile.
        """
        outputs = self._outputs = list[Output]()
        with torch.inference_mode(False), torch.no_grad(), without_fast_attention():
            try:
                yield outputs
            finally:
                self._outputs = None

    def output_grads(
        self, calls: Sequence[Call], losses: Tensor, weights: Tensor, *, retain: bool
    ) -> list[Tensor | None]:
        """Gradients of the weighted sum of losses by the outputs of calls.

        Args:
            calls: The calls.
            losses: Losses ``[B]``.
            weights: Weights ``[B]``.
            retain: Whether the graph is kept.

        Returns:
            A gradient for each call, ``None`` where the losses do not depend on it.
        """
        if not calls:
            return []
        # The stubs of autograd know nothing of `allow_unused`.
        found: Sequence[Tensor | None] = torch.autograd.grad(
            losses, [call.edge for call in calls], weights, retain_graph=retain, allow_unused=True
        )
        return [
            None if grad is None else grad.reshape(call.output_shape) for grad, call in zip(found, calls, strict=True)
        ]

    def find_scales(self, calls: Sequence[Call], losses: Tensor) -> Tensor | None:
        """Weights under which float16 gradients neither vanish nor overflow, sample by sample.

        Args:
            calls: The calls.
            losses: Losses ``[B]``; their graph is kept.

        Returns:
            Weights ``[B]``, or ``None`` where no output is float16.
        """
        if not any(call.output_dtype == torch.float16 for call in calls):
            return None

        def largest(scales: Tensor) -> Tensor:
            grads = self.output_grads(calls, losses, scales, retain=True)
            # Rows that are not samples are found and refused by the wrapper.
            return largest_by_sample([g for g in grads if g is not None and g.shape[:1] == losses.shape], losses)

        return find_scales(largest, losses)

    def _before(self, name: str) -> None:
        if not self._is_recording:
            return
        if not self._keeps_whole_graph:
            # The trunk below runs without a graph; from the first chosen layer on there must be one. A layer that runs
            # again needs none inside of it.
            if name not in self._replayed:
                torch.set_grad_enabled(True)
        elif not torch.is_grad_enabled():
            self.without_grad.add(name)
        else:
            self.order.append(name)

    def _after(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Any:
        if self._outputs is not None:
            self._outputs.append(Output(args, kwargs, output))
            return None
        if not self._is_recording or name in self.without_grad:
            return None
        activations = next(tensors_of([args, kwargs]), None)
        is_tuple = isinstance(output, tuple) and len(output) > 0
        first = output[0] if is_tuple else output
        if activations is None or not isinstance(first, Tensor):
            return None
        if not first.requires_grad and not self._keeps_whole_graph and name in self._replayed:
            torch.set_grad_enabled(True)
            first = first.detach().requires_grad_()
        if not first.requires_grad:
            return None
        if (first._is_view() and not _is_reshaped(first)) or first.is_leaf:
            # An in-place activation on a view takes the view's own node out of the graph, and the edge with it; on a
            # leaf it is forbidden.
            first = first.clone()
        inputs = (args, kwargs) if name in self._replayed else None
        self.calls.setdefault(name, []).append(Call(activations, first, inputs))
        if not is_tuple:
            return first
        items = [first, *output[1:]]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)


def _is_reshaped(output: Tensor) -> bool:
    """Whether a view is the whole of its base in another shape, so that gradients by the base are those by the view."""
    base = output._base
    return base is not None and base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous()
