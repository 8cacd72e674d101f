"""Attention alone, on random tensors: suites on one engine.

| module | holds |
|---|---|
| `engine.py` | `AttentionSuite`; `measure_attention`: checks, then times the variants |
| `inputs.py`, `packed.py`, `padded.py` | the tensors; variants on a packed row, on a padded batch |
| `kernels.py` | suite `kernels`: each backend beside the kernel that it wraps |
| `varlen_study.py`, `padding.py`, `host_time.py`, `published.py` | the suites of these names |
| `tables.py` | their tables |
"""
