"""Suite "model": training steps of whole models, packed, padded, one document at a time.

Llama and Qwen geometries with random weights; documents of a text collection's lengths, log-normal,
or of one length. Every variant of a case shares weights, documents and process; each one's first
step is compared with every document alone in fp64, and what is wrong is not timed. Throughput
counts the documents' tokens, never padding.

A step is forward, next-token loss, backward and optimizer. The base model is compiled without its
loss, which is the same code in every variant. The learning rate is 0: AdamW does all its work, and
each variant meets the same weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar

import torch

from flexvarlen.bench.suites.model import tables
from flexvarlen.bench.suites.model.attends import attends
from flexvarlen.bench.suites.model.cases import (
    WHOLE,
    ModelCase,
    cases_of,
    split_variant,
    variants_of,
)
from flexvarlen.report.figure import chart, lines, save
from flexvarlen.report.records import Record, by_machine, grouped, provenance
from flexvarlen.report.table import NOTHING, Column, Notes, Table, shown
from flexvarlen.runner.suite import Findings, Options, Suite
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.experiment import Experiment
from flexvarlen.verify.experiment.inputs import BATCHINGS, shapes_of
from flexvarlen.verify.experiment.measure import CheckedVariant, Measures, measure_variants
from flexvarlen.verify.experiment.step import checkpoint_layers, free


class Model(Suite[ModelCase]):
    name: ClassVar[str] = "model"
    reads_text: ClassVar[bool] = True

    def cases(self, options: Options) -> Sequence[ModelCase]:
        return cases_of(options)

    def variants(self, case: ModelCase, options: Options) -> Sequence[str]:
        return variants_of(case, options)

    def measure(self, case: ModelCase, variants: Sequence[str], options: Options) -> Findings:
        for variant in variants:
            split_variant(variant)
        return measure_variants(variants, Training(case, options).check, options)

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        models = [g for own in by_machine(records) for g in grouped(own, "geometry").values()]
        return map(training_table, models)

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        return [gains_table(own) for own in by_machine(_of_texts(records))]

    def figures(self, records: Sequence[Record], folder: Path) -> Sequence[Path]:
        shown = [r for r in _of_texts(records) if r.case["geometry"] == WHOLE]
        return [draw(shown, folder)] if shown else []


def _of_texts(records: Sequence[Record]) -> list[Record]:
    """The records of eager steps on texts that are right."""
    case = {"mode": "eager", "documents": "text"}
    return [r for r in records if tables.is_ok(r) and case.items() <= r.case.items()]


# --- steps ---------------------------------------------------------------------------------------


class Training(Experiment):
    """A training case: shared weights, one optimizer, one reference."""

    def __init__(self, case: ModelCase, options: Options) -> None:
        self.case, self.options = case, options
        lm = case.new_causal_lm(options.device)
        ids = torch.randint(lm.config.vocab_size, (1, case.tokens), device=options.device)
        super().__init__(lm, [PackedBatch(ids, tuple(case.lengths(options.text)))])
        if case.checkpointing:
            checkpoint_layers(self.base)
        self.optimizer = torch.optim.AdamW(lm.parameters(), lr=0.0, weight_decay=0.0, fused=True)
        # Its state is there before any step, so that all steps' peaks hold it.
        for parameter in lm.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        free(options.device, lm)

    def check(self, name: str) -> CheckedVariant:
        """Make a variant, compile it if asked, and compare its first step with the reference."""
        batching, attention = split_variant(name)
        variant, compiled = self.variant(attention), self.case.mode == "compiled"
        took = attends(variant, self.row, packed=batching == "packed", compiled=compiled)
        if compiled:
            forwards = self.forwards(variant, batching, self.row)
            variant = variant.compiled(
                self.options.compiler,
                fullgraph=not variant.theirs and batching == "packed",
                dynamic=True if shapes_of(forwards) > 1 else None,
            )
        checked = self.checked(variant, batching)
        checked.measures["attends"] = took
        checked.call = partial(self.train, checked.call)
        checked.conclude = self.conclude
        return checked

    def train(self, forward_backward: Callable[[], object]) -> None:
        forward_backward()
        self.optimizer.step()

    def conclude(self, ms: float) -> Measures:
        return {"tokens_per_s": self.case.tokens / (ms / 1e3)}


# --- tables --------------------------------------------------------------------------------------

Step = tuple[int, str]
"""The tokens of a step, and what is special about it."""
_KINDS = {"text": "", "uniform": " of one length", "log-normal": " log-normal"}


def _step_of(record: Record) -> Step:
    mode = " compiled" if record.case["mode"] == "compiled" else ""
    return record.case["tokens"], _KINDS[record.case["documents"]] + mode


def training_table(records: Sequence[Record]) -> Table:
    """One model's tokens per second: variants down, contexts across."""
    notes, by_variant = Notes(), grouped(records, "variant")
    found = {(r.case["variant"], _step_of(r)): r for r in records}
    steps = sorted({step for _, step in found}, key=lambda step: (step[1], step[0]))
    in_memory = _measured_by_most(records)

    def rate(variant: str, step: Step) -> str:
        record = found.get((variant, step))
        others = [r for (_, other), r in found.items() if other == step]
        return tables.cell(record, tables.with_ratio(record, "tokens_per_s", others, ",.0f"), notes)

    def peak(variant: str) -> str:
        return shown(tables.value(found.get((variant, in_memory)), "peak_mib"), ".1f", 1 / 1024)

    columns = [
        Column("batch", lambda v: split_variant(v)[0]),
        Column(
            "attention",
            lambda v: tables.attention_title(split_variant(v)[1], tables.took(by_variant[v])),
        ),
        *(Column(f"{step[0]:,}{step[1]}", partial(rate, step=step)) for step in steps),
        Column(f"peak GiB at {in_memory[0]:,}", peak),
    ]
    title = (
        f"{tables.model_title(records[0])}, training ({records[0].case['step']}): tokens per "
        f"second by the tokens per step, in parentheses the ratio to the best; "
        f"{tables.where(records)}"
    )
    # Packed, padded, one by one; within each, in the order of the records.
    variants = sorted(by_variant, key=lambda name: BATCHINGS.index(split_variant(name)[0]))
    return Table.of(variants, columns, title, notes=chain([_errors_of(records)], notes))


