"""The figure of the suite "kernels": TFLOP/s against tokens, a panel a kind and its documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexvarlen.bench.attention.engine import PASSES
from flexvarlen.bench.attention.kernels_cells import LONGEST, SHORTEST, Cell
from flexvarlen.bench.attention.kernels_tables import (
    Measured,
    measured_cells,
    shown_cells,
    where_of,
)
from flexvarlen.rows import Row

# Of the marks of what could not be measured, in heights of the axes: the lowest, from one to next.
MARKS, MARK_STEP = 0.03, 0.045


def documents_of(cell: Cell) -> str:
    """The kind of documents, as a panel's title."""
    if cell.documents == "log-normal":
        return f"log-normal, mean {cell.mean_doc:,}"
    if cell.documents == "uniform":
        return f"uniform, {cell.mean_doc:,} (or the row)"
    return f"all short, {SHORTEST}–{LONGEST}"


def kind_of(cell: Cell) -> str:
    """The kind of attention, as a row of panels is called."""
    mask = "causal" if cell.causal else "full"
    return f"head_dim {cell.head_dim}\n{cell.num_heads}/{cell.num_kv_heads} heads, {mask}"


def panel_rows(cells: Sequence[Measured]) -> list[str]:
    """Kinds with a line, of several lengths, in most panels; all kinds, if none has."""
    tokens: dict[str, dict[str, set[int]]] = {}
    for each in cells:
        panels = tokens.setdefault(kind_of(each.cell), {})
        panels.setdefault(documents_of(each.cell), set()).add(each.cell.tokens)
    wide = max((len(panels) for panels in tokens.values()), default=0)
    lines = {kind: sum(len(x) > 1 for x in panels.values()) for kind, panels in tokens.items()}
    return [kind for kind, count in lines.items() if 2 * count > wide] or list(tokens)


def drawn(rows: Sequence[Row]) -> Any:
    """TFLOP/s of a forward and a backward together, of one machine's rows."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    cells = shown_cells(measured_cells(rows))
    kinds = panel_rows(cells)
    order = ("uniform", "log-normal", "short")
    by_documents = sorted(cells, key=lambda e: (order.index(e.cell.documents), e.cell.mean_doc))
    documents = list(dict.fromkeys(documents_of(each.cell) for each in by_documents))
    backends = list(dict.fromkeys(name for each in cells for name in each.backends()))
    backends = [name for name in backends if any(each.total(name) for each in cells)]
    backends.append("auto")
    figure, grid = pyplot.subplots(
        len(kinds),
        len(documents),
        figsize=(3.1 * len(documents) + 1, 2.9 * len(kinds) + 1.4),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for axes_row, kind in zip(grid, kinds, strict=True):
        for axes, which in zip(axes_row, documents, strict=True):
            own = [e for e in cells if (kind_of(e.cell), documents_of(e.cell)) == (kind, which)]
            _panel(axes, own, backends)
            if kind == kinds[0]:
                axes.set_title(which, fontsize=10)
            if kind == kinds[-1]:
                axes.set_xlabel("tokens of the row (log2)", fontsize=9)
        axes_row[0].set_ylabel(f"{kind}\nTFLOP/s of unmasked work", fontsize=9)
    handles = [Line2D([], [], label=name, **_style(name).line()) for name in backends]
    marks = {"linestyle": "none", "marker": "x", "color": "#666666"}
    handles.append(Line2D([], [], label="no time: refused, wrong, …", **marks))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    runs = dict.fromkeys(where_of(row) for each in cells for row in each.rows.values())
    dtypes = ", ".join(dict.fromkeys(each.cell.dtype for each in cells))
    what = f"Packed attention, {dtypes}, forward + backward, device time (band: p20–p80)"
    figure.suptitle("\n".join([what, *runs]), fontsize=10)
    return figure


def _style(name: str) -> Any:
    from flexvarlen.plotstyle import STYLES, UNSUPPORTED

    return STYLES.get(name, UNSUPPORTED)


def _panel(axes: Any, cells: Sequence[Measured], backends: Sequence[str]) -> None:
    from matplotlib import ticker

    for index, name in enumerate(backends):
        style = _style(name)
        timed = [each for each in cells if not each.host_bound(name)]
        done = [each for each in timed if each.total(name) is not None]
        if done:
            x = [each.cell.tokens for each in done]
            line = style.line() | ({"linestyle": "none"} if name == "auto" else {})
            size, face = (9, "none") if name == "auto" else (5, line["markerfacecolor"])
            line |= {"markerfacecolor": face}
            axes.plot(x, [tflops(each, name, "p50") for each in done], markersize=size, **line)
            if name != "auto":  # the ring lies on the point of the backend that it took
                low, high = ([tflops(each, name, at) for each in done] for at in ("p80", "p20"))
                axes.fill_between(x, low, high, color=style.color, alpha=0.2, linewidth=0)
        missing = [e.cell.tokens for e in cells if e not in done and _is_there(e, name)]
        axes.plot(
            missing,
            [MARKS + MARK_STEP * index] * len(missing),
            transform=axes.get_xaxis_transform(),
            marker="x",
            linestyle="none",
            color=style.color,
            markersize=5,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.yaxis.set_major_formatter(
        ticker.FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:.2g}")
    )
    axes.tick_params(axis="x", labelrotation=35, labelsize=8)
    axes.grid(which="major", alpha=0.3)
    axes.margins(y=0.12)
    if not cells:
        axes.text(0.5, 0.5, "not measured", ha="center", color="#888888", transform=axes.transAxes)


def _is_there(each: Measured, name: str) -> bool:
    return any((name, pass_) in each.rows for pass_ in PASSES)


def tflops(each: Measured, name: str, at: str) -> float:
    """Of a forward and a backward together; `at`: which percentile of their times.

    From what the rows say of the unmasked work: a pass's TFLOP/s at p50 times its p50.
    """
    work = 0.0
    for pass_ in PASSES:
        measures = each.rows[name, pass_].measures
        work += measures["tflops"] * measures["device_ms_p50"]
    return work / (each.total(name, at=at) or float("nan"))
