"""Tables of the suite "kernels", from rows alone; `flexvarlen.bench.report` prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexvarlen.attention.auto.decoder_layer import NO_LAYER, Layer
from flexvarlen.bench.attention.clock import host_bound
from flexvarlen.bench.attention.engine import PASSES, RAW_PREFIX
from flexvarlen.bench.attention.kernels_cells import SUBSETS, Cell
from flexvarlen.bench.mask_build.tables import Notes
from flexvarlen.bench.series import ALONE, HOST_BOUND, legend, three_digits
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, commit_of

CLOCKS = ("device", "host")

SLACK, OVERHEAD_MS = 1.02, 0.010  # what a layer of ours may cost over the raw kernel
AUTO_CLOCKS = ("device", "eager")
RESOLUTION_MS = 0.001  # of a forward's and a backward's CUDA events together, half a µs each
MOST_MISSES = 40  # lines of a list of misses; the rows hold them all


@dataclass(frozen=True)
class Measured:
    """One cell's rows of one run, by variant and pass."""

    cell: Cell
    rows: Mapping[tuple[str, str], Row]

    def backends(self) -> list[str]:
        """flexvarlen's own, but "auto", in the order of the rows."""
        names = dict.fromkeys(variant for variant, _ in self.rows)
        return [n for n in names if n != "auto" and not n.startswith(RAW_PREFIX)]

    def ms(self, variant: str, pass_: str, clock: str = "device", at: str = "p50") -> float | None:
        """Milliseconds; None where they were not measured."""
        row = self.rows.get((variant, pass_))
        return None if row is None else row.measures.get(f"{clock}_ms_{at}")

    def total(self, variant: str, clock: str = "device", at: str = "p50") -> float | None:
        """Forward and backward together; None unless both were measured.

        The clock "eager": what the call adds to a decoder layer, of which the slower of host and
        device decides, as "auto" judges; of the call alone in rows that tell of no layer.
        """
        if clock == "eager":
            device_ms, host_ms = (self.total(variant, one, at) for one in CLOCKS)
            if device_ms is None or host_ms is None:
                return None
            return (self.layer() or NO_LAYER).added_ms(host_ms, device_ms)
        parts = [self.ms(variant, pass_, clock, at) for pass_ in PASSES]
        return None if None in parts else sum(x for x in parts if x is not None)

    def host_bound(self, variant: str) -> bool:
        """Whether the device waited for the host in a pass, so that its time is none of kernels."""
        rows = (self.rows.get((variant, pass_)) for pass_ in PASSES)
        return any(row is not None and host_bound(row.measures) for row in rows)

    def mark(self, variant: str) -> str:
        """What stands behind a device time, of `LEGEND`; "" behind most."""
        rows = (self.rows.get((variant, pass_)) for pass_ in PASSES)
        alone = any(row is not None and row.measures.get("timed_alone") for row in rows)
        return HOST_BOUND * self.host_bound(variant) + ALONE * alone

    def best(self, clock: str = "device") -> tuple[str, float] | None:
        """The fastest backend and its forward and backward together; of none that is host-bound."""
        names = [x for x in self.backends() if clock != "device" or not self.host_bound(x)]
        totals = ((self.total(name, clock), name) for name in names)
        found = min(((ms, name) for ms, name in totals if ms is not None), default=None)
        return None if found is None else (found[1], found[0])

    def layer(self) -> Layer | None:
        """What "auto" took to be around an eager call."""
        row = self.rows.get(("auto", "forward"))
        told = None if row is None else row.measures.get("layer_ms")
        return None if told is None else Layer(*told)

    def resolved(self, clock: str = "device") -> str | None:
        """What "auto" takes: inside a compiled graph ("device"), or eagerly."""
        row = self.rows.get(("auto", "forward"))
        if row is None:
            return None
        name = "resolved_compiled" if clock == "device" else "resolved"
        return row.measures.get(name, row.measures.get("resolved"))

    def auto(self, clock: str = "device") -> float | None:
        """Milliseconds, by name, of the kernel that "auto" took; None if its own call failed."""
        took = self.resolved(clock)
        if took is None or self.total("auto") is None:
            return None
        return None if clock == "device" and self.host_bound(took) else self.total(took, clock)

    def num_docs(self) -> int | None:
        """How many documents it holds, if any variant got that far."""
        found = (row.measures.get("num_docs") for row in self.rows.values())
        return next((count for count in found if count is not None), None)


