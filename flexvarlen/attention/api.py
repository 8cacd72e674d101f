"""`packed_attention`: check the arguments, choose a kernel, call it.

Shape legend: T, Tk = tokens of the query and the key row (equal in self-attention),
H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import pad

from flexvarlen.attention.backends.registry import get_backend, our_name
from flexvarlen.attention.call import attention_call, is_past_int32
from flexvarlen.attention.check_arguments import check_tensors
from flexvarlen.attention.choose import choose
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.arguments import Prefix
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.mask.spec import Align


def packed_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    layout: PackedLayout,
    *,
    layout_k: PackedLayout | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    chunk: int | None = None,
    prefix: Prefix | None = None,
    align: Align = "bottom_right",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    return_lse: bool = False,
    plan: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in which each document of a packed row attends only to its own keys.

    Args:
        q_THD: `[T, H, D]`, float, on the layout's device.
        k_THD, v_THD: `[Tk, Hkv, D]`, same dtype and device; H a multiple of Hkv (grouped-query
            attention; K and V are not repeated). V may have another head_dim, Dv: the smaller
            of the two is padded with zeros for the kernel.
        layout: the documents.
        layout_k, causal, window, chunk, prefix, align: which keys of its document a query sees; as
            in `DocumentMask.of`.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: `[H]`, floating point, on q's device: one logit per head that is added to the
            softmax's denominator.
        scale: factor on the scores, above 0; default `D ** -0.5`.
        backend: a name in `flexvarlen.BACKENDS`, or "auto": the backend that was fastest for such
            calls in the records (see `flexvarlen.explain`); on the CPU `sdpa`, or `reference` if
            `sdpa` does not support the call.
        deterministic: require a bitwise deterministic backward. None: use the environment
            variable FLEXVARLEN_DETERMINISTIC (1 or 0), read once per process; default 0.
        batch_invariant: require results that do not depend, bit for bit, on the other documents
            of the row. None: use FLEXVARLEN_BATCH_INVARIANT.
        return_lse: also return the log-sum-exp of the scores.
        plan: the result of `get_backend(name).plan(mask, batch_invariant=...)` for this mask (a
            BlockMask, for flex), to share it between layers.

    Returns:
        The output `[T, H, Dv]`, zero at padding; with `return_lse` also the LSE, fp32 `[H, T]`,
        -inf at padding (differentiable on flex and reference; elsewhere its gradient raises, in a
        compiled graph on a GPU by a device-side assertion).

    Raises:
        ValueError: the tensors do not match one another or the layout.
        NotImplementedError: the named backend does not support the call; the message says why and
            what to do. Only `reference` supports forward-mode AD (`torch.func.jvp`).

    No host sync on GPU backends other than `sdpa`; traces under `fullgraph=True`.

    >>> layout = PackedLayout.from_lengths([3, 2])
    >>> q = torch.randn(5, 4, 8); k = torch.randn(5, 2, 8)
    >>> packed_attention(q, k, k, layout).shape
    torch.Size([5, 4, 8])
    """
    mask = DocumentMask.of(
        layout,
        causal=causal,
        window=window,
        chunk=chunk,
        prefix=prefix,
        layout_k=layout_k,
        align=align,
    )
    check_tensors(q_THD, k_THD, v_THD, layout, mask.layout_k, sinks)
    own_dim, v_dim = q_THD.shape[2], v_THD.shape[2]
    if v_dim != own_dim:
        q_THD, k_THD, v_THD = to_one_head_dim(q_THD, k_THD, v_THD)
    _, num_heads, head_dim = q_THD.shape
    call = attention_call(
        q_THD.device,
        q_THD.dtype,
        num_heads,
        k_THD.shape[1],
        head_dim,
        mask.spec,
        scale=own_dim**-0.5 if scale is None else scale,
        softcap=softcap,
        sinks=sinks is not None,
        needs_grad=needs_gradients(q_THD, k_THD, v_THD, sinks),
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
        past_int32=is_past_int32(layout, mask.layout_k, num_heads, head_dim),
    )
    chosen = get_backend(choose(our_name(backend), call, mask))
    if layout.total_tokens == 0 or mask.layout_k.total_tokens == 0:
        chosen, plan = get_backend("reference"), None  # kernels fail on an empty row
    if forward_ad._current_level >= 0:
        refuse_forward_mode(chosen.name, q_THD, k_THD, v_THD, sinks)
    if plan is None:
        plan = chosen.plan(mask, batch_invariant=call.batch_invariant)
    out_THD, lse_HT = chosen.attend(q_THD, k_THD, v_THD, sinks, call, mask, plan)
    if v_dim != head_dim:
        out_THD = out_THD[..., :v_dim]
    return out_THD if lse_HT is None else (out_THD, lse_HT)


def needs_gradients(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
    """Whether a backward pass may follow."""
    return torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
    )


def to_one_head_dim(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero-pad q and k, or v, to the larger of their head_dims; results do not change."""
    missing = q.shape[-1] - v.shape[-1]
    if missing > 0:
        return q, k, pad(v, (0, missing))
    return pad(q, (0, -missing)), pad(k, (0, -missing)), v


def refuse_forward_mode(name: str, *tensors: Tensor | None) -> None:
    """Raise for forward-mode AD, except on `reference`: kernels would drop the tangents."""
    if name == "reference":
        return
    # While Dynamo traces, nothing tells whether a tensor has a tangent.
    if torch.compiler.is_compiling() or _may_have_tangents(*tensors):
        raise NotImplementedError(
            f"{name} has no forward-mode gradient (torch.func.jvp, dual tensors); use "
            "backend='reference'."
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _may_have_tangents(*tensors: Tensor | None) -> bool:
    """Whether any tensor has a tangent, or is a functorch wrapper, which may hold one."""
    return any(
        torch._C._functorch.is_functorch_wrapped_tensor(x)
        or forward_ad.unpack_dual(x).tangent is not None
        for x in tensors
        if x is not None
    )
