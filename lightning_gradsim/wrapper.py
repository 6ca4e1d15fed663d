"""Per-sample gradients of chosen layers of a module that is watched through hooks and left as found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_gradsim.errors import (
    GradSimError,
    SampleMixingError,
)
from lightning_gradsim.factors import Factors, OuterFactors, concatenate_positions
from lightning_gradsim.gradient_checks import (
    Problems,
    find_call_problem,
    find_mixed_rows,
    find_wrong_sums,
)
from lightning_gradsim.ladder import Ladder, find_rule_or_problem, joined
from lightning_gradsim.layer_selection import (
    LayerSpec,
    Selection,
    check_layer_spec,
    own_parameters,
    parameter_names,
    trainable_layers,
)
from lightning_gradsim.precision import SUM_SHARE, raise_half, scale_rows
from lightning_gradsim.recorder import Call, Output, Recorder
from lightning_gradsim.replay import Replay
from lightning_gradsim.rules import Rule, keep_parameters, split_gradients
from lightning_gradsim.whole_module import Gradients, Recompute


class PerSampleGradients:
    """Watches a module and turns per-sample losses into the factors of each chosen layer's per-sample gradients.

    The module is not wrapped or changed: hooks are registered on entering and removed on leaving. The backward runs
    from the losses to the outputs of the chosen layers only; it computes no weight gradients and touches no ``.grad``.

    Layers that hooks cannot serve (no rule, tied weights, weights used by a parent, rows that are not samples) need
    their samples to run again: ``compute`` does it, ``factors`` does if it is told how, and raises otherwise.

    The first batch settles which layers are called and how each is served, and is checked: the factors' sum must equal
    autograd's gradient of the summed losses, and a sample's loss must depend on its own rows alone. So what cannot be
    exact raises.

    Example::

        with PerSampleGradients(model, layers="all") as gradients:
            factors = gradients.compute(
                lambda batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch
            )
            similarities = dot(factors["head"], factors["head"])  # [B, B]

    Source:
        The contraction is that of Goodfellow (2015), arXiv:1510.01799; hooks on layers as in Opacus (Yousefpour et al.,
        2021, arXiv:2109.12298). We take gradient edges instead of backward hooks and need no train mode.
    """

    def __init__(self, module: nn.Module, layers: LayerSpec = "last") -> None:
        check_layer_spec(layers)
        self._module = module
        self._recorder = Recorder()
        self._ladder = Ladder(module, layers, self._recorder)
        self._own_names: dict[str, tuple[str, ...]] = {}
        self._unused: dict[str, Factors] = {}
        self._rows_are_checked = False

    @property
    def selection(self) -> Selection:
        """Names of the chosen layers, each with the names of the chosen parameters in it.

        Empty before the first batch for ``layers="last"``.
        """
        return self._ladder.selection

    @property
    def reasons(self) -> Problems:
        """Why a layer is not served by hooks, by name."""
        return self._ladder.reasons

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the chosen layers; empty before the first batch for ``layers="last"``."""
        return tuple(self.selection)

    @property
    def steps(self) -> dict[str, str]:
        """The step of the ladder that serves each layer, by name; settled by the first batch.

        ``rule``: a rule of ours; ``opacus``: a sampler of Opacus; ``vmap(layer)``: the layer's calls run again, all
        samples at once; ``vmap(module)``: the whole module does; ``one at a time``: either, a sample after the other.
        """
        return {name: self._ladder.step(name) for name in self.selection}

    def names_by_layer(self) -> dict[str, list[str]]:
        """Names of the chosen layers, or of single parameters where only some of a layer's are chosen, by layer."""
        return parameter_names(self.selection, trainable_layers(self._module))

    def __enter__(self) -> PerSampleGradients:
        """Check the choice of layers as far as it can be known, and start to watch."""
        layers = self._ladder.select()
        without_rule = [
            name for name, layer in layers.items() if isinstance(find_rule_or_problem(name, layer), GradSimError)
        ]
        self._recorder.watch(layers, replayed=without_rule, whole_graph=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove every hook and every reference to activations."""
        self._recorder.unwatch()
        self._recorder.calls.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of the chosen layers in the forward that runs inside.

        Only the part of the network above the lowest chosen layer enters the graph; on the first batch, all of it.
        The grad mode is restored afterwards.

        Yields:
            Nothing.
        """
        with self._recorder.recording():
            yield

    def compute(self, losses: Callable[[Any], Tensor], batch: Any) -> dict[str, Factors]:
        """Factors of the per-sample gradients of a batch, whatever its layers are.

        Args:
            losses: From a batch to one loss a sample, ``[B]``, through the module.
            batch: The batch: tensors, numbers and strings in mappings, lists and tuples, samples along the first
                dimension.

        Returns:
            Factors by layer name, as ``factors`` returns them.

        Raises:
            GradSimError: If a gradient cannot be exact.
        """
        with self.recording():
            values = losses(batch)
        return self.factors(values, recompute=Recompute(losses, batch))

    def materialise(self, losses: Callable[[Any], Tensor], batch: Any) -> dict[str, Tensor]:
        """Per-sample gradients of a batch by parameter: ``B`` times the memory of the parameters.

        Args:
            losses: As for ``compute``.
            batch: As for ``compute``.

        Returns:
            Gradients ``[B, *shape]`` by the parameter's full name in the module; tied parameters once.

        Raises:
            GradSimError: If a gradient cannot be exact.
        """
        return {
            joined(name, [own])[0]: gradients
            for name, factors in self.compute(losses, batch).items()
            for own, gradients in split_gradients(self._ladder.layers[name], factors, self.selection[name]).items()
        }

    def factors(
        self, losses: Tensor, *, retain: bool = False, recompute: Recompute | None = None
    ) -> dict[str, Factors]:
        """Factors of the per-sample gradients, for the forward recorded last.

        Args:
            losses: One loss a sample, ``[B]``, computed while recording.
            retain: Whether the recorded forward is kept for another call with other losses.
            recompute: How the batch's samples run again, for layers that hooks cannot serve.

        Returns:
            Factors by layer name, ``B`` samples each; half-precision layers give float32. A layer that this forward
            did not use has zero gradients; one that no forward has used yet is absent.

        Raises:
            LayerSelectionError: If a chosen layer ran without gradients on the first batch.
            UnsupportedLayerError: If hooks cannot serve a layer, and ``recompute`` is ``None``.
            SampleMixingError: If rows of samples cannot be told apart, or a loss depends on other samples.
            GradSimError: If the factors do not sum to autograd's gradient, or an activation was changed in place.
            LossError: If the losses have no graph.
        """
        if losses.ndim != 1:
            raise SampleMixingError(
                f"`losses` has shape {tuple(losses.shape)}. Expected one loss a sample, [B]: use a loss with "
                '`reduction="none"`, averaged over all but the first dimension.'
            )
        first = not self._ladder.is_settled
        if first:
            self._ladder.settle(losses)
        for name, problem in self._find_problems(losses).items():
            self._ladder.move_to_whole(name, problem, may_move=first)
        weights = torch.ones_like(losses)
        scales = self._recorder.find_scales([call for _, call in self._hooked_calls()], losses)
        result = self._from_hooks(losses, weights if scales is None else scales, scales, retain=retain or first)
        if first:
            summands = result
            if scales is not None:  # in float16, autograd's own sum would vanish or overflow
                weights = SUM_SHARE * scales
                summands = self._from_hooks(losses, weights, None, retain=True)
            dtypes = {name: call.output_dtype for name, call in self._hooked_calls()}
            wrong = find_wrong_sums(
                losses, weights, summands, self._ladder.layers, self.selection, dtypes, retain=retain
            )
            for name, problem in wrong.items():
                self._ladder.move_to_whole(name, problem, may_move=True)
            self._ladder.finish(recompute)
        result = {name: factors for name, factors in result.items() if name in self._ladder.rules}
        self._unused.update({name: factors.unused(0) for name, factors in result.items() if name not in self._unused})
        unused = {name: template.unused(len(losses)) for name, template in self._unused.items() if name not in result}
        if not retain:
            self._recorder.calls.clear()
        return self._in_order({**result, **unused, **self._ladder.from_whole(recompute, len(losses))})

    def served_alone(self) -> str | None:
        """The only chosen layer, where a rule serves it; ``None`` otherwise, and before the first batch."""
        rules = list(self._ladder.rules.items())
        is_alone = (
            self._ladder.is_settled
            and len(rules) == 1
            and not self._ladder.moved
            and not isinstance(rules[0][1], Replay)
        )
        return rules[0][0] if is_alone else None

    def puts_out(self, name: str, values: Tensor) -> bool:
        """Whether these are the output of a layer's only call in the forward recorded last, and nothing else."""
        calls = self._recorder.calls.get(name, [])
        if len(calls) != 1 or not values.requires_grad:
            return False
        edge = get_gradient_edge(values)
        return edge.node is calls[0].edge.node and edge.output_nr == calls[0].edge.output_nr

    def outputs(self) -> AbstractContextManager[list[Output]]:
        """Collect what the chosen layers put out in the forward that runs inside, without gradients."""
        return self._recorder.outputs()

    def factors_of(self, name: str, activations: Tensor, output_grads: Tensor) -> Factors:
        """Factors of a layer that a rule serves, from its input and the gradients by its output."""
        rule = self._ladder.rules[name]
        assert not isinstance(rule, Replay)  # as `served_alone` promises
        return self._by_rule(name, rule, activations, output_grads)

    def _find_problems(self, losses: Tensor) -> Problems:
        """Calls of this forward that cannot be told apart by sample, by name of the layer."""
        problems: Problems = {}
        for name, call in self._hooked_calls():
            problem = find_call_problem(name, call, len(losses))
            if problem is not None:
                problems.setdefault(name, problem)
        if not self._rows_are_checked and len(losses) > 1:
            calls = [(name, call) for name, call in self._hooked_calls() if name not in problems]
            mixed, self._rows_are_checked = find_mixed_rows(self._recorder, calls, losses)
            problems |= mixed
        return problems

    def _hooked_calls(self) -> list[tuple[str, Call]]:
        return [
            (name, call)
            for name in self._ladder.rules
            for call in self._recorder.calls.get(self._ladder.caller_of(name), [])
        ]

    def _from_hooks(
        self, losses: Tensor, weights: Tensor, scales: Tensor | None, *, retain: bool
    ) -> dict[str, Factors]:
        """Factors of the weighted losses, divided by the scales."""
        calls, parts = self._hooked_calls(), dict[str, list[Factors]]()
        all_grads = self._recorder.output_grads([call for _, call in calls], losses, weights, retain=retain)
        replayed: dict[int, Gradients] = {}
        for (name, call), grads in zip(calls, all_grads, strict=True):
            if grads is None:  # the losses do not depend on this output
                grads = torch.zeros(call.output_shape, dtype=call.output_dtype, device=call.activations.device)
            elif scales is not None:
                grads = scale_rows(grads, 1 / scales)
            rule = self._ladder.rules.get(name)
            try:
                if isinstance(rule, Replay):
                    if id(call) not in replayed:
                        replayed[id(call)] = rule.gradients(call, grads, len(losses))
                    parts.setdefault(name, []).append(self._replayed(name, replayed[id(call)]))
                elif rule is not None:
                    parts.setdefault(name, []).append(self._by_rule(name, rule, call.activations, grads))
            except GradSimError as error:
                named = type(error)(f"Layer `{name}`: {error}")
                if not isinstance(rule, Replay):
                    raise named from error
                self._ladder.move_to_whole(name, named, may_move=not self._ladder.is_settled)
        return {name: concatenate_positions(of_layer) for name, of_layer in parts.items() if name in self._ladder.rules}

    def _by_rule(self, name: str, rule: Rule, activations: Tensor, grads: Tensor) -> Factors:
        layer = self._ladder.layers[name]
        # Raised before the rule: a sum over positions in half precision would be off by per cents.
        factors = rule(layer, raise_half(activations), raise_half(grads))
        dtype = torch.promote_types(grads.dtype, torch.float32)
        if activations.is_floating_point():
            dtype = torch.promote_types(dtype, activations.dtype)
        if name not in self._own_names:
            self._own_names[name] = tuple(own_parameters(layer))
        return keep_parameters(layer, factors.to(dtype=dtype), self._own_names[name], self.selection[name])

    def _replayed(self, name: str, gradients: Gradients) -> Factors:
        return OuterFactors.from_gradients([gradients[path] for path in self._ladder.path_in_caller(name)])

    def _in_order(self, result: Mapping[str, Factors]) -> dict[str, Factors]:
        return {name: result[name] for name in self.selection if name in result}
