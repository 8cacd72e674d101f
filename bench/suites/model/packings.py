"""Suite "packings": one compiled step on packing after packing, ours and transformers'.

One packed row of log-normal documents; forward and backward of the base model, without an LM head,
whose logits would hide the difference. Each variant is compiled, checked and timed on one packing;
then come others of as many tokens: what they compile anew is counted, and the last one's outputs
are checked again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flexvarlen.bench.suites.model import tables
from flexvarlen.bench.suites.model.attends import attends
from flexvarlen.bench.suites.model.geometries import GEOMETRIES, GeometryCase, log_normal_lengths
from flexvarlen.report.figure import bars, chart, save, style_of
from flexvarlen.report.records import Record, provenance, records_alike
from flexvarlen.report.table import NOTHING, Column, Notes, Table
from flexvarlen.runner.suite import Findings, Options, Suite
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.experiment import Experiment
from flexvarlen.verify.experiment.measure import CheckedVariant, measure_variants
from flexvarlen.verify.experiment.variant import require_known

OTHER_PACKINGS = 50
VARIANTS = (
    "transformers:flash_attention_2",
    "transformers:flash_attention_3",
    "transformers:flash_attention_3@cu_seq_lens",
    "transformers:flex_attention",
    "auto",
    "auto@position_ids",
    "fa3",
    "flex",
)


@dataclass(frozen=True)
class RowCase(GeometryCase):
    """One model, and rows of documents drawn alike."""

    tokens: int
    mean_doc: int
    compiler: str = "inductor"
    sigma: float = 1.0
    passes: str = "forward+backward"

    @property
    def name(self) -> str:
        return f"{self.geometry}-t{self.tokens}-mean{self.mean_doc}"

    def packings(self, count: int) -> list[list[int]]:
        """Tokens of each document, packing by packing."""
        return [
            log_normal_lengths(self.tokens, self.mean_doc, self.sigma, self.seed + index)
            for index in range(count)
        ]


def rows_of(
    case: GeometryCase, packings: Sequence[Sequence[int]], device: torch.device
) -> tuple[PreTrainedModel, list[PackedBatch], Tensor]:
    """A base model, packings of equally many tokens, and where the backward starts."""
    base, tokens = case.new_base_model(device), sum(packings[0])
    ids = torch.randint(base.config.vocab_size, (1, tokens), device=device)
    shape = (tokens, base.config.hidden_size)
    grad_output = torch.randn(shape, device=device, dtype=base.dtype)
    return base, [PackedBatch(ids, tuple(lengths)) for lengths in packings], grad_output


class Packings(Suite[RowCase]):
    name: ClassVar[str] = "packings"

    def cases(self, options: Options) -> Sequence[RowCase]:
        if options.is_small:
            return [RowCase("qwen3-tiny", 2, 256, 32, options.compiler, dtype=options.dtype)]
        llama = GEOMETRIES["llama-3.2-1b"](None).num_hidden_layers
        return [
            RowCase("qwen3-1.7b", 14, 32_768, 2048),
            RowCase("qwen3-1.7b", 14, 65_536, 16_384),
            RowCase("llama-3.2-1b", llama, 32_768, 2048),
        ]

    def variants(self, case: RowCase, options: Options) -> Sequence[str]:
        return VARIANTS if options.on_gpu else ("transformers:sdpa", "auto", "sdpa@position_ids")

    def measure(self, case: RowCase, variants: Sequence[str], options: Options) -> Findings:
        require_known(*variants)
        others = 2 if options.quick else OTHER_PACKINGS
        base, rows, grad_output = rows_of(case, case.packings(1 + others), options.device)
        experiment = Experiment(base, rows, grad_output=grad_output)
        return measure_variants(variants, partial(check, experiment, case), options)

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        return map(packings_table, records_alike(records, ("variant",), of_one_run=True))

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        shown = ("attention", "compiled ms (p20–p80)", "graph breaks", "recompilations")
        found = map(packings_table, _longest_run(records))
        return [table.only(*shown, notes=table.notes[1:]) for table in found]

    def figures(self, records: Sequence[Record], folder: Path) -> Sequence[Path]:
        return [draw(own, folder) for own in _longest_run(records)]


def _longest_run(records: Sequence[Record]) -> list[list[Record]]:
    """The run with the most packings and variants, alone in a list; nothing of none."""
    groups = records_alike([r for r in records if tables.is_ok(r)], ("variant",), of_one_run=True)
    return [max(groups, key=_extent)] if groups else []


def check(experiment: Experiment, case: RowCase, name: str) -> CheckedVariant:
    """Compile a variant, and compare its first step with the reference."""
    variant = experiment.variant(name)
    took = attends(variant, experiment.row, compiled=True)
    found = experiment.checked(variant.compiled(case.compiler))
    found.measures |= {"attends": took, **asdict(experiment.sizes)}
    return found


# --- the table and the chart ---------------------------------------------------------------------


def packings_table(records: Sequence[Record]) -> Table:
    """One case: variants down; the first note is the baseline's error."""
    notes = Notes()
    columns = [
        Column("attention", _name),
        tables.number("eager ms", "eager_ms_p50", ".0f"),
        Column("compiled ms (p20–p80)", lambda r: tables.cell(r, tables.spread(r), notes)),
        tables.made("ratio to the best", lambda r: f"{tables.to_best(r, 'ms_p50', records):.2f}"),
        tables.number("graph breaks", "graph_breaks", ".0f"),
        Column("recompilations", lambda r: _recompilations(r, notes)),
        tables.number("peak GiB", "peak_mib", ".1f", 1 / 1024),
        tables.number("relative error", "error", ".1e"),
    ]
    done = [r.measures for r in records if tables.is_ok(r)][:1]
    said = [f"Error of each document alone: {m['baseline_error']:.1e}." for m in done]
    return Table.of(records, columns, _title(records), notes=chain(said, notes))


