"""Suite "kernels": every backend beside the kernel it wraps; `auto` chooses from its records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from flexvarlen.attention.auto.table import read_cases
from flexvarlen.attention.backends.registry import BACKENDS
from flexvarlen.bench.kernel_table import CAPABILITIES, sentences, table_of
from flexvarlen.bench.suites.attention.engine import PASSES, findings_of_all, measure_attention
from flexvarlen.bench.suites.attention.inputs import Inputs
from flexvarlen.bench.suites.attention.kernels_cells import SUBSETS, Cell, quick
from flexvarlen.bench.suites.attention.packed import ON_CPU, RAW, RAW_PREFIX, packed_calls
from flexvarlen.bench.suites.attention.tables import (
    PACKAGES,
    Measured,
    measured,
    times_table,
    where,
)
from flexvarlen.report.figure import chart, lines, save
from flexvarlen.report.records import Record, by_machine, one_line, provenance
from flexvarlen.report.table import Column, Table
from flexvarlen.runner.suite import Case, Finding, Options, Suite, choose

SLACK, OVERHEAD_MS = 1.02, 0.010  # what a backend may take more than the raw kernel
DRAWN: dict[str, Any] = {"head_dim": 128, "num_heads": 32, "num_kv_heads": 8, "causal": True}


@dataclass(frozen=True)
class KernelCase:
    """A cell of the grid; `subset` begins its name."""

    cell: Cell
    subset: str

    @property
    def name(self) -> str:
        return f"{self.subset}/{self.cell.name}"

    def data(self) -> dict[str, Any]:
        return self.cell.data()


class Kernels(Suite):
    """The grid: first the cells that the documentation shows."""

    name: ClassVar[str] = "kernels"

    def cases(self, options: Options) -> Sequence[Case]:
        if options.quick:
            return _cases("quick", quick("bfloat16" if options.on_gpu else "float32"))
        shown = SUBSETS["readme"]()
        rest = [cell for cell in SUBSETS["grid"]() if cell not in set(shown)]
        return [*_cases("readme", shown), *_cases("grid", rest)]

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        assert isinstance(case, KernelCase)
        names = [x for x in (*BACKENDS, "auto") if options.on_gpu == (x not in ON_CPU)]
        if options.on_gpu:
            return [x for name in names for x in (name, RAW_PREFIX + name)[: 1 + (name in RAW)]]
        return [*ON_CPU, "auto"]

    def measure(self, case: Case, variants: Sequence[str], options: Options) -> Sequence[Finding]:
        assert isinstance(case, KernelCase)
        cell, calls = case.cell, choose(variants, packed_calls())
        heads, dtype = (cell.num_heads, cell.num_kv_heads), getattr(torch, cell.dtype)
        try:
            inputs = Inputs.random(
                cell.lengths(), heads, cell.head_dim, dtype, options.device, cell.causal, cell.seed
            )
        except torch.OutOfMemoryError as error:
            return findings_of_all(variants, "oom", one_line(error))
        return measure_attention(inputs, calls, options)

    def section(self, records: Sequence[Record]) -> str:
        return "\n\n".join(_machine(own) for own in by_machine(records))

    def figures(self, records: Sequence[Record], folder: Path) -> Sequence[Path]:
        own = [r for r in records if r.environment.get("gpu")]
        return [draw(own, folder)] if own else []


SUITE = Kernels()


def _cases(subset: str, cells: list[Cell]) -> list[KernelCase]:
    """Those of one kind together, which share kernels, and small ones first."""
    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    cells = sorted(cells, key=lambda cell: (kinds.index(cell.kind), cell.tokens))
    return [KernelCase(cell, subset) for cell in cells]


# --- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellTimes:
    """A cell's forward and backward."""

    passes: Mapping[str, Measured]

    @property
    def cell(self) -> Cell:
        return Cell.of(dict(self.passes["forward"].case))

    def ms(self, variant: str) -> float | None:
        """Forward and backward on the device; None unless both are times of kernels."""
        found = [self.passes[x].kernel_ms(variant) for x in PASSES]
        return None if None in found else sum(x for x in found if x is not None)

    def backends(self) -> list[str]:
        names = self.passes["forward"].records
        return [x for x in names if x != "auto" and not x.startswith(RAW_PREFIX)]


