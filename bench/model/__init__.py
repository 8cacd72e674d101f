"""Whole models: training steps, generation, compilation, short rows.

| module | holds |
|---|---|
| `suite.py`, `cases.py` | suite `model`: packed, padded and one by one, ours beside transformers' |
| `documents.py`, `compared.py` | lengths of texts and prompts; the variants of a case |
| `train.py`, `generate.py`, `step.py`, `batches.py`, `measure.py` | how it measures a case |
| `packings.py`, `packings_run.py` | run as a module: steps on packing after packing |
| `compile_time.py`, `compile_time_child.py` | run as a module: compiling whole and by layer |
| `small_inference.py`, `small_inference_inputs.py` | run as a module: a few short documents |
| `geometries.py`, `variants.py` | models with random weights; attentions that share them |
| `accuracy.py`, `utilisation.py` | per-document reference and errors; FLOPs of a step |
"""
