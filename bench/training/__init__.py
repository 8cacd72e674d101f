"""Whole trainings on real texts, run as modules: `python -m flexvarlen.bench.training.X`.

| module | holds |
|---|---|
| `convergence.py`, `convergence_documents.py` | a small model from scratch, packed and padded |
| `end_to_end.py`, `end_to_end_….py` | transformers' `Trainer`, packed and padded, ours and theirs |
| `scaling_ranks.py` | under torchrun: DDP and FSDP2, rows balanced or not |
| `ulysses.py`, `sequence.py` | and one long row on all ranks: attention, a whole model |
| `ranks.py` | what these share |
| `resumable.py` | a run that leaves out what its file holds |
| `texts.py` | documents of real text, as token ids |

A module's `…_tables.py`, `…_figure.py` render its rows, for `flexvarlen bench report`.
"""
