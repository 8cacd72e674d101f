"""Drift: how far outputs and gradients move when only the backend, the batching or the compilation
changes, and where the movement comes from.

Data first: every run gives `flexvarlen.rows.Row`s; tables, Markdown and the page are made of rows
alone.

| file | holds |
|---|---|
| `difference.py` | `Difference`: two tensors, in five numbers |
"""
