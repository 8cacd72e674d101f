"""`sdpa`: torch's scaled_dot_product_attention, called once per document, on any device.

The cost grows with the sum of squared lengths, not with T². Documents cannot affect each other.
Launch-bound on a GPU; meant for the CPU.

Shape legend: as in `call.py`; L, Lk = tokens of one document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from flexvarlen.attention.call import AttentionCall
from flexvarlen.layout.boundaries import is_traced
from flexvarlen.layout.launch_sizes import NOT_CAPTURED
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.mask.spec import UNLIMITED, MaskSpec
from flexvarlen.mask.vectors import MaskInputs, dense_mask, query_bounds


class SdpaBackend:
    """Per-document SDPA."""

    name = "sdpa"

    def why_not(self, call: AttentionCall) -> str | None:
        """Refuse softcap, sinks and LSE, which SDPA does not support."""
        if call.softcap is not None or call.sinks or call.return_lse:
            return (
                "sdpa has no softcap, no sinks and no LSE; use backend='flex' on a GPU or "
                "'reference'."
            )
        if call.batch_invariant and call.spec.tree:
            return "sdpa is not batch invariant with trees; pack each path as a document."
        if call.ordered_backward and call.needs_grad and call.device.type == "cuda":
            others = "'fa3', 'fa2' or 'fa4' in half precision, 'reference' in any for deterministic"
            return f"sdpa's backward is not deterministic on a GPU; use backend={others}."
        return None

    def plan(self, mask: DocumentMask, *, batch_invariant: bool = False) -> Tensor:
        """Return the loop's input, int32 `[4, capacity + 1]`: cu_seqlens of q and k, dead, prefix.

        For trees, the table of their `Segments`. Masks with runs add start and end of each token's
        run: int32 `[6, max(capacity + 1, T)]`. Syncs if the boundaries are not known on the host,
        except inside a compiled graph.
        """
        q, k = mask.layout, mask.layout_k
        if k.segments is not None:
            return k.segments.table
        cu_q, cu_k = q.cu_seqlens, k.cu_seqlens
        q_host, k_host = q.cu_seqlens_host, k.cu_seqlens_host
        if mask.runs is None and q_host is not None and k_host is not None:
            cu_q, cu_k = q_host, k_host
        # Not zeros_like: for CUDA graphs Inductor moves zeros to the GPU, and not the boundaries.
        dead, prefix = cu_q & 0, cu_q & 0
        for layout in (q, k) if mask.spec.cross else (q,):
            if layout.padding is not None:
                first_token = layout.cu_seqlens.clamp(max=layout.total_tokens - 1).long()
                dead |= layout.padding[first_token].to(dead)
        if mask.prefix is not None:
            prefix[:-1] = mask.prefix
        plan = torch.stack([cu_q, cu_k, dead, prefix])
        if mask.runs is None:
            return plan
        width = max(plan.shape[1], mask.runs.shape[1])
        return torch.cat([pad(x, (0, width - x.shape[1])) for x in (plan, mask.runs)])

    def attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        sinks_H: Tensor | None,
        call: AttentionCall,
        mask: DocumentMask,
        plan: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Run a differentiable loop over the documents in eager mode.

        In a compiled graph, under a dispatch mode (selective activation checkpointing), for trees
        and if results must be batch invariant, call a custom operator that has a backward. It
        copies each document, as kernels sum in another order if a document's address is not a
        multiple of their vectors, and sums the gradients of shared keys in fp32.
        """
        spec = mask.spec.as_ints()
        if mask.spec.tree or call.batch_invariant or is_traced():
            return sdpa_forward(q_THD, k_THD, v_THD, plan, spec, call.scale), None
        return _loop(q_THD, k_THD, v_THD, plan, spec, call.scale), None


class _Document(NamedTuple):
    """A document's queries and keys; in a tree, a segment and its path.

    Attributes:
        rows, keys: tokens of q and of k; keys as indices if they are not contiguous.
        prefix: number of tokens of its prefix.
        spec: the mask of these keys.
        runs: int32 `[2, L]`, start and end of each token's run, counted from the document's first
            token, or None.
    """

    rows: slice
    keys: slice | Tensor
    prefix: int
    spec: MaskSpec
    runs: Tensor | None = None


