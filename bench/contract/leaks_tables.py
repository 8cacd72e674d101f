"""The table of `leaks.py`, from its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, commit_of


def leaks_section(rows: Sequence[Row]) -> str:
    """A table for each machine and dtype."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((_machine_of(row), row.case["dtype"]), []).append(row)
    return "\n\n".join(map(_leaks_table, groups.values()))


def _machine_of(row: Row) -> str:
    where = row.environment
    return (
        f"{where.get('gpu') or 'CPU'}, torch {where.get('torch')}, "
        f"transformers {where.get('transformers')}{commit_of(where)}"
    )


def _leaks_table(rows: Sequence[Row]) -> str:
    """Forms down, implementations across: the largest error of any model, bold where it leaks."""
    columns = list(dict.fromkeys(row.case["implementation"] for row in rows))
    forms = list(dict.fromkeys(row.case["form"] for row in rows))
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.case["form"], row.case["implementation"]), []).append(row)
    notes: dict[str, int] = {}
    header = ["packed batch", *(_shown_implementation(name) for name in columns)]
    lines = [[form, *(_leak_cell(cells[form, name], notes) for name in columns)] for form in forms]
    models = list(dict.fromkeys(row.case["model"] for row in rows))
    text = (
        f"Largest error of packed logits against each document alone in fp64, over tiny random "
        f"{' and '.join(models)} models (logits up to {_largest_logit(rows):.0f}); "
        f"{rows[0].case['dtype']}, {_machine_of(rows[0])}. Bold: documents leak, or the numbers "
        "are false."
        "\n\n"
        f"{markdown(header, lines)}"
    )
    for note, number in notes.items():
        text += f"\n\n({number}) {note}"
    return text


def _largest_logit(rows: Sequence[Row]) -> float:
    return max((row.measures.get("largest_logit", 0.0) for row in rows), default=0.0)


def _shown_implementation(name: str) -> str:
    kind, _, rest = name.partition(":")
    return f"{kind} `{rest}`"


def _leak_cell(rows: Sequence[Row], notes: dict[str, int]) -> str:
    def number(row: Row) -> str:
        return f"({notes.setdefault(row.reason or '', len(notes) + 1)})"

    refused = [row for row in rows if row.status == "unsupported"]
    failed = [row for row in rows if row.status in ("failed", "oom")]
    measured = [row.measures["max_error"] for row in rows if "max_error" in row.measures]
    parts = []
    if measured:
        worst = max(measured, key=lambda x: math.inf if math.isnan(x) else x)
        leaks = any(row.status == "wrong" for row in rows)
        value = "NaN" if math.isnan(worst) else f"{worst:.1f}" if worst >= 0.1 else f"{worst:.0e}"
        parts.append(f"**{value}**" if leaks else value)
    for row in [*refused, *failed]:
        word = "error" if row.status == "failed" else (row.reason or "").partition(".")[0]
        parts.append(f"{word} {number(row)}")
    return ", ".join(dict.fromkeys(parts))
