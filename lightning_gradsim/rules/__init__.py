"""Layer types and the rules that bring their per-sample gradients into factors."""

from lightning_gradsim.rules import linear
from lightning_gradsim.rules.registry import Rule, find_rule, register_rule, registered_types

__all__ = ["Rule", "find_rule", "linear", "register_rule", "registered_types"]
