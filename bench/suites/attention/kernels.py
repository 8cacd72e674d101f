"""Suite "kernels": every backend beside the kernel it wraps; `auto` chooses from its records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, ClassVar

from flexvarlen.attention.auto.table import read_cases
from flexvarlen.attention.backends.registry import BACKENDS
from flexvarlen.bench.kernel_table import CAPABILITIES, sentences, table_of
from flexvarlen.bench.suites.attention.engine import PASSES, AttentionSuite
from flexvarlen.bench.suites.attention.inputs import Prepare
from flexvarlen.bench.suites.attention.kernel_cells import (
    LONGEST,
    SHORTEST,
    Cell,
    all_cells,
    quick_cells,
)
from flexvarlen.bench.suites.attention.packed import ON_CPU, RAW, RAW_PREFIX, packed_calls
from flexvarlen.bench.suites.attention.tables import (
    PACKAGES,
    Measured,
    measured,
    times_table,
    where,
)
from flexvarlen.report.figure import chart, lines, save
from flexvarlen.report.records import Record, by_machine, provenance
from flexvarlen.report.table import NOTHING, Column, Table
from flexvarlen.runner.suite import Options

SLACK, OVERHEAD_MS = 1.02, 0.010  # what a backend may take more than the raw kernel
DRAWN: dict[str, Any] = {"head_dim": 128, "num_heads": 32, "num_kv_heads": 8, "causal": True}


# --- the suite -----------------------------------------------------------------------------------


class Kernels(AttentionSuite[Cell]):
    name: ClassVar[str] = "kernels"

    def cases(self, options: Options) -> Sequence[Cell]:
        cells = all_cells()
        if options.quick:
            cells = quick_cells("bfloat16" if options.on_gpu else "float32")
        # Those of one kind together, which share kernels, and small ones first.
        kinds = list(dict.fromkeys(cell.kind for cell in cells))
        return sorted(cells, key=lambda cell: (kinds.index(cell.kind), cell.tokens))

    def variants(self, case: Cell, options: Options) -> Sequence[str]:
        names = [x for x in (*BACKENDS, "auto") if options.on_gpu == (x not in ON_CPU)]
        if options.on_gpu:
            return [x for name in names for x in (name, RAW_PREFIX + name)[: 1 + (name in RAW)]]
        return [*ON_CPU, "auto"]

    def calls(self, case: Cell) -> Mapping[str, Prepare]:
        return packed_calls()

    def section(self, records: Sequence[Record]) -> str:
        return "\n\n".join(_machine(own) for own in by_machine(records))

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        return map(_ratios, by_machine(records))

    def figures(self, records: Sequence[Record], folder: Path) -> Sequence[Path]:
        own = [r for r in records if r.environment.get("gpu")]
        return [draw(own, folder)] if own else []


SUITE = Kernels()


# --- tables --------------------------------------------------------------------------------------


def both_passes(lines: Sequence[Measured]) -> list[Measured]:
    """Forward and backward of each cell together, by kind and tokens."""
    cells: dict[Cell, dict[str, Measured]] = {}
    for line in lines:
        cells.setdefault(Cell.of(line.case), {})[line.pass_] = line
    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    ordered = sorted(cells, key=lambda cell: (kinds.index(cell.kind), cell.tokens))
    return [
        Measured(cells[cell]["forward"].case, "both", _summed(*(cells[cell][x] for x in PASSES)))
        for cell in ordered
        if len(cells[cell]) == len(PASSES)
    ]


def _summed(forward: Measured, backward: Measured) -> dict[str, Record]:
    """The forward's records with the sum as their time."""
    records = {}
    for name, record in forward.records.items():
        other = backward.records.get(name, record)
        bad = next((r for r in (record, other) if r.status != "ok"), None)
        if bad is not None:
            records[name] = bad
            continue
        total = record.measures["device_ms_p50"] + other.measures["device_ms_p50"]
        bound = record.measures.get("host_bound") or other.measures.get("host_bound")
        records[name] = replace(record, measures={"device_ms_p50": total, "host_bound": bound})
    return records


def _is_backend(variant: str) -> bool:
    return variant != "auto" and not variant.startswith(RAW_PREFIX)


def _machine(records: Sequence[Record]) -> str:
    lines = measured(records)
    parts = [_times(both_passes(lines), where(records)).markdown(), _auto(records)]
    overhead = _overhead(lines)
    return "\n\n".join([*filter(None, parts), *[overhead.markdown()] * bool(overhead.lines)])


def _times(sums: Sequence[Measured], ran_on: str) -> Table:
    columns = [
        Column("head_dim, heads, mask", lambda line: _kind(Cell.of(line.case))),
        Column("tokens", lambda line: f"{line.case['tokens']:,}"),
        Column("documents", lambda line: _documents(Cell.of(line.case))),
    ]
    title = f"Forward and backward, ms on the device, median, the fastest bold; bfloat16; {ran_on}"
    return times_table(sums, columns, title, kept=_is_backend)


