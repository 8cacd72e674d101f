"""Proof that packed outputs are right, as data.

`compare`: every backend against each document alone. `verify_isolation`: raise if a document sees
another.

| file | holds |
|---|---|
| `batch.py` | `PackedBatch`: documents in one row, and other cuts of it |
| `corpus.py` | real text, tokens, packing |
| `models.py` | named geometries, checkpoints |
| `oracle.py` | each document alone, in fp64 and in the tested dtype |
| `variants.py` | the backends, ours and transformers', as steps |
| `accuracy.py` | errors, and the rule they are judged by |
| `isolation.py` | leaks; `verify_isolation` |
| `compare.py` | `compare` |
| `report.py`, `figure.py` | rows, table, files; the picture |
"""

from flexvarlen.equivalence.batch import PackedBatch
from flexvarlen.equivalence.compare import compare
from flexvarlen.equivalence.isolation import IsolationError, verify_isolation
from flexvarlen.equivalence.report import Report, Row

__all__ = ["IsolationError", "PackedBatch", "Report", "Row", "compare", "verify_isolation"]
