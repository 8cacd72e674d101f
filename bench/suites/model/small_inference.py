"""Suite "small-inference": the latency of a forward on four short documents.

Where the host, not the GPU, sets the time: each attention eagerly, compiled, and compiled with CUDA
graphs (`mode="reduce-overhead"`), under `no_grad`. Each is checked on one packing and then on
another of equal sizes: a graph that kept the first is wrong, and not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from flexvarlen.bench.suites.model import tables
from flexvarlen.bench.suites.model.attends import attends
from flexvarlen.bench.suites.model.geometries import GeometryCase
from flexvarlen.measure import watch_compilation
from flexvarlen.report.records import Record, grouped, records_alike
from flexvarlen.report.table import NOTHING, Column, Notes, Table, best
from flexvarlen.runner.failures import Unsupported
from flexvarlen.runner.suite import Findings, Options, Suite
from flexvarlen.verify.experiment.alone import Alone
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.measure import CheckedVariant, Measures, measure_variants
from flexvarlen.verify.experiment.variant import Sizes, make_variant, require_known

CUDA_GRAPHS = "cuda graphs"
MODES = ("eager", CUDA_GRAPHS, "compiled")
DOCUMENTS = (128, 64, 40, 24)
REPEATS = 60
THEIR_FLASH = ("flash_attention_2", "flash_attention_3")
VARIANTS = (
    "auto",
    "auto@position_ids",
    "fa3",
    "fa4",
    "fa2",
    "varlen",
    "flex",
    "transformers:sdpa",
    "transformers:flex_attention",
    *(f"transformers:{name}{form}" for form in ("", "@cu_seq_lens") for name in THEIR_FLASH),
)
ON_PAGE = [name for name in VARIANTS if name.startswith(("auto", "transformers"))]


@dataclass(frozen=True)
class SmallCase(GeometryCase):
    mode: str
    documents: tuple[int, ...] = DOCUMENTS
    compiler: str = "inductor"
    passes: str = "forward"

    @property
    def name(self) -> str:
        return f"{self.geometry}-{self.mode.replace(' ', '-')}"


class SmallInference(Suite[SmallCase]):
    name: ClassVar[str] = "small-inference"

    def cases(self, options: Options) -> Sequence[SmallCase]:
        if options.is_small:
            documents, how = (9, 4, 2, 1), options.compiler
            case = SmallCase("qwen3-tiny", 2, "", documents, how, dtype=options.dtype)
        else:
            case = SmallCase("qwen3-1.7b", 14, "")
        return [replace(case, mode=mode) for mode in MODES]

    def variants(self, case: SmallCase, options: Options) -> Sequence[str]:
        return VARIANTS if options.on_gpu else ("auto", "auto@position_ids", "transformers:sdpa")

    def measure(self, case: SmallCase, variants: Sequence[str], options: Options) -> Findings:
        require_known(*variants)
        repeats = 3 if options.quick else REPEATS
        check = OneMode(case, options).check
        return measure_variants(variants, check, options, most_repeats=repeats)

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        return _tables(records, VARIANTS)

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        return _tables(records, ON_PAGE)


class OneMode:
    """A case's model, two packings of equal shapes, and their references."""

    def __init__(self, case: SmallCase, options: Options) -> None:
        self.case, self.options = case, options
        self.base = case.new_base_model(options.device).eval()
        tokens = sum(case.documents)
        ids = torch.randint(self.base.config.vocab_size, (1, tokens), device=options.device)
        packings = (case.documents, case.documents[::-1])
        self.rows = [PackedBatch(ids, lengths) for lengths in packings]
        self.sizes = Sizes(len(case.documents), tokens)
        self.alone = [Alone.of(self.base, row) for row in self.rows]

    def check(self, name: str) -> CheckedVariant:
        """Run a variant on both packings, and on the first one again."""
        mode = self.case.mode
        if mode == CUDA_GRAPHS and not self.options.on_gpu:
            raise Unsupported("CUDA graphs need a GPU")
        variant = make_variant(name, self.base, self.sizes, train=False)
        # Before anything is compiled: "auto" measures nothing inside a graph.
        took = attends(variant, self.rows[0], compiled=mode != "eager", needs_grad=False)
        inputs = [variant.inputs(row) for row in self.rows]
        if mode != "eager":
            variant = variant.compiled(self.case.compiler, cuda_graphs=mode == CUDA_GRAPHS)

        def call(index: int = 0) -> Tensor:
            if mode == CUDA_GRAPHS:
                torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                output = variant.call(input_ids=self.rows[0].input_ids, **inputs[index])
            hidden: Tensor = output.last_hidden_state
            return hidden

        skips = _skipped()
        with watch_compilation() as first:
            for _ in range(3):  # a graph is recorded at the second call and replayed at the third
                errors, wrong = self.alone[0].check(call()[0])
        with watch_compilation() as later:
            for index in (1, 0):
                other, why = self.alone[index].check(call(index)[0])
                errors.setdefault("error_other_packing", other["error"])
                wrong = wrong or (why and f"after other documents came: {why}")
        measures: Measures = {
            "attends": took,
            "compile_s": first.compile_s,
            "graphs": first.compilations,
            "graph_breaks": first.graph_breaks,
            "recompilations": later.compilations,
            "cudagraph_skips": _skipped() - skips,
        }
        return CheckedVariant(call, measures | errors, wrong)


def _skipped() -> int:
    """Graphs so far that inductor ran without a CUDA graph."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


# --- the table -----------------------------------------------------------------------------------


def _tables(records: Sequence[Record], variants: Sequence[str]) -> Iterable[Table]:
    for own in records_alike(records, ("variant", "mode"), of_one_run=True):
        yield _table(own, variants)


def _table(records: Sequence[Record], variants: Sequence[str]) -> Table:
    """These attentions down, modes across."""
    notes = Notes()
    by_mode = grouped(records, "mode")
    by_variant = grouped(records, "variant")

    def in_mode(mode: str) -> Callable[[str], str]:
        def text(variant: str) -> str:
            record = next((r for r in by_variant[variant] if r.case["mode"] == mode), None)
            said = tables.cell(
                record, tables.with_ratio(record, "ms_p50", by_mode.get(mode, []), ".2f"), notes
            )
            skipped = tables.value(record, "cudagraph_skips")
            return said + (f", {skipped} graphs not captured" if skipped else "")

        return text

    def breaks(variant: str) -> str:
        most = best([tables.value(r, "graph_breaks") for r in by_variant[variant]], max)
        return NOTHING if most is None else str(most)

    columns = [
        Column("attention", lambda variant: _name(variant, by_variant[variant])),
        Column("eager ms", in_mode("eager")),
        Column("compiled ms", in_mode("compiled")),
        Column("CUDA graphs ms", in_mode(CUDA_GRAPHS)),
        Column("graph breaks", breaks),
    ]
    title = (
        f"{tables.model_title(records[0])}, documents of "
        f"{', '.join(map(str, records[0].case['documents']))} tokens in one row, forward under "
        f"no_grad; in parentheses the ratio to the best; {tables.where(records)}"
    )
    shown = [variant for variant in by_variant if variant in variants]
    return Table.of(shown, columns, title, notes=notes)


def _name(variant: str, records: Sequence[Record]) -> str:
    """The variant's name; for "auto" with the backend chosen in each mode."""
    names = tables.took(records)
    if len(names) > 1:
        found = [r for r in records if tables.took([r])]
        names = [f"{r.case['mode']}: {r.measures['attends']}" for r in found]
    return tables.attention_title(variant, names)


SUITE = SmallInference()
