"""`flexvarlen drift rollout`: a trainer's log-probabilities beside the engine's.

| file | holds |
|---|---|
| `responses.py` | responses of vLLM and SGLang, read from JSON lines |
| `logprobs.py` | a model's log-probabilities of them, packed or each alone |
| `consistency.py` | files that are broken: shifted, truncated, another temperature, other tokens |
| `drift.py` | suite "drift-rollout": backends, dtypes and batching, each against the engine |
| `report.py` | which comes closest, what causes the rest; the picture |
"""