def measured_cells(rows: Sequence[Row]) -> list[Measured]:
    """The cells of one GPU's rows, by kind and tokens, each as its latest run has it.

    Rows of two runs are never compared: one that measured a cell again replaces all of its rows.
    """
    found: dict[Cell, list[Row]] = {}
    for row in rows:
        found.setdefault(Cell.of(row.case), []).append(row)
    cells = []
    for cell, own in found.items():
        latest = max(_started(row) for row in own)
        latest_rows = [row for row in own if _started(row) == latest]
        cells.append(Measured(cell, {(r.case["variant"], r.case["pass"]): r for r in latest_rows}))
    kinds = list(dict.fromkeys(each.cell.kind for each in cells))
    cells.sort(key=lambda each: (kinds.index(each.cell.kind), each.cell.tokens))
    return cells


def _started(row: Row) -> str:
    return row.environment.get("started_utc") or ""


def shown_cells(cells: Sequence[Measured]) -> list[Measured]:
    """Those of the README's subset; all, if none is of it."""
    subset = set(SUBSETS["readme"]())
    return [each for each in cells if each.cell in subset] or list(cells)


def kernels_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one GPU (or of the CPU)."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        where = row.environment
        groups.setdefault(str(where.get("gpu") or where.get("device")), []).append(row)
    return list(groups.values())


def kernels_section(rows: Sequence[Row]) -> str:
    """Every machine's tables."""
    return "\n\n".join(_machine_section(group) for group in kernels_groups(rows))


def _machine_section(rows: Sequence[Row]) -> str:
    every = measured_cells(rows)
    cells = shown_cells(every)
    return "\n\n".join(
        [
            times_table(cells),
            overhead_table(every),
            auto_misses(every),
            own_call_misses(every),
            accuracy_sentence(every),
        ]
    )


# --- tables --------------------------------------------------------------------------------------


def times_table(cells: Sequence[Measured]) -> str:
    """Forward and backward of every backend, the best bold; what "auto" took."""
    backends = list(dict.fromkeys(name for each in cells for name in each.backends()))
    notes, lines = Notes(), []
    for each in cells:
        best = each.best()
        line = [*_shown_cell(each), *(_time(each, name, best, notes) for name in backends)]
        for clock in AUTO_CLOCKS:
            total, took, fastest = each.auto(clock), each.resolved(clock), each.best(clock)
            if total is None or fastest is None:
                line += [_status(each, "auto", notes) or "–", ""]
            else:
                line += [f"`{took}`", "best" if took == fastest[0] else f"{total / fastest[1]:.3f}"]
        lines.append(line)
    runs = dict.fromkeys(where_of(row) for each in cells for row in each.rows.values())
    said = ("auto chose for graphs", "÷ best", "auto eagerly", "÷ best")
    header = [*CELL_HEADER, *(f"`{name}`" for name in backends), *said]
    table = markdown(header, lines)
    layers = sum(each.layer() is not None for each in cells)
    around = ", of a whole decoder layer" if layers else ""
    if 0 < layers < len(cells):
        around += f" in {layers} cells and of the call alone in the rest"
    return (
        f"Device ms of a forward and a backward, p50, the best of a cell bold; {_dtypes(cells)}; "
        "`auto` in a compiled graph by device time, eagerly by the larger of host and device time"
        f"{around}; {'; '.join(runs)}:\n\n{table}{legend(table)}{notes.text()}"
    )