def _documents(plan: Tensor, spec: list[int], q: Tensor, k: Tensor) -> Iterator[_Document]:
    """Yield each document that has queries and is not padding."""
    mask = MaskSpec.from_ints(spec)
    if mask.tree:
        yield from _segments(plan, mask, k.shape[0] - q.shape[0], q.device)
        return
    cu_q, cu_k, dead, prefix = plan[:4].tolist()
    all_runs = plan[4:].cpu() if mask.runs else None
    for i, is_dead in enumerate(dead[:-1]):
        if cu_q[i + 1] > cu_q[i] and not is_dead:
            rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
            runs = None if all_runs is None else all_runs[:, rows] - cu_q[i]
            yield _Document(rows, keys, prefix[i], mask, runs)


def _segments(
    table: Tensor, mask: MaskSpec, keys_before: int, device: torch.device
) -> Iterator[_Document]:
    """Yield each non-empty segment; its last query is aligned with its path's last key.

    The first `keys_before` tokens are no queries.
    """
    starts, ends, above, _ = table.tolist()
    of_path = replace(mask, tree=False, cross=True)
    path: list[tuple[int, int, int]] = []  # a segment's first token, its end, and its subtree's
    for start, stop, end, tokens_above in zip(starts, starts[1:], ends, above, strict=False):
        if stop == start:
            continue
        while path and path[-1][2] <= start:
            path.pop()
        path.append((start, stop, end))
        rows = slice(max(start - keys_before, 0), stop - keys_before)
        if start >= keys_before and tokens_above == 0:
            of_root = replace(mask, tree=False, cross=False)
            yield _Document(rows, slice(start, stop), 0, of_root)
        elif stop > keys_before:
            keys = torch.cat([torch.arange(a, b, device=device) for a, b, _ in path])
            yield _Document(rows, keys, 0, of_path)


def _loop(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    plan: Tensor,
    spec: list[int],
    scale: float,
    take: Callable[[Tensor, slice | Tensor], Tensor] = Tensor.__getitem__,
) -> Tensor:
    """Call SDPA once per document, whose tokens `take` gives; the output is zero elsewhere."""
    pieces = []
    done = 0
    with _without_cudnn():
        for document in _documents(plan, spec, q_THD, k_THD):
            rows, keys = document.rows, document.keys
            pieces.append(torch.zeros_like(q_THD[done : rows.start]))
            q, k, v = take(q_THD, rows), take(k_THD, keys), take(v_THD, keys)
            pieces.append(_one_document(q, k, v, document, scale))
            done = rows.stop
    if not pieces:  # keep a row with only padding differentiable, with zero gradients
        pieces = [x[:0].reshape(0, *q_THD.shape[1:]) for x in (q_THD, k_THD, v_THD)]
    pieces.append(torch.zeros_like(q_THD[done:]))
    return torch.cat(pieces)


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Disable cuDNN's SDPA kernel, which torch prefers on Hopper.

    With torch 2.11 on an H200, its gradients are off by 140% after a call of the same shape with a
    gradient in another memory format, and NaN in float16 under masks that leave few keys:
    bench/results/sdpa-gradients-h200.jsonl.
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def _one_document(q: Tensor, k: Tensor, v: Tensor, document: _Document, scale: float) -> Tensor:
    mask = document.spec
    plain = (mask.left == UNLIMITED or mask.left >= q.shape[0] - 1) and not mask.chunk
    plainly_causal = plain and mask.ends_at_query
    seen, sees = None, None
    if not plainly_causal:
        seen, sees = _seen(q.shape[0], k.shape[0], document, q.device)
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=seen,
        is_causal=plainly_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )[0].transpose(0, 1)
    return out if sees is None else torch.where(sees[:, None, None], out, 0)


