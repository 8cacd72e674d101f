"""What tests of packing under accelerate share."""

from __future__ import annotations

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture
def _accelerate_as_it_was(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
