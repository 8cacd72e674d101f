"""The suite "sdpa-gradients": are the gradients of `scaled_dot_product_attention` right?

    flexvarlen bench sdpa-gradients

Two cases in which a kernel behind it is wrong: after a call of the same shape whose incoming
gradient lay in memory otherwise, and windows of few keys in float16. One document; errors against
fp64. Beside torch's kernels, flexvarlen's `sdpa` backend, which keeps SDPA from cuDNN.

Shape legend: L = tokens, H = num_heads, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flexvarlen import PackedLayout, packed_attention
from flexvarlen.bench.attention.sdpa_ways import FORCED
from flexvarlen.bench.suite import Case, Finding, Options, Suite
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, commit_of

OURS = "flexvarlen:sdpa"
BY_TOKENS, BY_HEADS = "by tokens", "by heads"
PARTS = ("output", "dq", "dk", "dv")


@dataclass(frozen=True)
class GradientCase:
    """One causal document.

    Attributes:
        tokens: of it; another number in each case, as a kernel may keep what it found for a shape.
        dtype: of the tensors.
        gradient: how the output's gradient lies in memory: `[L, H, D]`, as the output does, or
            `[H, L, D]`, as it comes out of indexing a batch of one, `out[0]`.
        earlier: the same of a call before the one that is measured; None: there is none.
        window: keys that a query sees; None: all before it.
        largest: of the numbers in q, k and v, which are uniform; None: they are standard normal.
    """

    tokens: int
    dtype: str
    gradient: str
    earlier: str | None = None
    window: int | None = None
    largest: float | None = None

    @property
    def name(self) -> str:
        """For `--cases`.

        >>> GradientCase(64, "float16", BY_TOKENS, window=2).name
        'float16-window2-64'
        """
        mask = "causal" if self.window is None else f"window{self.window}"
        return f"{self.dtype}-{mask}-{self.tokens}"

    def data(self) -> dict[str, Any]:
        return asdict(self)


class SdpaGradients(Suite):
    """Gradients of torch's SDPA, by kernel."""

    name = "sdpa-gradients"

    def cases(self, options: Options) -> Sequence[Case]:
        return [
            GradientCase(128, "bfloat16", BY_TOKENS, earlier=BY_TOKENS),
            GradientCase(192, "bfloat16", BY_TOKENS, earlier=BY_HEADS),
            GradientCase(256, "bfloat16", BY_HEADS, earlier=BY_TOKENS),
            GradientCase(320, "bfloat16", BY_HEADS, earlier=BY_HEADS),
            *(GradientCase(64, "float16", BY_TOKENS, None, window, 9.0) for window in (2, 9)),
        ]

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        return ["sdpa:default", *FORCED, OURS]

    def measure(self, case: Case, variants: Sequence[str], options: Options) -> Sequence[Finding]:
        assert isinstance(case, GradientCase)
        tensors = _tensors(case, options.device)
        exact = _gradients(_dense, case, [x.double() for x in tensors])
        return [_finding(name, case, tensors, exact) for name in variants]

    def section(self, rows: Sequence[Row]) -> str:
        """Relative errors of output, dq, dk and dv, and how gradients lay in memory."""
        lines = [
            [
                str(row.case["dtype"]),
                "all before" if row.case["window"] is None else f"{row.case['window']} keys",
                str(row.case["earlier"] or "–"),
                str(row.case["gradient"]),
                f"`{row.case['variant']}`",
                *(
                    [f"{row.measures[f'relative_{part}']:.2g}" for part in PARTS]
                    if row.status == "ok"
                    else [row.outcome, "", "", ""]
                ),
            ]
            for row in rows
        ]
        where = rows[0].environment
        head = f"{where.get('gpu') or 'CPU'}, torch {where['torch']}{commit_of(where)}:"
        header = ["dtype", "a query sees", "gradient before", "gradient", "kernel", *PARTS]
        return f"{head}\n\n{markdown(header, lines)}\n"


def _tensors(case: GradientCase, device: torch.device) -> list[Tensor]:
    """q, k, v and the output's gradient, `[L, H, D]`."""
    generator = torch.Generator(device).manual_seed(0)
    shape, dtype = (case.tokens, 4, 128), getattr(torch, case.dtype)
    if case.largest is None:
        qkv = [torch.randn(shape, generator=generator, device=device) for _ in range(3)]
    else:
        uniform = [torch.rand(shape, generator=generator, device=device) for _ in range(3)]
        qkv = [(2 * x - 1) * case.largest for x in uniform]
    grad = torch.randn(shape, generator=generator, device=device)
    return [x.to(dtype) for x in (*qkv, grad)]


def _lying(memory: str, grad_LHD: Tensor) -> Tensor:
    """The same gradient in that memory format."""
    if memory == BY_TOKENS:
        return grad_LHD.contiguous()
    return grad_LHD.transpose(0, 1).contiguous().transpose(0, 1)


def _finding(
    name: str, case: GradientCase, tensors: Sequence[Tensor], exact: Sequence[Tensor]
) -> Finding:
    context = sdpa_kernel(FORCED[name]) if name in FORCED else nullcontext()
    try:
        with context:
            *qkv, grad = tensors
            for memory in (case.earlier, case.gradient):
                if memory is not None:
                    inputs = [*qkv, _lying(memory, grad)]
                    found = _gradients(_ours if name == OURS else _sdpa, case, inputs)
    except RuntimeError as error:
        return Finding(name, "unsupported", str(error).partition("\n")[0])
    errors = {
        f"relative_{part}": float((x.double() - y).norm() / y.norm().clamp(min=1e-6))
        for part, x, y in zip(PARTS, found, exact, strict=True)
    }
    return Finding(name, "ok", None, errors)


Attend = Callable[[GradientCase, Tensor, Tensor, Tensor], Tensor]


def _gradients(attend: Attend, case: GradientCase, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The output, then the gradients of q, k and v."""
    *qkv, grad_LHD = tensors
    leaves = [x.detach().requires_grad_() for x in qkv]
    out_LHD = attend(case, *leaves)
    return [out_LHD.detach(), *torch.autograd.grad(out_LHD, leaves, grad_LHD)]


def _seen(case: GradientCase, q_LHD: Tensor) -> Tensor:
    tokens = torch.arange(len(q_LHD), device=q_LHD.device)
    behind = tokens[:, None] - tokens
    return (behind >= 0) & (behind < (case.window or len(tokens)))


def _sdpa(case: GradientCase, q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor) -> Tensor:
    """As users write it: a batch of one; `squeeze` hands the gradient on as it lies in memory."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_LHD, k_LHD, v_LHD))
    mask = None if case.window is None else _seen(case, q_LHD)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return out.squeeze(0).transpose(0, 1)


def _ours(case: GradientCase, q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor) -> Tensor:
    layout = PackedLayout.from_lengths([len(q_LHD)], device=q_LHD.device)
    out = packed_attention(q_LHD, k_LHD, v_LHD, layout, window=case.window, backend="sdpa")
    assert isinstance(out, Tensor)
    return out


def _dense(case: GradientCase, q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q_LHD, k_LHD) * q_LHD.shape[-1] ** -0.5
    probabilities = scores.masked_fill(~_seen(case, q_LHD), float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probabilities, v_LHD)


SUITE = SdpaGradients()
