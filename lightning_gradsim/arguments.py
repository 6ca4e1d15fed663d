"""Checks of what users pass to a constructor: the value, what was expected, what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real


def check_choice(argument: str, value: object, choices: Sequence[str]) -> None:
    """Refuse a value that is not among the choices.

    Args:
        argument: Name of the argument.
        value: Its value.
        choices: What it may be.

    Raises:
        ValueError: If it is none of them.
    """
    if value not in choices:
        raise ValueError(f"`{argument}={value!r}` is not known. Expected one of {', '.join(map(repr, choices))}.")


def with_article(name: str) -> str:
    """``"a str"``, ``"an int"``; the name may be in backticks."""
    return f"{'an' if name.strip('`')[:1].lower() in tuple('aeiou') else 'a'} {name}"


def check_type(argument: str, value: object, fits: bool, expected: str) -> None:
    """Refuse a value of a wrong type.

    Args:
        argument: Name of the argument.
        value: Its value.
        fits: Whether the type is right.
        expected: What was expected, in words.

    Raises:
        TypeError: If it is not.
    """
    if not fits:
        raise TypeError(f"`{argument}={value!r}` is {with_article(type(value).__name__)}. Expected {expected}.")


def check_normalisation(mean: Sequence[float] | None, std: Sequence[float] | None) -> None:
    """Refuse a mean and a standard deviation that do not fit together.

    Args:
        mean: Mean a channel.
        std: Standard deviation a channel.

    Raises:
        ValueError: If only one is given, their lengths differ, a value is not finite, or a deviation is not above 0.
    """
    if (mean is None) != (std is None):
        raise ValueError("`mean` and `std` undo a normalisation together. Pass both or neither.")
    for argument, values in {"mean": mean, "std": std}.items():
        check_type(argument, values, is_list_of(values, Real), "a list of numbers, one a channel")
    if mean is None or std is None:
        return
    if len(mean) != len(std) or not all(map(math.isfinite, [*mean, *std])) or not all(value > 0 for value in std):
        raise ValueError(
            f"`mean={mean!r}` and `std={std!r}`. Expected one finite number a channel in both, `std` above 0."
        )


def check_seed(seed: object) -> None:
    """Refuse what cannot seed a generator of torch.

    Args:
        seed: The value.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it does not fit into 64 bits.
    """
    check_type("seed", seed, isinstance(seed, int) and not isinstance(seed, bool), "a whole number")
    if isinstance(seed, int) and not -(2**63) <= seed < 2**64:
        raise ValueError(f"`seed={seed}` does not fit into 64 bits. Expected a number from -2**63 to 2**64 - 1.")


def check_folder_name(argument: str, value: object) -> None:
    """Refuse what cannot name one folder.

    Args:
        argument: Name of the argument.
        value: Its value.

    Raises:
        TypeError: If it is no string.
        ValueError: If it is empty, or leads elsewhere.
    """
    check_type(argument, value, isinstance(value, str), "a string")
    if isinstance(value, str) and (value in {"", ".", ".."} or "/" in value or "\\" in value):
        raise ValueError(f"`{argument}={value!r}` cannot name a folder. Expected a non-empty string without slashes.")


def check_names(argument: str, values: object, expected: str) -> None:
    """Refuse what is neither ``None`` nor a list of names.

    Args:
        argument: Name of the argument.
        values: Its value.
        expected: What was expected, in words.

    Raises:
        TypeError: If it is no list of strings.
        ValueError: If it is empty.
    """
    check_type(argument, values, is_list_of(values, str), "a list of strings")
    if isinstance(values, Sequence) and not values:
        raise ValueError(f"`{argument}={values!r}` is empty. Expected {expected}.")


def is_list_of(values: object, kinds: type) -> bool:
    """Whether this is ``None``, or several such values (an array, too) and not a string."""
    if values is None:
        return True
    return isinstance(values, Iterable) and not isinstance(values, str) and all(isinstance(v, kinds) for v in values)


def check_count(argument: str, value: object, *, optional: bool, at_least: int = 1) -> None:
    """Refuse what is not a whole number, or too small.

    Args:
        argument: Name of the argument.
        value: Its value.
        optional: Whether it may be ``None``.
        at_least: The smallest that it may be.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is too small.
    """
    if optional and value is None:
        return
    expected = f"Expected a whole number of at least {at_least}."
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{argument}={value!r}` is {with_article(type(value).__name__)}. {expected}")
    if value < at_least:
        raise ValueError(f"`{argument}={value}` is too small. {expected}")


def check_count_or_ids(argument: str, value: object) -> None:
    """Refuse what is neither a number nor a list of sample ids.

    Args:
        argument: Name of the argument.
        value: Its value.

    Raises:
        TypeError: If it is of another type, or holds others.
        ValueError: If the number is below 1, or the list empty, or with ids that are negative or repeated.
    """
    expected = "Expected a whole number of at least 1, or a list of different sample ids."
    if not isinstance(value, Iterable) or isinstance(value, (str, Mapping)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"`{argument}={value!r}` is {with_article(type(value).__name__)}. {expected}")
        if value < 1:
            raise ValueError(f"`{argument}={value}` is too small. {expected}")
        return
    ids = list(value)
    wrong = [each for each in ids if isinstance(each, bool) or not isinstance(each, Integral)]
    if wrong:
        raise TypeError(f"`{argument}={value!r}` holds {with_article(type(wrong[0]).__name__)}. {expected}")
    if not ids or min(ids) < 0 or len(set(ids)) < len(ids):
        what = "is empty" if not ids else "holds a negative id" if min(ids) < 0 else "holds an id twice"
        raise ValueError(f"`{argument}={value!r}` {what}. {expected}")


def check_share(argument: str, value: object) -> None:
    """Refuse what is neither ``None`` nor a number above 0.

    Args:
        argument: Name of the argument.
        value: Its value.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is not above 0, or not finite.
    """
    if value is None:
        return
    expected = "Expected a share of the training time, such as 0.1, or None for no limit."
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{argument}={value!r}` is {with_article(type(value).__name__)}. {expected}")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"`{argument}={value}` is out of range. {expected}")


def check_positive(argument: str, value: object) -> None:
    """Refuse what is no number above 0.

    Args:
        argument: Name of the argument.
        value: Its value.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is not above 0.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{argument}={value!r}` is a {type(value).__name__}. Expected a number above 0.")
    if not float(value) > 0:
        raise ValueError(f"`{argument}={value}` is too small. Expected a number above 0.")


def check_sinks(values: object) -> None:
    """Refuse what is no list of sinks.

    Args:
        values: The value of ``sinks``.

    Raises:
        TypeError: If one of them lacks a method.
    """
    methods = ("write_images", "write_texts", "write_scalars")
    expected = f"a list of objects with the methods {', '.join(f'`{method}`' for method in methods)}"
    check_type("sinks", values, isinstance(values, (list, tuple)), expected)
    for value in values if isinstance(values, (list, tuple)) else ():
        check_type("sinks", value, all(callable(getattr(value, method, None)) for method in methods), expected)


def in_words(value: object, longest: int = 120) -> str:
    """A value of an argument as a reader wants to see it: short, without addresses.

    Args:
        value: The value.
        longest: Most characters.

    Returns:
        Its text.

    Example:
        >>> in_words("last"), in_words([0.5, 2]), in_words(len)
        ("'last'", '[0.5, 2]', 'len')
    """
    if value is None or isinstance(value, (bool, int, float, str, list, tuple)):
        text = repr(value)
    else:
        text = getattr(value, "__name__", None) or type(value).__name__
    return text if len(text) <= longest else text[: longest - 1] + "…"
