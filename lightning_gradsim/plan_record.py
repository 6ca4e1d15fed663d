"""The record of how a pass computes: which step serves a layer, how its products are taken, what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class LayerPlan:
    """How the gradients of one layer are compared.

    Attributes:
        name: Name of the layer, or of a parameter where only some of the layer's are chosen.
        kind: Type of the layer.
        num_parameters: Chosen parameters.
        step: Step of the ladder: ``rule``, ``opacus``, ``vmap`` or ``one at a time``.
        product: ``gram`` (no gradient is built), ``materialise`` (each training gradient is built once) or ``indexed``
            (rows of a table).
        flops: Floating-point operations for the gradient of one training sample, its norm, and its products with all
            queries; the backward to the layer is not in it.
        num_bytes: Bytes that one training sample takes until it is scored.
        query_bytes: Bytes that all queries take during the pass.
        reason: Why no rule serves the layer, else empty.
    """

    name: str
    kind: str
    num_parameters: int
    step: str
    product: str
    flops: int
    num_bytes: int
    query_bytes: int
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """How a pass computes.

    Attributes:
        layers: The layers, in the order in which they were chosen.
        num_query_gradients: Gradients that every training sample is compared with: one for each query's label, and one
            more for its prediction.
        batch_size: Training samples of the batch that the plan was made for.
        rows: Training samples that are worked on together.
        memory_budget: Bytes that the pass may take.
        forward_flops: Floating-point operations of a plain forward for one sample, as counted by PyTorch; ``None``
            where they could not be counted.
    """

    layers: tuple[LayerPlan, ...]
    num_query_gradients: int
    batch_size: int
    rows: int
    memory_budget: int
    forward_flops: int | None

    def share(self, layer: LayerPlan) -> float | None:
        """Operations for a layer over those of a plain forward; ``None`` where these are not known."""
        return layer.flops / self.forward_flops if self.forward_flops else None

    def to_rows(self) -> list[dict[str, str]]:
        """The table as words, a row for each layer, with the headings as keys."""
        return [
            {
                "layer": layer.name,
                "type": layer.kind,
                "parameters": f"{layer.num_parameters:,}",
                "step": layer.step,
                "products": layer.product,
                "MFLOP a sample": f"{layer.flops / 1e6:,.3f}",
                "memory a sample": in_bytes(layer.num_bytes),
                "memory of queries": in_bytes(layer.query_bytes),
                "of a plain forward": "?" if (share := self.share(layer)) is None else f"{share:.1%}",
            }
            for layer in self.layers
        ]

    def __str__(self) -> str:
        """The table for a terminal, and what holds for all layers."""
        rows = self.to_rows()
        lines = _table(rows) if rows else ["no layers"]
        forward = "not counted" if self.forward_flops is None else f"{self.forward_flops / 1e6:,.3f} MFLOP a sample"
        lines.append(
            f"{self.num_query_gradients} query gradients; plain forward: {forward}; batches of {self.batch_size}, "
            f"{self.rows} samples at a time; memory budget {in_bytes(self.memory_budget)}"
        )
        lines += [f"{layer.name}: {layer.reason}" for layer in self.layers if layer.reason]
        return "\n".join(lines)


def in_bytes(number: int) -> str:
    """A number of bytes in the unit that suits it."""
    value, unit = float(number), 0
    while value >= 1024 and unit < len(BYTE_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {BYTE_UNITS[unit]}" if unit == 0 else f"{value:.1f} {BYTE_UNITS[unit]}"


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    columns = list(rows[0])
    widths = {column: max(len(column), *(len(row[column]) for row in rows)) for column in columns}
    words = ("layer", "type", "step", "products")

    def line(cells: dict[str, str]) -> str:
        return "  ".join(
            cells[column].ljust(widths[column]) if column in words else cells[column].rjust(widths[column])
            for column in columns
        ).rstrip()

    return [line({column: column for column in columns}), *(line(row) for row in rows)]
