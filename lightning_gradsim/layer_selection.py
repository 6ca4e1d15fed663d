"""From what the user writes as ``layers`` to the names of layers, and of their parameters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_gradsim.arguments import with_article
from lightning_gradsim.errors import LayerSelectionError

LayerSpec = str | type[nn.Module] | Callable[[str, nn.Module], bool] | Sequence["str | type[nn.Module]"]
"""``"last"``, ``"last:3"``, ``"all"``, a name of a layer or parameter, a glob, a layer type, several of these, or a
predicate of (name, layer)."""

Selection = dict[str, tuple[str, ...]]
"""Names of the chosen layers, each with the names of the chosen parameters in it."""

KEYWORDS = ("last", "last:2", "last:3", "all")
MAX_LISTED = 10
THE_MODULE = "(the module)"
"""What the layer that has no name, the module itself, is called where people read."""
FORMS = 'Expected "last", "last:3", "all", names, globs, layer types or one predicate of (name, layer).'


def trainable_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Layers with trainable parameters of their own.

    Args:
        module: The user's module.

    Returns:
        Layers by name, in the order of registration. The module itself has the name ``""``.
    """
    inner = tuple(f"{name}.parametrizations." for name, layer in module.named_modules() if is_parametrized(layer))
    return {
        name: layer
        for name, layer in module.named_modules()
        # What a parametrization trains belongs to the layer that it is made for.
        if own_parameters(layer) and not name.startswith(tuple(prefix.lstrip(".") for prefix in inner))
    }


