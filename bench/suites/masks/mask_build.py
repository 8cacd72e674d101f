"""Suite "mask-build": building document BlockMasks, ours and create_block_mask's.

Packed rows of log-normal documents, and of trees; boundaries on the device. Each builder's first
mask is compared, block by block, with tables made by plain torch on the CPU; one that differs is
not timed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

import flexvarlen as fv
from flexvarlen.bench.suites.masks.builders import (
    BASELINES,
    BUILDERS,
    COMPARED,
    KINDS,
    TREE_SEGMENTS,
    TREES,
    Build,
    MaskCase,
    difference,
    expected_tables,
    layout_of,
    options_of_kind,
)
from flexvarlen.measure import (
    HostAndDevice,
    peak_memory_mib,
    time_host_and_device,
    time_interleaved,
    watch_compilation,
)
from flexvarlen.report.figure import chart, lines, save
from flexvarlen.report.records import Record, commits_of, in_short, provenance, ran_on
from flexvarlen.report.table import NOTHING, Column, Table, best, three_digits
from flexvarlen.runner.each import measure_each
from flexvarlen.runner.suite import Finding, Findings, Options, Suite, require_known

UNTIMED_BUILDS = 5
HEADLINE_TOKENS = 131_072  # the longest row that people pack today; longer ones flatter us
EAGER_BYTES_A_PAIR = 10
"""create_block_mask evaluates T² pairs: 640 MiB at 8,192 tokens on an H200, torch 2.11."""

PARTS: Mapping[str, Collection[str]] = {"build": BUILDERS, "kinds": KINDS, "trees": TREES}
"""The variants of each part."""

# --- the suite -----------------------------------------------------------------------------------


class MaskBuild(Suite[MaskCase]):
    name: ClassVar[str] = "mask-build"

    def cases(self, options: Options) -> Sequence[MaskCase]:
        sizes = [(8192, 512), (32_768, 2048), (131_072, 4096), (1_048_576, 8192)]
        trees = [(32_768, 512), (1_048_576, 256)]  # 64 and 4,096 segments
        if options.quick:
            sizes, trees = [(1000, 128)], [(1024, 32)]
        documents = [MaskCase(part, *size) for size in sizes for part in ("build", "kinds")]
        return [*documents, *(MaskCase("trees", *size) for size in trees)]

    def variants(self, case: MaskCase, options: Options) -> Sequence[str]:
        return tuple(PARTS[case.part])

    def measure(self, case: MaskCase, variants: Sequence[str], options: Options) -> Findings:
        require_known(variants, self.variants(case, options))
        right: dict[str, Build] = {}

        def check(name: str) -> Finding:
            layout = layout_of(case, name, options.device)
            build, mask_options = builder(case, name, layout)
            measures, wrong = checked(case, build, mask_options, layout)
            if wrong is not None:
                return Finding(name, "wrong", wrong)
            right[name] = build
            return Finding(name, "ok", None, measures)

        findings = measure_each(case.name, variants, check, options.device)
        times = timed(right, options)
        return [
            replace(found, measures={**found.measures, **times.get(found.variant, {})})
            for found in findings
        ]

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        parts = {part: _of(records, part) for part in PARTS}
        return (_table(part, own) for part, own in parts.items() if own)

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        own = _of(records, "build")
        return [_page_table(own)] if own else []

    def figures(self, records: Sequence[Record], folder: Path) -> Sequence[Path]:
        own = [r for r in _of(records, "build") if r.status == "ok"]
        return [draw(own, folder)] if own else []


def builder(case: MaskCase, name: str, layout: fv.PackedLayout) -> tuple[Build, dict[str, Any]]:
    device = layout.device
    if case.part == "build":
        if name.startswith("create") and "compiled" not in name:
            require_memory(case, device)
        return BUILDERS[name](case, device), {}
    options = TREES[name] if case.part == "trees" else options_of_kind(name, case, layout)
    return lambda: fv.document_block_mask(layout, **options), options


def require_memory(case: MaskCase, device: torch.device) -> None:
    """Raise where evaluating T² pairs cannot fit, before it is tried."""
    needed = case.tokens**2 * EAGER_BYTES_A_PAIR
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise torch.OutOfMemoryError(
            f"evaluating T² pairs would take about {needed / 2**30:,.0f} GiB of the device's "
            f"{there / 2**30:,.0f} GiB; not tried"
        )


def checked(
    case: MaskCase, build: Build, mask_options: Mapping[str, Any], layout: fv.PackedLayout
) -> tuple[dict[str, Any], str | None]:
    """What is known of the documents and of a builder's first mask, and what is wrong with it."""
    with watch_compilation() as stats:
        mask = build()
    assert mask.full_kv_num_blocks is not None
    measures = {
        "num_docs": len(case.lengths()),
        "longest": max(case.lengths()),
        "blocks": int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()),
        "compile_s": stats.compile_s,
    }
    return measures, difference(mask, expected_tables(layout, **mask_options))


