"""The steps of fla's scan of Mamba-2 in plain torch, to run its operator on the CPU.

States are in fp32, as the operator makes them; all else is in the dtype of its inputs. A row has
chunks of 64 tokens; `h` and `dh` are the states before each, and the gradients of those after it.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from types import ModuleType

import torch

from flexvarlen.recurrent import layer_functions
from flexvarlen.recurrent.documents import CHUNK
from flexvarlen.recurrent.fla_kernels import decayed_scan
from tests.recurrent.cases import chunk_offsets, stand_in_for_fla


def run_on_the_cpu(patch):
    """Let models on the CPU run the operator, with these steps."""
    stand_in_for_fla(patch)
    steps = {
        "fla.ops.common": {},
        "fla.ops.common.chunk_o": {
            "chunk_fwd_o": chunk_fwd_o,
            "chunk_bwd_dqkwg": chunk_bwd_dqkwg,
            "chunk_bwd_dv": chunk_bwd_dv,
        },
        "fla.ops.common.chunk_h": {
            "chunk_fwd_kernel_h": Kernel(forward_states),
            "chunk_bwd_kernel_dh": Kernel(backward_states),
        },
        "fla.ops.utils": {"chunk_local_cumsum": chunk_local_cumsum},
        "fla.ops.utils.constant": {"RCP_LN2": 1 / math.log(2)},
    }
    for name, functions in steps.items():
        module = ModuleType(name)
        vars(module).update(functions)
        patch.setitem(sys.modules, name, module)
    patch.setattr(decayed_scan, "avoid_wrong_kernel", lambda: None)
    patch.setattr(layer_functions.fla_kernels, "why_not", lambda _: None)
    patch.setattr(layer_functions, "why_wrong", lambda *_: None)


class Kernel:
    """Called as Triton's kernels are: with a grid first."""

    def __init__(self, run):
        self.run = run

    def __getitem__(self, grid):
        return self.run


def chunks_of(cu_seqlens):
    """For each slot, its chunks: their numbers in the row and their tokens."""
    bounds, first = cu_seqlens.tolist(), chunk_offsets(cu_seqlens, CHUNK).tolist()
    for slot, (start, end) in enumerate(pairwise(bounds)):
        starts = range(start, end, CHUNK)
        yield [(first[slot] + i, slice(x, min(x + CHUNK, end))) for i, x in enumerate(starts)]


def one_chunk(q, k, v, g, h):
    """The outputs of a chunk `[L, H, V]`, and the state after it `[H, K, V]`."""
    decay = (g[:, None] - g[None]).permute(2, 0, 1).tril().exp().tril()
    scores = torch.einsum("ihk,jhk->hij", q, k) * decay
    out = torch.einsum("hij,jhv->ihv", scores, v)
    out = out + torch.einsum("ihk,hkv->ihv", q * g.exp()[..., None], h.to(q.dtype))
    written = torch.einsum("jhk,jhv->hkv", k * (g[-1] - g).exp()[..., None], v)
    return out, g[-1].exp()[:, None, None] * h + written


def chunk_local_cumsum(g, *, scale=None, reverse=False, cu_seqlens, **_):
    out = torch.empty_like(g)
    for _, tokens in chain(*chunks_of(cu_seqlens)):
        x = g[:, tokens]
        out[:, tokens] = x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1)
    return out * (scale or 1)


def forward_states(*, k, v, h, g, h0, ht, cu_seqlens, split_offsets, **_):
    for slot, chunks in enumerate(chunks_of(cu_seqlens)):
        state = h.new_zeros(h.shape[2:]) if h0 is None else h0[slot]
        for i, (_, tokens) in enumerate(chunks):
            h[0, split_offsets[slot] + i] = state
            gates = g[0, tokens] * math.log(2)
            state = one_chunk(k[0, tokens], k[0, tokens], v[0, tokens], gates, state)[1]
        if ht is not None:
            ht[slot] = state


def backward_states(*, q, g, do, dh, dht, dh0, cu_seqlens, split_offsets, **_):
    for slot, chunks in enumerate(chunks_of(cu_seqlens)):
        grad = dh.new_zeros(dh.shape[2:]) if dht is None else dht[slot]
        for i, (_, tokens) in reversed(list(enumerate(chunks))):
            dh[0, split_offsets[slot] + i] = grad
            decay = (g[0, tokens] * math.log(2)).exp()
            read = torch.einsum("ihk,ihv->hkv", q[0, tokens] * decay[..., None], do[0, tokens])
            grad = decay[-1][:, None, None] * grad + read
        if dh0 is not None:
            dh0[slot] = grad


def chunk_fwd_o(*, q, k, v, g, h, scale, cu_seqlens, **_):
    out = torch.empty_like(v)
    for chunk, tokens in chain(*chunks_of(cu_seqlens)):
        given = (x[0, tokens] for x in (q, k, v, g * math.log(2)))
        out[0, tokens] = one_chunk(*given, h[0, chunk])[0]
    return out


def gradients(*given):
    """Of q, k, v and the sums of g, by autograd, which is off in the thread of an operator."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(gradients_by_autograd, *given).result()


def gradients_by_autograd(q, k, v, g, h, do, dh, cu_seqlens):
    found = [torch.zeros_like(x) for x in (q, k, v, g)]
    for chunk, tokens in chain(*chunks_of(cu_seqlens)):
        leaves = [x[0, tokens].detach() for x in (q, k, v, g * math.log(2))]
        leaves = [x.requires_grad_() for x in leaves]
        out, state = one_chunk(*leaves, h[0, chunk])
        grads = torch.autograd.grad(
            (out, state), leaves, (do[0, tokens], dh[0, chunk].to(state.dtype))
        )
        for x, grad in zip(found, grads, strict=True):
            x[0, tokens] = grad
    return found


def chunk_bwd_dqkwg(*, q, k, v, g, h, do, dh, cu_seqlens, **_):
    dq, dk, _, dg = gradients(q, k, v, g, h, do, dh, cu_seqlens)
    return dq, dk, None, dg


def chunk_bwd_dv(*, q, k, g, do, dh, cu_seqlens, **_):
    h = torch.zeros_like(dh)
    return gradients(q, k, torch.zeros_like(do), g, h, do, dh, cu_seqlens)[2]
