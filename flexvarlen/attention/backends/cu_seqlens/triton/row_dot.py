"""Row-wise dot product of two tensors in fp32, without making fp32 copies of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32


@triton.jit
def _row_dot(a, b, out, tokens, heads, dim, ROWS: tl.constexpr, DIM: tl.constexpr):
    head = tl.program_id(1)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    where = (t[:, None] < tokens) & (d[None, :] < dim)
    at = (t[:, None].to(tl.int64) * heads + head) * dim + d[None, :]
    x = tl.load(a + at, mask=where, other=0.0).to(tl.float32)
    y = tl.load(b + at, mask=where, other=0.0).to(tl.float32)
    tl.store(out + head.to(tl.int64) * tokens + t, tl.sum(x * y, axis=1), mask=t < tokens)


def row_dot(a_THD: Tensor, b_THD: Tensor) -> Tensor:
    """Return `(a * b).sum(-1).T` as fp32 `[H, T]`, for contiguous `[T, H, D]` on a CUDA device.

    No sync. Deterministic.
    """
    tokens, heads, dim = a_THD.shape
    out = a_THD.new_empty((heads, tokens), dtype=torch.float32)
    if out.numel() == 0:
        return out
    with torch.cuda.device(a_THD.device):
        _row_dot[(triton.cdiv(tokens, ROWS), heads)](
            a_THD, b_THD, out, tokens, heads, dim, ROWS=ROWS, DIM=triton.next_power_of_2(dim)
        )
    return out