def timed(builds: Mapping[str, Build], options: Options) -> dict[str, dict[str, Any]]:
    """For each builder: `wall_us_*` on an idle device, `gpu_us` of its device work, and memory."""
    if not builds:
        return {}
    device = options.device
    once = time_interleaved(builds, device=device, warmup=1, repeats=1, flush_l2=False)
    share_ms = 1e3 * options.seconds / len(builds)
    repeats = {
        name: max(3, min(200, int(share_ms / ((UNTIMED_BUILDS + 1) * max(t.ms_p50, 1e-3)))))
        for name, t in once.items()
    }
    wall = time_interleaved(
        builds,
        device=device,
        warmup=0,
        repeats=repeats,
        flush_l2=False,
        lead_in=UNTIMED_BUILDS if max(t.ms_p50 for t in once.values()) < 200 else 0,
    )
    apart: Mapping[str, HostAndDevice] = (
        time_host_and_device(builds, device=device, warmup=0, repeats=min(20, *repeats.values()))
        if options.on_gpu
        else {}
    )
    return {
        name: {
            **{f"wall_us_p{p}": 1e3 * getattr(t, f"ms_p{p}") for p in (20, 50, 80)},
            "repeats": t.repeats,
            "gpu_us": apart[name].device.ms_p50 * 1e3 if name in apart else None,
        }
        | ({"peak_mib": peak_memory_mib(builds[name], device)} if options.on_gpu else {})
        for name, t in wall.items()
    }


# --- tables and the chart, from records ----------------------------------------------------------


def _of(records: Sequence[Record], part: str) -> list[Record]:
    """A part's records, in the order of its variants."""
    order = list(PARTS[part])
    found = [r for r in records if r.case["part"] == part]
    return sorted(found, key=lambda r: (r.case["tokens"], order.index(r.case["variant"])))


def _walls(records: Sequence[Record]) -> dict[int, dict[str, float]]:
    """Median µs of a build of causal documents, by tokens and builder."""
    found: dict[int, dict[str, float]] = {}
    for r in records:
        if r.case["part"] == "build" and r.status == "ok":
            found.setdefault(r.case["tokens"], {})[r.case["variant"]] = r.measures["wall_us_p50"]
    return found


def _wall(record: Record) -> str:
    if record.status != "ok":
        return f"{record.status}: {in_short(record.reason or '')}"
    p20, p50, p80 = (record.measures[f"wall_us_p{p}"] for p in (20, 50, 80))
    return f"{three_digits(p50)} ({three_digits(p20)}–{three_digits(p80)})"


_COLUMNS = (
    Column("tokens", lambda r: f"{r.case['tokens']:,}"),
    Column("mean document", lambda r: f"{r.case['mean_doc']:,}"),
    Column("builder", lambda r: r.case["variant"]),
    Column("wall µs, p50 (p20–p80)", _wall),
    Column("GPU µs", lambda r: three_digits(r.measures.get("gpu_us"))),
    Column("peak MiB", lambda r: three_digits(r.measures.get("peak_mib"))),
)


