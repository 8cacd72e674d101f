"""Suite "families": every verified family, on every backend, in every form of a packed batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from flexvarlen.bench.suites.contract.batch_forms import FORMS
from flexvarlen.bench.suites.contract.forms import Forms
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.reference.acceptance import largest
from flexvarlen.report.records import Record, by_machine, commits_of, grouped, ran_on
from flexvarlen.report.table import NOTHING, Column, Table, three_digits
from flexvarlen.runner.suite import Case, Options


class Families(Forms):
    name = "families"
    models = tuple(BY_TYPE)
    forms = tuple(form for form in FORMS if not form.cached)  # refused: see the suite leaks
    gradients = True

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        if options.on_gpu:
            return ("sdpa", "flex", "flex_fa4", "varlen", "fa2", "fa3", "fa4", "nested")
        return ("sdpa", "reference")

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        table = _by_backend(records)
        return [table] if table.lines else []

    def section(self, records: Sequence[Record]) -> str:
        said = (
            "In a cell: the forms that are right, of those that the backend serves; the largest "
            "error of a logit, and of a gradient, relative to the low-precision baseline's; how "
            "many logits change with another document's tokens."
        )
        return "\n\n".join([said, *(_table(own).markdown() for own in by_machine(records))])


def _by_backend(records: Sequence[Record]) -> Table:
    """All families and forms together: backends down, of one machine after another."""
    machines = by_machine(records)
    lines = [
        (served, _Outcome.of(served))
        for own in machines
        for found in grouped(own, "variant").values()
        if (served := [r for r in found if r.status != "unsupported"])
    ]
    columns = [
        Column("on", lambda line: line[0][0].environment.get("gpu") or "CPU"),
        Column("backend", lambda line: f"`{line[0][0].case['variant']}`"),
        Column("families", lambda line: str(len(grouped(line[0], "model")))),
        Column("right", lambda line: f"{line[1].right} of {line[1].served}"),
        Column("logit's error", lambda line: three_digits(line[1].error)),
        Column("gradient's error", lambda line: three_digits(line[1].gradient)),
        Column("logits that leak", lambda line: str(line[1].leaks)),
    ]
    ran = "; ".join(ran_on(own[0].environment) for own in machines)
    return Table.of(lines, columns, f"Families in forms of a batch, tiny models; {ran}")


def _table(records: Sequence[Record]) -> Table:
    """One machine: families down, backends across."""
    backends = list(dict.fromkeys(r.case["variant"] for r in records))
    by_family = grouped(records, "model")
    columns = [
        Column("family", lambda name: BY_TYPE[name].name),
        Column("model_type", lambda name: f"`{name}`"),
        Column("beside causal GQA", lambda name: BY_TYPE[name].has),
        *(Column(f"`{x}`", _cell_of(by_family, x)) for x in backends),
    ]
    case, forms = records[0].case, len({r.case["pass"] for r in records})
    title = f"Tiny models of head_dim {case['head_dim']}, {case['dtype']}, {forms} forms of a batch"
    where = f"{ran_on(records[0].environment)}{commits_of(records)}"
    return Table.of([x for x in BY_TYPE if x in by_family], columns, title=f"{title}; {where}")


def _cell_of(groups: Mapping[str, Sequence[Record]], variant: str) -> Callable[[str], str]:
    def cell(name: str) -> str:
        found = _Outcome.of([r for r in groups[name] if r.case["variant"] == variant])
        if not found.served:
            return NOTHING
        gradient = f", {found.gradient:.1f}" if found.gradient is not None else ""
        text = f"{found.right}/{found.served}: {found.error:.1f}{gradient}; {found.leaks}"
        return text if found.right == found.served else f"**{text}**"

    return cell


class _Outcome(NamedTuple):
    """How many records are served and right, the largest errors ÷ the baseline's, and leaks."""

    served: int
    right: int
    error: float
    gradient: float | None
    leaks: int

    @classmethod
    def of(cls, records: Sequence[Record]) -> _Outcome:
        served = [r for r in records if r.status != "unsupported"]
        found = [r.measures for r in served if r.measures.get("baseline_error")]
        grads = [
            m["grad_error"] / m["baseline_grad_error"]
            for m in found
            if m.get("grad_error") is not None and m["baseline_grad_error"]
        ]
        return cls(
            len(served),
            sum(r.status == "ok" for r in served),
            largest(m["error"] / m["baseline_error"] for m in found),
            largest(grads) if grads else None,
            sum(m["leaks"] for m in found),
        )


SUITE = Families()
