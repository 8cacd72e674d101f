"""What the rows of a drift say, in plain sentences; from rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flexvarlen.drift.grid import nan_last, share
from flexvarlen.drift.training.tables import training_sentences
from flexvarlen.rows import Row

FORWARD, BACKWARD = ("out", "lse"), ("dq", "dk", "dv")
SERIAL = "serial_"
RATIOS = tuple(f"{of}ratio_{part}" for of in ("", SERIAL) for part in (*FORWARD, *BACKWARD))
"""Measures: errors against fp64 over what the rule allows, in one call and with one a document."""

IN_WORDS = {
    "exact": "against fp64",
    "batch-serial": "all documents in one call, against one call a document",
    "run-run": "the same call again",
    "place": "the documents at other places of the batch",
    "eager-compiled": "compiled against eager",
    "backend-backend": "against another backend",
    "packed-alone": "packed against each document alone",
    "packed-padded": "packed against padded",
    "dtype": "against float32",
}
"""The comparisons."""


def plain_sentences(rows: Sequence[Row]) -> list[str]:
    """The verdicts: what is wrong first, then what each comparison found."""
    said = [*_broken(rows), *_operators(rows), *_models(rows), *_shares(rows)]
    return [*said, *training_sentences(rows)] or ["Nothing was compared."]


def suite_rows(rows: Iterable[Row], suite: str) -> list[Row]:
    """Those of one suite."""
    return [row for row in rows if row.suite == suite]


def groups(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by these entries of their case, in order."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.case.get(name) for name in names), []).append(row)
    return found


def largest(rows: Iterable[Row], names: Iterable[str]) -> tuple[float, str, Row] | None:
    """The largest of these measures over the rows, its name and its row; NaN is larger than any."""
    wanted = tuple(names)
    found = [
        (row.measures[name], name, row)
        for row in rows
        for name in wanted
        if row.measures.get(name) is not None
    ]
    return max(found, key=lambda one: nan_last(one[0])) if found else None


def equal_bits(rows: Iterable[Row], parts: Sequence[str]) -> bool | None:
    """Whether these parts are equal in every element of all rows; None if no row has them."""
    shares = [row.measures[f"{part}_equal"] for row in rows for part in parts if _has(row, part)]
    return all(share == 1 for share in shares) if shares else None


def _has(row: Row, part: str) -> bool:
    return f"{part}_equal" in row.measures


# ---- what is wrong ----


def _broken(rows: Sequence[Row]) -> list[str]:
    """Once for rows that share the reason: a wrong kernel is wrong in many comparisons."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.status in ("wrong", "failed") and row.suite != "drift-training":
            case = row.case
            name = f"{case.get('backend')} is wrong" if row.status == "wrong" else ""
            name = name or f"{case.get('backend')} failed"
            where = case.get("name") or case.get("model") or ""
            found.setdefault(f"{name}: {row.reason}", []).append(str(where))
    return [f"{text} ({', '.join(dict.fromkeys(places))})" for text, places in found.items()]


# ---- operators ----


def _operators(rows: Sequence[Row]) -> list[str]:
    ops = [row for row in suite_rows(rows, "drift-op") if row.status == "ok"]
    said = []
    for (dtype,), of_dtype in groups(ops, "dtype").items():
        for comparison in ("batch-serial", "run-run", "place", "eager-compiled"):
            compared = [row for row in of_dtype if row.case["comparison"] == comparison]
            if compared:
                asked = [row for row in suite_rows(rows, "drift-op") if row.case["dtype"] == dtype]
                asked = [row for row in asked if row.case["comparison"] == comparison]
                said.append(_who_is_exact(dtype, comparison, asked))
        said += _worst_error(dtype, of_dtype)
    return said


def _who_is_exact(dtype: str, comparison: str, rows: list[Row]) -> str:
    """One sentence: the backends by how far they are exact, each in the cases that it ran.

    `rows`: all of the comparison, those without a result too.
    """
    cases = len(groups(rows, "name"))
    kinds: dict[str, list[str]] = {}
    for (backend,), asked in groups(rows, "backend").items():
        own = [row for row in asked if row.status == "ok"]
        if not own:
            continue
        forward, backward = equal_bits(own, FORWARD), equal_bits(own, BACKWARD)
        ran = _ran(asked, cases)
        if forward and backward is not False:
            kind = "the same bits, forward and backward"
            kind = kind if backward else "the same bits forward (no backward compared)"
            with_backward = sum(equal_bits([row], BACKWARD) is not None for row in own)
            if 0 < with_backward < len(own):
                ran += f", with a backward in {with_backward}"
            kinds.setdefault(kind, []).append(f"{backend}{ran}")
            continue
        kind = "the same bits forward, not backward" if forward else "other bits"
        parts = BACKWARD if forward else (*FORWARD, *BACKWARD)
        differing = sum(equal_bits([row], parts) is False for row in own)
        text = f"{backend} ({_farthest(own, parts)})"
        if differing < len(own):
            text += f" in {differing} of {len(own)}"
        kinds.setdefault(kind, []).append(f"{text}{ran}")
    found = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())
    return f"{dtype}, {IN_WORDS[comparison]}, {cases} case{'s' * (cases != 1)}: {found}."


