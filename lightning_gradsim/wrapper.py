"""Per-sample gradients of chosen layers of a module that is watched through hooks and left as found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_gradsim.errors import GradSimError, LayerSelectionError, LossError, SampleMixingError
from lightning_gradsim.factors import Factors, concatenate_positions, squared_norms
from lightning_gradsim.layer_selection import LayerSpec, check_layer_spec, select_layers, trainable_layers
from lightning_gradsim.rules import Rule, find_rule, split_gradients

SUM_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Largest relative difference between the summed factors and autograd on the first batch, by dtype of the layer's
output.

Far above rounding (1e-6 in float32), far below what a wrong rule or a forgotten use of a weight gives.
"""


class _Call:
    """One call of a layer: its input, and where its output sits in the graph."""

    __slots__ = ("activations", "edge", "output_dtype", "output_shape", "version")

    def __init__(self, activations: Tensor, output: Tensor) -> None:
        self.activations = activations.detach()
        self.version = activations._version
        self.output_shape = output.shape
        self.output_dtype = output.dtype
        # Taken inside the hook: an in-place activation that follows would move the saved output's place in the graph.
        # Linear returns a view for inputs of rank 3 and more, and an in-place operation takes the node of a view out of
        # the graph, but not that of its base.
        self.edge: GradientEdge = get_gradient_edge(output if output._base is None else output._base)


