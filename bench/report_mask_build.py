"""Tables of the suite "mask-build", from rows alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.figure_mask_build import BUILDER_STYLES, where_of
from bench.markdown import markdown
from bench.rows import Row

BASELINES = {  # of the columns of speed
    "create_block_mask compiled": "× compiled create_block_mask",
    "create_block_mask(_compile=True)": "× _compile=True",
}


def mask_build_groups(rows: Sequence[Row], by_run: bool = False) -> list[list[Row]]:
    """Rows of one GPU (or CPU), or of one run on it."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        where = row.environment
        key = repr((where.get("gpu"), where.get("cpu"), by_run and where.get("started_utc")))
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def mask_build_section(rows: Sequence[Row]) -> str:
    """All parts' tables; rows of two runs never share one."""
    tables = []
    for part, table in PARTS.items():
        own = [row for row in rows if row.case["part"] == part]
        tables += [table(group) for group in mask_build_groups(own, by_run=True)]
    return "\n\n".join(tables)


# --- tables --------------------------------------------------------------------------------------


class Notes:
    """Why cells are empty, numbered, each reason once."""

    def __init__(self) -> None:
        self.reasons: dict[str, int] = {}

    def status(self, row: Row) -> str:
        number = self.reasons.setdefault(row.reason or "", len(self.reasons) + 1)
        return f"{row.status} ({number})"

    def text(self) -> str:
        return "".join(f"\n\n({number}) {why}" for why, number in self.reasons.items())


def build_table(rows: Sequence[Row]) -> str:
    """Every builder of causal documents at every size."""
    base = {
        (row.case["builder"], row.case["tokens"]): row.measures["wall_us_p50"]
        for row in rows
        if row.status == "ok"
    }

    def cells(row: Row) -> list[str]:
        took = row.measures["wall_us_p50"]
        theirs = [base.get((name, row.case["tokens"])) for name in BASELINES]
        return [*_cost(row.measures), *(_or_dash(x, lambda x: _three(x / took)) for x in theirs)]

    return (
        f"A causal BlockMask of log-normal documents (sigma 1), blocks of 128; {where_of(rows)}. "
        "Wall: one build on an idle device, to the end of its device work, p50 (p20–p80):\n\n"
        + _table(
            rows,
            ["builder", *COST, *BASELINES.values()],
            lambda row: [row.case["builder"]],
            cells,
        )
    )


def kinds_table(rows: Sequence[Row]) -> str:
    """Every other kind of mask, built by flexvarlen."""

    def cells(row: Row) -> list[str]:
        return [*_cost(row.measures), f"{row.measures['blocks']:,}"]

    return f"The other kinds, by flexvarlen; {where_of(rows)}:\n\n" + _table(
        rows,
        ["mask", *COST, "blocks kept"],
        lambda row: [row.case["kind"]],
        cells,
    )


COST = ("wall µs", "GPU µs", "launches", "peak MiB")


def _cost(m: dict[str, Any]) -> list[str]:
    return [
        f"{_three(m['wall_us_p50'])} ({_three(m['wall_us_p20'])}–{_three(m['wall_us_p80'])})",
        _or_dash(m["gpu_us"], _three),
        _or_dash(m["kernels"], lambda x: f"{x:g}"),
        _or_dash(m["peak_mib"], lambda x: f"{x:,.2f}" if x < 100 else f"{x:,.0f}"),
    ]


def attention_table(rows: Sequence[Row]) -> str:
    """flex_attention under either mask."""
    ok = {_attention_key(r): r for r in rows if r.status == "ok"}
    heads = rows[0].case

    def cells(row: Row) -> list[str]:
        other = ok.get(_attention_key(row, "create_block_mask"))
        both = [_ms(row.measures, "forward_"), _ms(row.measures, "backward_")]
        return [
            *both,
            _speed(row, other),
            _errors(row.measures),
            _or_dash(row.measures.get("max_difference"), lambda x: f"{x:.0e}"),
        ]

    title = (
        f"Compiled flex_attention under either mask: {heads['num_heads']} heads, "
        f"{heads['num_kv_heads']} KV heads, head_dim {heads['head_dim']}; {where_of(rows)}:"
    )
    header = ["kernel", "mask", "forward ms", "backward ms"]
    header += ["× create_block_mask's (forward, backward)"]
    header += ["error against fp64 (its peer's)", "largest difference from ours"]
    return f"{title}\n\n" + _table(
        rows,
        header,
        lambda row: [row.case["kernel"], row.case["mask"]],
        cells,
    )


def _attention_key(row: Row, mask: str | None = None) -> tuple[Any, ...]:
    case = row.case
    return case["tokens"], case["mean_doc"], case["kernel"], mask or case["mask"]


def _speed(row: Row, other: Row | None) -> str:
    def ratio(pass_: str) -> str:
        key = f"{pass_}_ms_p50"
        if other is None or key not in row.measures or key not in other.measures:
            return "–"
        return f"{other.measures[key] / row.measures[key]:.2f}"

    return f"{ratio('forward')}, {ratio('backward')}"


