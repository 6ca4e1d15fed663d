"""Layer types and the rules that bring their per-sample gradients into factors."""

from lightning_gradsim.rules import conv, embedding, linear, norm
from lightning_gradsim.rules.gradients import split_gradients
from lightning_gradsim.rules.registry import Rule, find_rule, register_rule, registered_types

__all__ = [
    "Rule",
    "conv",
    "embedding",
    "find_rule",
    "linear",
    "norm",
    "register_rule",
    "registered_types",
    "split_gradients",
]
