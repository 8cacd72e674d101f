"""`scaled_dot_product_attention` on a rectangle of documents, and which kernel a call of it ran.

Shapes: T = tokens of the row, B = documents, S = tokens of a line, H = num_heads, D = head_dim.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from flexvarlen.bench.attention.inputs import Inputs, Prepare, Prepared
from flexvarlen.bench.attention.rectangle import future_of, heads_first
from flexvarlen.bench.suite import DeviceLost, Finding
from flexvarlen.drift.op.failures import is_lost
from flexvarlen.equivalence.variants import Unsupported
from flexvarlen.rows import one_line

FORCED = {
    "sdpa:flash": SDPBackend.FLASH_ATTENTION,
    "sdpa:efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa:math": SDPBackend.MATH,
}
"""The kernels of `scaled_dot_product_attention` that can be forced, by variant."""

# What the raised message holds where the kernels that are left cannot serve a call: on CUDA, else.
_NO_KERNEL = ("No available kernel", "No viable backend")


def sdpa(
    inputs: Inputs,
    needs_grad: bool,
    *,
    backend: SDPBackend | None = None,
    masked: bool = False,
    width: int | None = None,
) -> Prepared:
    """`scaled_dot_product_attention` on the rectangle.

    Args:
        inputs, needs_grad: as every `Prepare` takes them.
        backend: forced around each forward by `sdpa_kernel`, which costs the host some
            microseconds; None: torch's choice.
        masked: a boolean mask `[B, 1, 1, S]` of the real keys, with the causal one
            `[B, 1, S, S]`. Without: right for documents of S tokens, and under a causal mask; else
            padding is attended to.
        width: tokens of a line; default: the longest document's.

    The call raises `Unsupported` where a forced kernel cannot serve it.
    """
    views = heads_first(inputs, needs_grad, width)
    device = inputs.q.device
    mask = views.rectangle.real(device)[:, None, None] if masked else None
    if mask is not None and inputs.causal:
        mask = mask & ~future_of(views.rectangle.longest, device)
    causal = inputs.causal and mask is None

    def attend() -> Tensor:
        q, k, v = views.leaves
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)

    if backend is None:
        return views.prepared(attend)

    def forced() -> Tensor:
        try:
            with sdpa_kernel(backend):
                return attend()
        except RuntimeError as error:
            if not any(said in str(error) for said in _NO_KERNEL):
                raise
            raise Unsupported(_why_no_kernel(forced_once, backend)) from error

    def forced_once() -> None:
        with sdpa_kernel(backend):
            attend()

    return views.prepared(forced)


def _why_no_kernel(call: Callable[[], None], backend: SDPBackend) -> str:
    """What torch warns of when it refuses a kernel, on one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except RuntimeError as error:
            refused = str(error).partition("\n")[0]
        else:
            refused = "refused once and not again"
    reasons = dict.fromkeys(str(each.message).partition(" (Triggered")[0] for each in caught)
    return f"{backend.name}: {' '.join([refused, *reasons])}"[:600]


class _Operators(TorchDispatchMode):
    """Names of the operators that reach the dispatcher, below autograd."""

    PREFIX: ClassVar[str] = "aten._scaled_dot_product_"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attention: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(self.PREFIX):
            self.attention.append(name.removeprefix(self.PREFIX).partition(".")[0])
        return func(*args, **(kwargs or {}))


KERNELS = {
    "flash_attention": "flash",
    "efficient_attention": "efficient",
    "cudnn_attention": "cudnn",
    "fused_attention_overrideable": "overrideable",
    "flash_attention_for_cpu": "flash",
}
"""Operators of `scaled_dot_product_attention`, without their prefix, and what users call them."""


def sdpa_kernel_of(call: Callable[[], object]) -> str:
    """Which kernel a call of SDPA runs, by the operator that it dispatches to; runs it once.

    "math" is what decomposes into matrix products; a name that is not known is the operator's own.
    """
    seen = _Operators()
    with seen:
        call()
    # Math's is an operator of several: those below it are seen too.
    found = [name for name in seen.attention if not name.startswith("attention_math")]
    return ", ".join(KERNELS.get(name, name) for name in dict.fromkeys(found)) or "math"


def noted_forward(inputs: Inputs, prepare: Prepare, *, needs_grad: bool) -> tuple[str, Tensor]:
    """One forward of a call of SDPA: the kernel that it ran, and its output `[T, H, D]`."""
    prepared = prepare(inputs, needs_grad)
    outputs: list[Tensor] = []
    kernel = sdpa_kernel_of(lambda: outputs.append(prepared.forward().detach()))
    return kernel, prepared.as_THD(outputs[0])


def with_measures(finding: Finding, more: Mapping[str, Any]) -> Finding:
    """A finding of what was timed, with more measures; any other as it is."""
    if finding.status != "ok":
        return finding
    return dataclasses.replace(finding, measures={**finding.measures, **more})


def stop_if_lost(
    error: Exception, device: torch.device, findings: Sequence[Finding], what: str
) -> None:
    """Raise `DeviceLost` if that is what an error behind the timing means; the times stay."""
    if is_lost(error, device):
        message = f"a call of {what} behind the timing killed the device: {one_line(error)}"
        raise DeviceLost(f"{message}; run again to go on", findings) from error


def with_kernels(
    findings: Sequence[Finding],
    inputs: Inputs,
    ways: Mapping[str, Prepare],
    *,
    needs_grad: bool,
) -> list[Finding]:
    """The findings; calls of SDPA that were timed, `ways`, gain `sdpa_kernel`: what ran.

    Raises:
        DeviceLost: one of these calls killed the device; with the findings as they were.
    """
    timed = {each.variant for each in findings if each.status == "ok"}
    kernels = {}
    for name in (name for name in ways if name in timed):
        try:
            kernels[name] = noted_forward(inputs, ways[name], needs_grad=needs_grad)[0]
        except Exception as error:  # cuDNN's front end and compilers raise what they like
            stop_if_lost(error, inputs.q.device, findings, name)
            kernels[name] = f"not known: {one_line(error)}"
    return [
        with_measures(each, {"sdpa_kernel": kernels[each.variant]})
        if each.variant in kernels
        else each
        for each in findings
    ]