def long_table(rows: Sequence[Row]) -> str:
    """Attention on long rows."""

    def cells(row: Row) -> list[str]:
        m = row.measures
        return [
            _ms(m, "forward_"),
            _ms(m, "backward_"),
            _or_dash(m.get("peak_mib"), lambda x: f"{x / 1024:.1f}"),
            _errors(m),
        ]

    heads = rows[0].case
    title = (
        f"`packed_attention(backend='flex')` on long rows: {heads['num_heads']} heads, "
        f"{heads['num_kv_heads']} KV heads, head_dim {heads['head_dim']}; {where_of(rows)}. Errors "
        "are relative, of sampled documents against each alone in fp64; in brackets, of each alone "
        "in the same dtype:"
    )
    header = ["forward ms", "backward ms", "peak GiB"]
    header += ["error of out, dq, dk, dv (its peer's)"]
    return f"{title}\n\n" + _table(rows, header, lambda row: [], cells)


def share_sentences(rows: Sequence[Row]) -> str:
    """A build beside one layer."""
    said = []
    for row in rows:
        m, case = row.measures, row.case
        if row.status != "ok":
            said.append(f"One layer of {case['geometry']}: {row.status}: {row.reason}")
            continue
        shares = [
            f"{m[key]:.1f}% ({what})"
            for key, what in (("build_share_percent", "wall"), ("gpu_share_percent", "GPU"))
            if key in m
        ]
        said.append(
            f"One {case['geometry']} layer's forward takes {m['layer_ms_p50']:.2f} ms at "
            f"{case['tokens']:,} tokens ({where_of([row])}); a build is "
            f"{' and '.join(shares) or 'not comparable'} of that, once for all layers."
        )
    return "\n\n".join(said)


def growth_sentence(rows: Sequence[Row]) -> str:
    """The ends of each series."""
    said = []
    for series in dict.fromkeys(row.case["series"] for row in rows):
        own = [row for row in rows if row.case["series"] == series and row.status == "ok"]
        own.sort(key=lambda row: row.measures["blocks"])
        if len(own) < 2:
            continue
        few, many = own[0], own[-1]
        said.append(
            f"{_size(few)} to {_size(many)}: "
            f"{many.measures['blocks'] / few.measures['blocks']:,.0f} × the blocks kept, "
            f"{many.measures['wall_us_p50'] / few.measures['wall_us_p50']:.1f} × the wall time."
        )
    return "\n\n".join([f"Growth of flexvarlen's build ({where_of(rows)}).", *said])


def _size(row: Row) -> str:
    return f"{row.case['tokens']:,} tokens in documents of mean {row.case['mean_doc']:,}"


PARTS: dict[str, Callable[[Sequence[Row]], str]] = {
    "build": build_table,
    "kinds": kinds_table,
    "growth": growth_sentence,
    "share": share_sentences,
    "attention": attention_table,
    "long": long_table,
}


# --- cells ---------------------------------------------------------------------------------------


def _table(
    rows: Sequence[Row],
    header: Sequence[str],
    what: Callable[[Row], list[str]],
    cells: Callable[[Row], list[str]],
) -> str:
    """A line a row, by tokens: two columns that say which, then `what` and `cells`.

    A row that is not ok has its status in place of its cells.
    """
    notes, lines = Notes(), []
    builders = list(BUILDER_STYLES)

    def place(row: Row) -> tuple[int, int]:  # rows that fail are written first
        builder = row.case.get("builder")
        return row.case["tokens"], builders.index(builder) if builder in builders else 0

    for row in sorted(rows, key=place):
        line = [_tokens(row), _documents(row, rows), *what(row)]
        if row.status == "ok":
            line += cells(row)
        else:
            line.append(notes.status(row))
        lines.append([*line, *[""] * (2 + len(header) - len(line))])
    return markdown(["tokens", "documents (mean)", *header], lines) + notes.text()


def _tokens(row: Row) -> str:
    return f"{row.case['tokens']:,}"


def _documents(row: Row, rows: Sequence[Row]) -> str:
    """How many, and their mean length; a row that failed may leave the count to its neighbours."""
    same = (row.case["tokens"], row.case["mean_doc"])
    for other in rows:
        if (other.case["tokens"], other.case["mean_doc"]) == same and "num_docs" in other.measures:
            return f"{other.measures['num_docs']:,} ({row.case['mean_doc']:,})"
    return f"({row.case['mean_doc']:,})"


def _three(value: float) -> str:
    """Three digits, or the whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _or_dash(value: float | None, shown: Callable[[float], str]) -> str:
    return "–" if value is None else shown(value)


def _ms(m: dict[str, Any], prefix: str) -> str:
    if f"{prefix}ms_p50" not in m:
        return "–"
    low, middle, high = (m[f"{prefix}ms_{p}"] for p in ("p20", "p50", "p80"))
    return f"{_three(middle)} ({_three(low)}–{_three(high)})"


def _errors(m: dict[str, Any]) -> str:
    names = [name for name in ("out", "dq", "dk", "dv") if f"error_{name}" in m]
    found = ", ".join(f"{m[f'error_{name}']:.1e}" for name in names)
    peers = ", ".join(f"{m[f'peer_error_{name}']:.1e}" for name in names)
    return f"{found} ({peers})"
