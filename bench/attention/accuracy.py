"""Some documents of a row, each alone in fp64, and how far every kernel of a cell is off on them.

As `mask_build/accuracy.py`, whose rule this keeps (within twice the error of a low-precision
peer, three times for gradients), but: the exact answers are made once for all kernels, a block of
queries at a time, with or without a causal mask, so that long documents fit.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim, L = tokens of one
document, G = H / Hkv.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flexvarlen.bench.mask_build.accuracy import NAMES, Answer, disagreement, why_wrong

SHORTEST_SAMPLE, LONGEST_SAMPLE = 16, 16_384
QUERY_BLOCK = 1024  # fp64 scores of 4 heads then take 512 MiB on the longest sample


def sampled_spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """First token and token past the last: near the start, middle and end, longest, shortest.

    Of documents of `SHORTEST_SAMPLE` to `LONGEST_SAMPLE` tokens; else the one nearest to that.
    """
    ends = list(accumulate(lengths))
    every = [(end - length, end) for length, end in zip(lengths, ends, strict=True)]

    def size(span: tuple[int, int]) -> int:
        return span[1] - span[0]

    spans = [span for span in every if SHORTEST_SAMPLE <= size(span) <= LONGEST_SAMPLE]
    if not spans:
        return [min(every, key=lambda span: abs(math.log(size(span) / LONGEST_SAMPLE)))]
    middle = min(spans, key=lambda span: abs(span[0] - ends[-1] // 2))
    chosen = {spans[0], middle, spans[-1], max(spans, key=size), min(spans, key=size)}
    return sorted(chosen)


def alone(
    inputs: Sequence[Tensor],
    cotangent: Tensor,
    dtype: torch.dtype,
    causal: bool,
    block: int = QUERY_BLOCK,
) -> dict[str, Tensor]:
    """Attention of one document in `dtype`, softmax in fp32 or wider, with its gradients.

    Args:
        inputs: q `[L, G, D]`, k and v `[L, 1, D]`.
        cotangent: `[L, G, D]`.
        block: queries whose scores are held at once.
    """
    q, k, v, g = (x.detach().to(dtype).transpose(0, 1) for x in (*inputs, cotangent))
    wide = torch.promote_types(dtype, torch.float32)
    length, scale = q.shape[1], q.shape[2] ** -0.5
    out, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for begin in range(0, length, block):
        rows = slice(begin, min(begin + block, length))
        keys = slice(0, rows.stop if causal else length)
        scores = (q[:, rows] @ k[:, keys].mT).to(wide) * scale
        if causal:
            future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
            scores.masked_fill_(future.triu(begin + 1), float("-inf"))
        probabilities = scores.softmax(-1)
        low = probabilities.to(dtype)
        out[:, rows] = low @ v[:, keys]
        grad = (g[:, rows] @ v[:, keys].mT).to(wide)
        mean = (probabilities * grad).sum(-1, keepdim=True)
        grad_scores = (probabilities * (grad - mean) * scale).to(dtype)
        dq[:, rows] = grad_scores @ k[:, keys]
        dk[:, keys] += (grad_scores.mT @ q[:, rows]).to(wide).sum(0, keepdim=True)
        dv[:, keys] += (low.mT @ g[:, rows]).to(wide).sum(0, keepdim=True)
    found = (out, dq, dk.to(dtype), dv.to(dtype))
    return {name: x.transpose(0, 1) for name, x in zip(NAMES, found, strict=True)}


# For the plain answer of a long document, whose scores fit nowhere; math where it cannot serve.
_PLAIN = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def plain_row(
    qkv: Sequence[Tensor],
    cotangent: Tensor,
    lengths: Sequence[int],
    causal: bool,
    gradients: bool,
) -> Answer:
    """The whole row by torch's SDPA, a document at a time, in the inputs' dtype.

    By the memory-efficient kernel or by matrix products: no code is shared with the kernels of
    FlashAttention and flex, and none knows of other documents.

    Args:
        qkv: `[T, H, D]`, `[T, Hkv, D]` twice.
        cotangent: `[T, H, D]`, what the backward starts from.

    Returns:
        Output `[T, H, D]`, and with `gradients` those of q, k and v.
    """
    group = qkv[0].shape[1] // qkv[1].shape[1]
    found = [torch.empty_like(x) for x in (qkv[0], *(qkv if gradients else ()))]
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        begin += length
        leaves = [x[rows].detach().requires_grad_(gradients) for x in qkv]
        q, k, v = (x.transpose(0, 1)[None] for x in leaves)
        if group > 1:  # the memory-efficient kernel knows no grouped queries
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        with sdpa_kernel(list(_PLAIN), set_priority=True):
            out = scaled_dot_product_attention(q, k, v, is_causal=causal)[0].transpose(0, 1)
        own = torch.autograd.grad(out, leaves, cotangent[rows]) if gradients else ()
        for whole, part in zip(found, (out.detach(), *own), strict=True):
            whole[rows] = part
    return Answer(found)


class Oracle:
    """The exact answers on sampled documents of one cell, the peer's errors, and a plain row.

    Args:
        qkv: `[T, H, D]`, `[T, Hkv, D]` twice.
        cotangent: `[T, H, D]`, what the backward starts from.
        row: also make the plain answer of the whole row ("forward", or with gradients "backward").

    Raises:
        RuntimeError: the plain answer is itself not right on the sampled documents.
    """

    def __init__(
        self,
        qkv: Sequence[Tensor],
        cotangent: Tensor,
        lengths: Sequence[int],
        causal: bool,
        row: Literal["forward", "backward"] | None = None,
    ) -> None:
        q, k, v = qkv
        group = q.shape[1] // k.shape[1]
        self.dtype = q.dtype
        self.samples: list[tuple[dict[str, tuple[slice, slice]], dict[str, Tensor]]] = []
        self.plain: Answer | None = None
        self.peer_errors: dict[str, float] = {}
        peers = []
        for start, end in sampled_spans(lengths):
            for head in sorted({0, k.shape[1] - 1}):  # of k and v
                rows, heads = slice(start, end), slice(head * group, (head + 1) * group)
                own = slice(head, head + 1)
                inputs = (q[rows, heads], k[rows, own], v[rows, own])
                gradient = cotangent[rows, heads]
                exact = alone(inputs, gradient, torch.float64, causal)
                where = {name: (rows, heads if name in ("out", "dq") else own) for name in exact}
                peer = alone(inputs, gradient, q.dtype, causal)
                self.samples.append((where, exact))
                peers.append(peer)
        for name in NAMES:
            errors = [
                _relative(peer[name], exact[name])
                for peer, (_, exact) in zip(peers, self.samples, strict=True)
            ]
            self.peer_errors[f"peer_error_{name}"] = _worst(errors)
        if row is not None:
            self.plain = plain_row(qkv, cotangent, lengths, causal, row == "backward")
            reason = why_wrong(self.errors(self.plain), self.dtype)
            if reason is not None:
                raise RuntimeError(f"torch's SDPA of each document alone is wrong: {reason}")

    def errors(self, answer: Answer) -> dict[str, Any]:
        """`error_*` and `peer_error_*` of each tensor of the answer, the worst sample's. Syncs."""
        measures: dict[str, Any] = {"samples": len(self.samples)}
        for name, found in answer.named().items():
            errors = [_relative(found[where[name]], exact[name]) for where, exact in self.samples]
            measures[f"error_{name}"] = _worst(errors)
            measures[f"peer_error_{name}"] = self.peer_errors[f"peer_error_{name}"]
        return measures

    def judge(self, answer: Answer) -> tuple[dict[str, Any], str | None]:
        """Measures, and the sentence that says how the answer is wrong, or None.

        Sampled documents are held against their exact answers; the whole row against the plain one,
        if that was made.
        """
        measures = self.errors(answer)
        reason = why_wrong(measures, self.dtype)
        if reason is not None or self.plain is None:
            return measures, reason
        apart = disagreement(answer, Answer(self.plain.tensors[: len(answer.tensors)]))
        measures |= apart
        held = {f"error_{key}": apart[f"difference_{key}"] for key in answer.named()}
        reason = why_wrong(measures | held, self.dtype)
        said = "another answer than torch's SDPA of each document alone"
        return measures, None if reason is None else f"{said}: {reason}"


def _relative(found: Tensor, exact: Tensor) -> Tensor:
    relative: Tensor = (found.to(exact.dtype) - exact).norm() / exact.norm()
    return relative


def _worst(errors: Sequence[Tensor]) -> float:
    """The largest; NaN if one is."""
    return float(torch.stack(list(errors)).max())
