"""Which step of the ladder serves each chosen layer: settled by the first batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from lightning_gradsim.errors import (
    GradSimError,
    LayerSelectionError,
    LossError,
    SampleMixingError,
    UnsupportedLayerError,
)
from lightning_gradsim.factors import Factors, OuterFactors
from lightning_gradsim.gradient_checks import Problems, check_batch_statistics, find_sharing, find_used_uncalled
from lightning_gradsim.layer_selection import LayerSpec, Selection, own_parameters, select_layers, trainable_layers
from lightning_gradsim.recorder import Recorder
from lightning_gradsim.replay import Replay
from lightning_gradsim.rules import Rule, find_rule, find_sampler, sampler_factors
from lightning_gradsim.whole_module import Recompute, WholeModule


class Ladder:
    """Serves each layer by the first step that can: a rule, a sampler, its calls run again, or the whole module.

    Life cycle: ``settle`` after the first forward; ``move_to_whole`` for layers whose first factors prove wrong;
    ``finish`` before any factors are handed out. From then on the choice stands.

    Args:
        module: The user's module.
        spec: The choice of layers.
        recorder: Watches them.

    Attributes:
        layers: The chosen layers by name.
        rules: What serves each of them in the recorded forward; absent are those that the whole module serves.
        moved: Names of those.
        selection: Names of the chosen layers, each with the names of the chosen parameters in it.
        reasons: Why a layer is not served by hooks, by name.
        is_settled: Whether the choice stands.
    """

    def __init__(self, module: nn.Module, spec: LayerSpec, recorder: Recorder) -> None:
        self.layers: dict[str, nn.Module] = {}
        self.rules: dict[str, Rule | Replay] = {}
        self.moved: list[str] = []
        self.selection: Selection = {}
        self.reasons: Problems = {}
        self.is_settled = False
        self._module = module
        self._spec = spec
        self._recorder = recorder
        self._callers: dict[str, str] = {}
        self._whole: WholeModule | None = None

    def select(self) -> dict[str, nn.Module]:
        """Check the choice of layers as far as it can be known before a forward.

        Returns:
            All layers with trainable parameters, by name.
        """
        self.selection = select_layers(self._module, self._spec)
        return trainable_layers(self._module)

    def caller_of(self, name: str) -> str:
        """Name of the module whose calls are watched for a layer: its own, or of the one that runs again for it."""
        return self._callers.get(name, name)

    def path_in_caller(self, name: str) -> list[str]:
        """Names of a layer's chosen parameters within the module that runs again for it."""
        return joined(name[len(self._callers[name]) :].lstrip("."), self.selection[name])

    def settle(self, losses: Tensor) -> None:
        """Choose the layers after the first forward, and find those that hooks cannot serve.

        Args:
            losses: One loss a sample, ``[B]``, of that forward.

        Raises:
            LayerSelectionError: If a chosen layer was not called, or ran without gradients.
            LossError: If the losses have no graph.
            SampleMixingError: If a layer mixes samples.
        """
        layers = trainable_layers(self._module)
        called = list(dict.fromkeys(reversed(self._recorder.order)))[::-1]
        self.selection = select_layers(self._module, self._spec, called)
        self.layers = {name: layers[name] for name in self.selection}
        for name in self.selection:
            if name in self._recorder.without_grad:
                raise LayerSelectionError(
                    f'Layer `{name}` runs under "no_grad" in the forward pass, so it has no gradient. Leave it out of '
                    "`layers`."
                )
        if not losses.requires_grad:
            raise LossError(
                "`losses` has no graph, so there is no gradient. 1. The outputs were detached. 2. The layers above run "
                'under "no_grad" in the forward pass. Compute the losses from the outputs as they are.'
            )
        check_batch_statistics(self._module)
        uncalled = {name: layer for name, layer in self.layers.items() if name not in self._recorder.calls}
        used = find_used_uncalled(losses, uncalled)
        if uncalled and not used and self._spec != "all":
            raise LayerSelectionError(
                f"Layer `{next(iter(uncalled))}` was not called in the forward pass, and the losses do not depend on "
                "it. It is unused for this batch. Choose another layer."
            )
        without_rule: Problems = {}
        for name, layer in self.layers.items():
            sharing, found = find_sharing(name, layers), used.get(name) or find_rule_or_problem(name, layer)
            if sharing is not None:
                self.move_to_whole(name, sharing, may_move=True)
            elif isinstance(found, GradSimError):
                without_rule[name] = found
            else:
                self.rules[name] = found
        self._settle_without_rule(without_rule, uncalled.keys() - used.keys())

    def _settle_without_rule(self, without_rule: Mapping[str, GradSimError], unused: Collection[str]) -> None:
        """Let the innermost call that holds a layer run again; where there is none, the whole module has to."""
        parameters: dict[str, dict[str, nn.Parameter]] = {}
        for name, problem in without_rule.items():
            self.reasons[name] = problem
            caller = name if name in unused else self._find_caller(name)
            if caller is None:
                self.move_to_whole(name, problem, may_move=True)
                continue
            self._callers[name] = caller
            own = own_parameters(self.layers[name])
            inner = joined(name[len(caller) :].lstrip("."), self.selection[name])
            parameters.setdefault(caller, {}).update(
                {path: own[chosen] for path, chosen in zip(inner, self.selection[name], strict=True)}
            )
        replays = {caller: Replay(self._module.get_submodule(caller), chosen) for caller, chosen in parameters.items()}
        self.rules.update({name: replays[caller] for name, caller in self._callers.items()})

    def _find_caller(self, name: str) -> str | None:
        path = name.split(".")
        holders = [".".join(path[:length]) for length in range(len(path), -1, -1)]
        return next((holder for holder in holders if self._can_replay(holder)), None)

    def _can_replay(self, name: str) -> bool:
        calls = self._recorder.calls.get(name, [])
        return bool(calls) and all(call.inputs is not None for call in calls)

    def finish(self, recompute: Recompute | None) -> None:
        """Let the choice stand, and watch from now on only what serves it.

        Args:
            recompute: How the batch's samples run again.

        Raises:
            GradSimError: If a layer needs that, and it is ``None``: why the layer does.
        """
        if self.moved and recompute is None:
            raise self.reasons[self.moved[0]]
        seen: set[int] = set()
        for name in self.moved:  # a tied parameter counts once, for the first of its layers
            parameters = own_parameters(self.layers[name])
            self.selection[name] = tuple(own for own in self.selection[name] if id(parameters[own]) not in seen)
            seen |= {id(parameters[own]) for own in self.selection[name]}
        self.selection = {name: chosen for name, chosen in self.selection.items() if chosen}
        self.moved = [name for name in self.moved if name in self.selection]
        if self.moved:
            chosen = {
                path: own_parameters(self.layers[name])[own]
                for name in self.moved
                for path, own in zip(joined(name, self.selection[name]), self.selection[name], strict=True)
            }
            self._whole = WholeModule(self._module, chosen)
        replayed = {self._callers[name] for name, rule in self.rules.items() if isinstance(rule, Replay)}
        watched = replayed | {name for name, rule in self.rules.items() if not isinstance(rule, Replay)}
        layers = {name: layer for name, layer in self._module.named_modules() if name in watched}
        self._recorder.watch(layers, replayed=replayed, whole_graph=False)
        self.is_settled = True

    def move_to_whole(self, name: str, problem: GradSimError, *, may_move: bool) -> None:
        """Let the whole module serve a layer.

        Args:
            name: Name of the layer.
            problem: Why hooks cannot.
            may_move: Whether it still may change.

        Raises:
            GradSimError: The problem, if it may not.
        """
        # Once factors of a layer were handed out, others of another form cannot be compared with them.
        if not may_move:
            raise problem
        self.reasons[name] = problem
        self.moved.append(name)
        self.rules.pop(name, None)

    def step(self, name: str) -> str:
        """The step that serves a layer, in the words of ``PerSampleGradients.steps``."""
        if name in self.moved:
            return "vmap(module)" if self._whole is None or self._whole.step == "vmap" else self._whole.step
        rule = self.rules.get(name)
        if isinstance(rule, Replay):
            return rule.step
        return "rule" if rule is not sampler_factors else "opacus"

    def from_whole(self, recompute: Recompute | None, num_samples: int) -> dict[str, Factors]:
        """Factors of the layers that the whole module serves.

        Args:
            recompute: How the batch's samples run again.
            num_samples: Number of samples.

        Returns:
            Factors by layer name.

        Raises:
            GradSimError: If samples cannot run again, or mix.
        """
        if self._whole is None:
            return {}
        if recompute is None:
            raise self.reasons[self.moved[0]]
        try:
            gradients = self._whole.gradients(recompute, num_samples)
        except SampleMixingError as error:
            # What was found on the way here names the layer.
            known = [self.reasons[name] for name in self.moved]
            mixing = [problem for problem in known if isinstance(problem, SampleMixingError)]
            raise (mixing or [error])[0] from error
        return {
            name: OuterFactors.from_gradients([gradients[path] for path in joined(name, self.selection[name])])
            for name in self.moved
        }


def find_rule_or_problem(name: str, layer: nn.Module) -> Rule | GradSimError:
    """The rule or sampler of a layer, or why there is none."""
    try:
        return find_sampler(layer) or find_rule(name or type(layer).__name__, layer)
    except UnsupportedLayerError as error:
        return error


def joined(name: str, inner: Sequence[str]) -> list[str]:
    """Full names of what lies in a module."""
    return [f"{name}.{each}" if name else each for each in inner]
