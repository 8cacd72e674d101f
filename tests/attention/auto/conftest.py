"""Fixtures that let `backend="auto"` choose among stand-ins for kernels, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from flexvarlen import env as switches
from flexvarlen.attention import choose
from flexvarlen.attention import explain as explain_module
from flexvarlen.attention.auto import decide as auto
from flexvarlen.attention.auto import table
from flexvarlen.attention.backends import registry as backends
from tests.attention.auto.stand_ins import BY_FAST, BY_SLOW, StandIn, a_case


@pytest.fixture
def candidates(monkeypatch, tmp_path):
    """A function that makes its arguments the candidates, by their times, and gives them back."""

    def make(*stand_ins):
        registry = {**backends._REGISTRY, **{backend.name: backend for backend in stand_ins}}
        monkeypatch.setattr(backends, "_REGISTRY", registry)
        for module in (auto, explain_module):
            monkeypatch.setattr(module, "BACKENDS", tuple(registry))
        monkeypatch.setitem(auto.CANDIDATES, "cpu", tuple(backend.name for backend in stand_ins))
        case = a_case({backend.name: backend.ms for backend in stand_ins})
        monkeypatch.setattr(table, "shipped_cases", lambda: (case,))
        monkeypatch.setattr(table, "HOST_BOUND", 0)
        monkeypatch.setenv(switches.CACHE, str(tmp_path / "cache"))
        choose.clear_cache()
        return stand_ins

    yield make
    monkeypatch.undo()
    choose.clear_cache()


@pytest.fixture
def two(candidates):
    """The slow one first in every order but that of times; each has its own factor."""
    return candidates(StandIn("slow", 2.0, BY_SLOW), StandIn("fast", 1.0, BY_FAST))


@pytest.fixture
def _fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
