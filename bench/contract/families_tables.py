"""The tables of `families.py`, from its rows."""

from __future__ import annotations

from collections.abc import Sequence

from flexvarlen.markdown import markdown
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.rows import Row, commit_of


def families_section(rows: Sequence[Row]) -> str:
    """A table of each machine: families down, backends across; what a family is, in the first."""
    machines: dict[str, list[Row]] = {}
    for row in rows:
        machines.setdefault(row.environment.get("gpu") or "CPU", []).append(row)
    tables = [_machine_table(own, described=i == 0) for i, own in enumerate(machines.values())]
    return (
        "In a cell: the forms that are right, of those that the backend serves; the largest error "
        "of a logit over that of each document alone in the same dtype, and of a gradient; how "
        "many logits changed with another document's tokens.\n\n" + "\n\n".join(tables)
    )


def _machine_table(rows: Sequence[Row], *, described: bool) -> str:
    backends = list(dict.fromkeys(row.case["backend"] for row in rows))
    found = {row.case["family"] for row in rows}
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.case["family"], row.case["backend"]), []).append(row)
    lines = []
    for model_type in (name for name in BY_TYPE if name in found):
        family = BY_TYPE[model_type]
        shown = [_cell(cells.get((model_type, backend), [])) for backend in backends]
        known = [family.name, f"`{model_type}`"]
        lines.append([*known, *((family.has, family.needs) if described else ()), *shown])
    said = ("beside causal GQA", "here") if described else ()
    header = ["family", "model_type", *said, *(f"`{b}`" for b in backends)]
    where, case = rows[0].environment, rows[0].case
    forms = len({row.case["form"] for row in rows})
    return (
        f"Tiny models of head_dim {case['head_dim']}, {case['dtype']}, {forms} forms of a batch; "
        f"{where.get('gpu') or 'CPU'}, torch {where.get('torch')}, transformers "
        f"{where.get('transformers')}{commit_of(where)}:\n\n{markdown(header, lines)}"
    )


def _cell(rows: Sequence[Row]) -> str:
    served = [row for row in rows if row.status != "unsupported"]
    if not served:
        return "–"
    right = [row for row in served if row.status == "ok"]
    measured = [row.measures for row in served if row.measures]
    error = max((m["error"] / m["peer_error"] for m in measured), default=float("nan"))
    pairs = [(m["grad_error"], m["peer_grad_error"]) for m in measured]
    grads = [a / b for a, b in pairs if a is not None and b > 0]
    gradient = f", {max(grads):.1f}" if grads else ""
    leaks = sum(m["leaks"] for m in measured)
    text = f"{len(right)}/{len(served)}: {error:.1f}{gradient}; {leaks}"
    return text if len(right) == len(served) else f"**{text}**"
