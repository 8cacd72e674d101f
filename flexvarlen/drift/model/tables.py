"""The tables of a model's drift and of its attribution, from rows alone.

A line without numbers has its status; the report's sentences and notes say why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flexvarlen.drift.grid import NOTHING, Grid, nan_last, number, share
from flexvarlen.rows import Row

MODEL_SUITE, ATTRIBUTION_SUITE = "drift-model", "drift-attribution"

WORST_DOCUMENTS = 5

NOTE_ON_SHARES = (
    "A class's share is the logits' relative difference with that class alone over the whole row, "
    "over that with all of them; shares need not add up to 1, as rounding errors partly cancel."
)


def batch_grids(rows: Sequence[Row]) -> list[Grid]:
    """Of the suite "drift-model", of each model and dtype: what the batch moved by."""
    grids = []
    for title, own in _titled(rows, MODEL_SUITE):
        whole = _in_scope(own, "batch")
        if whole:
            grids.append(_batches(title, whole))
        trained = [row for row in whole if row.status == "ok"]
        trained = [row for row in trained if "gradient_relative" in row.measures]
        if trained:
            lines = tuple(map(_gradient_line, trained))
            grids.append(Grid(f"{title}: gradients", _GRADIENTS, lines))
    return grids


def detail_grids(rows: Sequence[Row]) -> list[Grid]:
    """Of the suite "drift-model": what moved by layer; the documents that moved most."""
    grids = []
    for title, own in _titled(rows, MODEL_SUITE):
        for by in (_layers, _documents):
            for (comparison,), compared in _groups(own, "comparison").items():
                grids += by(f"{title}: {comparison}", compared)
    return grids


def attribution_grids(rows: Sequence[Row]) -> list[Grid]:
    """Of the suite "drift-attribution": the shares; what batch invariance gave."""
    grids = []
    for title, own in _titled(rows, ATTRIBUTION_SUITE):
        serial = [row for row in own if row.case["what"] != "invariant"]
        invariant = [row for row in own if row.case["what"] == "invariant"]
        if serial:
            lines = tuple(_share_line(row) for row in serial)
            grids.append(Grid(f"{title}: whose drift it is", _SHARES, lines, _bad(serial)))
        if invariant:
            lines = tuple(_invariant_line(row) for row in invariant)
            grids.append(Grid(f"{title}: batch invariant", _INVARIANT, lines, _bad(invariant)))
    return grids


def _titled(rows: Iterable[Row], suite: str) -> list[tuple[str, list[Row]]]:
    """The rows of a suite by model, dtype and batch, each with a title."""
    of_suite = [row for row in rows if row.suite == suite]
    grouped = _groups(of_suite, "model", "dtype", "tokens", "documents")
    return [
        (f"{model}, {dtype}, {tokens:,} tokens in {documents} documents", own)
        for (model, dtype, tokens, documents), own in grouped.items()
    ]


def _groups(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.case[name] for name in names), []).append(row)
    return found


def _in_scope(rows: Iterable[Row], scope: str) -> list[Row]:
    return [row for row in rows if row.case["scope"] == scope]


def _bad(rows: Sequence[Row]) -> frozenset[int]:
    return frozenset(i for i, row in enumerate(rows) if row.status in ("wrong", "failed"))


def _name(row: Row) -> str:
    """The backend, and the backend or dtype it is held against where that is another."""
    beside = row.case.get("other") or row.case.get("other_dtype")
    return str(row.case["backend"]) + (f" / {beside}" if beside else "")


# ---- a model ----

_BATCH = (
    "comparison",
    "backend",
    "parts first in",
    "logits relative",
    "Δ logprob mean",
    "p99",
    "max",
    "KL mean",
    "top-1",
    "top-5",
    "Δ loss",
)

_GRADIENTS = (
    "comparison",
    "backend",
    "gradient relative",
    "gradient cosine",
    "worst parameter",
    "its relative",
)


def _batches(title: str, rows: Sequence[Row]) -> Grid:
    lines = [_batch_line(row) for row in rows if row.status == "ok"]
    refused: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.status != "ok":  # most often a backend that has none of them, for one reason
            refused.setdefault((str(row.case["backend"]), row.status), []).append(row)
    bad = set()
    for (backend, status), own in refused.items():
        if _bad(own):
            bad.add(len(lines))
        which = ", ".join(row.case["comparison"] for row in own)
        lines.append((which, backend, status, *[NOTHING] * (len(_BATCH) - 3)))
    return Grid(title, _BATCH, tuple(lines), frozenset(bad))


def _batch_line(row: Row) -> tuple[str, ...]:
    of = row.measures
    return (
        str(row.case["comparison"]),
        _name(row),
        of["first_part"] or "nowhere",
        number(of["logits_relative"]),
        number(of.get("logprob_mean_abs")),
        number(of.get("logprob_p99")),
        number(of.get("logprob_max_abs")),
        number(of["kl_mean"]),
        share(of["top1"]),
        share(of["top5"]),
        number(of["loss_difference"]),
    )


def _gradient_line(row: Row) -> tuple[str, ...]:
    of = row.measures
    return (
        str(row.case["comparison"]),
        _name(row),
        number(of["gradient_relative"]),
        f"{of['gradient_cosine']:.6f}",
        of["worst_parameter"] or NOTHING,
        number(of["worst_parameter_relative"]),
    )


def _layers(title: str, rows: Sequence[Row]) -> list[Grid]:
    """Relative difference of the hidden states: a line a layer, a column a backend."""
    by_name: dict[str, dict[int, Row]] = {}
    for row in _in_scope(rows, "layer"):
        by_name.setdefault(_name(row), {})[row.case["index"]] = row
    if not by_name:
        return []
    lines = []
    for index in sorted({index for layers in by_name.values() for index in layers}):
        cells = [
            number(layers[index].measures["hidden_relative"]) if index in layers else NOTHING
            for layers in by_name.values()
        ]
        lines.append(("embeddings" if index < 0 else f"block {index}", *cells))
    return [Grid(f"{title}, by layer (relative)", ("after", *by_name), tuple(lines))]


_DOCUMENTS = ("backend", "document", "tokens", "logits relative", "KL mean", "KL max", "top-1")


def _documents(title: str, rows: Sequence[Row]) -> list[Grid]:
    """Of each backend the documents whose logits moved most; none where nothing moved."""
    lines = []
    for own in _groups(_in_scope(rows, "document"), "backend", "other").values():
        moved = [row for row in own if row.measures["logits_equal"] != 1]
        moved.sort(key=lambda row: -nan_last(row.measures["logits_relative"]))
        lines += [_document_line(row) for row in moved[:WORST_DOCUMENTS]]
    if not lines:
        return []
    return [Grid(f"{title}, documents that moved most", _DOCUMENTS, tuple(lines))]


def _document_line(row: Row) -> tuple[str, ...]:
    of = row.measures
    return (
        _name(row),
        str(row.case["index"]),
        f"{of['length']:,}",
        number(of["logits_relative"]),
        number(of["kl_mean"]),
        number(of["kl_max"]),
        share(of["top1"]),
    )


# ---- whose fault it is ----

_SHARES = (
    "backend",
    "over the whole row",
    "logits relative",
    "share",
    "last block relative",
    "gradient relative",
    "ms a step",
    "cost",
)

_INVARIANT = (
    "backend",
    "logits equal",
    "hidden equal",
    "own gradients equal",
    "documents",
    "largest difference",
    "ms a step",
    "cost",
)


_INVARIANT_SIZES = (
    "logits_max_abs",
    "hidden_max_abs",
    "any_hidden_max_abs",
    "document_gradients_max_abs",
)
"""Of what must be equal."""


def _judged(row: Row) -> str:
    """The backend; its numbers are shown where they are wrong too."""
    return str(row.case["backend"]) + (" (wrong)" if row.status == "wrong" else "")


def _share_line(row: Row) -> tuple[str, ...]:
    of, head = row.measures, (_judged(row), str(row.case["what"]))
    if row.status not in ("ok", "wrong"):
        return (*head, row.status, *[NOTHING] * (len(_SHARES) - 3))
    return (
        *head,
        number(of["logits_relative"]),
        share(of.get("share")),
        number(of["hidden_relative"]),
        number(of.get("gradient_relative")),
        *_time(of),
    )


def _invariant_line(row: Row) -> tuple[str, ...]:
    of, backend = row.measures, _judged(row)
    if row.status not in ("ok", "wrong"):
        return (backend, row.status, *[NOTHING] * (len(_INVARIANT) - 2))
    sizes = [of[name] for name in _INVARIANT_SIZES if of.get(name) is not None]
    documents = of.get("gradient_documents")
    return (
        backend,
        share(of["equal_logits"]),
        share(of["equal_hidden"]),
        share(of.get("equal_gradients")),
        NOTHING if documents is None else f"{len(documents)} of {row.case['documents']}",
        number(max(sizes, key=nan_last)),
        *_time(of),
    )


def _time(measures: dict[str, Any]) -> tuple[str, str]:
    took, cost = measures.get("ms_p50"), measures.get("cost")
    return (
        NOTHING if took is None else f"{took:,.1f}",
        NOTHING if cost is None else f"{cost:.2f} ×",
    )
