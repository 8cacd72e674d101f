"""Tables and the chart of the suite "scaling-ranks", from records alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from flexvarlen.bench.suites.model.geometries import is_hybrid
from flexvarlen.bench.suites.model.tables import made, model_title, number
from flexvarlen.report.figure import bars, chart, save
from flexvarlen.report.records import Record, commits_of, ran_on, records_alike
from flexvarlen.report.table import Column, Table, shown

NAMES = {"ddp": "DDP", "fsdp2": "FSDP2"}
TRAINERS = {"trainer": "Trainer", "sft": "SFTTrainer"}
COLORS = {"shuffled": "#56B4E9", "balanced": "#0072B2"}


def groups_of(records: Sequence[Record], *variants: str) -> list[list[Record]]:
    """Records of these variants on one model, which differ in rows, ranks and order."""
    own = [r for r in records if r.case["variant"] in variants]
    return records_alike(own, ("variant", "order", "ranks", "row"))


def tables(records: Sequence[Record]) -> list[Table]:
    return [*map(training_table, groups_of(records, *NAMES)), *page_tables(records)]


def page_tables(records: Sequence[Record]) -> list[Table]:
    """Models and trainers on rows over all ranks; a chart shows those with rows of their own."""
    rows, trainers = groups_of(records, "sequence"), groups_of(records, *TRAINERS)
    return [*map(row_table, rows), *map(trainer_table, trainers)]


def efficiency_of(record: Record, records: Sequence[Record]) -> float | None:
    """Tokens a second and GPU over those of one GPU by the same variant, or else by another."""
    one = [r for r in records if r.case["ranks"] == 1 and r.status == "ok"]
    own = [r for r in one if r.case["variant"] == record.case["variant"]] or one
    if not own or record.status != "ok":
        return None
    alone: float = own[-1].measures["tokens_per_s_rank"]
    return float(record.measures["tokens_per_s_rank"]) / alone


GPUS = Column("GPUs", lambda r: str(r.case["ranks"]))
TOKENS = number("tokens/s", "tokens_per_s", ",.0f", outcome=True)
PEAK = number("peak GiB", "peak_mib", ".1f", 1 / 1024)


def training_table(records: Sequence[Record]) -> Table:
    ordered = sorted(records, key=lambda r: (r.case["variant"], r.case["ranks"], r.case["order"]))
    columns = [
        Column("parallel", lambda r: NAMES[r.case["variant"]]),
        GPUS,
        Column("rows", lambda r: r.case["order"]),
        number("tokens/s per GPU", "tokens_per_s_rank", ",.0f", outcome=True),
        made("scaling efficiency", lambda r: shown(efficiency_of(r, records), ".1%")),
        made("attention imbalance", lambda r: f"{r.measures['imbalance'] - 1:.1%}"),
        PEAK,
    ]
    case = records[0].case
    note = (
        f"The same {case['timed_rows']} rows of Python's help topics, whatever the GPUs. Attention "
        "imbalance: how much more attention work the slowest rank has than the mean."
    )
    row = f"a packed row of {case['tokens']:,} tokens per GPU and step, "
    return Table.of(ordered, columns, _title(records, row), notes=[note])


def _row(record: Record) -> str:
    count, longest = record.measures["documents"], record.measures["longest_document"]
    return f"{record.case['document']:,} in {count} documents, longest {longest:,}"


ROW = made("tokens of the row", _row, outcome=True)


def row_table(records: Sequence[Record]) -> Table:
    def method(record: Record) -> str:
        return "the row's order" if is_hybrid(record.case["geometry"]) else "documents"

    def both(record: Record, names: Sequence[str], form: str, scale: float = 1.0) -> str | None:
        found = [record.measures[name] for name in names]
        return None if None in found else " → ".join(f"{x * scale:{form}}" for x in found)

    peaks = ("single_peak_mib", "peak_mib")
    columns = [
        ROW,
        GPUS,
        Column("split by", method),
        made("documents split", lambda r: str(r.measures["cut_documents"])),
        made("ms, one GPU → all", partial(both, names=("single_ms", "ms_p50"), form=",.0f")),
        made("efficiency", lambda r: f"{r.measures['efficiency']:.1%}"),
        made("peak GiB", partial(both, names=peaks, form=".1f", scale=1 / 1024)),
    ]
    note = (
        "Forward, backward and the sum of the gradients. One GPU: the slowest of them, on the "
        "whole row, in the same run."
    )
    ordered = sorted(records, key=lambda r: (r.case["row"], r.case["ranks"], r.case["variant"]))
    return Table.of(ordered, columns, _title(records, "one row over all GPUs, "), notes=[note])


def trainer_table(records: Sequence[Record]) -> Table:
    columns = [
        Column("trainer", lambda r: TRAINERS[r.case["variant"]]),
        GPUS,
        TOKENS,
        number("ms per step", "ms_step", ",.0f"),
        PEAK,
    ]
    row = f"FSDP2, a row of {records[0].case['tokens']:,} tokens over all GPUs, "
    note = "All but Trainer on four GPUs compute the loss without the logits of the whole row."
    ordered = sorted(records, key=lambda r: (r.case["variant"], r.case["ranks"]))
    return Table.of(ordered, columns, _title(records, row), notes=[note])


def _title(records: Sequence[Record], row: str = "") -> str:
    case = records[0].case
    checkpointed = ", layers checkpointed" if case["checkpointing"] else ""
    return (
        f"{model_title(records[0], ' geometry')}, {row}`{case['backend']}`, {case['dtype']}"
        f"{checkpointed}; {ran_on(records[0].environment)}{commits_of(records)}"
    )


# --- the chart -----------------------------------------------------------------------------------


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Share of one GPU's speed that each GPU keeps; none unless one GPU and more were measured."""
    group = max(groups_of(records, *NAMES), key=len, default=[])
    ordered = sorted(group, key=lambda r: (r.case["variant"], r.case["ranks"], r.case["order"]))
    shares = {
        (r.case["variant"], r.case["ranks"], r.case["order"]): share
        for r in ordered
        if (share := efficiency_of(r, group)) is not None and r.case["ranks"] > 1
    }
    if not shares:
        return []
    most = max(ranks for _, ranks, _ in shares)
    best = max(share for (_, ranks, _), share in shares.items() if ranks == most)
    figure, (axes,) = chart(
        f"On {most} GPUs each GPU keeps {best:.0%} of its speed if BalancedSampler deals the rows",
        f"{_title(group, 'one packed row a GPU and step, ').replace('`', '')}; flexvarlen bench "
        "scaling-ranks.",
        height_px=380,
    )
    bars(
        axes,
        {f"{NAMES[name]}, {n} GPUs, {order}": 100 * x for (name, n, order), x in shares.items()},
        label="% of one GPU's tokens a second, by each GPU",
        colors=[COLORS[order] for _, _, order in shares],
        texts=[f"{share:.1%}" for share in shares.values()],
    )
    return [save(figure, folder / "scaling-ranks.png")]
