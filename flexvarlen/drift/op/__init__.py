"""Attention alone, on random inputs, every way that should make no difference.

| file | holds |
|---|---|
| `cases.py` | documents and heads; the named suites |
| `comparisons.py` | `operator_drift` |
| `case_run.py`, `backend_run.py` | one case into rows; one backend's answers |
| `exact.py`, `judge.py` | each document alone in fp64, and plainly in the dtype; the rule |
| `blame.py`, `blame_gradients.py` | what is wrong with a kernel, in a sentence |
| `hypotheses.py`, `trial.py`, `fit.py`, `noise.py` | how that is found |
| `tables.py` | the study's tables and others, from rows |
"""
