"""Whole models: training steps, packing after packing, compilation, short rows.

| module | holds |
|---|---|
| `whole_model.py`, `cases.py`, `train.py` | suite "model": its tables and chart, cases, one step |
| `packings.py` | suite "packings": a compiled step on packing after packing |
| `compile_time.py` | suite "compile": the first compiled step, whole and by layer |
| `small_inference.py` | suite "small-inference": a forward on four short documents |
| `geometries.py`, `variants.py` | models with random weights; attentions that share them |
| `documents.py`, `batches.py`, `row.py`, `step.py` | lengths, batches, one packed row, one step |
| `alone.py` | the reference: each document alone |
| `measure.py`, `utilisation.py`, `tables.py` | check, then time; FLOPs; table cells |
"""
