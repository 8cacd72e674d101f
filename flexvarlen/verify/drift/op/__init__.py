"""Attention alone, on random inputs, computed in several ways that should agree.

| file | holds |
|---|---|
| `cases.py` | documents and heads; the named suites; the random inputs |
| `calls.py` | one backend's results: in one call, one call a document, compiled |
| `suite.py` | `OperatorDrift` for the runner, `operator_drift` for Python |
"""
