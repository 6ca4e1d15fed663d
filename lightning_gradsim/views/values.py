"""Named numbers of samples side by side: which of them differ enough to be looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DIFFERS = 0.25
"""Share of a number's range over all shown samples from which a difference is marked."""
Values = Sequence[tuple[str, float]]


@dataclass(frozen=True)
class ValueCell:
    """A number as shown, and whether it differs from the query's."""

    value: str
    differs: bool


@dataclass(frozen=True)
class ValueScale:
    """How far numbers of shown samples lie apart.

    Attributes:
        names: Names of the numbers; empty where nothing has any.
        ranges: Highest less lowest value of each.
    """

    names: tuple[str, ...]
    ranges: tuple[float, ...]

    def cells(self, values: Values | None, query: Values | None) -> list[ValueCell]:
        """The numbers of a sample, those marked that differ from the query's by a good part of their range."""
        if values is None:
            return [ValueCell("", differs=False)] * len(self.names)
        flags = (False,) * len(values) if query is None else self.differing(values, query)
        return [ValueCell(f"{value:.4g}", differs) for (_, value), differs in zip(values, flags, strict=True)]

    def differing(self, values: Values, query: Values) -> tuple[bool, ...]:
        """Which numbers differ by more than a quarter of their range, or are NaN in one sample only."""
        return tuple(
            math.isnan(value) != math.isnan(own) or abs(value - own) > DIFFERS * width
            for (_, value), (_, own), width in zip(values, query, self.ranges, strict=True)
        )


def make_scale(shown: Sequence[Values]) -> ValueScale:
    """The scale of all samples that are shown together.

    Args:
        shown: Names and numbers of each, in one order.

    Returns:
        The scale.

    Example:
        >>> scale = make_scale([[("age", 20.0), ("height", 1.0)], [("age", 60.0), ("height", 1.0)]])
        >>> scale.ranges
        (40.0, 0.0)
    """
    if not shown:
        return ValueScale((), ())
    columns = list(zip(*shown, strict=True))
    ranges = []
    for column in columns:
        finite = [value for _, value in column if math.isfinite(value)]
        ranges.append(max(finite) - min(finite) if finite else 0.0)
    return ValueScale(tuple(name for name, _ in shown[0]), tuple(ranges))
