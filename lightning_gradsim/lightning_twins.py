"""Lightning comes under two names, ``lightning.pytorch`` and ``pytorch_lightning``, with classes of their own each."""

from __future__ import annotations

import sys
from typing import TypeGuard, TypeVar

T = TypeVar("T")


def with_twin(cls: type) -> tuple[type, ...]:
    """A class of ``lightning.pytorch``, and that of the same name in ``pytorch_lightning`` where that is in use.

    Args:
        cls: A class of ``lightning.pytorch``.

    Returns:
        One class or two.
    """
    module = sys.modules.get(cls.__module__.replace("lightning.pytorch", "pytorch_lightning", 1))
    return tuple(dict.fromkeys([cls, getattr(module, cls.__name__, cls)]))


def is_instance(value: object, cls: type[T]) -> TypeGuard[T]:
    """``isinstance``, for either name of Lightning.

    Args:
        value: Any object.
        cls: A class of ``lightning.pytorch``.

    Returns:
        Whether it is one, or one of its twin.
    """
    return isinstance(value, with_twin(cls))


def overrides(method: str, instance: object, base: type) -> bool:
    """Whether an instance has a method of its own.

    Args:
        method: Name of the method.
        instance: Instance of the base, or of its twin.
        base: A class of ``lightning.pytorch`` that has the method.

    Returns:
        Whether it is another one than that of the base.
    """
    found = getattr(instance, method)
    inherited = [getattr(each, method, None) for each in with_twin(base)]
    return getattr(found, "__func__", found) not in inherited
