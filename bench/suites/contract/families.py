"""Suite "families": every verified family, on every backend, in every form of a packed batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flexvarlen.bench.suites.contract.batch_forms import FORMS
from flexvarlen.bench.suites.contract.forms import Forms
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.reference.acceptance import largest
from flexvarlen.report.records import Record, by_machine, commits_of, grouped, ran_on
from flexvarlen.report.table import NOTHING, Column, Table
from flexvarlen.runner.suite import Case, Options


class Families(Forms):
    """Every verified family, on our backends, with gradients."""

    name = "families"
    models = tuple(BY_TYPE)
    forms = tuple(form for form in FORMS if not form.cached)  # refused: see the suite leaks
    gradients = True

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        if options.on_gpu:
            return ("sdpa", "flex", "flex_fa4", "varlen", "fa2", "fa3", "fa4", "nested")
        return ("sdpa", "reference")

    def section(self, records: Sequence[Record]) -> str:
        said = (
            "In a cell: the forms that are right, of those that the backend serves; the largest "
            "error of a logit, and of a gradient, relative to the low-precision baseline's; how "
            "many logits change with another document's tokens."
        )
        return "\n\n".join([said, *(_table(own).markdown() for own in by_machine(records))])


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
        served = [
            r for r in groups[name] if r.case["variant"] == variant and r.status != "unsupported"
        ]
        if not served:
            return NOTHING
        right = sum(r.status == "ok" for r in served)
        found = [r.measures for r in served if r.measures.get("baseline_error")]
        error = largest(m["error"] / m["baseline_error"] for m in found)
        grads = [
            m["grad_error"] / m["baseline_grad_error"]
            for m in found
            if m.get("grad_error") is not None and m["baseline_grad_error"]
        ]
        gradient = f", {largest(grads):.1f}" if grads else ""
        text = f"{right}/{len(served)}: {error:.1f}{gradient}; {sum(m['leaks'] for m in found)}"
        return text if right == len(served) else f"**{text}**"

    return cell


SUITE = Families()