def _seen(
    length_q: int, length_k: int, document: _Document, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return which keys each query sees, bool `[L, Lk]`, and which queries see any key, `[L]`.

    None stands for all. A query without keys gets a row of True, as a softmax over nothing is NaN.
    """
    mask = document.spec
    if mask.right == UNLIMITED and mask.left == UNLIMITED and not (mask.causal or mask.chunk):
        return None, None
    rows = [[0, length_q], [0, length_k], [document.prefix, 0]]
    cu_q, cu_k, prefixes = torch.tensor(rows, dtype=torch.int32, device="cpu")
    prefix_1 = prefixes[:1] if mask.prefix else None
    sizes = [length_q, length_k]
    given = MaskInputs(
        *(cu_q, cu_k, None, None, prefix_1, None, document.runs), sizes, mask.as_ints()
    )
    lo, hi = query_bounds(given)
    seen = dense_mask(lo, hi, length_k).to(device)
    if not mask.cross:  # each query sees at least itself
        return seen, None
    sees = (lo < hi).to(device)
    return seen | ~sees[:, None], sees


@torch.library.custom_op("flexvarlen::sdpa_forward", mutates_args=(), tags=NOT_CAPTURED)
def sdpa_forward(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Tensor, spec: list[int], scale: float
) -> Tensor:
    """Run the loop as a single operator, for compiled graphs."""
    return _loop(q_THD, k_THD, v_THD, plan, spec, scale, _copied).contiguous()


def _copied(x: Tensor, tokens: slice | Tensor) -> Tensor:
    """A copy of the tokens, which torch aligns in memory."""
    return x[tokens].clone(memory_format=torch.contiguous_format)


@sdpa_forward.register_fake
def _(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Tensor, spec: list[int], scale: float
) -> Tensor:
    return q_THD.new_empty(q_THD.shape)


@torch.library.custom_op("flexvarlen::sdpa_backward", mutates_args=(), tags=NOT_CAPTURED)
def sdpa_backward(
    grad: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    plan: Tensor,
    spec: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients by hand, per document and KV head (no autograd in an operator)."""
    # Not zeros_like, which keeps the strides of a view: the fake implementation is contiguous.
    dq, dk, dv = (
        q_THD.new_zeros(q_THD.shape),
        k_THD.new_zeros(k_THD.shape),
        v_THD.new_zeros(v_THD.shape),
    )
    wide = torch.promote_types(k_THD.dtype, torch.float32)
    if MaskSpec.from_ints(spec).tree:  # a key belongs to several paths
        dk, dv = dk.to(wide), dv.to(wide)
    for document in _documents(plan, spec, q_THD, k_THD):
        rows, keys = document.rows, document.keys
        grad_q, q = _copied(grad, rows), _copied(q_THD, rows)
        k, v = _copied(k_THD, keys), _copied(v_THD, keys)
        dq[rows], own_dk, own_dv = _gradients(grad_q, q, k, v, document, scale)
        dk[keys] += own_dk
        dv[keys] += own_dv
    return dq, dk.to(k_THD.dtype), dv.to(v_THD.dtype)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, document: _Document, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv of one document from the probabilities, in at least fp32."""
    heads = q.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    seen, sees = _seen(q.shape[0], k.shape[0], document, q.device)
    if sees is not None:
        grad = torch.where(sees[:, None, None], grad, 0)
    dq = torch.empty_like(q)
    dk, dv = (torch.empty_like(x, dtype=dtype) for x in (k, v))
    repeats = heads // k.shape[1]
    for group in range(k.shape[1]):
        own = slice(group * repeats, (group + 1) * repeats)
        q_RLD, grad_RLD = (x[:, own].transpose(0, 1).to(dtype) for x in (q, grad))
        k_LD, v_LD = k[:, group].to(dtype), v[:, group].to(dtype)
        scores = q_RLD @ k_LD.T * scale
        probabilities = (
            scores if seen is None else scores.masked_fill(~seen, float("-inf"))
        ).softmax(-1)
        grad_probabilities = grad_RLD @ v_LD.T
        mean = (probabilities * grad_probabilities).sum(-1, keepdim=True)
        grad_scores = probabilities * (grad_probabilities - mean) * scale
        dq[:, own] = (grad_scores @ k_LD).transpose(0, 1).to(q.dtype)
        dk[:, group] = (grad_scores.transpose(1, 2) @ q_RLD).sum(0)
        dv[:, group] = (probabilities.transpose(1, 2) @ grad_RLD).sum(0)
    return dq, dk, dv


@sdpa_backward.register_fake
def _(
    grad: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    plan: Tensor,
    spec: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q_THD.new_empty(q_THD.shape), k_THD.new_empty(k_THD.shape), v_THD.new_empty(v_THD.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q_THD, k_THD, v_THD, plan, *ctx.settings = inputs
    ctx.save_for_backward(q_THD, k_THD, v_THD, plan)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *sdpa_backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None


sdpa_forward.register_autograd(_backward, setup_context=_save)

BACKEND = SdpaBackend()
