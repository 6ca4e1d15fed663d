"""Layer types and the rules that bring their per-sample gradients into factors."""

from lightning_gradsim.rules import conv, embedding, linear, norm
from lightning_gradsim.rules.gradients import keep_parameters, split_gradients
from lightning_gradsim.rules.registry import Rule, find_rule, register_rule, registered_types
from lightning_gradsim.rules.samplers import find_sampler, sampler_factors

__all__ = [
    "Rule",
    "conv",
    "embedding",
    "find_rule",
    "find_sampler",
    "keep_parameters",
    "linear",
    "norm",
    "register_rule",
    "registered_types",
    "sampler_factors",
    "split_gradients",
]
