"""Tables of the suite "preference", from records alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from flexvarlen.bench.suites.model import tables
from flexvarlen.report.figure import bars, chart, save, style_of
from flexvarlen.report.records import Record, by_machine, grouped, provenance, records_alike
from flexvarlen.report.table import NOTHING, Column, Notes, Table, shown

PADDED = "padded-fa3"
"""The variant that speeds are compared with, beside `padded-sdpa` where it did not run."""
TITLES = {
    "dpo": "DPOTrainer with its reference model",
    "grpo": "GRPOTrainer's policy update",
    "reward": "RewardTrainer",
    "classification": "Trainer, classification of texts",
    "images": "Trainer, documents with images",
}
EXPLAINED = (
    "Error ÷ allowed: the largest error of the loss and of any parameter's gradient, against the "
    "padded run in fp32, over what the acceptance rule allows beside `padded-sdpa`; at most 1 "
    "passes."
)
SAMPLES = {"dpo": "pairs", "grpo": "completions", "reward": "pairs", "classification": "texts"}
SAMPLES["images"] = "documents"
RATE, TEXT_RATE = "samples_per_s", "text_samples_per_s"
"""Of a step, and of a step less its tower's forward and backward."""


def section(records: Sequence[Record]) -> str:
    """What the error is, and a table of each case."""
    cases = records_alike(records, ("variant",))
    return "\n\n".join([EXPLAINED, *(table(group).markdown() for group in cases)])


# --- the page ------------------------------------------------------------------------------------

PACKED, SHARED, COLLATED, TREE = "auto", "auto+shared", "auto+packed", "auto+tree"
SHORT = {"dpo": "DPO", "grpo": "GRPO"}
Group = dict[str, Record]
"""A case's records, by variant."""


def page_groups(records: Sequence[Record]) -> list[list[Group]]:
    """For each model, the eager cases that show the gain of packing or sharing, on one machine."""
    found: list[list[Group]] = []
    for own in grouped((r for r in records if r.case["mode"] == "eager"), "geometry").values():
        alike = records_alike(by_machine(own)[0], ("variant",))
        groups = [{r.case["variant"]: r for r in group} for group in alike]
        found.append([x for x in groups if _gain(x, PACKED) or _gain(x, SHARED, PACKED)])
    return [groups for groups in found if groups]


def page_tables(records: Sequence[Record]) -> list[Table]:
    return [_page_table(groups) for groups in page_groups(records)]


def figures(records: Sequence[Record], folder: Path) -> list[Path]:
    every = page_groups(records)
    groups = [x for x in max(every, key=len, default=[]) if _gain(x, PACKED) is not None]
    return [_draw(groups, folder)] if groups else []


def _page_table(groups: Sequence[Group]) -> Table:
    """A line for each case: speedups over padding, those possible, and memory."""

    def speedup(variant: str, rate: str = RATE) -> Callable[[Group], str]:
        def cell(group: Group) -> str:
            found = _gain(group, variant, rate=rate)
            possible = f" ({1 / _run_share(group[variant]):.2f}×)" if found is not None else ""
            return _times(found) + possible

        return cell

    def padded(group: Group) -> str:
        return shown(tables.value(group.get(PADDED), RATE), ".2f")

    def each(name: str, form: str, scale: float = 1.0) -> Callable[[Group], str]:
        def cell(group: Group) -> str:
            found = (tables.value(group.get(x), name) for x in (PADDED, PACKED, SHARED))
            return ", ".join(shown(x, form, scale) for x in found)

        return cell

    columns = [
        Column("batch", _batch),
        Column("samples/s, padded", padded),
        Column("packed: speedup (possible)", speedup(PACKED)),
        Column("prompts shared: speedup (possible)", speedup(SHARED)),
        Column("prompts shared ÷ packed", lambda group: _times(_gain(group, SHARED, PACKED))),
        Column("peak GiB: padded, packed, shared", each("peak_mib", ".1f", 1 / 1024)),
        Column("a step as one tree: speedup (possible)", speedup(TREE)),
    ]
    records = [group[PACKED] for group in groups]
    if any(record.case.get("images") for record in records):
        columns += [
            Column("text alone, packed: speedup (possible)", speedup(PACKED, TEXT_RATE)),
            Column("text alone, rows of PackedCollator", speedup(COLLATED, TEXT_RATE)),
            Column("ms of the tower: padded, packed, shared", each("ms_tower", ".0f")),
        ]
    how = "eager, layers checkpointed" if records[0].case.get("checkpointing") else "eager"
    return Table.of(
        groups, columns, f"{tables.model_title(records[0])}, {how}, {tables.where(records)}"
    )


def _draw(groups: Sequence[Group], folder: Path) -> Path:
    """The speedups of all cases, without and with shared prompts, on one scale."""
    drawn = {PACKED: "packed", SHARED: "packed, each prompt once"}
    gains = {name: {_batch(group): _gain(group, name) or 0.0 for group in groups} for name in drawn}
    records = [group[PACKED] for group in groups]
    packed, shared = (sorted(filter(None, found.values())) for found in gains.values())
    # classification runs in transformers' Trainer
    of_trl = [_batch(r) for r in groups if next(iter(r.values())).case["task"] != "classification"]
    trl = sorted(gains[PACKED][batch] for batch in of_trl) or packed
    more = f", sharing prompts {shared[0]:.1f} to {shared[-1]:.1f}" if shared else ""
    figure, panels = chart(
        f"Packed, TRL's trainers are {trl[0]:.1f} to {trl[-1]:.1f} times as fast{more}",
        "Samples per second with auto over those of padded batches with FlashAttention-3; –: no "
        f"shared prompts. {tables.model_title(records[0])}, eager, bf16. {provenance(records)}",
        height_px=360,
        panels=2,
        share_y=True,
    )
    for axes, (name, label) in zip(panels, drawn.items(), strict=True):
        texts = [f"{x:.2f}×" if x else NOTHING for x in gains[name].values()]
        colors = [style_of("auto").color] * len(groups)
        bars(axes, gains[name], label=f"speedup, {label}", colors=colors, texts=texts)
        axes.set_xlim(0, 1.25 * max([*packed, *shared]))
    return save(figure, folder / "preference.png")


