"""Tables of attention: a line for each case and pass, a column for each variant."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flexvarlen.report.records import Record, by_machine, commits_of, in_short, latest_run, ran_on
from flexvarlen.report.table import NOTHING, Column, Notes, Table, best, three_digits

HOST_BOUND = "†"
HOST_BOUND_NOTE = f"{HOST_BOUND} the device waited for the host; never the best of a line."
PACKAGES = ("torch", "triton", "flash_attn", "flash_attn_3", "flash_attn_4")


@dataclass(frozen=True)
class Measured:
    """One pass of one case: the records of its variants, all of one run.

    Attributes:
        case: of the records, without the variant and the pass.
    """

    case: Mapping[str, Any]
    pass_: str
    records: Mapping[str, Record]

    def ms(self, variant: str) -> float | None:
        """Median milliseconds on the device; None if it was not timed."""
        record = self.records.get(variant)
        if record is None or record.status != "ok":
            return None
        value: float | None = record.measures.get("device_ms_p50")
        return value

    def host_bound(self, variant: str) -> bool:
        record = self.records.get(variant)
        return record is not None and bool(record.measures.get("host_bound"))

    def kernel_ms(self, variant: str) -> float | None:
        """`ms` where it is the time of kernels."""
        return None if self.host_bound(variant) else self.ms(variant)


def measured(records: Sequence[Record]) -> list[Measured]:
    """The cases and passes of one machine, each from its latest run, as runs are not compared."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        key = json.dumps({**record.case, "variant": ""}, sort_keys=True)
        groups.setdefault(key, []).append(record)
    found = []
    for own in groups.values():
        kept = latest_run(own)
        case = {k: v for k, v in kept[0].case.items() if k not in ("variant", "pass")}
        by_variant = {x.case["variant"]: x for x in kept}
        found.append(Measured(case, kept[0].case.get("pass", ""), by_variant))
    return found


def times_tables(
    records: Sequence[Record],
    columns: Sequence[Column],
    *,
    title: Callable[[Mapping[str, Any]], str],
    sort: Callable[[Measured], Any],
    kept: Callable[[str], bool] = lambda variant: True,
) -> Iterator[Table]:
    """Each machine's table of device times, forwards first, with a column of each variant kept."""
    for own in by_machine(records):
        lines = sorted(measured(own), key=lambda x: (x.pass_ != "forward", sort(x)))
        heading = f"{title(lines[0].case)}; {where(own)}"
        yield times_table(lines, columns, heading, kept=kept)


def times_table(
    lines: Sequence[Measured],
    columns: Sequence[Column],
    title: str,
    *,
    kept: Callable[[str], bool] = lambda variant: True,
) -> Table:
    """A column for each variant, the best of each line bold."""
    notes = Notes()
    variants = dict.fromkeys(name for line in lines for name in line.records if kept(name))
    shown = [Column(f"`{name}`", _cell(name, tuple(variants), notes)) for name in variants]
    table = Table.of(lines, [*columns, *shown], title)
    below = [HOST_BOUND_NOTE] * any(HOST_BOUND in cell for line in table.lines for cell in line)
    return replace(table, notes=(*below, *notes))


def _cell(name: str, variants: Sequence[str], notes: Notes) -> Callable[[Measured], str]:
    def cell(line: Measured) -> str:
        record = line.records.get(name)
        if record is None:
            return ""
        found = line.ms(name)
        if found is None:
            if not record.reason:
                return ""
            why = "out of memory" if record.status == "oom" else in_short(record.reason)
            word = NOTHING if record.status == "unsupported" else record.status
            return f"{word} {notes.mark(why)}"
        text = three_digits(found)
        if line.host_bound(name):
            return text + HOST_BOUND
        others = [line.kernel_ms(x) for x in variants]
        return f"**{text}**" if found == best(others, min) else text

    return cell


def where(records: Sequence[Record]) -> str:
    """The machine, the versions of the kernels and the commits of some records."""
    return f"{ran_on(records[0].environment, PACKAGES)}{commits_of(records)}"


def field(title: str, name: str, show: Callable[[Any], str] = str) -> Column:
    return Column(title, lambda line: show(line.case[name]))


def heads(case: Mapping[str, Any]) -> str:
    """The heads of a case without grouped queries."""
    return f"{case['num_heads']} heads of {case['head_dim']}"


def ratios(pairs: Iterable[Sequence[float | None]], form: str = "+.1%") -> str:
    """The second over the first, least and most; with a sign, by how much it exceeds the first."""
    known = sorted(b / a - form.startswith("+") for a, b in pairs if a and b is not None)
    return " to ".join(dict.fromkeys(f"{x:{form}}" for x in known[:1] + known[-1:])) or NOTHING


def stated(*each: str) -> list[str]:
    """One note, of the sentences whose numbers were all measured."""
    found = " ".join(sentence for sentence in each if NOTHING not in sentence)
    return [found] if found else []


PASS = Column("pass", lambda line: line.pass_)
MASK = field("mask", "causal", lambda causal: "causal" if causal else "full")
