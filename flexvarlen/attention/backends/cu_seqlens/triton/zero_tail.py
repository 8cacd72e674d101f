"""Zero the tokens past the last boundary without a sync, at almost no cost if there are none."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexvarlen.layout.triton.launcher import Launcher

ROWS = 16
COLUMNS = 1024


@triton.jit(do_not_specialize=["last", "rows", "columns"])
def _zero_tail(cu_seqlens, x, last, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    begin = tl.load(cu_seqlens + last)
    row = tl.program_id(0).to(tl.int64) * ROWS
    if row + ROWS <= begin:
        return
    r = row + tl.arange(0, ROWS)
    for c in range(0, columns, COLUMNS):
        column = c + tl.arange(0, COLUMNS)
        where = (r[:, None] >= begin) & (r[:, None] < rows) & (column[None, :] < columns)
        zero = tl.zeros([ROWS, COLUMNS], dtype=x.dtype.element_ty)
        tl.store(x + r[:, None] * columns + column[None, :], zero, mask=where)


@cache
def _launcher(dtype: torch.dtype) -> Launcher:
    """Return the launcher for a dtype, as all calls of a launcher must have the same signature."""
    return Launcher(_zero_tail, {"ROWS": ROWS, "COLUMNS": COLUMNS})


def zero_tail_(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Zero `x[cu_seqlens[-1]:]` in place.

    Args:
        x: contiguous `[T, ...]` on a CUDA device, with at least two dimensions.
        cu_seqlens: int32 `[N + 1]` on the same device.

    No sync.
    """
    rows = x.shape[0]
    columns = x.numel() // max(rows, 1)
    if columns == 0 or rows == 0:
        return x
    numbers = (cu_seqlens.shape[0] - 1, rows, columns)
    _launcher(x.dtype)(triton.cdiv(rows, ROWS), [cu_seqlens], [x], numbers)
    return x
