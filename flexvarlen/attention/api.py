"""`packed_attention`: validate, choose a kernel, call it.

Shape legend: T = tokens of the query row, Tk = of the key row (equal in self-attention),
H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import pad

from flexvarlen.attention.auto import decide as auto
from flexvarlen.attention.auto.keys import sizes_in_graph, torch_state
from flexvarlen.attention.backends.registry import (
    INT32_ELEMENTS,
    AttentionOptions,
    AttentionRequest,
    get_backend,
    refusal,
)
from flexvarlen.attention.recompile_limit import warn_if_fallen_back
from flexvarlen.env import BATCH_INVARIANT, DETERMINISTIC, promised
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.document_mask import DocumentMask, Prefix
from flexvarlen.mask.spec import Align, MaskSpec


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
    """Attention of every document of a packed row to itself alone, or to its own keys elsewhere.

    Args:
        q_THD: `[T, H, D]`, float, on the layout's device.
        k_THD, v_THD: `[Tk, Hkv, D]`, same dtype and device; H a multiple of Hkv (grouped-query
            attention; K and V are not repeated). V may have a head_dim of its own, Dv: the smaller
            of the two is padded with zeros for the kernel.
        layout: the documents.
        layout_k, causal, window, chunk, prefix, align: which keys of its document a query sees; as
            in `DocumentMask.of`.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: `[H]`, one logit a head that joins the softmax's denominator.
        scale: factor on the scores; default `D ** -0.5`.
        backend: a name of `flexvarlen.BACKENDS`, or "auto": the fastest here for such calls, timed
            at the first of them (see `flexvarlen.explain`); on the CPU `sdpa`, or
            `reference` for what that lacks.
        deterministic: the backward must give the same bits every time. None: as the environment
            variable FLEXVARLEN_DETERMINISTIC says (1 or 0), read once a process; default no.
        batch_invariant: a document must give the same bits whatever else is in the row. None: as
            FLEXVARLEN_BATCH_INVARIANT says.
        return_lse: also return the log-sum-exp of the scores.
        plan: what `get_backend(name).plan(mask, batch_invariant=...)` gave for this very mask (a
            BlockMask, for flex), to share it among layers.

    Returns:
        The output `[T, H, Dv]`, zero at padding; with `return_lse` also the LSE, fp32 `[H, T]`,
        -inf at padding (differentiable on flex and reference; elsewhere its gradient raises, in a
        compiled graph on a GPU by a device-side assertion).

    Raises:
        ValueError: tensors that do not fit one another or the layout.
        NotImplementedError: the named backend cannot serve the call; the sentence says why, and
            what to do. Forward-mode gradients (`torch.func.jvp`) have `reference` alone.

    No host sync on the GPU backends but `sdpa`; traces under `fullgraph=True`.

    >>> layout = PackedLayout.from_lengths([3, 2])
    >>> q = torch.randn(5, 4, 8); k = torch.randn(5, 2, 8)
    >>> packed_attention(q, k, k, layout).shape
    torch.Size([5, 4, 8])
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        warn_if_fallen_back()
    deterministic = promised(DETERMINISTIC, deterministic)
    batch_invariant = promised(BATCH_INVARIANT, batch_invariant)
    needs_grad = torch.is_grad_enabled() and (
        q_THD.requires_grad
        or k_THD.requires_grad
        or v_THD.requires_grad
        or (sinks is not None and sinks.requires_grad)
    )
    key: Any = None
    plain = layout_k is None and prefix is None and type(layout) is PackedLayout
    if plain and not compiling:
        key = (
            *(q_THD.shape, k_THD.shape, v_THD.shape, layout.total_tokens),
            *(q_THD.dtype, k_THD.dtype, v_THD.dtype),
            *(q_THD.device, k_THD.device, v_THD.device, layout.cu_seqlens.device),
            *(causal, window, chunk, align, softcap, scale),
            *(backend, deterministic, batch_invariant, return_lse, needs_grad),
            None if sinks is None else (sinks.shape, sinks.device),
            # 1, 1.0 and True are one key
            None if window is chunk is None else (type(window), type(chunk)),
            type(causal),
            torch_state(),
        )
        served = _served(key)
        if served is not None:
            mask = DocumentMask(layout, served.spec)
            name = auto.choose(served.call, mask) if backend == "auto" else backend
            return _attend(name, served.options, q_THD, k_THD, v_THD, mask, sinks, plan)
    kind: dict[str, Any] = {
        "layout_k": layout_k,
        "causal": causal,
        "window": window,
        "chunk": chunk,
        "prefix": prefix,
        "align": align,
    }
    if v_THD.shape[:-1] == k_THD.shape[:-1] and v_THD.shape[-1] != k_THD.shape[-1]:
        rest: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "scale": scale}
        rest |= {"deterministic": deterministic, "batch_invariant": batch_invariant}
        rest |= {"backend": backend, "return_lse": return_lse, "plan": plan}
        return _with_other_v_dim(q_THD, k_THD, v_THD, layout, **kind, **rest)
    mask = DocumentMask.of(layout, **kind)
    _check_tensors(q_THD, k_THD, v_THD, mask, sinks)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(
            f"softcap must be above 0 and finite, got {softcap}; pass None for no softcap."
        )
    if scale is not None and not -math.inf < scale < math.inf:  # isfinite does not trace
        raise ValueError(f"scale must be finite, got {scale}; pass None for head_dim ** -0.5.")
    _, num_heads, head_dim = q_THD.shape
    options = AttentionOptions(
        scale=head_dim**-0.5 if scale is None else scale,
        softcap=softcap,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
    )
    heads = (num_heads, k_THD.shape[1], head_dim)
    promises = (deterministic, batch_invariant, return_lse)
    past_int32 = _is_past_int32(mask, num_heads, head_dim)
    asked = (softcap, sinks is not None, needs_grad, *promises, past_int32)
    call = (q_THD.device, q_THD.dtype, *heads, mask.spec, *asked)
    name = _choose(backend, call, mask)
    if key is not None:
        _remember(key, _Served(mask.spec, call, options))
    return _attend(name, options, q_THD, k_THD, v_THD, mask, sinks, plan)


