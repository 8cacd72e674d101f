"""Drift: how far outputs and gradients move when only the backend, the batching or the compilation
changes.

| | holds |
|---|---|
| `model/`, `training/` | the suites: a whole model, steps of training |
| `report/` | tables, sentences, a user's own limits |
| `page_tables.py` | the tables of docs/verification.md |
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexvarlen.verify.drift.model.suite import model_drift
    from flexvarlen.verify.drift.report import DriftReport

__all__ = ["DriftReport", "model_drift"]

_HOMES = {"DriftReport": "report", "model_drift": "model.suite"}


def __getattr__(name: str) -> Any:
    """Imports transformers only where it is used."""
    if name in _HOMES:
        return getattr(import_module(f"flexvarlen.verify.drift.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'flexvarlen.verify.drift' has no attribute {name!r}")
