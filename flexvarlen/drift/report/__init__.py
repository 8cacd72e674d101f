"""What the rows of a drift say: on a terminal, as Markdown, as one page.

| file | holds |
|---|---|
| `files.py` | `DriftReport` |
| `verdicts.py`, `summary.py`, `details.py` | sentences, the short tables, the long ones |
| `figures.py`, `drawing.py`, `page.py` | plots, and the page |
| `thresholds.py` | `--fail-above` |
| `journal.py`, `complete.py` | rows as they come, and what `--resume` need not run |
"""
