"""What the tests of the scripts of examples/ share."""

from __future__ import annotations

import pytest
from accelerate.state import AcceleratorState

from tests.docs.scripts import ROOT, TINY, module_at


@pytest.fixture
def load(monkeypatch):
    """Loads a script, with a tinier model of its own if it has one; it runs on the CPU."""

    def module_of(name):
        module = module_at(ROOT / f"examples/{name}.py")
        if hasattr(module, "SMALL"):
            monkeypatch.setattr(module, "SMALL", TINY)
        return module

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    yield module_of
    AcceleratorState._reset_state(reset_partial_state=True)
