"""Differentiable attention over cu_seqlens: `attend`.

In eager mode, an autograd.Function calls `kernel.py`, or `levels.py` for trees, in a third of the
host time of an operator. For trees the fields of `Levels` take the place of cu_seqlens. In a
compiled graph, or under a dispatch mode (selective activation checkpointing), the same functions
run as `torch.ops.flexvarlen.cu_seqlens_forward` and `_backward`, which have fake implementations,
so that `fullgraph=True` works.

Shape legend: T, Tk = tokens of the query and the key row, H = num_heads, Hkv = num_kv_heads,
D = head_dim, N = document slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens import kernel as kernels
from flexvarlen.attention.backends.cu_seqlens import levels
from flexvarlen.attention.backends.cu_seqlens.kernel import KernelSizes
from flexvarlen.attention.call import AttentionCall
from flexvarlen.layout.launch_sizes import is_replayed
from flexvarlen.mask.spec import MaskSpec


def attend(
    kernel: str,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    sinks_H: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    sizes: KernelSizes,
    call: AttentionCall,
    *,
    traced: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the output and, with `call.return_lse`, the LSE, which is not differentiable.

    The LSE is that of the scores, without the sinks. For trees `cu_seqlens_q` and `cu_seqlens_k`
    are `Levels.inside` and `Levels.above`. `traced`: whether in a compiled graph or under a
    dispatch mode.
    """
    tensors = (q_THD, k_THD, v_THD, sinks_H, cu_seqlens_q, cu_seqlens_k)
    if traced:
        out_THD, lse_HT = cu_seqlens_forward(kernel, *tensors, *sizes, *_settings_of(call))
        return out_THD, lse_HT
    if call.needs_grad:
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                f"{kernel} does not support torch.func transforms; use backend='reference', "
                "or torch.autograd.grad."
            )
        constants = _Constants(kernel, cu_seqlens_q, cu_seqlens_k, sizes, call)
        found = _apply_eagerly(*tensors[:4], constants)  # type: ignore[no-untyped-call]
        return found if call.return_lse else (found, None)
    return _forward_of(call)(kernel, *tensors, sizes, call)


def _forward_of(call: AttentionCall) -> Callable[..., tuple[Tensor, Tensor]]:
    return levels.forward if call.spec.tree else kernels.forward


def _backward_of(
    call: AttentionCall,
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    return levels.backward if call.spec.tree else kernels.backward


# ---- the operators, which take flat arguments ----

_SETTINGS = (
    "int[] spec, float scale, float softcap, bool deterministic, bool batch_invariant, "
    "bool return_lse"
)


def _settings_of(call: AttentionCall) -> tuple[Any, ...]:
    """Return the fields of the call that kernels need, as arguments of the operators."""
    flags = (call.deterministic, call.batch_invariant, call.return_lse)
    return call.spec.as_ints(), call.scale, call.softcap or 0.0, *flags


def _sizes_and_call(
    q: Tensor,
    k: Tensor,
    sinks_H: Tensor | None,
    cu_seqlens_q: Tensor,
    numbers: tuple[Any, ...],
) -> tuple[KernelSizes, AttentionCall]:
    """Rebuild both from an operator's arguments: `KernelSizes`, then the output of `_settings_of`.

    The sizes are upper bounds if the operator is captured in a user's CUDA graph.
    """
    count = len(KernelSizes._fields)
    sizes = KernelSizes(*numbers[:count])
    if is_replayed(q):
        sizes = sizes.of_any_row(cu_seqlens_q.shape[-1] - 1)
    spec, scale, softcap, deterministic, batch_invariant, return_lse = numbers[count:]
    return sizes, AttentionCall(
        *(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2]),
        spec=MaskSpec.from_ints(spec),
        scale=scale,
        softcap=softcap or None,
        sinks=sinks_H is not None,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
    )


def _forward(kernel: str, *rest: Any) -> tuple[Tensor, Tensor]:
    q, k, v, sinks_H, cu_q, cu_k, *numbers = rest
    sizes, call = _sizes_and_call(q, k, sinks_H, cu_q, tuple(numbers))
    return _forward_of(call)(kernel, q, k, v, sinks_H, cu_q, cu_k, sizes, call)


def _backward(kernel: str, grad_THD: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, sinks_H, out, lse, cu_q, cu_k, *numbers = rest
    sizes, call = _sizes_and_call(q, k, sinks_H, cu_q, tuple(numbers))
    *grads, dsinks_H = _backward_of(call)(
        kernel, grad_THD, q, k, v, sinks_H, out, lse, cu_q, cu_k, sizes, call
    )
    return *grads, q.new_empty(0) if dsinks_H is None else dsinks_H  # type: ignore[return-value]


_library = torch.library.Library("flexvarlen", "FRAGMENT")
_QKV = "Tensor q_THD, Tensor k_THD, Tensor v_THD, Tensor? sinks_H"
_CU_SEQLENS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k"
_SIZES = ", ".join(f"SymInt {name}" for name in KernelSizes._fields)


def _operator(name: str, tensors: str, results: str, function: Any) -> Any:
    """Register a custom operator; `torch.library.custom_op` would take twice the host time."""
    schema = f"{name}(str kernel, {tensors}, {_SIZES}, {_SETTINGS}) -> ({results})"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.flexvarlen, name).default


cu_seqlens_forward = _operator(
    "cu_seqlens_forward", f"{_QKV}, {_CU_SEQLENS}", "Tensor, Tensor", _forward
)
"""Attention as an operator. A selective activation checkpointing policy can save it by this name:
`torch.ops.flexvarlen.cu_seqlens_forward.default`."""

