"""Suite "trees": samples that share their prompts as trees, beside the same samples repeated.

"attention" is that of one layer, forward and backward. "eager", "compiled" and "memory" are steps
of a model, the last on one group in one row; "parts" are steps on trees of any size, which run in
parts of a bounded number of tokens. Agents, and paths of four levels, are also timed
beside transformers' own FlashAttention-3 on the same samples repeated. A model with recurrent
layers takes the first two shapes, the same ragged, and a chain of 12 segments, each of which an
answer continues too. Every variant is compared with samples alone in fp64, those of "parts" with
the first of them, and what is wrong is not timed. The suite "mask-build" times the masks of trees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from flexvarlen.bench.suites.attention.tables import PACKAGES
from flexvarlen.bench.suites.model import tables
from flexvarlen.bench.suites.model.geometries import is_hybrid
from flexvarlen.bench.suites.model.tree_cases import (
    REPEATED,
    SEGMENTS,
    STEPS,
    Form,
    Kind,
    Shape,
    Tree,
    TreeCase,
)
from flexvarlen.bench.suites.model.tree_parts import (
    CHECKPOINTED,
    PARTS,
    measure_parts,
    memory_figure,
)
from flexvarlen.bench.suites.model.tree_runs import TreeSteps, measure_trees, split_variant
from flexvarlen.report.records import Record, by_machine, commits_of, grouped, ran_on, records_alike
from flexvarlen.report.table import NOTHING, Column, Notes, Table, shown
from flexvarlen.runner.suite import Findings, Options, Suite
from flexvarlen.verify.experiment.inputs import THEIRS
from flexvarlen.verify.experiment.measure import CheckedVariant, measure_variants

ROW_TOKENS, QUICK_TOKENS = 32_768, 128
SHAPES: tuple[Shape, ...] = (
    ((1, 4096), (8, 512)),
    ((1, 1024), (8, 384)),
    ((1, 4096), (16, 768)),
    ((1, 2048), (4, 512), (4, 256)),
)
QUICK_SHAPES: tuple[Shape, ...] = (((1, 24), (4, 8)), ((1, 16), (2, 8), (2, 8)))
AGENTS: tuple[Shape, Shape] = ((1, 3000), (12, 375)), ((1, 24), (4, 15))
PATHS: tuple[Shape, Shape] = (
    ((1, 1500), (2, 500), (2, 500), (4, 500)),
    ((1, 16), (2, 8), (2, 8), (2, 8)),
)
CHAIN: tuple[Shape, Shape] = ((1, 800), (1, 600)), ((1, 8), (1, 6))
"""Shapes of the other forms, and quick ones."""
GROUPS: dict[Form, int] = {"agents": 8, "chain": 12}
QUICK_GROUPS: dict[Form, int] = {"agents": 2, "chain": 4}
TASK: tuple[Shape, Shape] = (
    ((1, 6000), (6, 2000), (4, 1000), (4, 750)),
    ((1, 40), (3, 10), (2, 8), (2, 6)),
)
"""An agent's task: 96 samples of about 9,700 tokens, in a tree of about 114,000."""
HALF: tuple[Shape] = (((1, 6000), (3, 2000), *TASK[0][2:]),)
"""Half of it, which a model with recurrent layers runs in one forward."""
TASKS: tuple[Shape, ...] = (
    *(((1, 1000), (tasks, 5000), *TASK[0][1:]) for tasks in (1, 2, 4, 9)),
    ((1, 1000), (9, 5000), *TASK[0][1:3], (8, 750)),
)
"""Trees of several tasks under one prompt, of up to a million tokens; and twice the answers."""
DENSE, HYBRID, SMALL = "qwen3-1.7b", "qwen3.5-2b", "qwen3-0.6b"
LAYERS = {DENSE: 14, HYBRID: 12, SMALL: 28}
PART_LAYERS = LAYERS | {HYBRID: 8}
OTHER_TREES = {DENSE: 5, HYBRID: 20}
MINUTE_TOKENS = 500_000
"""A larger tree takes a minute for a step."""
SLOW_S = 6.0
"""A step that takes longer is timed once; of repeated samples one takes about two seconds."""