CELL_HEADER = ("head_dim, heads, mask", "tokens", "documents")


def _shown_cell(each: Measured) -> list[str]:
    cell = each.cell
    heads = f"{cell.head_dim}, {cell.num_heads}/{cell.num_kv_heads}"
    documents = "" if each.num_docs() is None else f"{each.num_docs():,} "
    documents += cell.documents
    if cell.documents == "log-normal":
        documents += f" {cell.mean_doc:,}"
    return [f"{heads}, {'causal' if cell.causal else 'full'}", f"{cell.tokens:,}", documents]


def _time(each: Measured, name: str, best: tuple[str, float] | None, notes: Notes) -> str:
    total = each.total(name)
    if total is None:
        return _status(each, name, notes)
    shown = three_digits(total) + each.mark(name)
    return f"**{shown}**" if best is not None and name == best[0] else shown


def _status(each: Measured, name: str, notes: Notes) -> str:
    """Why a variant has no time: a dash and a note for what is refused, else the status."""
    rows = (each.rows.get((name, pass_)) for pass_ in PASSES)
    row = next((row for row in rows if row is not None and row.status != "ok"), None)
    return "" if row is None else notes.status(row).replace("unsupported", "–")


def overhead_table(cells: Sequence[Measured]) -> str:
    """In how many cells flexvarlen costs on the device what the raw kernel does, and the worst.

    The host's time is the suite host_time's: alone on its machine, in calls back to back.
    """
    wrapped = list(dict.fromkeys(name for each in cells for name in _wrapped(each)))
    lines = []
    for name in wrapped:
        line = [f"`{name}`"]
        for pass_ in PASSES:
            pairs = [
                (each.ms(name, pass_), each.ms(RAW_PREFIX + name, pass_), each)
                for each in cells
                if not (each.host_bound(name) or each.host_bound(RAW_PREFIX + name))
            ]
            both = [
                (ours - raw, raw, each)
                for ours, raw, each in pairs
                if ours is not None and raw is not None
            ]
            late = [x for x in both if x[0] > x[1] * (SLACK - 1) + OVERHEAD_MS]
            worst = max(late, key=lambda x: x[0] / x[1], default=None)
            line += [f"{len(both) - len(late)} of {len(both)}" if both else "–", _late(worst)]
        lines.append(line)
    header = ["", *(x for pass_ in PASSES for x in (f"{pass_}, cells within", "the worst beyond"))]
    said = "Device time of flexvarlen's call within 2% + 10 µs of that of the raw kernel's own"
    raw = (each.rows.get((f"{RAW_PREFIX}varlen", pass_)) for each in cells for pass_ in PASSES)
    if any(row is not None and row.measures.get("prefers_cudnn") for row in raw):
        said += "; torch's own `varlen` takes cuDNN's kernel where that can serve it, ours never"
    return f"{said}:\n\n{markdown(header, lines)}"


def _late(worst: tuple[float, float, Measured] | None) -> str:
    if worst is None:
        return "–"
    extra, raw, each = worst
    return f"{100 * extra / raw:+.1f}%, {extra * 1e3:+,.0f} µs ({', '.join(_shown_cell(each))})"


def _wrapped(each: Measured) -> list[str]:
    return [name for name in each.backends() if (RAW_PREFIX + name, "forward") in each.rows]


# --- misses --------------------------------------------------------------------------------------


def auto_misses(cells: Sequence[Measured]) -> str:
    """Where "auto" took a backend that is slower than the best by more than it may be."""
    compared, lines = 0, []
    for each in cells:
        for clock in AUTO_CLOCKS:
            total, best = each.auto(clock), each.best(clock)
            if total is None or best is None:
                continue
            compared += 1
            if total > best[1] * SLACK + RESOLUTION_MS:
                lines.append(
                    [
                        *_shown_cell(each),
                        clock,
                        f"`{each.resolved(clock)}`",
                        f"{total * 1e3:,.0f}",
                        f"`{best[0]}` {best[1] * 1e3:,.0f}",
                        f"{total / best[1]:.3f}",
                    ]
                )
    header = [*CELL_HEADER, "clock", "auto took", "µs", "best µs", "÷ best"]
    promise = "`auto` took the best backend, or one within 2% of it (and the clock's 1 µs)"
    return _misses(promise, compared, header, lines)