def _with_other_v_dim(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *args: Any, scale: float | None, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`packed_attention` with the smaller head_dim padded: zeros change neither scores nor sums."""
    dim, v_dim = q_THD.shape[-1], v_THD.shape[-1]
    if v_dim < dim:
        v_THD = pad(v_THD, (0, dim - v_dim))
    else:
        q_THD, k_THD = pad(q_THD, (0, v_dim - dim)), pad(k_THD, (0, v_dim - dim))
    scale = dim**-0.5 if scale is None else scale
    result = packed_attention(q_THD, k_THD, v_THD, *args, scale=scale, **options)
    if isinstance(result, tuple):
        return result[0][..., :v_dim], result[1]
    return result[..., :v_dim]


class _Served(NamedTuple):
    """What was worked out of the arguments of a call that its backend can serve."""

    spec: MaskSpec
    call: _Call
    options: AttentionOptions


# The checks of a call look at nothing but what is in its key, and take longer than to look it up.
_known: dict[Any, _Served] = {}
_MOST_KNOWN = 4096


def _served(key: Any) -> _Served | None:
    try:
        return _known.get(key)
    except TypeError:  # what has no hash is no valid argument: the checks will say so
        return None


def _remember(key: Any, served: _Served) -> None:
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    with contextlib.suppress(TypeError):  # a list for a window
        _known[key] = served


def _attend(
    name: str,
    options: AttentionOptions,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    mask: DocumentMask,
    sinks: Tensor | None,
    plan: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Call the kernel; kernels fail on a row of no tokens, for which `reference` gives zeros."""
    if mask.layout.total_tokens == 0 or mask.layout_k.total_tokens == 0:
        name, plan = "reference", None
    if forward_ad._current_level >= 0:
        _refuse_forward_mode(name, q_THD, k_THD, v_THD, sinks)
    chosen = get_backend(name)
    if sinks is not None:
        options = replace(options, sinks_H=sinks)
    if plan is None:
        plan = chosen.plan(mask, batch_invariant=options.batch_invariant)
    out_THD, lse_HT = chosen.attend(q_THD, k_THD, v_THD, mask, plan, options)
    return out_THD if lse_HT is None else (out_THD, lse_HT)


def _refuse_forward_mode(name: str, *tensors: Tensor | None) -> None:
    """Raise for a tangent, but on `reference`: through a kernel it would be lost."""
    if name == "reference":
        return
    # Of a tensor that Dynamo traces nobody can tell whether it has one.
    if torch.compiler.is_compiling() or _may_have_tangents(*tensors):
        raise NotImplementedError(
            f"{name} has no forward-mode gradient (torch.func.jvp, dual tensors); use "
            "backend='reference'."
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _may_have_tangents(*tensors: Tensor | None) -> bool:
    """Whether any has one, or is a transform's own tensor, which may have one further in."""
    return any(
        torch._C._functorch.is_functorch_wrapped_tensor(x)
        or forward_ad.unpack_dual(x).tangent is not None
        for x in tensors
        if x is not None
    )


def resolve_backend(
    backend: str,
    mask: DocumentMask,
    *,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    needs_grad: bool,
    softcap: float | None = None,
    sinks: bool = False,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
) -> str:
    """The backend's name for calls of this kind, "auto" resolved, as `packed_attention` would.

    Args:
        backend: a name of `flexvarlen.BACKENDS`, or "auto", which may measure here.
        mask: the documents, on the device of the calls.
        dtype, num_heads, num_kv_heads, head_dim, needs_grad, sinks: of the calls' tensors.
        softcap, deterministic, batch_invariant: as in `packed_attention`.

    Raises:
        ValueError: no backend has that name.
        NotImplementedError: the backend, or every candidate of "auto", cannot serve them.

    Traces under `fullgraph=True`, as a constant.
    """
    deterministic = promised(DETERMINISTIC, deterministic)
    batch_invariant = promised(BATCH_INVARIANT, batch_invariant)
    heads = (num_heads, num_kv_heads, head_dim)
    past_int32 = _is_past_int32(mask, num_heads, head_dim)
    asked = (softcap, sinks, needs_grad, deterministic, batch_invariant, False, past_int32)
    return _choose(backend, (mask.layout.device, dtype, *heads, mask.spec, *asked), mask)


# ---- which backend ----

# The fields of an AttentionRequest, in order: a tuple, for the host's time.
_Call = tuple[
    torch.device,
    torch.dtype,
    int,
    int,
    int,
    MaskSpec,
    float | None,
    bool,
    bool,
    bool,
    bool,
    bool,
    bool,
]


def _is_past_int32(mask: DocumentMask, num_heads: int, head_dim: int) -> bool:
    tokens = max(mask.layout.total_tokens, mask.layout_k.total_tokens)
    # A plain bool, also of sizes that vary in a compiled graph.
    return True if tokens * num_heads * head_dim >= INT32_ELEMENTS else False  # noqa: SIM210


def _choose(backend: str, call: _Call, mask: DocumentMask) -> str:
    """The backend's name, once it is known to serve such calls."""
    if torch.compiler.is_compiling():
        device, dtype, num_heads, num_kv_heads, head_dim, spec, *asked = call
        # Heads that vary (dynamic=True) are fixed by index(), with a guard.
        heads = (index(num_heads), index(num_kv_heads), index(head_dim))
        sizes = sizes_in_graph(mask) if backend == "auto" else ()
        softcap, *others = asked
        asked = [None if softcap is None else 1.0, *others]  # how large is asked by no check
        name: str = _choose_constant(
            backend, device.type, device.index, dtype, heads, tuple(spec.as_ints()), sizes, *asked
        )
        return name
    if backend == "auto":
        return auto.choose(call, mask)
    # torch's switches decide what `varlen` can serve, so an answer holds only while they stay.
    return _checked(backend, call, torch_state())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choose_constant(
    backend: str,
    device_type: str,
    device_index: int | None,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    spec: tuple[int, ...],
    sizes: tuple[int, ...],
    *asked: Any,
) -> str:
    """As `_choose`, of constants only: Dynamo runs it while tracing. Nothing is measured."""
    device = torch.device(device_type if device_index is None else f"{device_type}:{device_index}")
    call = (device, dtype, *heads, MaskSpec.from_ints(spec), *asked)
    if backend == "auto":
        return auto.decide(AttentionRequest(*call), sizes, None).compiled
    return _checked(backend, call, torch_state())


@lru_cache(maxsize=4096)
def _checked(backend: str, call: tuple[Any, ...], torch_state: tuple[object, ...]) -> str:
    reason = refusal(backend, AttentionRequest(*call))
    if reason is not None:
        raise NotImplementedError(reason)
    return backend


# ---- do the tensors fit ----


def _check_tensors(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, mask: DocumentMask, sinks: Tensor | None
) -> None:
    """Raise a sentence unless the tensors fit one another and the layouts.

    Reads shapes only, no values.
    """
    device, dtype, q_shape, k_shape = q_THD.device, q_THD.dtype, q_THD.shape, k_THD.shape
    fit = (  # in one go, for the host's time; what does not is looked for below
        len(q_shape) == 3
        and len(k_shape) == 3
        and k_shape == v_THD.shape
        and q_shape[0] == mask.layout.total_tokens
        and k_shape[0] == mask.layout_k.total_tokens
        and q_shape[2] == k_shape[2]
        and k_shape[1] > 0
        and q_shape[1] % k_shape[1] == 0
        and dtype == k_THD.dtype == v_THD.dtype
        and device == k_THD.device == v_THD.device == mask.layout.cu_seqlens.device
        and (sinks is None or (sinks.shape == q_shape[1:2] and sinks.device == device))
    )
    if not fit:
        _raise_misfit(q_THD, k_THD, v_THD, mask, sinks)


def _raise_misfit(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, mask: DocumentMask, sinks: Tensor | None
) -> None:
    """The sentence for tensors that do not fit."""
    device = mask.layout.device
    of_keys = "layout_k" if mask.spec.cross else "layout"
    for name, x in (("q", q_THD), ("k", k_THD), ("v", v_THD)):
        whose, layout = ("layout", mask.layout) if name == "q" else (of_keys, mask.layout_k)
        if x.ndim != 3:
            raise ValueError(
                f"{name} must have shape [tokens, heads, head_dim], got {tuple(x.shape)}; drop the "
                "batch dimension, or flatten it into the tokens."
            )
        if x.shape[0] != layout.total_tokens:
            raise ValueError(
                f"{name} must have the {whose}'s total_tokens={layout.total_tokens} rows, got "
                f"{x.shape[0]}; pass total_tokens= to the layout if the row ends in padding."
            )
        if x.device != device:
            raise ValueError(
                f"{name} must be on the layout's device {device}, got {x.device}; call layout.to()."
            )
        if x.dtype != q_THD.dtype:
            raise ValueError(
                f"q, k and v must have one dtype, got {q_THD.dtype} and {x.dtype} for {name}; cast "
                "one."
            )
    if k_THD.shape != v_THD.shape or k_THD.shape[2] != q_THD.shape[2]:
        raise ValueError(
            f"k and v must have shape [tokens, kv_heads, {q_THD.shape[2]}], got "
            f"{tuple(k_THD.shape)} and {tuple(v_THD.shape)}; head_dim must be q's."
        )
    if k_THD.shape[1] == 0 or q_THD.shape[1] % k_THD.shape[1]:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got {q_THD.shape[1]} and "
            f"{k_THD.shape[1]}; check how the heads were split."
        )
    if sinks is not None and (sinks.shape != q_THD.shape[1:2] or sinks.device != device):
        raise ValueError(
            f"sinks must have shape [{q_THD.shape[1]}] on {device}, got {tuple(sinks.shape)} on "
            f"{sinks.device}; pass one logit a head."
        )