def own_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters of a layer that belong to no layer inside of it.

    Args:
        layer: The layer.

    Returns:
        Parameters by their names in the layer, those of its parametrizations (``weight_norm``, ``spectral_norm``)
        included.
    """
    parameters = dict(layer.named_parameters(recurse=False))
    if is_parametrized(layer):
        parametrizations = layer.get_submodule("parametrizations")
        parameters |= {f"parametrizations.{name}": value for name, value in parametrizations.named_parameters()}
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


def check_layer_spec(spec: LayerSpec) -> None:
    """Refuse what cannot be a choice of layers.

    Args:
        spec: The value of ``layers``.

    Raises:
        TypeError: If it is none of the accepted forms.
        ValueError: If it is empty, or asks for the last 0 layers.
    """
    if isinstance(spec, str) or (callable(spec) and not isinstance(spec, (type, nn.Module))):
        parts: Sequence[object] = ()
    elif isinstance(spec, Sequence):
        parts = spec
        if not parts:
            raise ValueError(f"`layers=[]` chooses nothing. {FORMS}")
    else:
        parts = (spec,)
    for part in parts:
        if not isinstance(part, str) and not (isinstance(part, type) and issubclass(part, nn.Module)):
            raise TypeError(f"`layers={spec!r}` holds {with_article(type(part).__name__)}. {FORMS}")
    if isinstance(spec, str) and spec.startswith("last:") and _number_of_last(spec) is None:
        raise ValueError(f'`layers={spec!r}` names no number. Expected "last:" and a whole number of at least 1.')


def select_layers(module: nn.Module, spec: LayerSpec, called: Sequence[str] | None = None) -> Selection:
    """The chosen layers, and the chosen parameters of each.

    Args:
        module: The user's module.
        spec: ``"last"`` (the last called), ``"last:3"`` (the last three), ``"all"``, a name (of a layer, of a container
            for all layers in it, or of a parameter), a glob, a layer type, several of these, or a predicate of
            (name, layer).
        called: Names of the trainable layers in the order in which a forward began them; ``None`` before the first
            forward, when ``"last"`` cannot be told yet.

    Returns:
        Names of parameters by layer; empty only for ``"last"`` before the first forward.

    Raises:
        LayerSelectionError: If nothing matches, or what matches has nothing to train.
    """
    layers = trainable_layers(module)
    if not layers:
        raise LayerSelectionError(
            f"`{type(module).__name__}` has no trainable parameters, so there are no gradients to compare. Set "
            "`requires_grad` on the layers of interest."
        )
    number = _number_of_last(spec)
    if number is not None:
        names = () if called is None else _last(module, number, called)
    elif spec == "all":
        names = tuple(layers)
    elif callable(spec) and not isinstance(spec, type):
        names = tuple(name for name, layer in layers.items() if spec(name, layer))
        if not names:
            raise LayerSelectionError(
                f"The predicate passed as `layers` accepts none of the {len(layers)} trainable layers: "
                f"{_listed(layers)}."
            )
    else:
        parts = (spec,) if isinstance(spec, (str, type)) else spec
        return _union([_matches(module, part, layers) for part in parts], layers)
    return _whole(names, layers)


def parameter_names(selection: Selection, layers: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """What a selection holds, in words: layers, or single parameters where only some of a layer's are chosen.

    Args:
        selection: The chosen layers.
        layers: All trainable layers.

    Returns:
        Names by layer, in the order of the selection.
    """
    return {
        layer: [layer or THE_MODULE]
        if len(chosen) == len(own_parameters(layers[layer]))
        else _full_names(layer, chosen)
        for layer, chosen in selection.items()
    }


def _number_of_last(spec: LayerSpec) -> int | None:
    """How many of the last called layers are meant; ``None`` if others are."""
    if spec == "last":
        return 1
    found = re.fullmatch(r"last:([1-9]\d*)", spec) if isinstance(spec, str) else None
    return None if found is None else int(found.group(1))


def _last(module: nn.Module, number: int, called: Sequence[str]) -> tuple[str, ...]:
    if not called:
        raise LayerSelectionError(
            f"The forward pass of `{type(module).__name__}` called none of its trainable layers with gradients on "
            f"({_listed(trainable_layers(module))}), so there is no last one. Choose by name, which also finds "
            'parameters that are used without calling their layer, and check that `forward` sets no "no_grad".'
        )
    if number > len(called):
        raise LayerSelectionError(
            f'`layers="last:{number}"` asks for more layers than the {len(called)} trainable ones that the forward '
            f'pass of `{type(module).__name__}` called. Ask for fewer, or for "all".'
        )
    return tuple(called[-number:])


def _whole(names: Sequence[str], layers: Mapping[str, nn.Module]) -> Selection:
    return {name: tuple(own_parameters(layers[name])) for name in names}


def _union(parts: Sequence[Selection], layers: Mapping[str, nn.Module]) -> Selection:
    chosen: dict[str, set[str]] = {}
    for part in parts:
        for layer, names in part.items():
            chosen.setdefault(layer, set()).update(names)
    return {layer: tuple(n for n in own_parameters(layers[layer]) if n in names) for layer, names in chosen.items()}


def _matches(module: nn.Module, part: str | type[nn.Module], layers: Mapping[str, nn.Module]) -> Selection:
    if isinstance(part, type):
        found = [name for name, layer in layers.items() if isinstance(layer, part)]
        if not found:
            raise LayerSelectionError(
                f"`layers` names the type `{part.__name__}`, but `{type(module).__name__}` has no trainable layer of "
                f"it. Trainable layers: {_listed(layers)}."
            )
        return _whole(found, layers)
    found = [name for name in layers if fnmatchcase(name, part) or name.startswith(f"{part}.")]
    if found:
        return _whole(found, layers)
    parameters = {
        name: tuple(own for own in own_parameters(layer) if fnmatchcase(_full_names(name, [own])[0], part))
        for name, layer in layers.items()
    }
    chosen = {name: own for name, own in parameters.items() if own}
    if chosen:
        return chosen
    raise LayerSelectionError(_no_match(module, part, layers))


def _no_match(module: nn.Module, part: str, layers: Mapping[str, nn.Module]) -> str:
    known = dict(module.named_modules())
    if part == "all" or _number_of_last(part) is not None:
        return f"`layers` holds {part!r} among others. Expected it alone: `layers={part!r}`."
    if part in known:
        return (
            f"Layer `{part}` (`{type(known[part]).__name__}`) has no trainable parameter, so it has no gradient. Set "
            f"`requires_grad`, or choose among {_listed(layers)}."
        )
    if part in dict(module.named_parameters()):
        return (
            f"Parameter `{part}` is frozen, so it has no gradient. Set `requires_grad`, or choose among "
            f"{_listed(layers)}."
        )
    parameters = [full for name, layer in layers.items() for full in _full_names(name, list(own_parameters(layer)))]
    keyword = difflib.get_close_matches(part, KEYWORDS, n=1, cutoff=0.7)
    names = [*keyword, *filter(None, layers), *parameters]
    closest = difflib.get_close_matches(part, names, n=3, cutoff=0.4)
    if closest and closest[0] in layers:
        closest = [name for name in closest if name in layers]
    hint = (
        f"Closest: {', '.join(f'`{name}`' for name in closest)}" if closest else f"Trainable layers: {_listed(layers)}"
    )
    return (
        f"`layers={part!r}` matches no layer or parameter of `{type(module).__name__}`. {hint}. "
        "`GradSimCallback.available_layers(model)` lists all."
    )


def _full_names(layer: str, names: Sequence[str]) -> list[str]:
    return [f"{layer}.{name}" if layer else name for name in names]


def _listed(layers: Mapping[str, nn.Module]) -> str:
    names = [f"`{name or THE_MODULE}`" for name in layers]
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