class PerSampleGradients:
    """Watches a module and turns per-sample losses into the factors of each chosen layer's per-sample gradients.

    The module is not wrapped or changed: hooks are registered on entering and removed on leaving. The backward runs
    from the losses to the outputs of the chosen layers only; it computes no weight gradients and touches no ``.grad``.

    The first batch settles which layers are called, and is checked: the factors' sum must equal autograd's gradient of
    the summed losses, and a sample's loss must depend on its own rows alone. So what cannot be exact raises.

    Attributes:
        names: Names of the chosen layers; empty before the first batch for ``layers="last"``.

    Example::

        with PerSampleGradients(model, layers="last") as gradients:
            with gradients.recording():
                losses = F.cross_entropy(model(x), y, reduction="none")
            factors = gradients.factors(losses)["head"]
        similarities = dot(factors, factors)  # [B, B]

    Source:
        The contraction is that of Goodfellow (2015), arXiv:1510.01799; hooks on layers as in Opacus (Yousefpour et al.,
        2021, arXiv:2109.12298). We take gradient edges instead of backward hooks and need no train mode.
    """

    def __init__(self, module: nn.Module, layers: LayerSpec = "last") -> None:
        check_layer_spec(layers)
        self._module = module
        self._spec = layers
        self._calls: dict[str, list[_Call]] = {}
        self._without_grad: set[str] = set()
        self._order: list[str] = []
        self._handles: list[RemovableHandle] = []
        self._rules: dict[str, Rule] = {}
        self._layers: dict[str, nn.Module] = {}
        self._unused: dict[str, Factors] = {}
        self._is_settled = False
        self._is_recording = False
        self._rows_are_checked = False
        self.names: tuple[str, ...] = ()

    def __enter__(self) -> PerSampleGradients:
        """Check the choice of layers as far as it can be known, and start to watch."""
        self.names = select_layers(self._module, self._spec)
        for name, layer in trainable_layers(self._module).items():
            if name in self.names:
                self._rules[name] = find_rule(name or type(layer).__name__, layer)
        self._watch(trainable_layers(self._module))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove every hook and every reference to activations."""
        self._unwatch()
        self._calls.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of the chosen layers in the forward that runs inside.

        Only the part of the network above the lowest chosen layer enters the graph; on the first batch, all of it.
        The grad mode is restored afterwards.

        Yields:
            Nothing.
        """
        self._calls.clear()
        self._without_grad.clear()
        self._order.clear()
        with torch.inference_mode(False), torch.set_grad_enabled(not self._is_settled):
            self._is_recording = True
            try:
                yield
            finally:
                self._is_recording = False

    def factors(self, losses: Tensor, *, retain: bool = False) -> dict[str, Factors]:
        """Factors of the per-sample gradients, for the forward recorded last.

        Args:
            losses: One loss a sample, ``[B]``, computed while recording.
            retain: Whether the recorded forward is kept for another call with other losses.

        Returns:
            Factors by layer name, ``B`` samples each; half-precision layers give float32. A layer that this forward
            did not use has zero gradients; one that no forward has used yet is absent.

        Raises:
            LayerSelectionError: If a chosen layer was not called or ran without gradients on the first batch.
            SampleMixingError: If rows of samples cannot be told apart, or a loss depends on other samples.
            GradSimError: If the factors do not sum to autograd's gradient, or an activation was changed in place.
            LossError: If the losses have no graph.
        """
        if losses.ndim != 1:
            raise SampleMixingError(
                f"`losses` has shape {tuple(losses.shape)}. Expected one loss a sample, [B]: use a loss with "
                '`reduction="none"`, averaged over all but the first dimension.'
            )
        first = not self._is_settled
        if first:
            self._settle(losses)
        calls = [(name, call) for name in self.names for call in self._calls.get(name, [])]
        for name, call in calls:
            _check_call(name, call, len(losses))
        if not self._rows_are_checked and len(losses) > 1:
            self._check_rows(losses, calls)
        parts: dict[str, list[Factors]] = {}
        weights = torch.ones_like(losses)
        for (name, call), grads in zip(calls, _output_grads(losses, weights, calls, retain or first), strict=True):
            parts.setdefault(name, []).append(self._one_call(name, call, grads))
        result = {name: concatenate_positions(parts[name]) for name in self.names if name in parts}
        if first:
            self._check_sum(losses, result, retain)
        self._unused.update({name: factors.unused(0) for name, factors in result.items() if name not in self._unused})
        unused = {name: template.unused(len(losses)) for name, template in self._unused.items() if name not in result}
        if not retain:
            self._calls.clear()
        return {**result, **unused}

    def _watch(self, layers: Mapping[str, nn.Module]) -> None:
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

    def _unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, name: str) -> None:
        if not self._is_recording:
            return
        if self._is_settled:
            # The trunk below runs without a graph; from the first chosen layer on there must be one.
            torch.set_grad_enabled(True)
        elif not torch.is_grad_enabled():
            self._without_grad.add(name)
        else:
            self._order.append(name)

    def _after(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Any:
        if not self._is_recording or name in self._without_grad:
            return None
        activations = next((value for value in [*args, *kwargs.values()] if isinstance(value, Tensor)), None)
        if activations is None or not isinstance(output, Tensor) or not output.requires_grad:
            return None
        if output._is_view() and not _is_reshaped(output):
            # An in-place activation on a view takes the view's own node out of the graph, and the edge with it.
            output = output.clone()
        self._calls.setdefault(name, []).append(_Call(activations, output))
        return output

    def _settle(self, losses: Tensor) -> None:
        """Choose the layers after the first forward, and refuse what cannot be exact."""
        layers = trainable_layers(self._module)
        self.names = select_layers(self._module, self._spec, list(dict.fromkeys(reversed(self._order)))[::-1])
        for name in self.names:
            self._rules[name] = find_rule(name or type(layers[name]).__name__, layers[name])
            if name in self._without_grad:
                raise LayerSelectionError(
                    f'Layer `{name}` runs under "no_grad" in the forward pass, so it has no gradient. Leave it out of '
                    "`layers`."
                )
            self._check_sharing(name, layers)
        if not losses.requires_grad:
            raise LossError(
                "`losses` has no graph, so there is no gradient. 1. The outputs were detached. 2. The layers above run "
                'under "no_grad" in the forward pass. Compute the losses from the outputs as they are.'
            )
        _check_mixing(self._module)
        self._check_uncalled(losses, layers)
        self._unwatch()
        self._layers = {name: layers[name] for name in self.names}
        self._watch(self._layers)
        self._is_settled = True

    def _check_sharing(self, name: str, layers: Mapping[str, nn.Module]) -> None:
        own = {id(parameter) for parameter in layers[name].parameters(recurse=False)}
        for other, layer in layers.items():
            if other != name and own & {id(parameter) for parameter in layer.parameters(recurse=False)}:
                raise LayerSelectionError(
                    f"Layers `{name}` and `{other}` share a parameter (tied weights), so neither alone has its "
                    "gradient. Tied weights are not supported yet. Leave both out of `layers`."
                )

    def _check_uncalled(self, losses: Tensor, layers: Mapping[str, nn.Module]) -> None:
        uncalled = [name for name in self.names if name not in self._calls]
        parameters = [(name, parameter) for name in uncalled for parameter in _trainable(layers[name])]
        if not uncalled:
            return
        # The stubs of autograd know nothing of `allow_unused`.
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            losses, [p for _, p in parameters], torch.ones_like(losses), retain_graph=True, allow_unused=True
        )
        used = sorted({name for (name, _), grad in zip(parameters, grads, strict=True) if grad is not None})
        if used or self._spec != "all":
            raise LayerSelectionError(
                f"Layer `{(used or uncalled)[0]}` was not called in the forward pass, so it has no activations. "
                "1. It is unused for this batch. 2. Its parent uses the weight directly (as `nn.MultiheadAttention` "
                "does). Choose another layer."
            )

    def _check_rows(self, losses: Tensor, calls: Sequence[tuple[str, _Call]]) -> None:
        # The sample of highest loss: an ignored one has no gradient, by which mixing would show.
        row = int(losses.detach().nan_to_num(0.0, 0.0, 0.0).argmax())
        others = torch.arange(len(losses), device=losses.device) != row
        only_one = (~others).to(losses.dtype)
        for (name, call), grads in zip(calls, _output_grads(losses, only_one, calls, retain=True), strict=True):
            if grads is None:
                continue
            grads = grads.reshape(call.output_shape)
            self._rows_are_checked = self._rows_are_checked or bool(grads[row].any())
            # Not-a-number passes: the engine names the samples that caused it.
            if bool((grads[others].abs() > 0).any()):
                raise SampleMixingError(
                    f"The loss of one sample depends on other rows of the output of layer `{name}`. 1. The batch is "
                    "not the first dimension there. 2. A layer above mixes samples (BatchNorm without running "
                    "statistics, a contrastive loss). Such a sample has no gradient of its own. Choose a layer above "
                    "it."
                )

    def _one_call(self, name: str, call: _Call, grads: Tensor | None) -> Factors:
        if grads is None:  # the losses do not depend on this output
            grads = torch.zeros(call.output_shape, dtype=call.output_dtype, device=call.activations.device)
        grads = grads.reshape(call.output_shape)
        try:
            factors = self._rules[name](self._layers[name], call.activations, grads)
        except GradSimError as error:
            raise type(error)(f"Layer `{name}`: {error}") from error
        dtype = torch.promote_types(torch.promote_types(call.activations.dtype, grads.dtype), torch.float32)
        return factors.to(dtype=dtype)

    def _check_sum(self, losses: Tensor, result: Mapping[str, Factors], retain: bool) -> None:
        ours = {name: split_gradients(self._layers[name], factors.summed()) for name, factors in result.items()}
        parameters = [self._layers[name].get_parameter(own) for name, grads in ours.items() for own in grads]
        if not parameters:
            return
        expected = iter(
            torch.autograd.grad(losses, parameters, torch.ones_like(losses), retain_graph=retain, allow_unused=True)
        )
        for name, grads in ours.items():
            differences = [_dense(next(expected), grad[0]) - grad[0] for grad in grads.values()]
            difference = torch.stack([part.norm() for part in differences]).norm()
            tolerance = max(SUM_TOLERANCE[call.output_dtype] for call in self._calls[name])
            scale = squared_norms(result[name]).sqrt().sum()
            # Not-a-number passes: the engine names the samples that caused it.
            if bool(difference > tolerance * scale):
                raise GradSimError(
                    f"The per-sample gradients of layer `{name}` do not sum to autograd's gradient. 1. Its weight is "
                    "also used outside the layer. 2. Its gradient rule is wrong. Leave the layer out of `layers`."
                )


