"""The tables of `engine.py`."""

from __future__ import annotations

from typing import Any

LABELS = {
    "forward": "plain forward",
    "train": "forward + backward",
    "ours": "ours",
    "teachers": "ours, with teachers",
    "loop": "one by one",
    "vmap": "torch.func vmap(grad)",
    "opacus": "Opacus GradSampleModule",
}


def print_row(row: dict[str, Any], num_queries: int) -> None:
    """The table of one network, choice of layers and batch size."""
    print(
        f"\n{row['row']}, batch {row['batch_size']}: {row['parameters']:,} parameters, {row['samples']:,} samples, "
        f"{num_queries} queries"
    )
    head = f"{'samples':>9}{'ms, median (range)':>31}{'us a sample':>13}{'x forward':>11}{'/ ours':>9}"
    print(f"  {'way':<32}{head}")
    for name, answer in row["ways"].items():
        print(f"  {answer.get('way', LABELS.get(name, name)):<32}{_cells(answer)}")
    print(f"  {_flops(row)}")
    print("".join(f"  {_target(target)}\n" for target in row["targets"]), end="", flush=True)


def print_summary(results: list[dict[str, Any]]) -> None:
    """One line a row: the ratios that have targets."""
    print("\nSummary (a pass costs its `once` part in addition, however long it is)")
    for row in results:
        once = row["ways"].get("ours", {}).get("once_ms")
        cells = [_target(target) for target in row["targets"]]
        cells += [] if once is None else [f"once {once:,.0f} ms"]
        print(f"  {row['row'] + ', ' + str(row['batch_size']):<22}{'; '.join(cells)}")


def _cells(answer: dict[str, Any]) -> str:
    if "refused" in answer:
        return f"  {answer['refused']}"
    median, smallest, largest = answer["ms"]
    times = f"{median:,.1f} ({smallest:,.1f} to {largest:,.1f})"
    ratios = [f"{answer[name]:.2f}" if name in answer else "-" for name in ("over_forward", "over_ours")]
    return f"{answer['samples']:>9,}{times:>31}{answer['us']:>13,.1f}{ratios[0]:>11}{ratios[1]:>9}"


def _flops(row: dict[str, Any]) -> str:
    rate, parts = row["matrix_rate"], []
    for name, flops in row["flops"].items():
        us = row["ways"].get(name, {}).get("us")
        share = "" if us is None else f" at {flops / (us * 1e-6) / rate:.0%}"
        parts.append(f"{LABELS[name]} {flops / 1e6:,.2f}{share}")
    return f"MFLOP a sample, at the share of the {rate / 1e9:.0f} GFLOP/s of a matrix product: {'; '.join(parts)}"


def _target(target: dict[str, Any]) -> str:
    words = f"{target['name']} {target['value']:.2f}"
    if target["bound"] is None:
        return words
    return f"{words} ({target['bound']}: {'met' if target['met'] else 'MISSED'})"
