"""Whole models: training steps, packing after packing, compilation, short rows, trees.

Each is a `flexvarlen.verify.experiment` on models with random weights.

| module | holds |
|---|---|
| `whole_model.py`, `cases.py` | suite "model": training steps |
| `packings.py` | suite "packings": a compiled step on packing after packing |
| `hybrid.py`, `recurrences.py` | suite "hybrid": a model with recurrent layers |
| `trees.py`, `tree_cases.py`, `tree_runs.py` | suite "trees": samples that share their prompts |
| `compile_time.py` | suite "compile": the first compiled step, whole and by layer |
| `small_inference.py` | suite "small-inference": a forward on four short documents |
| `embeddings.py` | suite "embeddings": vectors of many short texts |
| `geometries.py` | models with random weights, lengths of documents |
| `attends.py`, `tables.py` | what attends to a row; table cells |
"""