def _is_reshaped(output: Tensor) -> bool:
    """Whether a view is the whole of its base in another shape, so that gradients by the base are those by the view."""
    base = output._base
    return base is not None and base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous()


def _check_mixing(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None):
            raise SampleMixingError(
                f"Layer `{name}` (`{type(layer).__name__}`) normalises by the statistics of the batch, so a sample has "
                "no gradient of its own. Put the module into eval mode, and keep `track_running_stats=True`."
            )


def _check_call(name: str, call: _Call, num_samples: int) -> None:
    rows = call.output_shape[0] if call.output_shape else 0
    if rows != num_samples or call.activations.shape[:1] != (num_samples,):
        raise SampleMixingError(
            f"Layer `{name}` ran on {rows} rows for {num_samples} samples, so its rows cannot be told apart by sample. "
            "Expected the batch as the first dimension. Leave the layer out of `layers`, or keep samples and positions "
            "in separate dimensions."
        )
    if call.activations._version != call.version:
        raise GradSimError(
            f"The input of layer `{name}` was changed in place after the layer ran, so its gradient cannot be "
            "computed. Make the operation that follows out of place, or leave the layer out of `layers`."
        )


def _output_grads(
    losses: Tensor, weights: Tensor, calls: Sequence[tuple[str, _Call]], retain: bool
) -> Sequence[Tensor | None]:
    edges = [call.edge for _, call in calls]
    if not edges:
        return ()
    return torch.autograd.grad(losses, edges, weights, retain_graph=retain, allow_unused=True)


def _trainable(layer: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in layer.parameters(recurse=False) if parameter.requires_grad]


def _dense(grad: Tensor | None, like: Tensor) -> Tensor:
    if grad is None:
        return torch.zeros_like(like)
    return grad.to_dense() if grad.is_sparse else grad
