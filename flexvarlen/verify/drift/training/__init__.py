"""Steps of training on several backends, compared with the spread between seeds.

| file | holds |
|---|---|
| `suite.py` | `TrainingDrift` for the runner |
| `run.py` | one training, and the angles between gradients |
"""
