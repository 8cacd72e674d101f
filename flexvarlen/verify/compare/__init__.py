"""`compare`: every backend against each document alone.

| file | holds |
|---|---|
| `compare.py` | `compare`: which variants run, in which order |
| `accuracy.py` | which documents the reference has room for; errors as measures |
| `check.py` | the check of one variant |
| `report.py`, `figure.py` | `Report`: records as table, sentences and files; the picture |
"""

from flexvarlen.verify.compare.compare import compare
from flexvarlen.verify.compare.report import Report

__all__ = ["Report", "compare"]
