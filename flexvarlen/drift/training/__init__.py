"""Steps of training on several variants, against the noise between seeds.

| file | holds |
|---|---|
| `variants.py` | `training_drift` |
| `run.py` | one training, and its gradients |
| `verdict.py` | the rule |
| `tables.py`, `figure.py` | tables and the plot, from rows |
"""
