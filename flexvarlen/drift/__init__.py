"""Drift: how far outputs and gradients move when only the backend, the batching or the compilation
changes, and where the movement comes from.

Data first: every run gives `flexvarlen.rows.Row`s; tables, Markdown and the page are made of rows
alone.

| | holds |
|---|---|
| `difference.py` | `Difference`: two tensors, in five numbers |
| `op/` | attention alone: `operator_drift` |
| `model/` | a whole model: `model_drift`, and whose drift it is: `attribute` |
| `training/` | steps of training: `training_drift` |
| `grid.py` | a table for terminal and Markdown |
| `report/` | `DriftReport`: sentences, tables, plots, the page, limits |
"""

from typing import TYPE_CHECKING, Any

from flexvarlen.drift.difference import Difference

if TYPE_CHECKING:
    from flexvarlen.drift.model.attribution import attribute
    from flexvarlen.drift.model.comparisons import model_drift
    from flexvarlen.drift.op.comparisons import operator_drift
    from flexvarlen.drift.report.files import DriftReport
    from flexvarlen.drift.training.variants import training_drift

__all__ = [
    "Difference",
    "DriftReport",
    "attribute",
    "model_drift",
    "operator_drift",
    "training_drift",
]

_HOMES = {
    "DriftReport": "report.files",
    "attribute": "model.attribution",
    "model_drift": "model.comparisons",
    "operator_drift": "op.comparisons",
    "training_drift": "training.variants",
}


def __getattr__(name: str) -> Any:
    """What imports transformers and plotting, when first used."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"flexvarlen.drift.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'flexvarlen.drift' has no attribute {name!r}")
