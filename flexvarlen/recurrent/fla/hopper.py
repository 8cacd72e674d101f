"""A step of fla's backwards in plain torch, where Triton compiles fla's kernel of it wrongly.

On Hopper, Triton 3.4 to 3.7.0 makes a kernel of `chunk_bwd_dqkwg` whose gradients of keys and decay
are wrong (flash-linear-attention issue 640), so fla refuses it there, unless tilelang is installed.
fla lets other packages register an implementation of a step; this one is matrix products by torch.

Shapes: T tokens in M chunks of 64; H, HV = heads of queries and keys, and of values; K, V = their
head_dim.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def avoid_wrong_kernel() -> None:
    """Register the step with fla on a machine where its own kernel is wrong."""
    from fla.backends import BaseBackend, register
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    if not IS_NVIDIA_HOPPER or not TRITON_ABOVE_3_4_0 or TRITON_ABOVE_3_7_1:
        return

    class InTorch(BaseBackend):  # type: ignore[misc]
        backend_type = "flexvarlen"
        priority = 9  # after tilelang's

        def chunk_bwd_dqkwg_verifier(self, *_: Any, **given: Any) -> tuple[bool, str | None]:
            """Whether the call is for packed rows, with a decay for each token and head."""
            by_document = given.get("chunk_indices") is not None and given.get("g") is not None
            return by_document and given.get(
                "g_gamma"
            ) is None, "it is for packed rows with a decay"

        def chunk_bwd_dqkwg(self, **given: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
            given.pop("g_gamma", None)  # not given by the delta rule
            return gradients_of_chunks(**given)

    register("common")(InTorch)


def gradients_of_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    g: Tensor,
    scale: float,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    w: Tensor | None = None,
    dv: Tensor | None = None,
    chunk_size: int = 64,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of queries, keys, w and decay, from those of the outputs and of the states.

    Args:
        q, k: `[1, T, H, K]`.
        v, do, dv: `[1, T, HV, V]`.
        h, dh: states before each chunk, and their gradients, `[1, M, HV, K, V]`.
        g: sums of the log2 of the decay inside each chunk, fp32 `[1, T, HV]`.
        cu_seqlens, chunk_indices: as in `RecurrentDocuments`.

    Returns:
        dq, dk `[1, T, H, K]`, dw `[1, T, HV, K]` or None, dg `[1, T, HV]` of natural logarithms.
    """
    assert not state_v_first
    slots, numbers = chunk_indices.long().unbind(1)
    starts, ends = cu_seqlens.long()[slots], cu_seqlens.long()[slots + 1]
    tokens = (starts + numbers * chunk_size)[:, None] + torch.arange(chunk_size, device=q.device)
    real = tokens < ends[:, None]
    tokens = tokens.clamp(max=q.shape[1] - 1)
    heads = v.shape[2]

    def chunks(x: Tensor) -> Tensor:
        """`[1, T, heads, D]` as `[M, HV, 64, D]`, zeros past the end of a document."""
        found = x[0, tokens].masked_fill(~real[..., None, None], 0).transpose(1, 2)
        return found.repeat_interleave(heads // x.shape[2], dim=1)

    def row(x: Tensor) -> Tensor:
        """`[M, HV, 64, D]` as `[1, T, HV, D]`."""
        out = x.new_empty(1, q.shape[1], heads, x.shape[-1])
        out[0, tokens[real]] = x.transpose(1, 2)[real]
        return out

    q_c, k_c, v_c, do_c = map(chunks, (q, k, v, do))
    g_c = chunks(g[..., None])[..., 0]
    h_t, dh_t = (x[0].to(q.dtype).transpose(-1, -2) for x in (h, dh))
    last = (real.sum(1) - 1).clamp(min=0)[:, None].expand(-1, heads)[..., None]
    g_last = g_c.gather(2, last)
    dg_last = (h[0].float() * dh[0].float()).sum((-1, -2)) * g_last[..., 0].exp2()

    dq = _product(do_c, h_t) * g_c.exp2()[..., None] * scale
    dk = _product(v_c, dh_t) * (g_last - g_c).exp2()[..., None]
    dg_last += (dk * k_c).sum((-1, -2))
    future = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).triu(1)
    unseen = future | ~real[:, None, :, None]
    decay = (g_c[..., :, None] - g_c[..., None, :]).masked_fill(unseen, float("-inf")).exp2()
    dscores = (_product(do_c, v_c.transpose(-1, -2)) * decay * scale).to(k.dtype)
    dq += _product(dscores, k_c)
    dk += _product(dscores.transpose(-1, -2), q_c)
    dg = (dq * q_c).sum(-1) - (dk * k_c).sum(-1)
    dg.scatter_add_(2, last, dg_last[..., None])

    dw = None if dv is None else row(-_product(chunks(dv), h_t)).to(q.dtype)
    dq_row, dk_row = (row(x).unflatten(2, (q.shape[2], -1)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq_row, dk_row, dw, row(dg[..., None])[..., 0]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in fp32, of `[M, HV, n, D]` and `[M, HV, D, m]`."""
    if not a.is_cuda or a.dtype == torch.float32:
        return a.float() @ b.float()
    a_flat, b_flat = a.flatten(0, 1).contiguous(), b.flatten(0, 1)
    out = torch.bmm(a_flat, b_flat, out_dtype=torch.float32)
    return out.view(*a.shape[:-1], b.shape[-1])
