from __future__ import annotations

import numpy as np
import pytest
import torch

import lightning_gradsim.presentation


@pytest.fixture(autouse=True)
def _one_thread():
    """Models of a few hundred weights: a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def real_panel():
    """Asked for by the tests that look at the panel."""


@pytest.fixture(autouse=True)
def _small_panel(request, monkeypatch):
    """A panel takes as long to draw as a run: the other tests get one of a few pixels."""
    if "real_panel" not in request.fixturenames:
        panel = np.zeros((4, 4, 3), np.uint8)
        monkeypatch.setattr(lightning_gradsim.presentation, "mistake_panel", lambda *_, **__: panel)