def both_passes(records: Sequence[Record]) -> list[CellTimes]:
    """The cells of one machine, by kind and tokens."""
    cells: dict[str, dict[str, Measured]] = {}
    for line in measured(records):
        cells.setdefault(Cell.of(dict(line.case)).name, {})[line.pass_] = line
    found = [CellTimes(passes) for passes in cells.values() if len(passes) == len(PASSES)]
    kinds = list(dict.fromkeys(x.cell.kind for x in found))
    return sorted(found, key=lambda x: (kinds.index(x.cell.kind), x.cell.tokens))


def _machine(records: Sequence[Record]) -> str:
    cells = both_passes(records)
    shown = set(SUBSETS["readme"]())
    own = [x for x in cells if x.cell in shown] or cells
    overhead = _overhead(cells)
    parts = [_times(own, where(records)).markdown(), _auto(records)]
    return "\n\n".join([*filter(None, parts), *[overhead.markdown()] * bool(overhead.lines)])


def _times(cells: Sequence[CellTimes], ran_on: str) -> Table:
    sums = [_summed(both) for both in cells]
    columns = [
        Column("head_dim, heads, mask", lambda line: _kind(Cell.of(dict(line.case)))),
        Column("tokens", lambda line: f"{line.case['tokens']:,}"),
        Column("documents", lambda line: _documents(Cell.of(dict(line.case)))),
    ]
    title = f"Forward and backward, ms on the device, median, the fastest bold; bfloat16; {ran_on}"
    return times_table(
        sums,
        columns,
        title,
        kept=lambda name: name != "auto" and not name.startswith(RAW_PREFIX),
    )


def _summed(both: CellTimes) -> Measured:
    """A line of forward and backward together: the forward's records with the sum as their time."""
    forward, backward = (both.passes[x].records for x in PASSES)
    records = {}
    for name, record in forward.items():
        other = backward.get(name, record)
        bad = next((r for r in (record, other) if r.status != "ok"), None)
        if bad is not None:
            records[name] = bad
            continue
        total = record.measures["device_ms_p50"] + other.measures["device_ms_p50"]
        bound = record.measures.get("host_bound") or other.measures.get("host_bound")
        records[name] = replace(record, measures={"device_ms_p50": total, "host_bound": bound})
    return Measured(both.passes["forward"].case, "both", records)


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


def _overhead(cells: Sequence[CellTimes]) -> Table:
    """In how many cells a backend takes as long on the device as the kernel that it wraps."""
    names = dict.fromkeys(x for both in cells for x in both.backends() if x in RAW)

    def within(pass_: str) -> Callable[[str], str]:
        def cell(name: str) -> str:
            pairs = [
                (line.kernel_ms(name), line.kernel_ms(RAW_PREFIX + name))
                for line in (both.passes[pass_] for both in cells)
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
    cells = both_passes(records)
    shown = [
        x for x in cells if DRAWN.items() <= x.cell.data().items() and x.cell.documents == "uniform"
    ] or cells
    series: dict[str, dict[float, float]] = {}
    for both in shown:
        for name in both.backends():
            if (ms := both.ms(name)) is not None:
                series.setdefault(name, {})[both.cell.tokens] = 1e3 * ms / both.cell.tokens
    longest = max(series["fa2"])
    ratios = [series[name][longest] / series["fa2"][longest] for name in ("fa3", "fa4")]
    document = max(max(x.cell.lengths()) for x in shown if x.cell.tokens == longest)
    absent = dict.fromkeys(x for both in shown for x in both.backends() if x not in series)
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
