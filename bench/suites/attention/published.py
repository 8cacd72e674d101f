"""Suite "published": three published results, measured again and set beside the published figures.

- "overhead": what varlen costs over fixed lengths, and a deterministic backward over another one.
  Dao-AILab/flash-attention#2150 has it of FA4 on a B200, in this shape.
- "memory": time and peak memory of attention that holds all scores, and of kernels that do not;
  alone, and in Llama. The flash-attention skill of NousResearch/hermes-agent has the forward's
  times in this shape on an H100, FA3's in FP16; it does not say under which mask.
- "sdpa": the kernels behind `scaled_dot_product_attention`, each forced, beside FA2. No source was
  found for what is said of the two.

All documents of a case are equally long. "fixed:", "sdpa:" and "standard" take them as a batch, the
others as one packed row; "raw:" is a kernel's own varlen function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from flexvarlen.bench.suites.attention.engine import measure_attention
from flexvarlen.bench.suites.attention.inputs import Inputs, Prepare, Prepared
from flexvarlen.bench.suites.attention.packed import ON_CPU, PACKAGES, RAW, ours
from flexvarlen.bench.suites.attention.padded import fixed, forced, sdpa, standard
from flexvarlen.bench.suites.attention.padding import PaddingCase
from flexvarlen.bench.suites.attention.tables import (
    MASK,
    PASS,
    Measured,
    field,
    measured,
    times_table,
    where,
)
from flexvarlen.bench.suites.model.cases import SEED, ModelCase, split_variant
from flexvarlen.bench.suites.model.tables import value
from flexvarlen.bench.suites.model.whole_model import Training
from flexvarlen.measure.memory import peak_memory_mib
from flexvarlen.report.records import Record, by_machine
from flexvarlen.report.table import NOTHING, Column, Table
from flexvarlen.runner.suite import Findings, Options, Suite, choose
from flexvarlen.verify.experiment.measure import CheckedVariant, first_run, measure_variants
from flexvarlen.verify.experiment.variant import make_variant

SIZES = (512, 1024, 2048, 4096, 8192, 16_384)
ORDERED = "@deterministic"
TIMED = (("forward", ""), ("backward", ""), ("backward", ORDERED))
FA4_ON_B200 = {
    False: ((1.445, 1.485), (4.461, 4.577), (6.007, 6.020)),
    True: ((0.775, 0.792), (2.447, 2.542), (2.923, 3.012)),
}
"""Published ms of fixed lengths and of varlen, in the order of `TIMED`, by causal."""
KERNELS = {x: (f"fixed:{x}", f"raw:{x}") for x in PACKAGES} | {
    "torch": ("sdpa:flash", "raw:varlen")
}
"""The variants of each kernel, of fixed lengths and varlen."""
DEFAULT = "sdpa:default"
FORCED = {
    "sdpa:flash": SDPBackend.FLASH_ATTENTION,
    "sdpa:efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa:math": SDPBackend.MATH,
}
PACKED = ("flex", "varlen", "fa2", "fa3")
THEIRS = ("eager", "flash_attention_2", "flash_attention_3")


# --- variants ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Switched(Prepared):
    """Its backward runs under torch's switch, which also fills new memory, as its users have it."""

    def backward(self, out: Any) -> tuple[Tensor, ...]:
        torch.use_deterministic_algorithms(True)
        try:
            return super().backward(out)
        finally:
            torch.use_deterministic_algorithms(False)


def switched(prepare: Prepare, inputs: Inputs, grad: bool) -> Prepared:
    """A kernel of torch with a deterministic backward."""
    return _Switched(**vars(prepare(inputs, grad)))


def observed(prepare: Prepare, default: Prepare | None, inputs: Inputs, grad: bool) -> Prepared:
    """The same, with measures: by how much a call raises the peak of memory, and what bits it has.

    `forward_peak_mib`, and `backward_peak_mib` of a forward with its backward; `same_bits`: whether
    two backwards agree; of the output's elements `unequal`, the share that are not the default's.
    """
    one = prepare(inputs, grad)
    measures: dict[str, Any] = {}
    calls = {"forward": one.forward, "backward": lambda: one.backward(one.forward())}
    for pass_ in ("forward", "backward")[: 1 + grad]:
        first = calls[pass_]()  # compiles, too
        held = torch.cuda.memory_allocated() / 2**20 if inputs.q.is_cuda else 0.0
        peak = peak_memory_mib(calls[pass_], inputs.q.device)
        measures[f"{pass_}_peak_mib"] = None if peak is None else peak - held
    if grad:
        measures["same_bits"] = all(map(torch.equal, first, calls["backward"]()))
    if default is not None:
        out, other = (x.as_THD(x.forward().detach()) for x in (one, default(inputs, False)))
        measures["unequal"] = float((out != other).double().mean())
        measures["difference"] = float((out.double() - other.double()).abs().max())
    return replace(one, measures={**one.measures, **measures})