_WHAT = {
    "build": "Causal documents",
    "kinds": "Other kinds of mask, by flexvarlen",
    "trees": f"Trees of {TREE_SEGMENTS} segments, a prompt and its answers, by flexvarlen",
}


def _table(part: str, records: Sequence[Record]) -> Table:
    """A part's table; of causal documents with how many times as fast ours is."""
    tokens, mean, builder, *times = _COLUMNS
    columns = [tokens, mean, builder, *times]
    if part == "build":
        columns += [_faster(title, name, _walls(records)) for name, title in BASELINES.items()]
    elif part == "kinds":
        columns.append(Column("blocks kept", lambda r: f"{r.measures['blocks']:,}"))
    else:
        segments = Column("segments", lambda r: f"{r.case['tokens'] // r.case['mean_doc']:,}")
        columns = [tokens, segments, replace(builder, title="laid out as"), *times]
    title = f"{_WHAT[part]}; {ran_on(records[0].environment)}{commits_of(records)}"
    return Table.of(records, columns, title=title)


def _page_table(records: Sequence[Record]) -> Table:
    """A line for each length of a row: µs of a build, ours beside create_block_mask's."""
    walls, (theirs, *_) = _walls(records), BASELINES

    def wall_of(builder: str) -> Column:
        return Column(builder, lambda r: three_digits(walls[r.case["tokens"]].get(builder)))

    tokens, mean, *_, peak = _COLUMNS
    columns = [tokens, mean, *map(wall_of, ("create_block_mask eager", theirs, COMPARED))]
    columns += [
        _faster("compiled ÷ flexvarlen", theirs, walls),
        replace(peak, title="flexvarlen, peak MiB"),
    ]
    title = f"{_WHAT['build']}, µs of a build, median; {ran_on(records[0].environment)}"
    return Table.of([r for r in records if r.case["variant"] == COMPARED], columns, title)


def _faster(title: str, baseline: str, walls: Mapping[int, Mapping[str, float]]) -> Column:
    def cell(record: Record) -> str:
        us = walls.get(record.case["tokens"], {})
        if record.case["variant"] != COMPARED or not {COMPARED, baseline} <= set(us):
            return NOTHING
        return three_digits(us[baseline] / us[COMPARED])

    return Column(title, cell)


def speed_up(records: Sequence[Record]) -> tuple[int, float] | None:
    """The longest row of at most `HEADLINE_TOKENS`, and how many times as fast ours is."""
    wall = _walls(records)
    for tokens in sorted((x for x in wall if x <= HEADLINE_TOKENS), reverse=True):
        theirs = best([wall[tokens].get(name) for name in BASELINES], min)
        if theirs is not None and COMPARED in wall[tokens]:
            return tokens, theirs / wall[tokens][COMPARED]
    return None


def draw(records: Sequence[Record], folder: Path) -> Path:
    """Wall time of a build by the length of the row."""
    series: dict[str, dict[float, float]] = {}
    for record in records:
        points = series.setdefault(STYLE_OF[record.case["variant"]], {})
        points[record.case["tokens"]] = record.measures["wall_us_p50"]
    found = speed_up(records)
    title = (
        "Time to build a document BlockMask"
        if found is None
        else f"Building the mask of {found[0]:,} tokens is {found[1]:,.0f} times as fast as with "
        "create_block_mask"
    )
    figure, (axes,) = chart(
        title,
        f"Causal log-normal documents, boundaries on the device. {provenance(records)}",
    )
    lines(
        axes,
        series,
        x_label="tokens of the row",
        y_label="µs per build",
        log_y=True,
        labels={style: name for name, style in STYLE_OF.items()},
    )
    return save(figure, folder / "mask-build.png")


STYLE_OF = {
    "flexvarlen": "flex",
    COMPARED: "flex_fa4",
    "create_block_mask eager": "transformers:eager",
    "create_block_mask compiled": "fa2",
    "create_block_mask(_compile=True)": "transformers:flash_attention_2",
}
"""The backend whose colour each builder has."""

SUITE = MaskBuild()
