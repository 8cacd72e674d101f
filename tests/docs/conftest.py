"""What the tests of the scripts of examples/ share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

ROOT = Path(__file__).resolve().parents[2]
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def load(monkeypatch):
    """Loads a script, with a tinier model of its own if it has one; it runs on the CPU."""

    def module_of(name):
        spec = importlib.util.spec_from_file_location(
            f"example_{name}", ROOT / f"examples/{name}.py"
        )
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # datasets pickles functions by module
        spec.loader.exec_module(module)
        if hasattr(module, "SMALL"):
            monkeypatch.setattr(module, "SMALL", TINY)
        return module

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    yield module_of
    AcceleratorState._reset_state(reset_partial_state=True)