def _ran(asked: list[Row], cases: int) -> str:
    """In brackets how many cases a backend ran, and what became of the others; empty if all."""
    ran = len(groups((row for row in asked if row.status == "ok"), "name"))
    if ran == cases:
        return ""
    ended: dict[str, list[str]] = {}
    for row in asked:
        if row.status != "ok":
            ended.setdefault(row.status, []).append(str(row.case["name"]))
    why = "".join(f"; {status}: {_some(names)}" for status, names in ended.items())
    return f" [ran {ran} of {cases}{why}]"


def _some(names: Sequence[str], most: int = 4) -> str:
    beyond = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + beyond


def _farthest(rows: list[Row], parts: Sequence[str]) -> str:
    worst = largest(rows, [f"{part}_relative" for part in parts])
    if worst is None:
        return "not measured"
    value, name, row = worst
    return f"{name.removesuffix('_relative')} by {value:.1e} relative in {row.case['name']}"


def _worst_error(dtype: str, rows: list[Row]) -> list[str]:
    worst = largest(rows, RATIOS)
    if worst is None:
        return []
    value, name, row = worst
    alone = ", one call a document," if name.startswith(SERIAL) else ""
    return [
        f"{dtype}, {IN_WORDS['exact']}: the largest error is {value:.0%} of what the rule allows "
        f"(twice the error of plain attention in this dtype, three times for gradients): "
        f"{name.rpartition('_')[2]}{alone} of {row.case['backend']} in {row.case['name']}."
    ]


# ---- models ----


def _models(rows: Sequence[Row]) -> list[str]:
    whole = [row for row in suite_rows(rows, "drift-model") if row.case["scope"] == "batch"]
    ran = [row for row in whole if row.status == "ok"]
    ran = [row for row in ran if row.case.get("other") != row.case["backend"]]
    said = []
    for key, own in groups(ran, "model", "dtype", "comparison").items():
        model, dtype, comparison = key
        each = "; ".join(_parting(row) for row in own)
        said.append(f"{model}, {dtype}, {IN_WORDS.get(comparison, comparison)}: {each}.")
    return said


def _parting(row: Row) -> str:
    of, backend = row.measures, row.case["backend"]
    if row.case.get("other"):
        backend = f"{backend} against {row.case['other']}"
    if of["logits_equal"] == 1:
        return f"{backend}: {_exact_where(of)}"
    first = of.get("first_layer")
    where = "in the head" if first is None else f"in block {first}"
    where = "in the embeddings" if first == -1 else where
    return (
        f"{backend}: they part first {where}; logits {of['logits_relative']:.1e} relative, "
        f"mean KL {of['kl_mean']:.1e}, the same likeliest token at {share(of['top1'])}"
    )


def _exact_where(measures: dict[str, Any]) -> str:
    gradient = measures.get("gradient_relative")
    if gradient is None:
        return "the same bits forward (no backward compared)"
    if gradient == 0:
        return "the same bits, forward and backward"
    return f"the same bits forward; gradients {gradient:.1e} relative"


def _shares(rows: Sequence[Row]) -> list[str]:
    ran = [row for row in suite_rows(rows, "drift-attribution") if row.status == "ok"]
    said = []
    for (model, backend, dtype), own in groups(ran, "model", "backend", "dtype").items():
        by = {row.case["what"]: row.measures for row in own}
        parts = [
            f"{what} alone {by[what]['share']:.0%}"
            for what in ("attention", "matmuls", "norms")
            if what in by and by[what].get("share") is not None
        ]
        text = f"{model}, {dtype}, {backend}: of the drift of logits, " + ", ".join(parts)
        if parts:
            said.append(f"{text} (shares need not add up: rounding errors partly cancel).")
        if "invariant" in by:
            said.append(f"{model}, {dtype}, {backend}: {_invariant(by['invariant'], own[0])}")
    return said


def _invariant(measures: dict[str, Any], row: Row) -> str:
    """What batch invariance gave, over how many of the row's documents, and its cost."""
    parts = {"logits": measures.get("equal_logits"), "hidden states": measures.get("equal_hidden")}
    if measures.get("equal_gradients") is not None:
        compared = f"{len(measures['gradient_documents'])} of {row.case['documents']}"
        parts[f"own gradients of {compared} documents"] = measures["equal_gradients"]
    kinds = {
        "have the same bits": [name for name, equal in parts.items() if equal == 1],
        "differ": [name for name, equal in parts.items() if equal is not None and equal != 1],
    }
    found = "; ".join(f"{_listed(names)} {kind}" for kind, names in kinds.items() if names)
    text = f"with everything batch invariant, packed and alone: {found}"
    cost = measures.get("cost")
    return f"{text}." if cost is None else f"{text}; a step takes {cost:.2f} times as long."


def _listed(names: Sequence[str]) -> str:
    """In words.

    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
