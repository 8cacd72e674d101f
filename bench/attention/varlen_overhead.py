"""Suite "varlen-overhead": what varlen costs over the same kernel's fixed lengths; and determinism.

The same documents, all equally long, three times: as `[B, S, H, D]` through a kernel's fixed-length
function, as one packed row through its varlen function, and through `packed_attention`. Each also
with a deterministic backward ("@deterministic"), where the function takes that as an argument, of
torch's own kernels by its switch; it is timed only if it repeats its own bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from flexvarlen.bench.attention.engine import (
    PASSES,
    Inputs,
    Prepare,
    findings_of_all,
    measure_attention,
    ways_of,
)
from flexvarlen.bench.attention.kernels_tables import kernels_groups
from flexvarlen.bench.attention.varlen_forms import (
    DETERMINISTIC,
    KERNELS,
    ON_CPU,
    Forms,
    ways_of_kernel,
)
from flexvarlen.bench.mask_build.tables import Notes
from flexvarlen.bench.series import Measured, by_shape, legend, measured_cases, three_digits
from flexvarlen.bench.series_figure import Panel, Point, figure_path, runs_of, save_dots
from flexvarlen.bench.suite import Case, Finding, Options, Suite
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, one_line

SOURCE = "https://github.com/Dao-AILab/flash-attention/pull/2150"
CLAIMED = {
    (False, "forward", ""): (1.445, 1.485),
    (False, "backward", ""): (4.461, 4.577),
    (False, "backward", DETERMINISTIC): (6.007, 6.020),
    (True, "forward", ""): (0.775, 0.792),
    (True, "backward", ""): (2.447, 2.542),
    (True, "backward", DETERMINISTIC): (2.923, 3.012),
}
"""What that source measured of FA4 on a B200, fixed and varlen, in ms; by causal, pass, form."""
CLAIMED_KERNEL, CLAIMED_ON = "fa4", "B200"
CLAIMED_COST = 0.03  # "minimal", of which its own figures make 3%
SHAPE = ("batch", "seqlen", "num_heads", "head_dim", "dtype")  # what a table's cases share


@dataclass(frozen=True)
class OverheadCase:
    """A batch of documents of `seqlen` tokens each."""

    causal: bool
    seqlen: int = 8192
    batch: int = 4
    num_heads: int = 16
    head_dim: int = 128
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{'causal' if self.causal else 'full'}-{self.batch}x{self.seqlen}"

    def data(self) -> dict[str, Any]:
        return asdict(self)

    def inputs(self, device: torch.device) -> Inputs:
        """Random q, k, v `[batch · seqlen, num_heads, head_dim]`."""
        shape = (self.batch, self.seqlen, self.num_heads, self.head_dim)
        return Inputs.equally_long(*shape, self.dtype, device, self.causal)


class VarlenOverhead(Suite):
    """Two cases, causal and not."""

    name: ClassVar[str] = "varlen-overhead"

    def cases(self, options: Options) -> Sequence[Case]:
        small: dict[str, Any] = {}
        if options.quick or not options.on_gpu:
            dtype = "bfloat16" if options.on_gpu else "float32"
            small = {"seqlen": 64, "batch": 2, "num_heads": 2, "head_dim": 16, "dtype": dtype}
        return [OverheadCase(causal, **small) for causal in (False, True)]

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        assert isinstance(case, OverheadCase)
        left_out = ON_CPU if options.on_gpu else "flex"  # which takes long to compile there
        return [name for kernel in KERNELS if kernel != left_out for name in ways_of_kernel(kernel)]

    def measure(self, case: Case, variants: Sequence[str], options: Options) -> Sequence[Finding]:
        assert isinstance(case, OverheadCase)
        known: dict[str, Prepare] = {}
        for kernel in KERNELS:
            known |= ways_of_kernel(kernel)
        chosen = ways_of(variants, known)
        try:
            inputs = case.inputs(options.device)
        except torch.OutOfMemoryError as error:
            return findings_of_all(chosen, PASSES, "oom", one_line(error))
        return measure_attention(inputs, chosen, options, bits=True)

    def section(self, rows: Sequence[Row]) -> str:
        return "\n\n".join(
            _section(own) for group in kernels_groups(rows) for own in by_shape(group, *SHAPE)
        )

    def figures(self, rows: Sequence[Row], folder: Path) -> Sequence[Path]:
        groups = (by_shape(group, *SHAPE)[0] for group in kernels_groups(rows))
        return [_machine_figure(group, folder) for group in groups]


SUITE = VarlenOverhead()


# --- tables --------------------------------------------------------------------------------------

LINES = (("forward", ""), ("backward", ""), ("backward", DETERMINISTIC))
"""Passes and what is asked of them, as the tables tell them."""


def mask_of(each: Measured) -> str:
    return "causal" if each.case["causal"] else "full"


def cost(each: Measured, slow: str | None, fast: str, pass_: str) -> float | None:
    """By how much longer one takes than the other, 0.03 for 3%; None unless both were timed."""
    ratio = None if slow is None else each.ratio(slow, fast, pass_)
    return None if ratio is None else ratio - 1


def percent(value: float | None) -> str:
    """A share with its sign.

    >>> percent(0.0312), percent(None)
    ('+3.1%', '–')
    """
    return "–" if value is None else f"{value:+.1%}"


def _kernels(each: Measured) -> Iterator[tuple[str, Forms]]:
    """Those that the rows hold."""
    for kernel, forms in KERNELS.items():
        if any(name in each.variants() for name in forms.named().values()):
            yield kernel, forms


def _section(rows: Sequence[Row]) -> str:
    cases = sorted(measured_cases(rows), key=lambda each: each.case["causal"])
    shape = cases[0].case
    said = (
        f"Batch {shape['batch']}, {shape['seqlen']:,} tokens each, {shape['num_heads']} heads, "
        f"head_dim {shape['head_dim']}, {shape['dtype']}; {runs_of(rows)}. TFLOP/s of unmasked "
        "work (and ms) by device time, p50; costs are in time. `varlen` and `sdpa:…` are made "
        "deterministic by torch's switch."
    )
    return "\n\n".join([said, varlen_table(cases), determinism_table(cases)])


def varlen_table(cases: Sequence[Measured]) -> str:
    """Fixed lengths beside varlen beside ours, of each kernel and pass."""
    notes, lines = Notes(), []
    for each in cases:
        for pass_, form in LINES:
            for kernel, forms in _kernels(each):
                names = [x if x is None else x + form for x in (forms.fixed, forms.varlen)]
                own = forms.ours + form
                fixed = forms.fixed + form
                claimed = CLAIMED[each.case["causal"], pass_, form]
                lines.append(
                    [
                        mask_of(each),
                        f"{pass_}{form.replace('@', ', ')}",
                        f"`{kernel}`",
                        *(_speed(each, name, pass_, notes) for name in (*names, own)),
                        percent(cost(each, names[1], fixed, pass_)),
                        percent(cost(each, own, fixed, pass_)),
                        f"{claimed[1] / claimed[0] - 1:+.1%}" if kernel == CLAIMED_KERNEL else "",
                    ]
                )
    header = [
        *("mask", "pass", "kernel", "fixed", "varlen", "flexvarlen"),
        *("varlen costs", "flexvarlen costs", f"claimed, {CLAIMED_ON}"),
    ]
    table = markdown(header, lines)
    return f"What varlen costs, over fixed lengths:\n\n{table}{legend(table)}{notes.text()}"


def _speed(each: Measured, variant: str | None, pass_: str, notes: Notes) -> str:
    row = None if variant is None else each.rows.get((variant, pass_))
    if row is None:
        return "–"
    if row.status != "ok":
        return notes.status(row).replace("unsupported", "–")
    tflops, mark = each.tflops(variant or "", pass_), each.mark(variant or "", pass_)
    speed = "–" if tflops is None else three_digits(tflops)
    return f"{speed} ({three_digits(row.measures['device_ms_p50'])}){mark}"


def determinism_table(cases: Sequence[Measured]) -> str:
    """Each form's backward, ordinary and deterministic; whether the ordinary repeats its bits."""
    notes, lines = Notes(), []
    for each in cases:
        for kernel, forms in _kernels(each):
            for form, name in forms.named().items():
                repeats = each.value(name, "backward", "bits_equal")
                lines.append(
                    [
                        *(mask_of(each), f"`{kernel}`", form),
                        _speed(each, name, "backward", notes),
                        _speed(each, name + DETERMINISTIC, "backward", notes),
                        percent(cost(each, name + DETERMINISTIC, name, "backward")),
                        "–" if repeats is None else "the same" if repeats else "others",
                    ]
                )
    header = [
        *("mask", "kernel", "form", "backward", "deterministic backward"),
        *("determinism costs", "bits of repeated ordinary backwards"),
    ]
    table = markdown(header, lines)
    return f"What determinism costs:\n\n{table}{legend(table)}{notes.text()}"


# --- figure --------------------------------------------------------------------------------------


def _machine_figure(rows: Sequence[Row], folder: Path) -> Path:
    cases = sorted(measured_cases(rows), key=lambda each: each.case["causal"])
    panels = [
        Panel(f"{pass_}, {mask_of(each)}", "", list(_points(each, pass_)))
        for pass_ in PASSES
        for each in cases
    ]
    shape = cases[0].case
    what = (
        f"Varlen beside fixed lengths: batch {shape['batch']}, {shape['seqlen']:,} tokens, "
        f"{shape['num_heads']} heads, head_dim {shape['head_dim']}, {shape['dtype']}, forward and "
        "backward (line: p20–p80)"
    )
    return save_dots(
        [panels],
        figure_path(folder, VarlenOverhead.name, rows),
        title=f"{what}\n{runs_of(rows)}",
        xlabel="TFLOP/s of unmasked work (log2)",
    )


def _points(each: Measured, pass_: str) -> Iterator[Point]:
    for variant in each.variants():
        if (variant, pass_) not in each.rows:
            continue
        y, low, high = (each.tflops(variant, pass_, at) for at in ("p50", "p80", "p20"))
        yield Point(variant, 0.0, y, low, high, each.status(variant, pass_))
