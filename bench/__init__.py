"""Benchmarks: a suite's cases give rows of JSON; tables and figures read the rows only.

| here | holds |
|---|---|
| `suite.py` | `Suite`, `Case`, `Finding`: what a benchmark brings; the suites by name |
| `runner.py` | `run_suite`: cases one after another, their rows appended, resumable |
| `attention/` | attention alone: the engine and six suites |
| `model/` | whole models: the suite `model`, and what is run as modules |
| `mask_build/` | the suite `mask-build` |
| `contract/` | run as modules: what leaks, which family is right, what each backend can do |
| `training/` | run as modules: whole trainings, packed and padded, on one GPU and on several |
| `claims.py`, `claims_tables.py` | what public sources claim beside what was measured |
| `clock_check.py`, `device_trace.py` | the clock held against a profiler's trace |
| `report.py`, `diff.py` | rows to tables and figures; two files of rows compared |
| `drift_tables.py` | the rows of `flexvarlen drift`, for the docs |
| `series.py`, `series_figure.py` | rows as lines of a plot |
| `bench_run.py` | what the modules with a main of their own share |
| `results/` | committed rows and figures |

In each folder a module's `…_tables.py`, `…_figure.py` render its rows.
"""

if __name__ == "bench":
    raise ImportError(
        "this folder must be imported as flexvarlen.bench, got bench; install flexvarlen, or put "
        "the folder above it on the path."
    )
