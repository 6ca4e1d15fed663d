"""Charts of the page, as plain values for its template: 240 by 56 units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning_gradsim.records import Histogram


def draw_line(name: str, form: str, epochs: Sequence[int], values: Sequence[float | None]) -> dict[str, Any] | None:
    """A line through the values that there are.

    Args:
        name: What they are.
        form: How a value is written, a format specification.
        epochs: Epoch of each value.
        values: The values; ``None`` where there is none.

    Returns:
        Texts and points for the template; ``None`` where there is no value at all.
    """
    known = [(place, float(value)) for place, value in enumerate(values) if value is not None and math.isfinite(value)]
    if not known:
        return None
    low, high = min(0.0, *(value for _, value in known)), max(value for _, value in known)
    points = [
        (6 + 228 * place / max(1, len(values) - 1), 50 - 44 * (value - low) / ((high - low) or 1.0))
        for place, value in known
    ]
    last = known[-1][1]
    return {
        "name": name,
        "line": " ".join(f"{x:.1f},{y:.1f}" for x, y in points),
        "end": (f"{points[-1][0]:.1f}", f"{points[-1][1]:.1f}"),
        "last": format(last, form),
        "words": f"epochs {epochs[0]} to {epochs[-1]}, up to {format(high, form)}",
    }


def draw_histogram(histogram: Histogram) -> dict[str, Any]:
    """The bars of a histogram.

    Args:
        histogram: The histogram, with at least one sample.

    Returns:
        Texts and places for the template.
    """
    width, highest = 240 / len(histogram.counts), max(histogram.counts)
    bars = [
        {"x": f"{place * width:.1f}", "width": f"{width - 1:.1f}", "height": f"{50 * count / highest:.1f}"}
        for place, count in enumerate(histogram.counts)
    ]
    low, high = histogram.edges[0], histogram.edges[-1]
    zeros = f"; {histogram.num_zero:,} are zero" if histogram.num_zero else ""
    return {"bars": bars, "words": f"10^{low:.1f} to 10^{high:.1f}{zeros}"}
