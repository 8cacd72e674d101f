"""Attention alone, on random inputs, computed in several variants that should agree.

| file | holds |
|---|---|
| `cases.py` | documents and heads; the named suites; the random inputs |
| `calls.py` | one backend's results: in one call, one call per document, compiled |
| `suite.py` | `OperatorDrift` for the runner, `operator_drift` for Python |
"""