class Trees(Suite[TreeCase]):
    name: ClassVar[str] = "trees"

    def cases(self, options: Options) -> Sequence[TreeCase]:
        small = options.is_small
        shapes, few = (QUICK_SHAPES, QUICK_SHAPES[:1]) if small else (SHAPES, SHAPES[:2])
        dense, hybrid = (partial(_case, options=options, geometry=x) for x in (DENSE, HYBRID))
        return [
            *(dense("attention", levels) for levels in shapes),
            *(dense(kind, levels) for kind in STEPS for levels in shapes),
            dense("eager", AGENTS[small], form="agents"),
            dense("eager", PATHS[small], form="paths"),
            *(hybrid("eager", levels) for levels in few),
            *(hybrid("compiled", levels) for levels in few),
            *(hybrid("eager", levels, form="ragged") for levels in few),
            hybrid("eager", CHAIN[small], form="chain"),
            dense("attention", TASK[small], form="paths"),
            dense("parts", TASK[small], form="paths"),
            hybrid("parts", (TASK if small else HALF)[small], form="paths"),
            *(
                _case("parts", x, options, geometry=SMALL, form="paths")
                for x in (() if small else TASKS)
            ),
        ]

    def variants(self, case: TreeCase, options: Options) -> Sequence[str]:
        if case.kind == "parts":
            if case.geometry == SMALL:
                in_parts = [f"{PARTS}16384", f"{CHECKPOINTED}{PARTS}16384"]
                return in_parts[:1] if case.tokens > MINUTE_TOKENS else ["checkpointed", *in_parts]
            budgets = (100, 40) if options.is_small else (49_152, 32_768, 16_384, 8192)
            first = ["whole"] if is_hybrid(case.geometry) else [f"{REPEATED}auto", "checkpointed"]
            return [*first, *(f"{PARTS}{tokens}" for tokens in budgets)]
        if case.kind in STEPS:
            names = ["auto", f"{SEGMENTS if case.form == 'chain' else REPEATED}auto"]
            if case.form in ("agents", "paths"):
                fast = "flash_attention_3@cu_seq_lens" if options.on_gpu else "sdpa"
                names.append(REPEATED + THEIRS + fast)
            return names
        kernel = _kernel(options)
        others = ("fa2", "varlen", "fa4", "flex", "flex_fa4") if options.on_gpu else ("reference",)
        return (f"{REPEATED}{kernel}", kernel, *others, "auto")

    def measure(self, case: TreeCase, variants: Sequence[str], options: Options) -> Findings:
        if case.kind == "parts":
            return measure_parts(case, variants, options)
        if case.kind == "attention":
            return measure_trees(case, variants, REPEATED + _kernel(options), options)
        for variant in variants:
            split_variant(variant)
        trees = TreeSteps(case, options)
        if not any(x.startswith(SEGMENTS) for x in variants):
            return measure_variants(variants, trees.check, options, slow_s=SLOW_S)
        segments = TreeSteps(case, options, of_segments=True)

        def check(name: str) -> CheckedVariant:
            return (segments if name.startswith(SEGMENTS) else trees).check(name)

        return measure_variants(variants, check, options, slow_s=SLOW_S)

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        shapes = ("variant", "levels", "groups", "max_row_tokens", "samples", "tokens", "form")
        return map(_table, records_alike(records, shapes, of_one_run=True))

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        """A table for each machine and model, and one of its steps in parts."""
        parts = [r for r in records if r.case["kind"] == "parts"]
        steps = [r for r in records if r.case["kind"] != "parts"]
        found = [
            make(own)
            for make, of_kind in ((_page_table, steps), (_parts_page_table, parts))
            for machine in by_machine(of_kind)
            for own in grouped(machine, "geometry").values()
        ]
        return [table for table in found if table.lines]

    def figures(self, records: Sequence[Record], folder: Path) -> Sequence[Path]:
        """The memory of the model whose trees are of the most sizes."""
        found = grouped([r for r in records if r.case["kind"] == "parts"], "geometry").values()
        return memory_figure(max(found, key=len, default=[]), folder)


def _kernel(options: Options) -> str:
    """The backend whose rate on the repeated samples is the ideal."""
    return "fa3" if options.on_gpu else "sdpa"


