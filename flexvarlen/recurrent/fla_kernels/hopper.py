"""The step of fla's backwards that Triton compiles wrongly on Hopper.

With four warps, Triton 3.4 to 3.7.0 makes a kernel of `chunk_bwd_dqkwg` whose gradients of keys and
decay are wrong: it transposes the result of Hopper's matrix instructions in registers
(flash-linear-attention issue 640). So fla refuses the step there, unless tilelang is installed. Two
warps are too few for these instructions. fla lets other packages register an implementation of a
step: this one launches fla's own kernel with two warps.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

WARPS = 2
TILE, STAGES = 32, 3
"""Channels of a tile, and stages of the pipeline: the fastest of nine on an H200."""


@cache
def avoid_wrong_kernel() -> None:
    """Register the step with fla for the whole process if fla's own launch is wrong."""
    from fla.backends import BaseBackend, register
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    if not IS_NVIDIA_HOPPER or not TRITON_ABOVE_3_4_0 or TRITON_ABOVE_3_7_1:
        return

    class TwoWarps(BaseBackend):  # type: ignore[misc]
        backend_type = "flexvarlen"
        priority = 9  # after tilelang's

        def chunk_bwd_dqkwg_verifier(self, *_: Any, **given: Any) -> tuple[bool, str | None]:
            """Whether fla refuses this call."""
            serves = given.get("g") is not None
            return serves, None if serves else "fla's own launch serves calls without g"

        def chunk_bwd_dqkwg(self, **given: Any) -> tuple[Tensor | None, ...]:
            return gradients_of_chunks(**given)

    register("common")(TwoWarps)


def gradients_of_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    g: Tensor,
    w: Tensor | None = None,
    g_gamma: Tensor | None = None,
    dv: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of queries, keys, w and decay, from the gradients of the outputs and states.

    Takes the arguments of fla's `chunk_bwd_dqkwg`.

    Returns:
        dq, dk `[B, T, H, K]`, dw `[B, T, HV, K]`, None without w, and dg fp32 `[B, T, HV]`.
    """
    from fla.ops.common.chunk_o import chunk_bwd_kernel_dqkwg
    from fla.ops.utils import prepare_chunk_indices

    rows, tokens, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    if cu_seqlens is not None and chunk_indices is None:
        chunk_indices = prepare_chunk_indices(cu_seqlens, chunk_size)
    chunks = -(-tokens // chunk_size) if chunk_indices is None else len(chunk_indices)
    blocks = -(-key_dim // TILE)
    of_heads = (rows, tokens, value_heads, key_dim)
    dq, dk = q.new_empty(of_heads), k.new_empty(of_heads)
    dw = None if w is None else torch.empty_like(w)
    dg = g.new_empty(blocks, *g.shape, dtype=torch.float32)
    tensors = {"q": q, "k": k, "v": v, "g": g, "g_gamma": g_gamma, "h": h, "do": do, "dh": dh}
    tensors |= {"dq": dq, "dk": dk, "dw": dw, "dv": dv, "dg": dg}
    kernel = chunk_bwd_kernel_dqkwg.fn.fn  # below fla's heuristics and its choice of warps
    kernel[blocks * chunks, rows * value_heads](
        **tensors,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
        scale=scale,
        B=rows,
        T=tokens,
        H=heads,
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        BT=chunk_size,
        BK=TILE,
        BV=TILE,
        USE_G=True,
        USE_G_GAMMA=g_gamma is not None,
        USE_DW=w is not None,
        STATE_V_FIRST=state_v_first,
        IS_VARLEN=cu_seqlens is not None,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    if heads != value_heads:
        dq, dk = (x.unflatten(2, (heads, -1)).sum(3) for x in (dq, dk))
    return dq, dk, dw, dg.sum(0)
