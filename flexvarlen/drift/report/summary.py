"""The tables of a drift in short: one a suite, for a terminal and for the page; from rows alone."""

from __future__ import annotations

from collections.abc import Sequence

from flexvarlen.drift.grid import NOTHING, Grid, number, share
from flexvarlen.drift.report.verdicts import BACKWARD, FORWARD, groups, largest, suite_rows
from flexvarlen.drift.training.tables import training_grids
from flexvarlen.rows import Row

_OP = ("batch-serial", "run-run", "place", "eager-compiled", "backend-backend")


def grids(rows: Sequence[Row]) -> list[Grid]:
    """Of every suite that has rows; what cannot run here is in the report's notes alone."""
    rows = [row for row in rows if row.status != "unsupported"]
    found = [*_operators(rows), *_models(rows), *_attribution(rows)]
    return [*found, *training_grids(rows)]


# ---- operators ----


def _operators(rows: Sequence[Row]) -> list[Grid]:
    """A row a backend: its largest relative difference over all cases, of each comparison."""
    made = []
    for (dtype,), of_dtype in groups(suite_rows(rows, "drift-op"), "dtype").items():
        shown = [c for c in _OP if any(row.case["comparison"] == c for row in of_dtype)]
        header = ["backend", "verdict", "share of allowed error"]
        header += [f"{c} {part}" for c in shown for part in ("fwd", "bwd")]
        lines: list[tuple[str, ...]] = []
        bad: set[int] = set()
        for (backend,), own in groups(of_dtype, "backend").items():
            verdict = _verdict(own)
            if verdict in ("wrong", "failed"):
                bad.add(len(lines))
            ratio = largest(own, [f"ratio_{part}" for part in (*FORWARD, *BACKWARD)])
            cells = [str(backend), verdict, NOTHING if ratio is None else f"{ratio[0]:.0%}"]
            for comparison in shown:
                compared = [row for row in own if row.case["comparison"] == comparison]
                cells += [_farthest(compared, FORWARD), _farthest(compared, BACKWARD)]
            lines.append(tuple(cells))
        cases = len(groups(of_dtype, "name"))
        title = f"Attention alone, {dtype}: largest relative difference over the cases ({cases})"
        made.append(Grid(title, tuple(header), tuple(lines), frozenset(bad)))
    return made


def _verdict(rows: Sequence[Row]) -> str:
    """The worst status of its rows; "ok" if it ran at all and nothing is wrong."""
    found = {row.status for row in rows}
    order = ("wrong", "failed", "ok", "oom")
    return next((status for status in order if status in found), "skipped")


def _farthest(rows: Sequence[Row], parts: Sequence[str]) -> str:
    worst = largest(rows, [f"{part}_relative" for part in parts])
    return number(None if worst is None else worst[0])


# ---- models ----

_MODEL_COLUMNS = (
    "comparison",
    "backend",
    "parts first in",
    "logits relative",
    "max |Δ log p|",
    "mean KL",
    "top-1",
    "Δ loss",
    "gradients relative",
    "cosine",
)


def _models(rows: Sequence[Row]) -> list[Grid]:
    whole = [row for row in suite_rows(rows, "drift-model") if row.case["scope"] == "batch"]
    made = []
    for key, own in groups(whole, "model", "tokens", "documents").items():
        model, tokens, documents = key
        bad = {i for i, row in enumerate(own) if row.status in ("wrong", "failed")}
        title = f"{model}: {tokens:,} tokens in {documents} documents"
        lines = tuple(_model_line(row) for row in own)
        made.append(Grid(title, _MODEL_COLUMNS, lines, frozenset(bad)))
    return made


def _model_line(row: Row) -> tuple[str, ...]:
    case, of = row.case, row.measures
    beside = case.get("other") or case.get("other_dtype")
    name = f"{case['backend']}, {case['dtype']}" + (f" / {beside}" if beside else "")
    if row.status != "ok":
        return (case["comparison"], name, row.status, *[NOTHING] * 7)
    first = of.get("first_part") or ("nowhere" if of["logits_equal"] == 1 else NOTHING)
    if of.get("first_part") is None and of.get("first_layer") is not None:
        first = f"block {of['first_layer']}"
    return (
        case["comparison"],
        name,
        first,
        number(of["logits_relative"]),
        number(of.get("logprob_max_abs")),
        number(of.get("kl_mean")),
        share(of.get("top1")),
        number(of.get("loss_difference")),
        number(of.get("gradient_relative")),
        NOTHING if of.get("gradient_cosine") is None else f"{of['gradient_cosine']:.6f}",
    )


# ---- attribution ----

_SHARE_COLUMNS = ("backend", "exchanged", "share", "logits relative", "gradients relative", "ms")


def _attribution(rows: Sequence[Row]) -> list[Grid]:
    made = []
    for (model, dtype), own in groups(
        suite_rows(rows, "drift-attribution"), "model", "dtype"
    ).items():
        bad = {i for i, row in enumerate(own) if row.status in ("wrong", "failed")}
        title = f"{model}, {dtype}: whose drift is it, packed against serial"
        lines = tuple(_share_line(row) for row in own)
        made.append(Grid(title, _SHARE_COLUMNS, lines, frozenset(bad)))
    return made


def _share_line(row: Row) -> tuple[str, ...]:
    of = row.measures
    took = of.get("ms_p50")
    return (
        str(row.case["backend"]),
        str(row.case["what"]),
        share(of.get("share")) if row.status == "ok" else row.status,
        number(of.get("logits_relative")),
        number(of.get("gradient_relative")),
        NOTHING if took is None else f"{took:,.1f}",
    )
