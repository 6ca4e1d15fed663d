"""How fast `engine.py` says that a pass should be."""

from __future__ import annotations

from typing import Any

LAST_OVER_FORWARD = {
    ("conv", 64): 1.2,
    ("mlp", 64): 1.6,
    ("mlp", 512): 1.15,
    ("resnet", 64): 1.08,
    ("transformer", 64): 1.08,
}
ALL_OVER_TRAIN = {"conv": 1.25, "mlp": 0.85, "resnet": 1.8, "transformer": 1.35}
LOOP_OVER_OURS = {
    "all": {"conv": 8, "mlp": 100, "resnet": 4, "transformer": 2},
    "last": {"conv": 15, "mlp": 5, "resnet": 5, "transformer": 5},
}
NO_PEERS = ("forward", "train", "ours", "teachers")


def targets_of(model: str, layers: str, batch_size: int, answers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratios of a row with the bounds that they should keep, as far as their parts were measured.

    Args:
        model: Name of the network.
        layers: `all` or `last`.
        batch_size: Samples in a batch.
        answers: What was measured, by way, with ratios.

    Returns:
        Name, value, bound in words, and whether it is met; `None` where there is no bound.
    """
    us = {name: answer["us"] for name, answer in answers.items() if "us" in answer}
    found: list[dict[str, Any]] = []

    def add(name: str, top: str, bottom: str, bound: float | None, *, at_most: bool) -> None:
        if top not in us or bottom not in us:
            return
        value = us[top] / us[bottom]
        met = None if bound is None else (value <= bound if at_most else value >= bound)
        words = None if bound is None else f"{'<=' if at_most else '>='} {bound:g}"
        found.append({"name": name, "value": value, "bound": words, "met": met})

    if layers == "last":
        add("ours / forward", "ours", "forward", LAST_OVER_FORWARD.get((model, batch_size)), at_most=True)
    else:
        add("ours / (forward + backward)", "ours", "train", ALL_OVER_TRAIN[model], at_most=True)
    add("one by one / ours", "loop", "ours", LOOP_OVER_OURS[layers][model], at_most=False)
    peers = {name: answer["over_ours"] for name, answer in answers.items() if "over_ours" in answer}
    peers = {name: value for name, value in peers.items() if name not in NO_PEERS}
    if peers:
        closest = min(peers, key=peers.__getitem__)
        value = peers[closest]
        found.append({"name": f"fastest peer ({closest}) / ours", "value": value, "bound": "> 1", "met": value > 1})
    return found
