"""Tables of the suite `model`, from its rows: a line a variant, a column a context."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flexvarlen.bench.attention.kernels_tables import versions_of
from flexvarlen.bench.mask_build.tables import Notes
from flexvarlen.bench.model.cases import BATCHINGS, SORTED, split_variant
from flexvarlen.bench.model.geometries import GEOMETRY_TITLES
from flexvarlen.bench.series import Measured, measured_runs
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, commits_of

BASELINES = ("padded:transformers:sdpa", "serial:transformers:sdpa")
"""What speeds are told against, in a case: the first of them that was timed."""


def section(rows: Sequence[Row]) -> str:
    """All tables, a group of cases each."""
    return "\n\n".join(
        train_table(group) if group[0].case["task"] == "train" else generate_table(group)
        for group in groups_of(rows)
    )


def groups_of(rows: Sequence[Row]) -> list[list[Measured]]:
    """The cases, grouped: one machine's that differ in tokens alone, fewest tokens first."""
    machines: dict[str, list[Row]] = {}
    for row in rows:
        machine = row.environment.get("gpu") or row.environment.get("cpu")
        machines.setdefault(str(machine), []).append(row)
    groups: dict[str, list[Measured]] = {}
    for machine, own in machines.items():
        for each in measured_runs(own):
            of_size = ("tokens", "checkpointing", "mean_doc", "longest_doc")
            same = {name: value for name, value in each.case.items() if name not in of_size}
            key = json.dumps([machine, same], sort_keys=True)
            groups.setdefault(key, []).append(each)
    return [sorted(group, key=lambda each: each.case["tokens"]) for group in groups.values()]


def title_of(group: Sequence[Measured]) -> str:
    """Model, step, documents and dtype of a group."""
    case = group[0].case
    name = GEOMETRY_TITLES.get(case["geometry"], case["geometry"])
    lengths = {
        "text": f"lengths of texts ({case['source']})",
        "uniform": "documents of equal length",
        "log-normal": "log-normal lengths",
    }
    done = "" if case["task"] == "generate" else f", {case['mode']}"
    return (
        f"{name} geometry, {case['layers']} layers, random weights; {case['step']}{done}; "
        f"{lengths[case['documents']]}; {case['dtype']}"
    )


def where_measured(group: Sequence[Measured]) -> str:
    """Machine, versions and commits of a group's runs."""
    alike: dict[str, list[Row]] = {}
    for row in (row for each in group for row in each.rows.values()):
        where = f"{versions_of(row)}, transformers {row.environment.get('transformers')}"
        alike.setdefault(where, []).append(row)
    return " / ".join(where + commits_of(rows) for where, rows in alike.items())


def variants_of(group: Sequence[Measured]) -> list[str]:
    """Packed, padded, one by one; in each, in the order of the rows."""
    found = dict.fromkeys(name for each in group for name in each.variants())
    return sorted(found, key=lambda name: BATCHINGS.index(split_variant(name)[0]))


# --- training ------------------------------------------------------------------------------------


def train_table(group: Sequence[Measured]) -> str:
    """One group's throughput, over its contexts."""
    notes, known = Notes(), [_facts(each) for each in group]
    compiled = group[0].case["mode"] == "compiled"
    header = ["batch", "attention", *(_size(each, group) for each in group)]
    if compiled:
        header += ["graphs", "graph breaks"]
    lines = []
    for variant in variants_of(group):
        cells = [_train_cell(each, variant, notes) for each in group]
        if compiled:
            cells += [_largest(group, variant, name) for name in ("graphs", "graph_breaks")]
        lines.append([*_name_cells(group, variant), *cells])
    baseline = " or, where that has no time, ".join(_shown(name) for name in BASELINES)
    text = (
        f"{title_of(group)}; {where_measured(group)}. Thousands of the documents' tokens a second "
        f"(median), speed against {baseline}, MFU, peak GiB. Padded: batches of at most as many "
        f"positions as the packed row has, of documents as they come; padded-sorted: the longest "
        f"first, the best that Trainer's group_by_length can do; gradients of all batches are "
        f"summed before the one optimizer step:\n\n{markdown(header, lines)}"
    )
    text += "".join(f"\n\n{fact}" for fact in dict.fromkeys(known) if fact)
    return text + _train_notes(group) + notes.text()


def _size(each: Measured, group: Sequence[Measured]) -> str:
    """A column's size; and its commit, if another run's column of that size stands beside it."""
    size = f"{each.case['tokens']:,} tokens"
    alone = sum(other.case["tokens"] == each.case["tokens"] for other in group) == 1
    return size if alone else size + commits_of(each.rows.values())


def _largest(group: Sequence[Measured], variant: str, name: str) -> str:
    found = [value for each in group if (value := each.value(variant, "", name)) is not None]
    return str(max(found)) if found else ""


def _train_cell(each: Measured, variant: str, notes: Notes) -> str:
    row = each.rows.get((variant, ""))
    if row is None:
        return ""
    if row.status != "ok":
        return notes.status(row)
    m = row.measures
    base = next((ms for name in BASELINES if (ms := each.value(name, "", "ms_p50"))), None)
    parts = [f"{m['tokens_per_s'] / 1e3:,.1f}"]
    parts.append("–" if base is None else f"{base / m['ms_p50']:.2f}×")
    parts.append("–" if m.get("mfu") is None else f"{m['mfu']:.0%}")
    parts.append(_gib(m))
    return " · ".join(parts)


