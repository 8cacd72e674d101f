"""A whole model on one packed batch, computed in several variants that should agree.

| file | holds |
|---|---|
| `suite.py` | `ModelDrift` for the runner, `model_drift` for Python |
| `run.py`, `hidden_states.py` | one run of a model, and what it leaves |
| `measures.py` | how far two runs are apart |
"""