def _ratios(records: Sequence[Record]) -> Table:
    """A line for each kind of cell, short documents apart: each time over the fastest one's."""
    groups: dict[tuple[str, bool], list[dict[str, float]]] = {}
    for line in both_passes(measured(records)):
        cell = Cell.of(line.case)
        backends = filter(_is_backend, line.records)
        times = {x: ms for x in backends if (ms := line.kernel_ms(x)) is not None}
        ratios = {name: ms / min(times.values()) for name, ms in times.items()}
        groups.setdefault((_kind(cell), cell.documents == "short"), []).append(ratios)
    means = {
        group: {x: geometric_mean([r[x] for r in cells if x in r]) for x in set().union(*cells)}
        for group, cells in groups.items()
    }

    def mean_of(name: str) -> Column:
        def cell(group: tuple[str, bool]) -> str:
            found, least = means[group].get(name), min(means[group].values())
            text = NOTHING if found is None else f"{found:.2f}"
            return f"**{text}**" if found == least else text

        return Column(f"`{name}`", cell)

    columns = [
        Column("head_dim, heads, mask", lambda group: group[0]),
        Column("documents", lambda group: f"of {SHORTEST} to {LONGEST}" if group[1] else "longer"),
        Column("rows", lambda group: str(len(groups[group]))),
        *map(mean_of, filter(_is_backend, BACKENDS)),
    ]
    title = (
        "Forward and backward on the device: time over that of the row's fastest backend, "
        f"geometric mean over the rows; bfloat16; {where(records)}"
    )
    return Table.of(groups, columns, title)


def _kind(cell: Cell) -> str:
    mask = "causal" if cell.causal else "full"
    return f"{cell.head_dim}, {cell.num_heads}/{cell.num_kv_heads}, {mask}"


def _documents(cell: Cell) -> str:
    mean = f" {cell.mean_doc:,}" if cell.documents == "log-normal" else ""
    return f"{len(cell.lengths()):,} {cell.documents}{mean}"


def _auto(records: Sequence[Record]) -> str:
    """What is lost where "auto" chooses for a cell from the other ones; nothing of few cells."""
    if records[0].environment.get("gpu") not in CAPABILITIES:
        return ""
    cases = read_cases(table_of(records))
    if len(cases) < 2:
        return ""
    said = "\n".join(f"- {sentence}." for sentence in sentences(cases))
    return f"What `auto` takes for each cell if it knows the others alone:\n\n{said}"


def _overhead(lines: Sequence[Measured]) -> Table:
    """In how many cells a backend takes as long on the device as the kernel that it wraps."""
    names = dict.fromkeys(x for line in lines for x in line.records if x in RAW)

    def within(pass_: str) -> Callable[[str], str]:
        def cell(name: str) -> str:
            pairs = [
                (line.kernel_ms(name), line.kernel_ms(RAW_PREFIX + name))
                for line in lines
                if line.pass_ == pass_
            ]
            known = [(x, y) for x, y in pairs if x is not None and y is not None]
            near = sum(x <= y * SLACK + OVERHEAD_MS for x, y in known)
            worst = max((x / y for x, y in known), default=None)
            return "–" if worst is None else f"{near} of {len(known)}, at most {worst:.2f}×"

        return cell

    return Table.of(
        names,
        [Column("backend", lambda x: f"`{x}`"), *(Column(x, within(x)) for x in PASSES)],
        "Cells in which a backend takes at most 2% + 10 µs more on the device than its raw kernel",
    )


# --- figure --------------------------------------------------------------------------------------


def draw(records: Sequence[Record], folder: Path) -> Path:
    """Time of the commonest kind of cell over the row's length, packed with documents of 2,048."""
    sums = both_passes(measured(records))
    drawn = DRAWN | {"documents": "uniform"}
    shown = [line for line in sums if drawn.items() <= line.case.items()] or sums
    series: dict[str, dict[float, float]] = {}
    for line in shown:
        tokens = line.case["tokens"]
        for name in filter(_is_backend, line.records):
            if (ms := line.kernel_ms(name)) is not None:
                series.setdefault(name, {})[tokens] = 1e3 * ms / tokens
    longest = max(series["fa2"])
    ratios = [series[name][longest] / series["fa2"][longest] for name in ("fa3", "fa4")]
    document = max(max(Cell.of(x.case).lengths()) for x in shown if x.case["tokens"] == longest)
    names = dict.fromkeys(name for line in shown for name in filter(_is_backend, line.records))
    absent = [name for name in names if name not in series]
    left_out = (
        f"Not drawn, as the device waits for the host: {', '.join(absent)}. " if absent else ""
    )
    figure, (axes,) = chart(
        f"fa3 and fa4 take {min(ratios):.0%} to {max(ratios):.0%} of fa2's time on packed rows of "
        f"{longest:,} tokens in documents of {document:,}",
        f"head_dim {DRAWN['head_dim']}, {DRAWN['num_heads']} query and {DRAWN['num_kv_heads']} KV "
        f"heads, causal, bfloat16; documents of {document:,} tokens, or one shorter; forward and "
        f"backward, device time, median. {left_out}{provenance(records, PACKAGES)}",
    )
    lines(axes, series, x_label="tokens of the row", y_label="µs per token")
    return save(figure, folder / "kernels.png")