def _facts(each: Measured) -> str:
    """A sentence on a case's documents and pads; "" where nothing ran."""
    ran = [row for row in each.rows.values() if "documents" in row.measures]
    if not ran:
        return ""
    m = ran[0].measures
    pads = ""
    for batching in ("padded", SORTED):
        own = (r.measures for r in ran if split_variant(r.case["variant"])[0] == batching)
        padded = next(own, None)
        if padded is not None:
            share = 1 - each.case["tokens"] / padded["positions"]
            pads += f"; {padded['forwards']} {batching} batches, {share:.0%} of them pads"
    recomputed = "; layers checkpointed" if each.case["checkpointing"] else ""
    return (
        f"{each.case['tokens']:,} tokens: {m['documents']} documents of up to "
        f"{m['longest_document']:,}{pads}{recomputed}."
    )


def _oracle_of(measures: Mapping[str, Any]) -> str:
    """In what precision each document alone was computed; records of before it was fp64 differ."""
    if "oracle_dtype" in measures:
        return f"in {measures['oracle_dtype']}"
    in_tf32 = measures.get("oracle_in_tf32")
    return "in float32 with products in TF32" if in_tf32 else "one precision up"


def _train_notes(group: Sequence[Measured]) -> str:
    done = [r.measures for each in group for r in each.rows.values() if r.status == "ok"]
    if not done:
        return ""
    worst = {
        name: max(m[name] for m in done)
        for name in ("error", "grad_error", "peer_error", "peer_grad_error")
    }
    oracle = " or ".join(sorted({_oracle_of(m) for m in done}))
    text = (
        f"\n\nLargest relative errors against each document alone, {oracle}: outputs "
        f"{worst['error']:.1e}, gradients {worst['grad_error']:.1e}; of each document alone in "
        f"{group[0].case['dtype']}: {worst['peer_error']:.1e}, {worst['peer_grad_error']:.1e}. "
        f"Peak: {done[0]['peak_meaning']}."
    )
    again = max(m["compilations_while_timing_all"] for m in done)
    return text + (f" While a case was timed, {again} graphs were compiled." if again else "")


# --- generation ----------------------------------------------------------------------------------


def generate_table(group: Sequence[Measured]) -> str:
    """One group's prefill and decoding, a line a variant and size."""
    notes, lines = Notes(), []
    header = [
        "prompts' tokens",
        "batch",
        "attention",
        "prefill tokens/s",
        "prefill ms (p20–p80)",
        "prefill MFU",
        "decoded tokens/s",
        "decoding ms (p20–p80)",
        "peak GiB",
        "tokens as unpatched",
        "relative error of logits",
    ]
    for each in group:
        for variant in (name for name in variants_of(group) if name in each.variants()):
            lines.append(
                [
                    f"{each.case['tokens']:,}",
                    *_name_cells([each], variant),
                    *_generate_cells(each, variant, notes),
                ]
            )
    ran = [row.measures for each in group for row in each.rows.values() if row.status == "ok"]
    facts = ""
    if ran:
        facts = (
            f" {ran[0]['prompts']} prompts of up to {ran[0]['longest_prompt']:,} tokens, "
            f"{group[0].case['new_tokens']} tokens generated for each; decoding: the whole less "
            f"the median prefill. Each prompt alone in {group[0].case['dtype']} has a relative "
            f"error of {max(m['peer_error'] for m in ran):.1e}. Peak: {ran[0]['peak_meaning']}."
        )
    where = where_measured(group)
    return f"{title_of(group)}; {where}.{facts}\n\n{markdown(header, lines)}{notes.text()}"


def _generate_cells(each: Measured, variant: str, notes: Notes) -> list[str]:
    prefill, decode = (each.rows.get((variant, pass_)) for pass_ in ("prefill", "decode"))
    if prefill is None or decode is None:  # cut off in the writing
        return ["a row is missing", *[""] * 7]
    if prefill.status != "ok" or decode.status != "ok":
        return [notes.status(prefill if prefill.status != "ok" else decode), *[""] * 7]
    before, after = prefill.measures, decode.measures
    mfu = before.get("mfu")
    return [
        f"{before['tokens_per_s']:,.0f}",
        _spread(before),
        "–" if mfu is None else f"{mfu:.0%}",
        "–" if after["tokens_per_s"] is None else f"{after['tokens_per_s']:,.0f}",
        _spread(after),
        _gib(after),
        f"{after['tokens_equal']:.0%}",
        f"{after['error']:.1e}",
    ]


def _spread(m: Mapping[str, Any]) -> str:
    return f"{m['ms_p50']:.1f} ({m['ms_p20']:.1f}–{m['ms_p80']:.1f})"


# --- words ---------------------------------------------------------------------------------------


def _gib(m: Mapping[str, Any]) -> str:
    return "–" if m.get("peak_mib") is None else f"{m['peak_mib'] / 1024:.1f}"


def _name_cells(group: Sequence[Measured], variant: str) -> list[str]:
    batching, attention = split_variant(variant)
    found = dict.fromkeys(
        kernel
        for each in group
        for (name, _), row in each.rows.items()
        if name == variant
        for kernel in (row.measures.get("attends") or "").split(", ")
    )
    took = ", ".join(filter(None, found)) if attention.startswith("auto") else ""
    return [batching, _attention(attention) + (f" ({took})" if took else "")]


def _shown(variant: str) -> str:
    batching, attention = split_variant(variant)
    return f"{batching} {_attention(attention)}"


def _attention(name: str) -> str:
    kind, _, boundaries = name.partition("@")
    theirs = kind.startswith("transformers:")
    shown = f"transformers `{kind.removeprefix('transformers:')}`" if theirs else f"`{kind}`"
    return shown + (f", boundaries from {boundaries}" if boundaries else "")