def gains_table(records: Sequence[Record]) -> Table:
    """A line for each model and step: packed rows with `auto` beside the fastest other variants."""
    best: dict[tuple[str, int], dict[str, float]] = {}
    for record in records:
        batching, attention = split_variant(record.case["variant"])
        rate = record.measures["tokens_per_s"]
        rates = best.setdefault(
            (tables.model_title(record).partition(",")[0], record.case["tokens"]), {}
        )
        for name in (batching, f"{batching}:{attention.partition(':')[0]}"):
            rates[name] = max(rate, rates.get(name, 0.0))

    def gain_over(name: str) -> Callable[[tuple[str, int]], str]:
        def cell(line: tuple[str, int]) -> str:
            rates = best[line]
            return f"{rates['packed:auto'] / rates[name]:.2f}" if name in rates else NOTHING

        return cell

    columns = [
        Column("model", lambda line: line[0]),
        Column("tokens per step", lambda line: f"{line[1]:,}"),
        Column("packed, `auto`: tokens/s", lambda line: f"{best[line]['packed:auto']:,.0f}"),
        Column("÷ packed, transformers", gain_over("packed:transformers")),
        Column("÷ padded, sorted by length", gain_over("padded-sorted")),
        Column("÷ padded", gain_over("padded")),
        Column("÷ one by one", gain_over("serial")),
    ]
    title = (
        f"Training ({records[0].case['step']}): tokens per second with packed rows and `auto`, and "
        f"over that of the fastest other attention; {tables.where(records)}"
    )
    return Table.of((x for x in sorted(best) if "packed:auto" in best[x]), columns, title)


def _measured_by_most(records: Sequence[Record]) -> Step:
    """The longest step in which most variants ran, so that their memory can be compared."""
    counts = Counter(_step_of(r) for r in records if tables.is_ok(r))
    most = max(counts.values(), default=0)
    steps = [step for step, count in counts.items() if 4 * count >= 3 * most]
    return max(steps, default=_step_of(records[0]), key=lambda step: (not step[1], step[0]))


def _errors_of(records: Sequence[Record]) -> str:
    done = [r.measures for r in records if tables.is_ok(r)]
    if not done:
        return ""
    worst = {
        name: max(m[name] for m in done)
        for name in ("error", "grad_error", "baseline_error", "baseline_grad_error")
    }
    return (
        f"Largest relative errors against each document alone: outputs {worst['error']:.1e}, "
        f"gradients {worst['grad_error']:.1e}; of each document alone in "
        f"{records[0].case['dtype']}: {worst['baseline_error']:.1e} and "
        f"{worst['baseline_grad_error']:.1e}."
    )


# --- the chart -----------------------------------------------------------------------------------

PACKED = {
    "auto": "packed, flexvarlen auto",
    "transformers:flash_attention_3@cu_seq_lens": "packed, transformers FA3\nwith cu_seq_lens",
    "transformers:flex_attention": "packed, transformers flex",
    "transformers:flash_attention_2": "packed, transformers FA2",
}
OTHERS = {
    "padded": "padded",
    "padded-sorted": "padded, sorted by length",
    "serial": "one document at a time",
}
"""The other batches of the chart: each with its fastest attention."""


def draw(records: Sequence[Record], folder: Path) -> Path:
    series: dict[str, dict[float, float]] = {name: {} for name in (*PACKED, *OTHERS)}
    for record in records:
        batching, attention = split_variant(record.case["variant"])
        points = series.get(attention if batching == "packed" else batching, {})
        rate, tokens = record.measures["tokens_per_s"], record.case["tokens"]
        points[tokens] = max(rate, points.get(tokens, rate))
    series = {name: points for name, points in series.items() if points}
    figure, (axes,) = chart(
        _finding(series),
        f"{tables.model_title(records[0])}, documents of texts, {records[0].case['dtype']}, eager. "
        f"Other batches: with the fastest attention measured at each size. {provenance(records)}",
    )
    lines(
        axes,
        series,
        x_label="tokens of a training step",
        y_label="document tokens per second",
        labels=PACKED | OTHERS,
    )
    axes.yaxis.set_major_formatter("{x:,g}")
    return save(figure, folder / "model.png")


def _finding(series: Mapping[str, Mapping[float, float]]) -> str:
    """What packing gains in the longest step over the fastest of each kind of other batches."""
    x = max(series.get("auto", {}), default=0)
    others = [series[name][x] for name in OTHERS if x in series.get(name, {})]
    if not others:
        return "Training whole models on packed rows and on other batches"
    gains = [series["auto"][x] / rate for rate in (max(others), min(others))]
    return (
        f"In steps of {x:,.0f} tokens packed rows train {gains[0]:.1f} to {gains[1]:.1f} times as "
        "many tokens per second as other batches"
    )


SUITE = Model()
