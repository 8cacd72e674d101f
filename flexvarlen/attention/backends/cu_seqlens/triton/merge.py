"""Merge the outputs of two attention calls by their log-sum-exp, in one launch."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexvarlen.layout.triton.launcher import Launcher

TOKENS = 32


@triton.jit(do_not_specialize=["total_tokens", "heads"])
def _merge(
    out,
    lse,
    next_out,
    next_lse,
    merged,
    merged_lse,
    total_tokens,
    heads,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = tl.program_id(0) % heads
    tokens = (tl.program_id(0) // heads) * TOKENS + tl.arange(0, TOKENS)
    in_row = tokens < total_tokens
    at = head.to(tl.int64) * total_tokens + tokens
    before = tl.load(lse + at, mask=in_row, other=float("-inf"))
    after = tl.load(next_lse + at, mask=in_row, other=float("-inf"))
    before = tl.where(before == float("inf"), float("-inf"), before)
    after = tl.where(after == float("inf"), float("-inf"), after)
    sees = after != float("-inf")  # else nothing changes; NaN propagates
    most = tl.where(sees, tl.maximum(before, after), 0.0)
    both = most + tl.log(tl.exp(before - most) + tl.exp(after - most))
    tl.store(merged_lse + at, tl.where(sees, both, before), mask=in_row)
    share = tl.where(sees, tl.exp(before - both), 1.0)[:, None]
    next_share = tl.where(sees, tl.exp(after - both), 0.0)[:, None]
    lane = tl.arange(0, LANES)
    cells = (tokens.to(tl.int64)[:, None] * heads + head) * HEAD_DIM + lane[None, :]
    wanted = in_row[:, None] & (lane < HEAD_DIM)[None, :]
    x = tl.load(out + cells, mask=wanted, other=0.0).to(tl.float32)
    # Without visible keys it is 0, or NaN: kernels report NaN scores as no visible keys, too.
    y = tl.load(next_out + cells, mask=wanted, other=0.0).to(tl.float32)
    tl.store(merged + cells, (x * share + y * next_share).to(merged.dtype.element_ty), mask=wanted)


def merge_in_one_launch(
    out: Tensor, lse: Tensor, next_out: Tensor, next_lse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`flexvarlen.attention.backends.cu_seqlens.levels.merge` on a CUDA device."""
    tokens, heads, head_dim = out.shape
    merged, merged_lse = torch.empty_like(out, dtype=dtype), torch.empty_like(lse)
    programs = triton.cdiv(tokens, TOKENS) * heads
    if programs:
        launcher = _launcher(head_dim, out.dtype, next_out.dtype, dtype)
        inputs, outputs = [out, lse, next_out, next_lse], [merged, merged_lse]
        launcher(programs, inputs, outputs, (tokens, heads))
    return merged, merged_lse


@lru_cache
def _launcher(head_dim: int, *dtypes: torch.dtype) -> Launcher:
    """Return the launcher for a signature."""
    lanes = triton.next_power_of_2(head_dim)
    return Launcher(_merge, {"HEAD_DIM": head_dim, "LANES": lanes, "TOKENS": TOKENS})