def calls_of(part: str, options: Options) -> dict[str, Prepare]:
    """The variants of a part."""
    each: dict[str, Prepare] = {name: partial(forced, kernel) for name, kernel in FORCED.items()}
    batches = {f"fixed:{name}": partial(fixed, module) for name, module in PACKAGES.items()}
    if part == "overhead":
        asked: dict[str, Prepare] = {**batches, **{f"raw:{x}": RAW[x] for x in PACKAGES}}
        of_torch = {"sdpa:flash": each["sdpa:flash"], "raw:varlen": RAW["varlen"]}
        ordered: dict[str, Prepare]
        ordered = {x + ORDERED: partial(y, deterministic=True) for x, y in asked.items()}
        ordered |= {x + ORDERED: partial(switched, y) for x, y in of_torch.items()}
        return asked | of_torch | ordered
    first: dict[str, Prepare] = {"standard": standard}
    if part == "sdpa":
        first = {DEFAULT: sdpa, **each}
    packed = {name: ours(name) for name in (PACKED if options.on_gpu else ON_CPU[:1])}
    return {**first, **{x: batches[x] for x in ("fixed:fa2", "fixed:fa3")}, **packed}


# --- cases ---------------------------------------------------------------------------------------


class EqualDocuments(PaddingCase):
    """Attention on `batch` documents of `max_length` tokens each."""

    @property
    def name(self) -> str:
        mask, head_dim = "causal" if self.causal else "full", self.embedding // self.num_heads
        return f"{self.part}-d{head_dim}-{mask}-{self.batch}x{self.max_length}"

    def variants(self, options: Options) -> Sequence[str]:
        return list(calls_of(self.part, options))

    def measure(self, variants: Sequence[str], options: Options) -> Findings:
        default = sdpa if self.part == "sdpa" else None
        chosen = choose(variants, calls_of(self.part, options)).items()
        calls = {name: partial(observed, call, default) for name, call in chosen}
        repeats = 100 if self.part == "overhead" else 30  # a cost is of a few percent
        return measure_attention(self.inputs(options.device), calls, options, repeats=repeats)


