"""Suite "hybrid": training steps of a Qwen3.5-like model, packed and padded, eager and compiled.

Three of four layers are the gated delta rule, a recurrence, the fourth is attention. Forward and
backward of the base model with random weights, without an LM head or an optimizer. Every variant's
first step is compared with every document alone in fp64, and what is wrong is not timed.

"compiled" compiles each layer by itself, as accelerate's `compile_regions` does, and has 8 layers,
so that they fit without checkpointing. transformers' delta rule is kept out of the graphs: torch
2.11 would compile its plain torch, for minutes. "packings" compiles the whole model.

transformers' own layers are given cu_seq_lens and seq_idx ("@both"). Their convolution needs the
package causal-conv1d: without it, it leaks (5.17) or raises (5.23). "+fla-conv" puts fla's in its
place. On Hopper with Triton 3.4 to 3.7.0, where fla refuses a step of its backward, all variants
take flexvarlen's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor

from flexvarlen.bench.suites.model import geometries, recurrences, tables
from flexvarlen.bench.suites.model.attends import attends
from flexvarlen.bench.suites.model.packings import rows_of
from flexvarlen.recurrent.fla_kernels import let_fla_run
from flexvarlen.reference.recurrences import CONVOLUTION, DELTA_RULE, Replacements, replaced
from flexvarlen.report.records import Record, records_alike
from flexvarlen.report.table import NOTHING, Column, Notes, Table
from flexvarlen.runner.suite import Findings, Options, Suite, UnknownVariant
from flexvarlen.verify.experiment.experiment import Experiment
from flexvarlen.verify.experiment.inputs import SORTED
from flexvarlen.verify.experiment.measure import CheckedVariant, measure_variants
from flexvarlen.verify.experiment.step import checkpoint_layers
from flexvarlen.verify.experiment.variant import require_known

Kind = Literal["eager", "compiled", "padded", "packings"]

PADDED, FLA_CONVOLUTION = "padded", "+fla-conv"
THEIRS = "transformers:flash_attention_3"
BOTH, FASTEST = f"{THEIRS}@both", f"{THEIRS}@both{FLA_CONVOLUTION}"
VARIANTS: dict[Kind, tuple[str, ...]] = {
    "eager": ("auto", "fa3", BOTH, FASTEST),
    "compiled": ("auto", FASTEST),
    "padded": (
        "auto",
        f"{PADDED}:auto",
        f"{SORTED}:auto",
        f"{PADDED}:{THEIRS}",
        f"{PADDED}:{THEIRS}{FLA_CONVOLUTION}",
        f"{SORTED}:{THEIRS}{FLA_CONVOLUTION}",
    ),
    "packings": ("auto",),
}
ON_A_CPU: dict[Kind, tuple[str, ...]] = {
    "eager": ("auto", "transformers:sdpa", "transformers:sdpa@both", FASTEST),
    "compiled": ("auto",),
    "padded": (
        "auto",
        f"{PADDED}:auto",
        f"{PADDED}:transformers:sdpa",
        f"{SORTED}:transformers:sdpa",
    ),
    "packings": ("auto",),
}
LAYERS: dict[Kind, int] = {"eager": 24, "compiled": 8, "padded": 24, "packings": 4}
OTHER_PACKINGS = 20
SLOW_S = 6.0
"""A step that takes longer is timed once; one of 24 layers takes one or two seconds."""


@dataclass(frozen=True)
class HybridCase(geometries.GeometryCase):
    """One hybrid model on one set of documents.

    Attributes:
        kind: "eager" or "compiled" (layer by layer), on a packed row; "padded", eager, on padded
            batches too; "packings", compiled as a whole, on one packing after another.
        tokens: of all documents, padding not counted.
        source: which texts the lengths come from; "" where they are log-normal.
        mean_doc: mean tokens of a log-normal document; None for texts.
        longest_doc: tokens at which a text is cut; None where there are none.
        other_packings: that follow the one that is timed.
        checkpointing: whether the backward computes the layers' insides again.
        compiler: a backend of torch.compile; "" where nothing is compiled.
    """

    kind: Kind
    tokens: int
    source: str
    mean_doc: int | None
    longest_doc: int | None
    other_packings: int
    checkpointing: bool
    compiler: str

    @property
    def name(self) -> str:
        return f"{self.geometry}-{self.kind}"

    def lengths(self, index: int, files: Sequence[Path] | None) -> list[int]:
        """Tokens of each document of one packing; their sum is `tokens`."""
        if self.mean_doc is None:
            return geometries.text_lengths(self.tokens, self.seed + index, files, self.longest_doc)
        return geometries.drawn_lengths(self.tokens, "log-normal", self.mean_doc, self.seed + index)


def split_variant(variant: str) -> tuple[str, str, bool]:
    """How a variant batches, its attention, and whether fla's convolution stands in.

    >>> split_variant("padded:transformers:flash_attention_3+fla-conv")
    ('padded', 'transformers:flash_attention_3', True)
    >>> split_variant("fa3")
    ('packed', 'fa3', False)

    Raises:
        UnknownVariant: the attention is unknown, or ours is to run fla's public convolution.
    """
    batching = next((x for x in ("padded", SORTED) if variant.startswith(f"{x}:")), "packed")
    rest = variant.removeprefix(f"{batching}:")
    attention = rest.removesuffix(FLA_CONVOLUTION)
    require_known(attention)
    if attention != rest and not attention.startswith("transformers:"):
        raise UnknownVariant(
            f"{FLA_CONVOLUTION} must follow an attention of transformers, got {variant!r}; leave "
            "it out."
        )
    return batching, attention, attention != rest


class Hybrid(Suite[HybridCase]):
    name: ClassVar[str] = "hybrid"
    reads_text: ClassVar[bool] = True

    def cases(self, options: Options) -> Sequence[HybridCase]:
        return [_case(kind, options) for kind in VARIANTS]

    def variants(self, case: HybridCase, options: Options) -> Sequence[str]:
        return (VARIANTS if options.on_gpu else ON_A_CPU)[case.kind]

    def measure(self, case: HybridCase, variants: Sequence[str], options: Options) -> Findings:
        for variant in variants:
            split_variant(variant)
        check = HybridSteps(case, options).check
        return measure_variants(variants, check, options, slow_s=SLOW_S)

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        return map(_table, records_alike(records, ("variant",), of_one_run=True))

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        """Tables of packed rows and of padded batches, without compiled variants."""
        eager = [r for r in records if r.case["kind"] in ("eager", "padded")]
        shown = ("variant", "ms (p20–p80)", "tokens per second", "peak GiB")
        return [table.only(*shown, notes=table.notes) for table in self.tables(eager)]


def _case(kind: Kind, options: Options) -> HybridCase:
    small = options.is_small
    compiled = kind in ("compiled", "packings")
    tokens = 128 if small else 8192 if kind == "packings" else 32_768
    texts = kind == "padded" and not small  # texts are longer than a small case's row
    return HybridCase(
        kind=kind,
        geometry="qwen3.5-tiny" if small else "qwen3.5-2b",
        layers=2 if small else LAYERS[kind],
        tokens=tokens,
        source=geometries.source_of(options.text) if texts else "",
        mean_doc=None if texts else tokens // (4 if small else 16),
        longest_doc=tokens // geometries.LONGEST_SHARE if texts else None,
        other_packings=0 if kind != "packings" else 2 if small else OTHER_PACKINGS,
        checkpointing=not compiled,
        dtype=options.dtype,
        compiler="" if not compiled else options.compiler,
    )


# --- steps ---------------------------------------------------------------------------------------


class HybridSteps(Experiment):
    """A case's model with random weights, its packings, and the references of first and last.

    The reference, and the low-precision baseline, run transformers' functions in plain torch:
    fla's have no fp64.
    """

    def __init__(self, case: HybridCase, options: Options) -> None:
        self.case = case
        packings = [case.lengths(i, options.text) for i in range(1 + case.other_packings)]
        base, rows, grad_output = rows_of(case, packings, options.device)
        super().__init__(base, rows, grad_output=grad_output)
        if case.checkpointing:
            checkpoint_layers(base)

    def check(self, name: str) -> CheckedVariant:
        """Make a variant, compile it if asked, and compare its first step with the reference."""
        batching, attention, fla_convolution = split_variant(name)
        let_fla_run()  # transformers' layers too, where fla refuses its own backward
        variant, compiler = self.variant(attention), self.case.compiler
        functions: Replacements = {DELTA_RULE: recurrences.untraced} if variant.theirs else {}
        if fla_convolution:
            convolve = recurrences.convolution_of_fla(self.base)
            functions[CONVOLUTION] = lambda _: convolve
        took = attends(variant, self.row, packed=batching == "packed", compiled=bool(compiler))
        if self.case.kind == "compiled":
            variant.compile_layers(compiler)
        elif compiler:
            variant = variant.compiled(compiler, fullgraph=False)

        def step(*forwards: Any, **options: Any) -> list[Tensor]:
            with replaced(self.base, functions):
                return self.step(*forwards, **options)

        with recurrences.refusals():
            checked = self.checked(variant, batching, step)
        kernels = recurrences.kernels_of(
            self.base, theirs=variant.theirs, fla_convolution=fla_convolution
        )
        ratio = checked.measures["positions"] / self.case.tokens
        checked.measures |= {"attends": took, **kernels, "positions_per_token": ratio}
        checked.conclude = lambda ms: {"tokens_per_s": self.case.tokens / (ms / 1e3)}
        return checked


# --- tables --------------------------------------------------------------------------------------


def _table(records: Sequence[Record]) -> Table:
    """One case: variants down."""
    notes = Notes()
    case = records[0].case

    def rate(record: Record) -> str:
        return tables.with_ratio(record, "tokens_per_s", records, ",.0f") or NOTHING

    columns = [
        Column("variant", _name),
        Column("ms (p20–p80)", lambda r: tables.cell(r, tables.spread(r), notes)),
        Column("tokens per second", rate),
        Column("delta rule", lambda r: str(r.measures.get("delta_rule", NOTHING))),
        Column("convolution", lambda r: str(r.measures.get("convolution", NOTHING))),
    ]
    if case["kind"] == "padded":
        columns.append(tables.number("positions ÷ tokens", "positions_per_token", ".2f"))
    if case["compiler"]:
        columns += [
            tables.number("graph breaks", "graph_breaks", ".0f"),
            tables.number("compile s", "compile_s", ".0f"),
        ]
    if case["other_packings"]:
        columns.append(tables.made("recompilations", _recompilations))
    columns += [
        tables.number("peak GiB", "peak_mib", ".1f", 1 / 1024),
        tables.number("error ÷ allowed", "error_over_allowed", ".2f"),
    ]
    right_first = sorted(records, key=lambda r: not tables.is_ok(r))
    return Table.of(right_first, columns, _title(records), notes=notes)


def _name(record: Record) -> str:
    batching, attention, fla_convolution = split_variant(record.case["variant"])
    title = tables.attention_title(attention, tables.took([record]))
    title = title.replace("boundaries from both", "boundaries from cu_seq_lens and seq_idx")
    batch = {PADDED: "padded, ", SORTED: "padded, sorted by length, "}.get(batching, "")
    return f"{batch}{title}{', fla’s convolution' if fla_convolution else ''}"


def _recompilations(record: Record) -> str:
    return "{recompilations} in {other_packings} packings".format(**record.measures)


_HOW = {
    "eager": "eager",
    "padded": "eager",
    "compiled": "layers compiled one by one,",
    "packings": "compiled",
}


def _title(records: Sequence[Record]) -> str:
    case = records[0].case
    counts = (r.measures["documents"] for r in records if "documents" in r.measures)
    documents = f"{next(counts, '')} documents".lstrip()
    lengths = f"log-normal with mean {case['mean_doc']:,}" if case["mean_doc"] else case["source"]
    checkpointed = ", layers checkpointed" if case["checkpointing"] else ""
    return (
        f"{tables.model_title(records[0])}, {_HOW[case['kind']]} forward and "
        f"backward{checkpointed}; {case['tokens']:,} tokens in {documents}, lengths "
        f"{lengths}; {tables.where(records)}"
    )


SUITE = Hybrid()