def _title(records: Sequence[Record]) -> str:
    case = records[0].case
    documents = next((r.measures["documents"] for r in records if "documents" in r.measures), "")
    return (
        f"{tables.model_title(records[0])}, a row of {case['tokens']:,} tokens, {documents} "
        f"documents, lengths drawn with mean {case['mean_doc']:,}; {case['passes']}; "
        f"{tables.where(records)}"
    )


def _name(record: Record) -> str:
    return tables.attention_title(record.case["variant"], tables.took([record]))


def _recompilations(record: Record, notes: Notes) -> str:
    if not tables.is_ok(record):
        return NOTHING
    m = record.measures
    if not m.get("other_packings"):
        return f"none run {notes.mark('no time was left for other packings')}"
    said = f"{m['recompilations']} in {m['other_packings']} packings"
    if "error_last_packing" in m:
        return said
    return f"{said} {notes.mark('no time was left for the last packing, which is checked')}"


def _extent(records: Sequence[Record]) -> tuple[int, int]:
    return min(r.measures["other_packings"] for r in records), len(records)


def draw(records: Sequence[Record], folder: Path) -> Path:
    """The time of a step, and how often new packings recompiled it."""
    own = sorted(records, key=lambda r: r.measures["ms_p50"])[:7]
    anew = {_plain(r): r.measures["recompilations"] for r in own}
    ours = [n for name, n in anew.items() if name.startswith("flexvarlen")]
    flash = "transformers flash_attention_"
    theirs = {name: n for name, n in anew.items() if name.startswith(flash)}
    case, count = own[0].case, _extent(own)[0]
    title = f"A compiled step, and its recompilations over {count} new packings"
    if theirs and ours and max(theirs.values()) > max(ours) == 0:
        versions = " and -".join(sorted({name.removeprefix(flash)[0] for name in theirs}))
        title = (
            f"Over {count} new packings flexvarlen never recompiles; transformers' "
            f"FlashAttention-{versions} recompile {min(theirs.values())} to "
            f"{max(theirs.values())} times"
        )
    figure, (left, right) = chart(
        title,
        f"{tables.model_title(own[0])}, {case['passes']}, {case['dtype']}; a row of "
        f"{case['tokens']:,} tokens, {own[0].measures['documents']} documents in the packing that "
        "is timed. "
        "Boundaries: a layout (flexvarlen) or position_ids (transformers) unless the label says "
        f"otherwise. {provenance(own)}",
        panels=2,
    )
    colors = [style_of(r.case["variant"]).color for r in own]
    times = {_plain(r): r.measures["ms_p50"] for r in own}
    bars(left, times, label="ms per compiled step", colors=colors)
    texts, label = [str(n) for n in anew.values()], f"recompilations in {count} packings"
    bars(right, anew, label=label, colors=colors, texts=texts)
    right.set_yticks([])
    return save(figure, folder / "packings.png")


def _plain(record: Record) -> str:
    return _name(record).replace("`", "").replace(", boundaries from ", "\n")


SUITE = Packings()
