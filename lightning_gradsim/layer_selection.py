"""From what the user writes as ``layers`` to the names of layers."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from lightning_gradsim.errors import LayerSelectionError

LayerSpec = str | type[nn.Module] | Callable[[str, nn.Module], bool] | Sequence["str | type[nn.Module]"]
"""``"last"``, ``"all"``, a name, a glob, a layer type, several of these, or a predicate of (name, layer)."""

MAX_LISTED = 10


def trainable_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Layers with trainable parameters of their own.

    Args:
        module: The user's module.

    Returns:
        Layers by name, in the order of registration. The module itself has the name ``""``.
    """
    return {
        name: layer
        for name, layer in module.named_modules()
        if any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
    }


def check_layer_spec(spec: LayerSpec) -> None:
    """Refuse what cannot be a choice of layers.

    Args:
        spec: The value of ``layers``.

    Raises:
        TypeError: If it is none of the accepted forms.
        ValueError: If it is empty.
    """
    if isinstance(spec, str) or (callable(spec) and not isinstance(spec, (type, nn.Module))):
        parts: Sequence[object] = ()
    elif isinstance(spec, Sequence):
        parts = spec
        if not parts:
            raise ValueError(
                '`layers=[]` chooses nothing. Pass "last", "all", names, globs, layer types or a predicate.'
            )
    else:
        parts = (spec,)
    for part in parts:
        if not isinstance(part, str) and not (isinstance(part, type) and issubclass(part, nn.Module)):
            raise TypeError(
                f'`layers={spec!r}` holds a {type(part).__name__}. Expected "last", "all", names, globs, layer types '
                "or one predicate of (name, layer)."
            )


def select_layers(module: nn.Module, spec: LayerSpec, called: Sequence[str] | None = None) -> tuple[str, ...]:
    """Names of the chosen layers.

    Args:
        module: The user's module.
        spec: ``"last"`` (the last called), ``"all"``, a name (of a layer, or of a container for all layers in it), a
            glob, a layer type, several of these, or a predicate of (name, layer).
        called: Names of the trainable layers in the order in which a forward began them; ``None`` before the first
            forward, when ``"last"`` cannot be told yet.

    Returns:
        Names, each once; empty only for ``"last"`` before the first forward.

    Raises:
        LayerSelectionError: If nothing matches, or what matches has nothing to train.
    """
    layers = trainable_layers(module)
    if not layers:
        raise LayerSelectionError(
            f"`{type(module).__name__}` has no trainable parameters, so there are no gradients to compare. Set "
            "`requires_grad` on the layers of interest."
        )
    if spec == "last":
        if called is None:
            return ()
        if not called:
            raise LayerSelectionError(
                f"No trainable layer of `{type(module).__name__}` was called with gradients on in the forward pass, so "
                'there is no last one. Pass `layers=` by name, and check that `forward` does not run under "no_grad".'
            )
        return (called[-1],)
    if spec == "all":
        return tuple(layers)
    if callable(spec) and not isinstance(spec, type):
        chosen = tuple(name for name, layer in layers.items() if spec(name, layer))
        if not chosen:
            raise LayerSelectionError(
                f"The predicate passed as `layers` accepts none of the {len(layers)} trainable layers: "
                f"{_listed(layers)}."
            )
        return chosen
    parts = (spec,) if isinstance(spec, (str, type)) else spec
    return tuple(dict.fromkeys(name for part in parts for name in _matches(module, part, layers)))


def _matches(module: nn.Module, part: str | type[nn.Module], layers: Mapping[str, nn.Module]) -> list[str]:
    if isinstance(part, type):
        found = [name for name, layer in layers.items() if isinstance(layer, part)]
        if not found:
            raise LayerSelectionError(
                f"`layers` names the type `{part.__name__}`, but `{type(module).__name__}` has no trainable layer of "
                f"it. Trainable layers: {_listed(layers)}."
            )
        return found
    found = [name for name in layers if fnmatchcase(name, part) or name.startswith(f"{part}.")]
    if found:
        return found
    known = dict(module.named_modules())
    if part in known:
        raise LayerSelectionError(
            f"Layer `{part}` (`{type(known[part]).__name__}`) has no trainable parameter, so it has no gradient. Set "
            f"`requires_grad`, or choose among {_listed(layers)}."
        )
    closest = difflib.get_close_matches(part, list(layers), n=3, cutoff=0.4)
    hint = (
        f"Closest: {', '.join(f'`{name}`' for name in closest)}" if closest else f"Trainable layers: {_listed(layers)}"
    )
    raise LayerSelectionError(
        f"`layers={part!r}` matches no layer of `{type(module).__name__}`. {hint}. "
        "`GradSimCallback.available_layers(model)` lists all."
    )


def _listed(layers: Mapping[str, nn.Module]) -> str:
    names = [f"`{name}`" for name in layers]
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
