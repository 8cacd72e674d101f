"""Suite "published": three published results, measured again and set beside the published figures.

- "overhead": of varlen, and of determinism; Dao-AILab/flash-attention#2150 has FA4's on a B200.
- "memory": time and peak memory, alone and in Llama; a skill of NousResearch/hermes-agent has some.
- "sdpa": the kernels behind SDPA, each forced, beside FA2. No source was found of these figures.

All documents of a case are equally long. "fixed:", "sdpa:" and "standard" take them as a batch, the
others as one packed row; "raw:" is a kernel's own varlen function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch.nn.attention import SDPBackend

from flexvarlen.bench.suites.attention.engine import measure_attention
from flexvarlen.bench.suites.attention.inputs import Inputs, Prepare, Prepared, switched
from flexvarlen.bench.suites.attention.packed import ON_CPU, PACKAGES, RAW, ours
from flexvarlen.bench.suites.attention.padded import fixed, forced, sdpa, standard
from flexvarlen.bench.suites.attention.padding import PaddingCase
from flexvarlen.bench.suites.attention.tables import MASK, Measured, measured, ratios, stated, where
from flexvarlen.bench.suites.model.cases import ModelCase, split_variant
from flexvarlen.bench.suites.model.tables import is_ok, value
from flexvarlen.bench.suites.model.whole_model import Training
from flexvarlen.measure.memory import memory_growth_mib
from flexvarlen.report.records import Record, by_machine, commits_of, grouped_by, ran_on
from flexvarlen.report.table import NOTHING, Column, Table, number, share, three_digits
from flexvarlen.runner.suite import Findings, Options, Suite, choose
from flexvarlen.verify.experiment.measure import CheckedVariant, first_run, measure_variants
from flexvarlen.verify.experiment.variant import make_variant

Lines = Sequence[Measured]
SIZES = (512, 1024, 2048, 4096, 8192, 16_384)
ORDERED = "@deterministic"
TIMED = (("forward", ""), ("backward", ""), ("backward", ORDERED))
FA4_ON_B200 = {
    False: ((1.445, 1.485), (4.461, 4.577), (6.007, 6.020)),
    True: ((0.775, 0.792), (2.447, 2.542), (2.923, 3.012)),
}
"""Published ms of fixed lengths and of varlen, in the order of `TIMED`, by causal."""
KERNELS = {x: (f"fixed:{x}", f"raw:{x}") for x in PACKAGES}
KERNELS["torch"] = ("sdpa:flash", "raw:varlen")  # of fixed lengths, and varlen
DEFAULT, FA2, FA3 = "sdpa:default", "fixed:fa2", "fixed:fa3"
OF_SDPA = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
FORCED = {f"sdpa:{x.partition('_')[0].lower()}": getattr(SDPBackend, x) for x in OF_SDPA}
PACKED = ("flex", "varlen", "fa2", "fa3")
OFF_PAGE = {"mask", "full", "heads", "32", "largest difference", "error against fp64", "outcome"}
OFF_PAGE |= {"1,024", "2,048", "4,096", *(f"`{x}`" for x in PACKED[1:])}
THEIRS = [f"padded:transformers:{x}" for x in ("eager", "flash_attention_2", "flash_attention_3")]


def observed(prepare: Prepare, default: Prepare | None, inputs: Inputs, grad: bool) -> Prepared:
    """Prepare a call, and add measures to it.

    `forward_peak_mib`, and `backward_peak_mib` of a forward with its backward; `same_bits`: of two
    backwards; `unequal`, `difference`: the share of elements that are not the default's, the most.
    """
    one = prepare(inputs, grad)
    measures: dict[str, Any] = {}
    calls: Any = {"forward": one.forward, "backward": lambda: one.backward(one.forward())}
    for pass_ in ("forward", "backward")[: 1 + grad]:
        calls[pass_]()  # compiles
        measures[f"{pass_}_peak_mib"] = memory_growth_mib(calls[pass_], inputs.q.device)
    if grad:
        measures["same_bits"] = all(map(torch.equal, calls["backward"](), calls["backward"]()))
    if default is not None:
        out, other = (x.as_THD(x.forward().detach()) for x in (one, default(inputs, False)))
        measures["unequal"] = float((out != other).double().mean())
        measures["difference"] = float((out.double() - other.double()).abs().max())
    return replace(one, measures={**one.measures, **measures})


def calls_of(part: str, options: Options) -> dict[str, Prepare]:
    each: dict[str, Prepare] = {name: partial(forced, kernel) for name, kernel in FORCED.items()}
    batches = {f"fixed:{name}": partial(fixed, module) for name, module in PACKAGES.items()}
    if part == "overhead":
        asked: dict[str, Any] = {**batches, **{f"raw:{name}": RAW[name] for name in PACKAGES}}
        of_torch = {"sdpa:flash": each["sdpa:flash"], "raw:varlen": RAW["varlen"]}
        ordered = {x + ORDERED: partial(call, deterministic=True) for x, call in asked.items()}
        ordered |= {x + ORDERED: partial(switched, call) for x, call in of_torch.items()}
        return asked | of_torch | ordered
    packed = {name: ours(name) for name in (PACKED if options.on_gpu else ON_CPU[:1])}
    others = {"standard": standard} if part == "memory" else {DEFAULT: sdpa, **each}
    return {**others, **{x: batches[x] for x in (FA2, FA3)}, **packed}


class EqualDocuments(PaddingCase):
    """Attention on `batch` documents of `max_length` tokens each."""

    @property
    def name(self) -> str:
        mask, head_dim = "causal" if self.causal else "full", self.embedding // self.num_heads
        return f"{self.part}-d{head_dim}-{mask}-{self.batch}x{self.max_length}"

    def measure(self, variants: Sequence[str], options: Options) -> Findings:
        chosen = choose(variants, calls_of(self.part, options)).items()
        calls = {x: partial(observed, y, sdpa if self.part == "sdpa" else None) for x, y in chosen}
        repeats = 100 if self.part == "overhead" else 30  # a cost is of a few percent
        return measure_attention(self.inputs(options.device), calls, options, repeats=repeats)


@dataclass(frozen=True)
class LlamaSteps(ModelCase):
    """A training step, and the forward of the base model alone; `mean_doc` tokens a document."""

    part: str = "llama"

    @property
    def name(self) -> str:
        return f"{self.geometry}-{self.mean_doc}"

    def measure(self, variants: Sequence[str], options: Options) -> Findings:
        steps = Training(self, options)
        found = []
        for pass_, check in ("training", steps.check), ("inference", partial(_forward, steps)):
            own = measure_variants(variants, check, options, most_repeats=3)
            found += [replace(x, pass_=pass_) for x in own]
            steps.optimizer.state.clear()  # is no part of inference
        return found


def _forward(steps: Training, name: str) -> CheckedVariant:
    """The forward alone, checked."""
    batching, attention = split_variant(name)
    variant = make_variant(attention, steps.base, steps.sizes, train=False)
    call = partial(steps.step, variant, steps.forwards(variant, batching, steps.row))
    step = partial(steps.checked_step, variant, batching, steps.step, steps.row)
    outputs, compilation = first_run(step)
    errors, wrong = steps.alone.check(outputs)
    return CheckedVariant(call, compilation | errors, wrong)


class Published(Suite[Any]):
    """Each part has tables of its own on the page."""

    name: ClassVar[str] = "published"
    page_parts: ClassVar[Sequence[str]] = ("overhead", "memory", "llama", "sdpa")

    def cases(self, options: Options) -> Sequence[EqualDocuments | LlamaSteps]:
        def equal(part: str, causal: bool, batch: int, tokens: int, heads: int, dim: int) -> Any:
            shape = (causal, batch, tokens, heads * dim, heads, options.dtype)
            return EqualDocuments("full-length", *shape, part=part)

        def llama(geometry: str, layers: int, total: int, tokens: int) -> LlamaSteps:
            documents: Any = ("uniform", "", tokens, None, False)
            return LlamaSteps(geometry, layers, "eager", total, *documents, dtype=options.dtype)

        if options.is_small:
            small = [equal(x, True, 2, 48, 2, 64) for x in self.page_parts if x != "llama"]
            return [*small, llama("llama-tiny", 2, 96, 48)]
        return [
            *(equal("overhead", causal, 4, 8192, 16, 128) for causal in (False, True)),
            *(equal("memory", True, 8, tokens, 32, 64) for tokens in SIZES),
            equal("memory", False, 8, 8192, 32, 64),
            *(equal("sdpa", x, 4, 4096, 2048 // d, d) for d in (64, 128) for x in (False, True)),
            *(llama("llama-3.2-1b", 16, 16_384, tokens) for tokens in SIZES),
        ]

    def variants(self, case: Any, options: Options) -> Sequence[str]:
        if isinstance(case, EqualDocuments):
            return list(calls_of(case.part, options))
        return [*THEIRS, "packed:flex" if options.on_gpu else "packed:sdpa"]

    def measure(self, case: Any, variants: Sequence[str], options: Options) -> Findings:
        return list(case.measure(variants, options))

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        """Under a causal mask, without what stands in `OFF_PAGE`."""
        for table in self.tables(records, lambda x: ran_on(x[0].environment, ()) + commits_of(x)):
            lines = tuple(line for line in table.lines if OFF_PAGE.isdisjoint(line))
            shown = replace(table, title=f"Causal: {table.title}", lines=lines)
            yield shown.only(*(x for x in table.header if x not in OFF_PAGE), notes=table.notes)

    def tables(self, records: Sequence[Record], place: Any = where) -> Iterable[Table]:
        for own in by_machine(records):
            for part, table in zip(self.page_parts, TABLES, strict=True):
                of_part = [x for x in own if x.case["part"] == part]
                # An overhead is of one kernel, which may be of a run of its own.
                runs = grouped_by(of_part, _kernel if part == "overhead" else lambda x: None)
                if lines := [line for run in runs.values() for line in measured(run)]:
                    yield table(lines, place(of_part))


def _kernel(record: Record) -> str:
    own = record.case["variant"].removesuffix(ORDERED)
    return next((x for x, pair in KERNELS.items() if own in pair), "")


def _shape(case: Mapping[str, Any]) -> str:
    form = "{batch} documents of equal length, {num_heads} heads of {dim}, {dtype}"
    return form.format(dim=case["embedding"] // case["num_heads"], **case)


def _overhead(lines: Lines, machine: str) -> Table:
    case = lines[0].case
    work = 4 * case["batch"] * case["max_length"] ** 2 * case["embedding"] / 1e9
    at = {(x.case["causal"], x.pass_, name): x.ms(name) for x in lines for name in x.records}
    ours = [
        (causal, name, [[at.get((causal, x, y + form)) for y in pair] for x, form in TIMED])
        for causal in FA4_ON_B200
        for name, pair in KERNELS.items()
    ]
    theirs = [(causal, "FA4, B200, published", ms) for causal, ms in FA4_ON_B200.items()]

    def rates(index: int, row: tuple[bool, str, Any]) -> str:
        done, pair = work * (2.5 if index else 1) / (2 if row[0] else 1), row[2][index]
        found = "/".join(f"{done / ms:,.0f}" for ms in pair if ms)
        return f"{found}, {ratios([pair])}" if found else NOTHING

    varlen = [ratios(pair for *_, ms in group for pair in ms) for group in (ours, theirs)]
    ordered = [ratios((ms[1][1], ms[2][1]) for *_, ms in group) for group in (ours, theirs)]
    of = {(y, r.measures.get("same_bits")) for x in lines for y, r in x.records.items() if "@" in y}
    bad = sorted(x for x, y in of if y is False) or ["none" if any(y for _, y in of) else NOTHING]
    said = stated(
        f"Varlen costs {varlen[0]} (published: {varlen[1]}).",
        f"A deterministic backward of a packed row costs {ordered[0]} (published: {ordered[1]}).",
        f"Other bits in a second deterministic backward: {', '.join(bad)}.",
    )
    columns = [
        Column("mask", lambda row: "causal" if row[0] else "full"),
        Column("kernel", lambda row: row[1]),
        *(Column("".join(x).replace("@", ", "), partial(rates, i)) for i, x in enumerate(TIMED)),
    ]
    rows = [row for row in (*ours, *theirs) if any(map(all, row[2]))]
    title = f"{_shape(case)}: fixed/varlen TFLOP/s, cost; {machine}"
    return Table.of(rows, columns, title, notes=said)


def _by_size(lines: Lines, size: str, ms: str, peak: str, title: str, said: Any = ()) -> Table:
    """A line for each size; the times of both passes, then their peaks."""
    rows = grouped_by(lines, lambda x: (x.case.get("causal"), x.case[size]))
    names = dict.fromkeys(name for line in lines for name in line.records)

    def text(name: str, own: Lines) -> str:
        found = [x.records[name] for x in own if name in x.records]
        times = "/".join(three_digits(value(r, ms)) if is_ok(r) else r.status for r in found)
        peaks = (value(r, peak.format(r.case["pass"])) for r in found)
        return f"{times}, {'/'.join(f'{mib:,.0f}' for mib in peaks if mib)}".removesuffix(", ")

    columns = [
        Column("mask", lambda own: MASK.cell(own[0]) if "causal" in own[0].case else ""),
        Column("tokens", lambda own: f"{own[0].case[size]:,}"),
        *(Column(f"`{name}`", partial(text, name)) for name in names),
    ]
    return Table.of(rows.values(), columns, title, notes=said)


def _memory(lines: Lines, machine: str) -> Table:
    known = [x for x in lines if x.case["max_length"] == 8192 and x.pass_ == "forward"]
    fa2, fa3 = (ratios(((x.ms(y), x.ms("standard")) for x in known), ".1f") for y in (FA2, FA3))
    two = ([x.records.get(y) for y in (FA2, "standard")] for x in known)
    peaks = ([value(x, "forward_peak_mib") for x in pair] for pair in two)
    said = stated(
        f"At 8,192 tokens FA2's forward is {fa2} times as fast as standard attention (published of "
        f"an H100: 3.2), FA3's {fa3} times (5.6).",
        f"Standard attention's takes {ratios(peaks, '.0f')} times the memory of FA2's.",
    )
    title = f"{_shape(lines[0].case)}: forward/backward ms, peak MiB; {machine}"
    return _by_size(lines, "max_length", "device_ms_p50", "{}_peak_mib", title, said)


def _llama(lines: Lines, machine: str) -> Table:
    shape = f"{lines[0].case['geometry']}, {lines[0].case['tokens']:,} tokens in equal documents"
    title = f"{shape}: training/inference ms, peak MiB; {machine}"
    return _by_size(lines, "mean_doc", "ms_p50", "peak_mib", title)


def _sdpa(lines: Lines, machine: str) -> Table:
    passes = grouped_by(lines, lambda x: repr(x.case)).values()
    records = [(own, name, r) for own in passes for name, r in own[0].records.items()]
    shares = {x: {value(r, "unequal") for _, y, r in records if y == x} for x in (FA2, *FORCED)}
    took = [name for name in FORCED if shares[name] == {0.0}]
    equal = ratios(((1, 1 - x) for x in shares[FA2] if x is not None), ".1%")
    slower, flash = (ratios((x.ms(y), x.ms(FA2)) for x in lines) for y in (DEFAULT, "sdpa:flash"))
    said = stated(
        f"The default has the bits of {', '.join(f'`{x}`' for x in took) or 'no kernel'}.",
        f"FA2's output equals it in {equal} of the elements (published: 96.7%).",
        f"FA2's times differ by {slower} (published: 6%), from `sdpa:flash`'s by {flash}.",
    )
    columns = [
        Column("heads", lambda row: str(row[0][0].case["num_heads"])),
        Column("mask", lambda row: MASK.cell(row[0][0])),
        Column("attention", lambda row: f"`{row[1]}`"),
        Column("forward/backward ms", lambda r: "/".join(three_digits(x.ms(r[1])) for x in r[0])),
        Column("other bits", lambda row: share(value(row[2], "unequal"))),
        Column("largest difference", lambda row: number(value(row[2], "difference"))),
        Column("error against fp64", lambda row: number(value(row[2], "error_out"))),
        Column("outcome", lambda row: "" if is_ok(row[2]) else row[2].outcome),
    ]
    title = "{batch} documents of {max_length:,} tokens, {dtype}; ".format(**lines[0].case)
    return Table.of(records, columns, title + machine, notes=said)


TABLES, SUITE = (_overhead, _memory, _llama, _sdpa), Published()
