"""Which rule turns a layer's inputs and output gradients into factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from lightning_gradsim.errors import UnsupportedLayerError
from lightning_gradsim.factors import Factors


class Rule(Protocol):
    """A pure function that brings one call of a layer into the canonical layout."""

    def __call__(self, layer: nn.Module, activations: Tensor, output_grads: Tensor, /) -> Factors:
        """Factors of one call.

        Args:
            layer: The layer; its frozen parameters must drop out of the factors.
            activations: Its input, first dimension ``B``.
            output_grads: Gradients of the per-sample losses by its output, first dimension ``B``.

        Returns:
            The factors.
        """
        ...


_RULES: dict[type[nn.Module], tuple[Rule, frozenset[str]]] = {}


def register_rule(
    *types: type[nn.Module], parameters: tuple[str, ...] = ("weight", "bias"), overwrite: bool = False
) -> Callable[[Rule], Rule]:
    """Make a rule the one for layers of these types.

    Args:
        types: Layer types; subclasses follow as long as they keep the type's ``forward``.
        parameters: Names of the layer's parameters that the rule covers.
        overwrite: Whether a rule that a type already has may be replaced.

    Returns:
        A decorator that returns the rule unchanged.

    Raises:
        ValueError: If a type already has a rule and ``overwrite`` is not set.

    Example::

        @register_rule(MyLinear)
        def my_linear_factors(layer, activations, output_grads):
            return OuterFactors(activations[:, None, None], output_grads[:, None, None], bias=False)
    """

    def register(rule: Rule) -> Rule:
        for layer_type in types:
            if layer_type in _RULES and not overwrite:
                raise ValueError(
                    f"`{layer_type.__name__}` already has a gradient rule. Pass `overwrite=True` to `register_rule` to "
                    "replace it."
                )
        _RULES.update(dict.fromkeys(types, (rule, frozenset(parameters))))
        return rule

    return register


def find_rule(name: str, layer: nn.Module) -> Rule:
    """The rule for a layer.

    Base classes are followed only while the layer still runs the registered type's ``forward`` on the registered
    parameters: a LoRA-style or weight-normalised ``Linear`` trains something else than the rule would compute.

    Args:
        name: Name of the layer in the user's module, for messages.
        layer: The layer.

    Returns:
        The rule.

    Raises:
        UnsupportedLayerError: If no rule fits.
    """
    for layer_type in type(layer).__mro__:
        if layer_type not in _RULES:
            continue
        rule, parameters = _RULES[layer_type]
        if type(layer).forward is not layer_type.forward or "forward" in vars(layer):
            raise UnsupportedLayerError(_refusal(name, layer, f"it overrides `{layer_type.__name__}.forward`"))
        others = {own for own, _ in layer.named_parameters()} - parameters
        if others:
            raise UnsupportedLayerError(
                _refusal(
                    name,
                    layer,
                    f"it trains {', '.join(f'`{own}`' for own in sorted(others))} instead of {_words(parameters)}",
                )
            )
        return rule
    raise UnsupportedLayerError(_refusal(name, layer, "its type has none"))


def registered_types() -> tuple[type[nn.Module], ...]:
    """All layer types that have a rule."""
    return tuple(_RULES)


def _refusal(name: str, layer: nn.Module, reason: str) -> str:
    kind = type(layer).__name__
    return (
        f"No gradient rule for layer `{name}` (`{kind}`): {reason}. Types with a rule: "
        f"{', '.join(sorted(known.__name__ for known in _RULES))}. Use `PerSampleGradients.compute`, which needs none, "
        f"register a rule with `register_rule({kind})`, or leave the layer out of `layers`."
    )


def _words(names: frozenset[str]) -> str:
    return " and ".join(f"`{name}`" for name in sorted(names, reverse=True))
