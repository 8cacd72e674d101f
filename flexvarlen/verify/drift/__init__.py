"""Drift: how far outputs and gradients move when only the backend, the batching or the compilation
changes.

| | holds |
|---|---|
| `op/`, `model/`, `training/` | the suites: attention alone, a whole model, steps of training |
| `difference.py` | `Difference`: two tensors, in four numbers |
| `report/` | tables, sentences, a user's own limits |
| `page_tables.py` | the tables of docs/verification.md |
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexvarlen.verify.drift.model.suite import model_drift
    from flexvarlen.verify.drift.op.suite import operator_drift
    from flexvarlen.verify.drift.report import DriftReport

__all__ = ["DriftReport", "model_drift", "operator_drift"]

_HOMES = {"DriftReport": "report", "model_drift": "model.suite", "operator_drift": "op.suite"}


def __getattr__(name: str) -> Any:
    """Imports transformers only where it is used."""
    if name in _HOMES:
        return getattr(import_module(f"flexvarlen.verify.drift.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'flexvarlen.verify.drift' has no attribute {name!r}")
