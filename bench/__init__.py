"""Benchmarks: suites of frozen cases give records; tables and figures read the records only.

| here | holds |
|---|---|
| `suites/` | `attention/`, `model/`, `training/`, `masks/`, `contract/`; the registry of names |
| `report.py`, `front_page.py` | tables and charts on pages; the README's |
| `results/` | committed records |
"""

if __name__ == "bench":
    raise ImportError(
        "this folder must be imported as flexvarlen.bench, got bench; install flexvarlen, or put "
        "the folder above it on the path."
    )