def _case(
    kind: Kind, levels: Shape, options: Options, *, geometry: str, form: Form = "equal"
) -> TreeCase:
    small, compiled = options.is_small, kind == "compiled"
    tokens = QUICK_TOKENS if small else ROW_TOKENS
    groups = max(1, tokens // sum(Tree.of(levels, 1).lengths))
    groups = (QUICK_GROUPS if small else GROUPS).get(form, groups)
    if levels in (*TASK, *HALF, *TASKS):
        groups = 1
    if kind == "memory":
        groups, tokens = 1, sum(map(len, Tree.of(levels, 1).paths()))
    return TreeCase(
        geometry=f"{geometry.rpartition('-')[0]}-tiny" if small else geometry,
        layers=2 if small else (PART_LAYERS if kind == "parts" else LAYERS)[geometry],
        kind=kind,
        levels=levels,
        groups=groups,
        max_row_tokens=tokens,
        dtype=options.dtype,
        compiler="" if not compiled else options.compiler,
        other_trees=0 if not compiled else 2 if small else OTHER_TREES[geometry],
        form=form,
    )


# --- tables --------------------------------------------------------------------------------------


def _parts_table(records: Sequence[Record]) -> Table:
    def tokens(record: Record) -> str:
        found = record.measures.get("tokens_of_forwards", [])
        sizes = " to ".join(f"{x:,}" for x in sorted({min(found), max(found)})) if found else ""
        return f"{len(found)} of {sizes}" if found else NOTHING

    columns = [
        tables.number("tokens of the samples", "sample_tokens", ",.0f"),
        tables.number("of the tree", "tree_tokens", ",.0f"),
        Column("variant", lambda r: f"`{r.case['variant']}`"),
        Column("forwards with gradients, tokens", tokens),
        tables.number("ms", "ms_p50", ",.0f"),
        tables.number("peak GiB", "peak_mib", ".1f", 1 / 1024),
        tables.number("difference of gradients", "gradient_difference", ".3f"),
    ]
    return Table.of(records, columns, _title(records))


def _parts_page_table(records: Sequence[Record]) -> Table:
    """A line for each tree: milliseconds and peak memory of each variant."""

    def of_variant(variant: str, tree: Mapping[str, Record]) -> str:
        ms, mib = (tables.value(tree.get(variant), name) for name in ("ms_p50", "peak_mib"))
        return NOTHING if ms is None or mib is None else f"{ms:,.0f} ms, {mib / 1024:.1f} GiB"

    def tokens(name: str, tree: Mapping[str, Record]) -> str:
        found = (r.measures[name] for r in tree.values() if name in r.measures)
        return shown(next(found, None), ",.0f")

    trees = [{r.case["variant"]: r for r in own} for own in grouped(records, "levels").values()]
    columns = [
        Column("tokens of the samples", partial(tokens, "sample_tokens")),
        Column("of the tree", partial(tokens, "tree_tokens")),
    ]
    for variant in dict.fromkeys(variant for tree in trees for variant in tree):
        columns.append(Column(f"`{variant}`", partial(of_variant, variant)))
    model = tables.model_title(records[0])
    return Table.of(trees, columns, f"{model}, {_WHAT['parts']}, {tables.where(records)}")


def _table(records: Sequence[Record]) -> Table:
    """A table of one kind: shapes and variants down, without columns that were not measured."""
    if records[0].case["kind"] == "parts":
        return _parts_table(records)
    notes = Notes()

    def ms(title: str, name: str, digits: int) -> Column:
        return Column(title, lambda r: tables.cell(r, tables.spread(r, digits, name), notes))

    times = [ms("ms (p20–p80)", "ms", 0)]
    if records[0].case["kind"] == "attention":
        passes = ("forward", "backward")
        times = [ms(f"{x} ms (p20–p80)", f"{x}_device_ms", 2) for x in passes]
    has_equal_rows = records[0].case["kind"] == "memory"  # else their memory does not compare
    columns = [
        Column("trees", _shape),
        Column("variant", _variant),
        *times,
        tables.number("TFLOP", "tflop", ".2f"),
        tables.number("TFLOP/s", "tflops", ".0f"),
        tables.number("× ideal", "times_ideal", ".2f"),
        tables.number("samples per second", "samples_per_s", ",.1f"),
        Column("speedup", lambda r: _ratio(_rate(r), _rate(_repeated(r, records)))),
        _over_transformers(records),
        *_without_head(records),
        tables.number("repeated tokens ÷ tokens", "token_ratio", ".2f"),
        tables.number("tokens of a row", "row_tokens", ",.0f"),
        tables.number("ms to find the trees", "prefixes_ms", ".0f"),
        *([tables.number("peak GiB", "peak_mib", ".1f", 1 / 1024)] if has_equal_rows else []),
        tables.number("error ÷ allowed", "error_over_allowed", ".2f"),
        tables.number("graph breaks", "graph_breaks", ".0f"),
        tables.number("recompilations", "recompilations", ".0f"),
    ]
    return Table.of(records, columns, _title(records), notes=notes)


def _page_table(records: Sequence[Record]) -> Table:
    """A line for each shape: what sharing gains in each kind of step, with `auto`."""
    found = {(r.case["kind"], _levels(r), r.case["variant"]): r for r in records}

    def of(record: Record, kind: Kind, variant: str, name: str) -> float | None:
        return tables.value(found.get((kind, _levels(record), variant)), name)

    def gain(kind: Kind) -> Column:
        def cell(record: Record) -> str:
            rates = (of(record, kind, x, "samples_per_s") for x in ("auto", f"{REPEATED}auto"))
            return _ratio(*rates)

        return Column(f"{kind} speedup", cell)

    def to_segments(record: Record) -> str:
        times = (of(record, "eager", x, "ms_p50") for x in ("auto", f"{SEGMENTS}auto"))
        return _ratio(*times)

    def peak(record: Record) -> str:
        found = (of(record, "memory", x, "peak_mib") for x in (f"{REPEATED}auto", "auto"))
        gib = [shown(x, ".1f", 1 / 1024) for x in found]
        return NOTHING if set(gib) == {NOTHING} else " → ".join(gib)

    eager = [r for r in records if r.case["kind"] == "eager"]
    columns = [
        Column("trees", _shape),
        tables.number("repeated tokens ÷ tokens", "token_ratio", ".2f"),
        gain("eager"),
        _over_transformers(eager),
        tables.number("ms to find the trees", "prefixes_ms", ".0f"),
        *_without_head(eager),
        gain("compiled"),
        Column("peak GiB of one tree in a row, repeated → shared", peak),
        Column("time ÷ its segments as documents", to_segments),
    ]
    shared = [found[key] for key in found if key[0] == "eager" and key[2] == "auto"]
    title = (
        f"{tables.model_title(records[0])}, forward and backward, `auto`; {tables.where(records)}"
    )
    return Table.of(shared, columns, title)


def _levels(record: Record) -> str:
    """What trees in rows of any length have in common."""
    return f"{record.case.get('form', 'equal')} {record.case['levels']}"


def _shape(record: Record) -> str:
    """How often a prompt and what continues it, as in "4 × (4,096 + 8 × 512)"; and its form."""
    (_, root), *others = record.case["levels"]
    groups, form, text = record.case["groups"], record.case.get("form", "equal"), ""
    if form == "agents":
        return f"{root:,} + {groups} rollouts of {others[0][0]} turns"
    for count, tokens in reversed([(groups, root), *others]):
        text = f"{count} × ({tokens:,} + {text})" if text else f"{count} × {tokens:,}"
    words = {"chain": "a chain of ", "ragged": "ragged ", "paths": "paths, "}
    return words.get(form, "") + text


def _variant(record: Record) -> str:
    taken = ", ".join(tables.took([record])) or record.measures.get("forward_resolved", "")
    return f"`{record.case['variant']}`" + (f" ({taken})" if taken else "")


def _rate(record: Record | None) -> float | None:
    return tables.value(record, "samples_per_s")


def _repeated(record: Record, records: Sequence[Record]) -> Record | None:
    wanted = (REPEATED + record.case["variant"], _shape(record))
    return next((r for r in records if (r.case["variant"], _shape(r)) == wanted), None)


def _over_transformers(records: Sequence[Record]) -> Column:
    """The speedup over transformers' own attention on the same samples repeated."""
    rates = {
        _shape(r): _rate(r) for r in records if r.case["variant"].startswith(REPEATED + THEIRS)
    }

    def speedup(record: Record) -> str:
        theirs = rates.get(_shape(record)) if record.case["variant"] == "auto" else None
        return _ratio(_rate(record), theirs)

    return Column("speedup over transformers", speedup)


def _without_head(records: Sequence[Record]) -> list[Column]:
    """The speedup of steps without their losses."""

    def base_ms(record: Record | None) -> float | None:
        step, head = tables.value(record, "ms_p50"), tables.value(record, "head_ms")
        return None if step is None or head is None else step - head

    def speedup(record: Record) -> str:
        return _ratio(base_ms(_repeated(record, records)), base_ms(record))

    return [tables.number("loss ms", "head_ms", ".0f"), Column("speedup without loss", speedup)]


def _ratio(shared: float | None, repeated: float | None) -> str:
    return NOTHING if shared is None or repeated is None else f"{shared / repeated:.2f}"


_WHAT = {
    "attention": "attention over trees",
    "eager": "eager step",
    "compiled": "compiled step",
    "memory": "eager step on one group in one row",
    "parts": "eager step in parts",
}


def _title(records: Sequence[Record]) -> str:
    case = records[0].case
    heads, kv_heads, head_dim = case["heads"]
    of = tables.model_title(records[0])
    if case["kind"] == "attention":
        of = f"{heads} query and {kv_heads} KV heads of {head_dim}"
    ran = f"{ran_on(records[0].environment, ('transformers', *PACKAGES))}{commits_of(records)}"
    return f"{of}, {_WHAT[case['kind']]}, forward and backward; {case['dtype']}; {ran}"


SUITE = Trees()
