"""A whole model, run two ways that should give the same; and which operations are at fault.

| file | holds |
|---|---|
| `comparisons.py` | `model_drift` |
| `setting.py`, `run.py`, `hidden_states.py` | what is shared; one execution and what it leaves |
| `measures.py` | two executions, in numbers |
| `attribution.py`, `serial.py` | `attribute`; operations document by document |
| `invariance.py`, `fixed_shapes.py` | the batch-invariant mode |
| `tables.py` | tables, from rows |
"""
