"""``GradSimCallback`` does its work and changes nothing, in every configuration of the table."""

from __future__ import annotations

import pytest

from lightning_gradsim import GradSimCallback
from tests.noninterference.cases import CASES, Case
from tests.noninterference.harness import differences, record_baseline, record_run


@pytest.mark.filterwarnings("ignore:.*augmented at random")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_callback_changes_nothing(case: Case) -> None:
    """With the callback and without: the same run, bit for bit, while queries were scored."""
    callback = GradSimCallback(num_queries=8, top_k=3, on_error="raise", every_n_epochs=1)
    assert differences(record_run(case, [callback]), record_baseline(case)) == []
    assert callback.report is not None
    assert callback.report.queries