cu_seqlens_backward = _operator(
    "cu_seqlens_backward",
    f"Tensor grad_THD, {_QKV}, Tensor out_THD, Tensor lse_HT, {_CU_SEQLENS}",
    "Tensor, Tensor, Tensor, Tensor",
    _backward,
)


@torch.library.register_fake("flexvarlen::cu_seqlens_forward", lib=_library)  # type: ignore[untyped-decorator]
def _(kernel: str, q_THD: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q_THD.shape
    return q_THD.new_empty(q_THD.shape), q_THD.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.register_fake("flexvarlen::cu_seqlens_backward", lib=_library)  # type: ignore[untyped-decorator]
def _(
    kernel: str,
    grad_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    sinks_H: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q_THD.new_empty(0) if sinks_H is None else sinks_H.new_empty(sinks_H.shape)
    return *(x.new_empty(x.shape) for x in (q_THD, k_THD, v_THD)), dsinks  # type: ignore[return-value]


# ---- autograd for the operators and for the plain functions ----


def _differentiate(
    backward: Any, ctx: Any, grad_THD: Tensor | None, *numbers: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v and the sinks."""
    if torch.is_grad_enabled():  # create_graph=True
        raise NotImplementedError(f"{ctx.kernel} has no double backward; use backend='reference'.")
    if grad_THD is None:
        return (None,) * 4
    saved = ctx.saved_tensors  # read once: under checkpointing, a second read fails
    dq, dk, dv, dsinks_H = backward(ctx.kernel, grad_THD, *saved, *numbers)
    return dq, dk, dv, None if saved[3] is None else dsinks_H


class _TracedAttention(torch.autograd.Function):
    """Forward and backward as custom operators, for tracing and dispatch modes."""

    @staticmethod
    def forward(ctx: Any, below: torch._C.DispatchKeySet, *inputs: Any) -> tuple[Tensor, Tensor]:
        kernel, q_THD, k_THD, v_THD, sinks_H, cu_seqlens_q, cu_seqlens_k, *numbers = inputs
        out_THD, lse_HT = _below_autograd(below, *inputs)
        ctx.kernel, ctx.numbers = kernel, numbers
        boundaries = (cu_seqlens_q, cu_seqlens_k)
        ctx.save_for_backward(q_THD, k_THD, v_THD, sinks_H, out_THD, lse_HT, *boundaries)
        ctx.mark_non_differentiable(lse_HT)
        ctx.set_materialize_grads(False)
        return out_THD, lse_HT

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = _differentiate(cu_seqlens_backward, ctx, grad_THD, *ctx.numbers)
        return None, None, *grads, None, None, *(None for _ in ctx.numbers)


def _below_autograd(below: torch._C.DispatchKeySet, *inputs: Any) -> Any:
    """Call the operator with the dispatch keys below autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return cu_seqlens_forward.redispatch(below, *inputs)


_BELOW_AUTOGRAD = torch._C._after_ADInplaceOrView_keyset
_KERNELS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def _autograd(keyset: torch._C.DispatchKeySet, *inputs: Any) -> Any:
    """Autograd implementation; `torch.library.register_autograd` would take twice the host time.

    A kernel that another library registers for a device is called only if gradients are needed.
    """
    _, q_THD, k_THD, v_THD, sinks_H, *_ = inputs
    below = keyset & _BELOW_AUTOGRAD
    if torch.is_grad_enabled() and torch._C._any_requires_grad(q_THD, k_THD, v_THD, sinks_H):
        return _TracedAttention.apply(below, *inputs)  # type: ignore[no-untyped-call]
    if below.highestPriorityTypeId() in _KERNELS:  # no dispatch key in between
        return _forward(*inputs)
    return _below_autograd(below, *inputs)


_library.impl("cu_seqlens_forward", _autograd, "Autograd", with_keyset=True)


class _Constants(NamedTuple):
    """Arguments without gradients, passed as one, because each argument costs host time."""

    kernel: str
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    sizes: KernelSizes
    call: AttentionCall


class _EagerAttention(torch.autograd.Function):
    """The same forward and backward, without custom operators.

    To save host time, the LSE is an output only if it is requested, and there is no
    `setup_context`, for which torch would inspect the signature in every call.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        sinks_H: Tensor | None,
        constants: _Constants,
    ) -> Tensor | tuple[Tensor, Tensor]:
        kernel, cu_q, cu_k, sizes, call = constants
        tensors = (q_THD, k_THD, v_THD, sinks_H)
        out_THD, lse_HT = _forward_of(call)(kernel, *tensors, cu_q, cu_k, sizes, call)
        ctx.kernel, ctx.numbers = kernel, (sizes, call)
        ctx.save_for_backward(*tensors, out_THD, lse_HT, cu_q, cu_k)
        if not call.return_lse:
            return out_THD
        ctx.mark_non_differentiable(lse_HT)
        ctx.set_materialize_grads(False)
        return out_THD, lse_HT

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor | None, *grad_lse: None) -> tuple[Tensor | None, ...]:
        backward = _backward_of(ctx.numbers[1])
        return *_differentiate(backward, ctx, grad_THD, *ctx.numbers), None


# Skip the Python wrapper of `apply`, which checks for setup_context and torch.func transforms and
# takes two microseconds.
_apply_eagerly = super(torch.autograd.Function, _EagerAttention).apply
