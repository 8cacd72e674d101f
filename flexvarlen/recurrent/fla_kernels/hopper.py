"""A step of fla's backwards in plain torch, where Triton compiles fla's kernel of it wrongly.

On Hopper, Triton 3.4 to 3.7.0 makes a kernel of `chunk_bwd_dqkwg` whose gradients of keys and decay
are wrong (flash-linear-attention issue 640), so fla refuses it there, unless tilelang is installed.
fla lets other packages register an implementation of a step; this one is matrix products by torch,
and what Inductor makes of the rest.

Shapes: B rows of T tokens, each in M chunks of 64; H, HV = heads of queries and keys, and of
values; K, V = their head_dim.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def avoid_wrong_kernel() -> None:
    """Register the step with fla where its own kernel is wrong, for all of the process."""
    from fla.backends import BaseBackend, register
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    if not IS_NVIDIA_HOPPER or not TRITON_ABOVE_3_4_0 or TRITON_ABOVE_3_7_1:
        return

    compiled = torch.compile(gradients_of_chunks)  # of too many kinds of scans, some run eagerly

    class TorchBackend(BaseBackend):  # type: ignore[misc]
        backend_type = "flexvarlen"
        priority = 9  # after tilelang's

        def chunk_bwd_dqkwg_verifier(self, *_: Any, **given: Any) -> tuple[bool, str | None]:
            """Whether the call is one of those that `gradients_of_chunks` can serve."""
            serves = given.get("g") is not None and given.get("g_gamma") is None
            serves = serves and not given.get("state_v_first")
            return serves, None if serves else "it serves a decay per token"

        def chunk_bwd_dqkwg(self, **given: Any) -> tuple[Tensor | None, ...]:
            for unused in ("g_gamma", "state_v_first", "w"):
                given.pop(unused, None)
            if given.get("cu_seqlens") is None:
                return gradients_of_rows(**given)
            for name in ("q", "k", "v", "do", "dv", "g", "h", "dh"):
                if given.get(name) is not None:
                    given[name] = given[name].detach()  # in eager models some require gradients
                    torch._dynamo.maybe_mark_dynamic(given[name], 1)  # tokens or chunks
            torch._dynamo.maybe_mark_dynamic(given["cu_seqlens"], 0)
            torch._dynamo.maybe_mark_dynamic(given["chunk_indices"], 0)
            return compiled(**given)

    register("common")(TorchBackend)


def gradients_of_rows(
    cu_seqlens: None = None,
    chunk_indices: None = None,
    *,
    scale: float,
    chunk_size: int = 64,
    **given: Any,
) -> tuple[Tensor | None, ...]:
    """`gradients_of_chunks` of B rows, each a document: `[B, T, …]` and `[B, M, …]`."""
    rows, tokens = given["q"].shape[:2]
    ends = torch.arange(rows + 1, device=given["q"].device) * tokens
    numbers = torch.arange(-(-tokens // chunk_size), device=ends.device)
    chunks = torch.cartesian_prod(torch.arange(rows, device=ends.device), numbers)
    flat = {
        name: x.flatten(0, 1)[None] if isinstance(x, Tensor) else x for name, x in given.items()
    }
    found = gradients_of_chunks(
        **flat,
        scale=scale,
        cu_seqlens=ends,
        chunk_indices=chunks,
        chunk_size=chunk_size,
    )
    return tuple(None if x is None else x[0].unflatten(0, (rows, tokens)) for x in found)


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
    dv: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of queries, keys, w and decay, from those of the outputs and of the states.

    Args:
        q, k: `[1, T, H, K]`.
        v, do, dv: `[1, T, HV, V]`, in the dtype of q.
        h, dh: states before each chunk and gradients of those after it, `[1, M, HV, K, V]`, in
            fp32 or the dtype of q.
        g: sums of the log2 of the decay inside each chunk, fp32 `[1, T, HV]`.
        cu_seqlens, chunk_indices: as in `RecurrentDocuments`.

    Returns:
        dq, dk `[1, T, H, K]` and dw `[1, T, HV, K]` in the dtype of q, dw None without dv, and dg
        fp32 `[1, T, HV]`, with respect to natural logarithms.
    """
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

    to_row = torch.where(real, tokens, q.shape[1])  # past the end, where there is no token

    def row(x: Tensor) -> Tensor:
        """`[M, HV, 64, D]` as `[1, T, HV, D]`."""
        out = x.new_empty(q.shape[1] + 1, heads, x.shape[-1])
        return out.index_copy(0, to_row.flatten(), x.transpose(1, 2).flatten(0, 1))[None, :-1]

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
