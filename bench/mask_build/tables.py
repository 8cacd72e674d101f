"""Tables of the suite "mask-build", from rows alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from flexvarlen.bench.mask_build.figure import BUILDER_STYLES, place_of, where_of, with_variants
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, in_short

BASELINES = {  # of the columns of speed
    "create_block_mask compiled": "× compiled create_block_mask",
    "create_block_mask(_compile=True)": "× _compile=True",
}
COMPARED = "flexvarlen from cu_seqlens"  # starts each build from what the baselines start from
FEW_REPEATS = 20  # percentiles of fewer say how many they are of


def mask_build_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one GPU (or of the CPU)."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        where = row.environment
        groups.setdefault(str(where.get("gpu") or where.get("device")), []).append(row)
    return list(groups.values())


def _places(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(place_of(row), []).append(row)
    return list(groups.values())


def mask_build_section(rows: Sequence[Row]) -> str:
    """All parts' tables; rows of two machines, versions or commits never share one."""
    rows = with_variants(rows)
    tables = []
    for part, table in PARTS.items():
        own = [row for row in rows if row.case["part"] == part]
        tables += [table(group) for group in _places(own)]
    return "\n\n".join(tables)


# --- tables --------------------------------------------------------------------------------------


class Notes:
    """Why cells are empty, numbered, each reason once."""

    def __init__(self) -> None:
        self.reasons: dict[str, int] = {}

    def status(self, row: Row) -> str:
        number = self.reasons.setdefault(in_short(row.reason or ""), len(self.reasons) + 1)
        return f"{row.status} ({number})"

    def text(self) -> str:
        return "".join(f"\n\n({number}) {why}" for why, number in self.reasons.items())


def build_table(rows: Sequence[Row]) -> str:
    """Every builder of causal documents at every size."""
    base = {
        (row.case["variant"], row.case["tokens"]): row.measures["wall_us_p50"]
        for row in rows
        if row.status == "ok"
    }

    def cells(row: Row) -> list[str]:
        took, builder = row.measures["wall_us_p50"], row.case["variant"]
        theirs = [
            base.get((name, row.case["tokens"])) if builder in (COMPARED, name) else None
            for name in BASELINES
        ]
        return [*_cost(row.measures), *(_or_dash(x, lambda x: _three(x / took)) for x in theirs)]

    untimed = max(row.measures.get("untimed_builds") or 0 for row in rows)
    return (
        f"A causal BlockMask of log-normal documents (sigma {_recorded(rows, 'sigma')}), block "
        f"size {_recorded(rows, 'block_size')}; {where_of(rows)}. Wall: one build on an idle "
        f"device, right after up to {untimed} untimed ones, to the end of its device work, p50 "
        "(p20–p80). Tables: what the mask holds. "
        "“flexvarlen” starts from a layout in hand, all others from boundaries on the device: "
        f"speed-ups (×) are those of “{COMPARED}”:\n\n"
        + _table(
            rows,
            ["builder", *COST, *BASELINES.values()],
            lambda row: [row.case["variant"]],
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
        lambda row: [row.case["variant"]],
        cells,
    )


COST = ("wall µs", "GPU µs", "launches", "peak MiB", "tables MiB")


def _cost(m: dict[str, Any]) -> list[str]:
    return [
        _spread(m, "wall_us", m["repeats"]),
        _or_dash(m["gpu_us"], _three),
        _or_dash(m["kernels"], lambda x: f"{x:g}"),
        _or_dash(m["peak_mib"], _mib),
        _or_dash(m.get("tables_mib"), _mib),
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
        lambda row: [row.case["kernel"], row.case["variant"]],
        cells,
    )


def _attention_key(row: Row, mask: str | None = None) -> tuple[Any, ...]:
    case = row.case
    return case["tokens"], case["mean_doc"], case["kernel"], mask or case["variant"]


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
    backends = ", ".join(f"`{name}`" for name in dict.fromkeys(r.case["variant"] for r in rows))
    title = (
        f"`packed_attention` on long rows, by {backends}: {heads['num_heads']} heads, "
        f"{heads['num_kv_heads']} KV heads, head_dim {heads['head_dim']}; {where_of(rows)}. Errors "
        "are relative, of sampled documents against each alone in fp64; in brackets, of each alone "
        "in the same dtype:"
    )
    header = ["backend", "forward ms", "backward ms", "peak GiB"]
    header += ["error of out, dq, dk, dv (its peer's)"]
    return f"{title}\n\n" + _table(rows, header, lambda row: [row.case["variant"]], cells)


def share_sentences(rows: Sequence[Row]) -> str:
    """A build beside one layer."""
    said = []
    for row in rows:
        m, case = row.measures, row.case
        if row.status != "ok":
            said.append(f"One layer of {case['geometry']}: {row.outcome}")
            continue
        shares = [
            f"{_digits(m[key], 2)}% ({what})"
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
        few, many = own[0].measures, own[-1].measures
        times = [
            f"{_digits(many[key] / few[key], 2)} × the {what} time "
            f"({_three(few[key])} to {_three(many[key])} µs)"
            for key, what in (("wall_us_p50", "wall"), ("gpu_us", "GPU"))
            if few[key] and many[key]
        ]
        said.append(
            f"{_size(own[0])} to {_size(own[-1])}: "
            f"{_three(many['blocks'] / few['blocks'])} × the blocks kept, {', '.join(times)}."
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
        builder = row.case.get("variant")
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


def _recorded(rows: Sequence[Row], key: str) -> str:
    """What the rows' cases say of `key`; a dash where one does not."""
    found = dict.fromkeys(row.case.get(key) for row in rows)
    return ", ".join(_or_dash(value, lambda x: f"{x:g}") for value in found)


def _digits(value: float, count: int) -> str:
    """So many significant digits, or the whole number."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = int(f"{value:.{count - 1}e}".partition("e")[2])
    return f"{value:,.{max(0, count - 1 - exponent)}f}"


def _three(value: float) -> str:
    return _digits(value, 3)


def _mib(value: float) -> str:
    if value < 0.1:
        return _digits(value, 2)
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _spread(m: dict[str, Any], name: str, repeats: int) -> str:
    """Median (p20–p80), and of how many, where they are few."""
    low, middle, high = (_three(m[f"{name}_{p}"]) for p in ("p20", "p50", "p80"))
    few = f"; {repeats} repeats" if repeats < FEW_REPEATS else ""
    return f"{middle} ({low}–{high}{few})"


def _or_dash(value: float | None, shown: Callable[[float], str]) -> str:
    return "–" if value is None else shown(value)


def _ms(m: dict[str, Any], prefix: str) -> str:
    if f"{prefix}ms_p50" not in m:
        return "–"
    return _spread(m, f"{prefix}ms", m[f"{prefix}repeats"])


def _errors(m: dict[str, Any]) -> str:
    names = [name for name in ("out", "dq", "dk", "dv") if f"error_{name}" in m]
    found = ", ".join(f"{m[f'error_{name}']:.1e}" for name in names)
    peers = ", ".join(f"{m[f'peer_error_{name}']:.1e}" for name in names)
    return f"{found} ({peers})"
