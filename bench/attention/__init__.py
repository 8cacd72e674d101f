"""Attention alone, on random tensors: six suites on one engine.

| module | holds |
|---|---|
| `engine.py` | `measure_attention`: prepares, checks and times the ways of one computation |
| `inputs.py`, `ways.py`, `raw_kernels.py` | inputs; `packed_attention`, the raw kernels |
| `check.py`, `accuracy.py`, `clock.py` | held against fp64; timed, interleaved |
| `kernels.py`, `kernels_cells.py` | suite `kernels`: each backend beside the kernel that it wraps |
| `varlen_study.py`, `varlen_overhead.py`, `varlen_forms.py` | the two suites on varlen kernels |
| `scaling.py`, `padding.py`, `sdpa_backends.py`, `sdpa_ways.py` | the suites of these names |
| `padded.py`, `padded_module.py`, `rectangle.py` | attention over lines of equal length, padded |
| `host_time.py` | run as a module: what a call costs the host over the raw kernel |
"""
