"""One traceable operator for every kernel that takes cu_seqlens: torch's varlen, FlashAttention.

Eagerly a plain autograd.Function calls the kernels of `cu_seqlens_kernel.py` (three times cheaper
than an operator); inside a compiled graph, and where something watches operators (selective
activation checkpointing), they are `torch.ops.flexvarlen.cu_seqlens_forward` and `_backward`, with
fake implementations, so that `fullgraph=True` holds.

Shape legend: T, Tk = tokens of the query and the key row, H = num_heads, Hkv = num_kv_heads,
D = head_dim, N = document slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens.kernel import Numbers, kernel_backward, kernel_forward


def attend(
    kernel: str,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    sinks_H: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    numbers: Numbers,
) -> tuple[Tensor, Tensor | None]:
    """Output and, `with_lse`, the LSE by a registered kernel; differentiable, but for the LSE.

    The LSE is that of the scores, without the sinks.
    """
    tensors = (q_THD, k_THD, v_THD, sinks_H, cu_seqlens_q, cu_seqlens_k)
    result: Any
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        result = cu_seqlens_forward(kernel, *tensors, *numbers)
    elif torch.is_grad_enabled() and (
        q_THD.requires_grad
        or k_THD.requires_grad
        or v_THD.requires_grad
        or (sinks_H is not None and sinks_H.requires_grad)
    ):
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                f"{kernel} is not made for the transforms of torch.func; use backend='reference', "
                "or torch.autograd.grad."
            )
        result = _apply_eagerly(kernel, *tensors, numbers)  # type: ignore[no-untyped-call]
    else:
        result = kernel_forward(kernel, *tensors, numbers)
    return (result, None) if isinstance(result, Tensor) else result


_library = torch.library.Library("flexvarlen", "FRAGMENT")
_SCHEMA_TYPES = {int: "SymInt", float: "float", bool: "bool"}


def _flat(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on the fields of `Numbers`, as an operator's arguments are flat."""
    fields = len(Numbers._fields)

    def flat(*arguments: Any) -> Any:
        return function(*arguments[:-fields], Numbers(*arguments[-fields:]))

    return flat


def _operator(name: str, tensors: str, results: str, flat: Callable[..., Any]) -> Any:
    """The function as an operator; `torch.library.custom_op` would take twice the host's time.

    Its schema is the kernel's name, `tensors` and the fields of `Numbers`.
    """
    fields = get_type_hints(Numbers)
    numbers = ", ".join(f"{_SCHEMA_TYPES[kind]} {field}" for field, kind in fields.items())
    schema = f"{name}(str kernel, {tensors}, {numbers}) -> ({results})"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, flat, "CompositeExplicitAutograd")
    return getattr(torch.ops.flexvarlen, name).default


_QKV = "Tensor q_THD, Tensor k_THD, Tensor v_THD, Tensor? sinks_H"
_CU_SEQLENS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k"

_flat_forward = _flat(kernel_forward)

cu_seqlens_forward = _operator(
    "cu_seqlens_forward", f"{_QKV}, {_CU_SEQLENS}", "Tensor, Tensor", _flat_forward
)
"""Attention as an operator. Selective activation checkpointing keeps its outputs by this name:
`torch.ops.flexvarlen.cu_seqlens_forward.default`."""

cu_seqlens_backward = _operator(
    "cu_seqlens_backward",
    f"Tensor grad_THD, {_QKV}, Tensor out_THD, Tensor lse_HT, {_CU_SEQLENS}",
    "Tensor, Tensor, Tensor, Tensor",
    _flat(kernel_backward),
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


def _differentiate(
    backward: Any, ctx: Any, grad_THD: Tensor | None, *numbers: Any
) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():  # create_graph=True
        raise NotImplementedError(
            f"{ctx.kernel} has no gradient of its gradient; use backend='reference'."
        )
    if grad_THD is None:
        return (None,) * 7
    saved = ctx.saved_tensors  # once: checkpointing hands each out once
    sinks_H = saved[3]
    dq, dk, dv, dsinks_H = backward(ctx.kernel, grad_THD, *saved, *numbers)
    return None, dq, dk, dv, None if sinks_H is None else dsinks_H, None, None


class _TracedAttention(torch.autograd.Function):
    """Forward and backward as operators, for what watches operators."""

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
        return None, *grads, *(None for _ in ctx.numbers)


def _below_autograd(below: torch._C.DispatchKeySet, *inputs: Any) -> Any:
    """The operator, for whatever lies between autograd and its kernel."""
    with torch._C._AutoDispatchBelowAutograd():
        return cu_seqlens_forward.redispatch(below, *inputs)


_BELOW_AUTOGRAD = torch._C._after_ADInplaceOrView_keyset
_KERNELS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def _autograd(keyset: torch._C.DispatchKeySet, *inputs: Any) -> Any:
    """What autograd calls. `torch.library.register_autograd` would take twice the host's time.

    A kernel that somebody else registers for a device is called with gradients alone.
    """
    _, q_THD, k_THD, v_THD, sinks_H, *_ = inputs
    below = keyset & _BELOW_AUTOGRAD
    if torch.is_grad_enabled() and torch._C._any_requires_grad(q_THD, k_THD, v_THD, sinks_H):
        return _TracedAttention.apply(below, *inputs)  # type: ignore[no-untyped-call]
    if below.highestPriorityTypeId() in _KERNELS:  # nothing lies between
        return _flat_forward(*inputs)
    return _below_autograd(below, *inputs)


_library.impl("cu_seqlens_forward", _autograd, "Autograd", with_keyset=True)


class _EagerAttention(torch.autograd.Function):
    """The same forward and backward, called plainly.

    For the host's time the numbers are one argument, an LSE that nobody wants is no output, and
    there is no `setup_context`, for which torch would look at the signature in each call.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernel: str,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        sinks_H: Tensor | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        numbers: Numbers,
    ) -> Tensor | tuple[Tensor, Tensor]:
        boundaries = (cu_seqlens_q, cu_seqlens_k)
        out_THD, lse_HT = kernel_forward(kernel, q_THD, k_THD, v_THD, sinks_H, *boundaries, numbers)
        ctx.kernel, ctx.numbers = kernel, numbers
        ctx.save_for_backward(q_THD, k_THD, v_THD, sinks_H, out_THD, lse_HT, *boundaries)
        if not numbers.with_lse:
            return out_THD
        ctx.mark_non_differentiable(lse_HT)
        ctx.set_materialize_grads(False)
        return out_THD, lse_HT

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor | None, *grad_lse: None) -> tuple[Tensor | None, ...]:
        return *_differentiate(kernel_backward, ctx, grad_THD, ctx.numbers), None


# Without the Python around it, which looks for a setup_context and for transforms of torch.func:
# two microseconds.
_apply_eagerly = super(torch.autograd.Function, _EagerAttention).apply