def own_call_misses(cells: Sequence[Measured]) -> str:
    """Where an eager call of "auto" took longer than one of the same kernel by name.

    It looks up which, and is the same call then. Both are of one run, in turn; of short documents
    both are the host's, whose clock is noisy: `host_time` has what looking up takes.
    """
    compared, lines = 0, []
    for each in cells:
        took = each.resolved("eager")
        own, same = (each.total(x, "eager") if x else None for x in ("auto", took))
        if own is None or same is None:
            continue
        compared += 1
        if own > same * SLACK + OVERHEAD_MS:
            times = [f"{ms * 1e3:,.0f}" for ms in (own, same)]
            lines.append([*_shown_cell(each), f"`{took}`", *times, f"{own / same:.3f}"])
    header = [*CELL_HEADER, "auto took", "auto's call µs", "by name µs", "÷ by name"]
    promise = "An eager call of `auto` is within 2% + 10 µs of one of that kernel by name"
    return _misses(promise, compared, header, lines)


def _misses(promise: str, compared: int, header: Sequence[str], lines: list[list[str]]) -> str:
    said = f"{promise}: {compared - len(lines):,} of {compared:,}."
    if not lines:
        return said
    more = len(lines) - MOST_MISSES
    table = markdown(header, lines[:MOST_MISSES])
    rest = "" if more <= 0 else f"\n\nAnd {more} more, in the rows."
    return f"{said} Not so:\n\n{table}{rest}"


def accuracy_sentence(cells: Sequence[Measured]) -> str:
    """How far off what was timed is, as multiples of the peer's error; and what was not timed."""
    worst = {"out": 0.0, "gradients": 0.0}
    bad, timed = [], 0
    for each in cells:
        for (variant, pass_), row in each.rows.items():
            if row.status in ("wrong", "failed", "oom"):
                bad.append(f"{each.cell.name} {variant} {pass_}: {row.status}, {row.reason}")
            if row.status != "ok":
                continue
            timed += 1
            for name in ("out", "dq", "dk", "dv"):
                peer = row.measures.get(f"peer_error_{name}")
                if peer:
                    what = "out" if name == "out" else "gradients"
                    ratio = row.measures[f"error_{name}"] / peer
                    worst[what] = max(worst[what], ratio)
    said = "Nothing was timed."
    if timed:
        said = (
            "All that was timed is right on sampled documents against fp64; the largest errors are "
            f"{worst['out']:.2f} (outputs) and {worst['gradients']:.2f} (gradients) times those of "
            "a document alone in plain low-precision torch."
        )
    if bad:
        said += "\n\nNot timed:\n\n" + "\n".join(f"- {line}" for line in bad[:MOST_MISSES])
    if len(bad) > MOST_MISSES:
        said += f"\n\nAnd {len(bad) - MOST_MISSES} more, in the rows."
    return said


def where_of(row: Row) -> str:
    """The machine, the versions of the kernels and the commit of a row's run."""
    return versions_of(row) + commit_of(row.environment)


def versions_of(row: Row) -> str:
    """The machine and the versions of the kernels of a row's run."""
    where = row.environment
    machine = where.get("gpu") or where.get("cpu")
    names = ("torch", "triton", "flash_attn", "flash_attn_3", "flash_attn_4")
    versions = [f"{name} {where[name]}" for name in names if where.get(name)]
    return f"{machine}, {', '.join(versions)}"


def _dtypes(cells: Sequence[Measured]) -> str:
    return ", ".join(dict.fromkeys(each.cell.dtype for each in cells))