def _batch(group: Group) -> str:
    case = next(iter(group.values())).case
    task = case["task"]
    name = f"{SHORT.get(task, task)}, {case['samples']} {SAMPLES[task]}"
    name += f", {case['group']} a prompt" if task == "grpo" else ""
    name += f", images: {case['images']}" if task == "grpo" and case.get("images") else ""
    name += f", {case['micro_batches']} micro-batches" if case.get("micro_batches", 1) > 1 else ""
    return name + (f", prompts of {case['prompt']:,}" if case["prompt"] else "")


def _gain(group: Group, variant: str, base: str = PADDED, rate: str = RATE) -> float | None:
    """Over padded batches, or another variant."""
    own, other = (tables.value(group.get(x), rate) for x in (variant, base))
    return None if own is None or other is None else own / other


def _times(gain: float | None) -> str:
    return NOTHING if gain is None else f"{gain:.2f}×"


def _run_share(record: Record) -> float:
    """Tokens that are run, of the positions of the padded batch."""
    m = record.measures
    run: float = (m.get("tokens_run") or m["tokens_real"]) / m["tokens_padded"]
    return run


# --- all tables ----------------------------------------------------------------------------------


def table(records: Sequence[Record]) -> Table:
    notes = Notes()

    def rate(record: Record) -> str:
        return tables.cell(record, shown(tables.value(record, RATE), ".2f"), notes)

    columns = [
        Column("variant", _shown),
        Column("samples/s", rate),
        Column("ms a step (p20–p80)", lambda r: tables.spread(r) or "–"),
        tables.number("peak GiB", "peak_mib", ".1f", 1 / 1024),
    ]
    if records[0].case["mode"] == "compiled":
        columns += [
            tables.number("graphs", "compilations", ".0f"),
            tables.number("recompilations", "recompilations", ".0f"),
            tables.number("graph breaks", "graph_breaks", ".0f"),
            tables.number("s of compiling", "compile_s", ".0f"),
        ]
    text = bool(records[0].case.get("images"))
    if text:
        columns += [
            tables.number("ms of the tower", "ms_tower", ".0f"),
            tables.number("syncs in layers", "syncs_in_layers", ".0f"),
        ]
    base, name = _base(records)
    if base is not None:

        def gain(record: Record, rate: str = RATE) -> float | None:
            own = tables.value(record, rate)
            return None if own is None else own / (tables.value(base, rate) or own)

        def used(record: Record) -> str:
            found = gain(record, TEXT_RATE if text else RATE)
            if found is None or record.case["variant"].startswith("padded"):
                return "–"
            return f"{found * _run_share(record):.0%}"

        if any(r.case["variant"].endswith("+shared") for r in records):
            columns.append(tables.number("tokens run", "tokens_run", ",.0f"))
        columns += [
            Column(f"speed ÷ `{name}`'s", lambda r: _times(gain(r))),
            Column("share of the possible speedup" + ", text alone" * text, used),
        ]
    columns.append(tables.number("error ÷ allowed", "error_over_allowed", ".2f"))
    return Table.of(records, columns, _title(records), notes=chain(_said(records), notes))


def _shown(record: Record) -> str:
    variant, attends = record.case["variant"], record.measures.get("attends")
    return f"`{variant}`" + (f" ({attends})" if attends else "")


def _base(records: Sequence[Record]) -> tuple[Record | None, str]:
    found = {r.case["variant"]: r for r in records if tables.is_ok(r)}
    name = PADDED if PADDED in found else "padded-sdpa"
    return found.get(name), name


def _said(records: Sequence[Record]) -> list[str]:
    done = next((r.measures for r in records if tables.is_ok(r)), None)
    if done is None:
        return []
    return [
        f"A step is {records[0].case['step']}. A batch holds {done['tokens_padded']:,.0f} "
        f"positions for {done['tokens_real']:,.0f} tokens, "
        f"{done['tokens_padded'] / done['tokens_real']:.2f} times as many. Gradients of "
        f"{done['gradients']} parameters are compared."
    ]


def _title(records: Sequence[Record]) -> str:
    case = records[0].case
    shared = "shared " if any(r.case["variant"].endswith("+shared") for r in records) else ""
    what = f"{shared}prompts of {case['prompt']:,} tokens, answers of {case['shortest']:,} to "
    if case.get("images"):
        what = f"{case['images']} images of {case['smallest_image']:,} to {case['largest_image']:,}"
        what = f"{'up to ' * (case['task'] == 'images')}{what} tokens, texts of up to "
    elif not case["prompt"]:
        what = "Python's help topics cut at "
    how = f"{case['mode']}{', layers checkpointed' if case.get('checkpointing') else ''}"
    groups = f", {case['group']} to a prompt" if "group" in case and case["task"] == "grpo" else ""
    return (
        f"{TITLES[case['task']]}, {case['samples']} {SAMPLES[case['task']]} a batch{groups}, {what}"
        f"{case['longest']:,}; {tables.model_title(records[0])}, {how}, {tables.where(records)}"
    )
