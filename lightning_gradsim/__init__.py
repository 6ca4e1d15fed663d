"""Why the model is wrong and which training labels are wrong, while you train: one callback for PyTorch Lightning."""

from lightning_gradsim.adapter import Adapter, Step
from lightning_gradsim.callback import GradSimCallback
from lightning_gradsim.errors import GradSimError, GradSimWarning
from lightning_gradsim.explain import explain
from lightning_gradsim.factors import IndexedFactors, OuterFactors, dot, squared_norms
from lightning_gradsim.plan_record import LayerPlan, Plan
from lightning_gradsim.planner import plan
from lightning_gradsim.records import InfluentialSample, QueryReport
from lightning_gradsim.report import Report
from lightning_gradsim.rules import register_rule
from lightning_gradsim.saved_report import load_report
from lightning_gradsim.sinks import Sink
from lightning_gradsim.suspects import Suspect, SuspectTable
from lightning_gradsim.true_labels import SuspectQuality
from lightning_gradsim.verification import Check, Verification, verify
from lightning_gradsim.wrapper import PerSampleGradients

__all__ = [  # noqa: RUF022 -- grouped for readers
    # The callback and what it returns
    "GradSimCallback",
    "InfluentialSample",
    "QueryReport",
    "Report",
    "Suspect",
    "SuspectQuality",
    "SuspectTable",
    "load_report",
    # The same for a trained module
    "explain",
    # Where reports go
    "Sink",
    # Other forms of batches
    "Adapter",
    "Step",
    # Per-sample gradients
    "IndexedFactors",
    "OuterFactors",
    "PerSampleGradients",
    "dot",
    "register_rule",
    "squared_norms",
    # What a pass will cost
    "LayerPlan",
    "Plan",
    "plan",
    # A self-check
    "Check",
    "Verification",
    "verify",
    # Errors and warnings
    "GradSimError",
    "GradSimWarning",
]
