"""`compare`: every backend against each document alone.

| file | holds |
|---|---|
| `compare.py` | `compare`: which variants run, in which order |
| `accuracy.py` | which documents the reference has room for; errors as measures |
| `check.py` | the check of one variant, and its leaks |
| `report.py`, `figure.py` | `Report`: records as table, sentences and files; the picture |

`flexvarlen drift` compares pairs of runs:

| file | holds |
|---|---|
| `pairs.py` | suite "drift-model": packed and alone, backends, dtypes, compiled |
| `model_run.py`, `differences.py` | one run of a model; how far two are apart |
| `drift_report.py`, `drift_tables.py` | `DriftReport`: tables, sentences, a user's own limits |
"""

from flexvarlen.verify.compare.compare import Interrupted, compare
from flexvarlen.verify.compare.report import Report

__all__ = ["Interrupted", "Report", "compare"]