@dataclass(frozen=True)
class LlamaSteps(ModelCase):
    """A training step, and the forward of the base model alone; `mean_doc` tokens a document."""

    part: str = "memory"

    @property
    def name(self) -> str:
        return f"{self.part}-{self.geometry}-{self.mean_doc}"

    def variants(self, options: Options) -> Sequence[str]:
        names = [f"padded:transformers:{x}" for x in THEIRS]
        return [*names, "packed:flex"] if options.on_gpu else [*names, "packed:sdpa"]

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
    """Three parts, each a section of the page."""

    name: ClassVar[str] = "published"
    page_parts: ClassVar[Sequence[str]] = ("overhead", "memory", "sdpa")

    def cases(self, options: Options) -> Sequence[EqualDocuments | LlamaSteps]:
        def equal(part: str, causal: bool, batch: int, tokens: int, heads: int, dim: int) -> Any:
            shape = (causal, batch, tokens, heads * dim, heads, options.dtype)
            return EqualDocuments("full-length", *shape, part=part)

        def llama(geometry: str, layers: int, total: int, tokens: int) -> LlamaSteps:
            given = (geometry, layers, "eager", total, "uniform", "", tokens, None, False)
            return LlamaSteps(*given, dtype=options.dtype, seed=SEED)

        if options.is_small:
            parts = [equal(part, True, 2, 48, 2, 64) for part in self.page_parts]
            return [*parts, llama("llama-tiny", 2, 96, 48)]
        return [
            *(equal("overhead", causal, 4, 8192, 16, 128) for causal in (False, True)),
            *(equal("memory", True, 8, tokens, 32, 64) for tokens in SIZES),
            equal("memory", False, 8, 8192, 32, 64),
            *(equal("sdpa", x, 4, 4096, 2048 // d, d) for d in (64, 128) for x in (False, True)),
            *(llama("llama-3.2-1b", 16, 16_384, tokens) for tokens in SIZES),
        ]

    def variants(self, case: Any, options: Options) -> Sequence[str]:
        return list(case.variants(options))

    def measure(self, case: Any, variants: Sequence[str], options: Options) -> Findings:
        return list(case.measure(variants, options))

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        for own in by_machine(records):
            lines = sorted(measured(own), key=_order)
            for part, tables in zip(self.page_parts, (_overhead, _memory, _sdpa), strict=True):
                of_part = [x for x in lines if x.case["part"] == part]
                yield from tables(of_part, where(own)) if of_part else ()


# --- tables --------------------------------------------------------------------------------------


def _order(line: Measured) -> tuple[Any, ...]:
    fields = ("causal", "num_heads", "mean_doc", "max_length")
    return (line.pass_ in ("backward", "inference"), *(line.case.get(x) or 0 for x in fields))


def _of(name: str) -> Callable[[Measured, str], float | None]:
    """A measure of a variant; `name` may hold the pass."""
    return lambda line, variant: value(line.records.get(variant), name.format(line.pass_))


def _range(found: Iterable[float], form: str = "+.1%") -> str:
    known = sorted(found)
    return f"{known[0]:{form}} to {known[-1]:{form}}" if known else NOTHING


def _costs(pairs: Iterable[Sequence[float | None]]) -> list[float]:
    """By how much the second time exceeds the first, where both are known."""
    return [b / a - 1 for a, b in pairs if a and b]


def _overhead(lines: Sequence[Measured], ran_on: str) -> Iterator[Table]:
    case = lines[0].case
    work = 4 * case["batch"] * case["max_length"] ** 2 * case["embedding"] / 1e9
    at = {(x.case["causal"], x.pass_): x for x in lines}
    theirs, own = [], []
    for causal in dict.fromkeys(causal for causal, _ in at):
        theirs.append((causal, "FA4 on a B200, published", FA4_ON_B200[causal]))
        for name, pair in KERNELS.items():
            ms = [[at[causal, x].ms(y + form) for y in pair] for x, form in TIMED]
            own.append((causal, f"`{name}`", ms))

    def times(index: int, row: tuple[bool, str, Any]) -> str:
        done = work * (2.5 if index else 1) / (2 if row[0] else 1)
        text = " → ".join(f"{ms:.2f} ({done / ms:,.0f})" for ms in row[2][index] if ms)
        return f"{text}, {cost[0]:+.1%}" if (cost := _costs([row[2][index]])) else NOTHING

    costs, ordered = (
        [_range(_costs(pair for *_, ms in rows for pair in pairs(ms))) for rows in (own, theirs)]
        for pairs in (list, lambda ms: [(ms[1][1], ms[2][1])])
    )
    columns = [
        Column("mask", lambda row: "causal" if row[0] else "full"),
        Column("kernel", lambda row: row[1]),
        *(Column("".join(x).replace("@", ", "), partial(times, i)) for i, x in enumerate(TIMED)),
    ]
    title = f"{case['batch']} documents of {case['max_length']:,} tokens, {case['num_heads']} heads"
    said = (
        f"Varlen costs {costs[0]} (published: {costs[1]}); a deterministic backward of the packed "
        f"row costs {ordered[0]} (published: {ordered[1]})."
    )
    title = f"{title}, {case['dtype']}: ms (TFLOP/s) of fixed lengths → varlen, its cost; {ran_on}"
    yield Table.of(sorted(own + theirs, key=lambda row: row[0]), columns, title, notes=[said])


def _memory(lines: Sequence[Measured], ran_on: str) -> Iterator[Table]:
    llama = [x for x in lines if "geometry" in x.case]
    alone = [x for x in lines if x not in llama]
    columns = [PASS, MASK, field("tokens", "max_length", "{:,}".format)]
    shape = f"8 documents, 32 heads of 64, {lines[0].case['dtype']}"
    peak = "MiB by which it raises the peak of memory, of the backward with its forward"
    yield times_table(alone, columns, f"{shape}: ms on the device; {ran_on}")
    yield times_table(alone, columns, f"{shape}: {peak}", value=_of("{}_peak_mib"))
    columns = [PASS, field("tokens", "mean_doc", "{:,}".format)]
    shape = "Llama-3.2-1B, 16,384 tokens in documents of one length"
    yield times_table(llama, columns, f"{shape}: ms; {ran_on}", value=_of("ms_p50"))
    yield times_table(llama, columns, f"{shape}: peak MiB, weights included", value=_of("peak_mib"))


def _sdpa(lines: Sequence[Measured], ran_on: str) -> Iterator[Table]:
    columns = [PASS, MASK, field("heads", "num_heads")]
    shape = "4 documents of 4,096 tokens, 2,048 channels"
    yield times_table(lines, columns, f"{shape}: ms on the device; {ran_on}")
    forwards = [x for x in lines if x.pass_ == "forward"]
    for name, what in (
        ("unequal", "share of the output's elements that are not the default's"),
        ("difference", "largest difference from the default's output"),
        ("error_out", "relative error of the output against fp64"),
    ):
        yield times_table(forwards, columns[1:], f"{shape}: {what}", value=_of(name))


SUITE = Published()
