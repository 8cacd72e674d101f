"""Benchmarks: a `Case` gives a `Row`; rows are JSON lines; tables and figures read the rows only.

| module | holds |
|---|---|
| `rows.py` | `Row`: written whole or not at all, read back by the report; where a run ran |
| `model.py` | run as a module: steps of a whole model, ours beside transformers' own |
| `model_run.py` | one such run: oracle, variants, timing, other packings |
| `bench_run.py` | `BenchRun`: what a run of any suite has: environment, clock, file of rows |
| `cases.py` | `Case`, model geometries and models of them, log-normal documents |
| `variants.py` | the attention variants of one model, all sharing its weights |
| `utilisation.py` | FLOPs of a step, the GPU's peak, what "auto" takes |
| `compile_time.py` | run as a module: compiling whole and by layer, cold and warm |
| `compile_time_child.py` | what its processes do |
| `small_inference.py` | run as a module: latency on a few short documents |
| `small_inference_inputs.py` | its packings, and the tensors that a variant gets them in |
| `report_compile.py` | tables of these two suites |
| `accuracy.py` | per-document reference outputs and gradients, and the error against them |
| `leaks.py` | run as a module: what leaks in plain transformers, and what here |
| `mask_build.py` | run as a module: building document BlockMasks |
| `mask_build_run.py` | one such run: its rows, packed rows and clock |
| `mask_build_builders.py` | the parts "build" and "growth" |
| `mask_build_attention.py` | the parts "share", "attention" and "long" |
| `mask_build_check.py` | whether two BlockMasks list the same blocks; the memory one holds |
| `mask_build_accuracy.py` | documents of a long row, each alone in fp64 |
| `report_mask_build.py`, `figure_mask_build.py` | tables and figure of that suite |
| `kernels.py` | run as a module: each backend beside the raw kernel that it wraps |
| `kernels_cells.py`, `kernels_run.py`, `kernels_cell.py` | its cells; one run; one cell of it |
| `kernels_accuracy.py` | fp64 on sampled documents, and variants against one another |
| `raw_kernels.py` | the kernels as their own users call them |
| `report_kernels.py`, `figure_kernels.py` | tables and figure of that suite |
| `capabilities.py` | run as a module: what each backend can do, rows and table |
| `markdown.py` | Markdown tables |
| `report.py` | run as a module: rows to Markdown tables and figures |
"""

if __name__ == "bench":
    raise ImportError(
        "this folder must be imported as flexvarlen.bench, got bench; install flexvarlen, or put "
        "the folder above it on the path."
    )
