"""Variants that take a packed row: flexvarlen's backends, and the kernels that they wrap ("raw:").

A raw kernel is called as its own users call it: exact cu_seqlens and longest document, and what is
made once for a batch (a BlockMask, nested offsets) made beforehand.

Shapes: T = tokens of the row, B = 1, H = num_heads, Hkv = num_kv_heads, D = head_dim, J = jagged.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import flexvarlen as fv
from flexvarlen.attention.backends.registry import BACKENDS, get_backend, why_not
from flexvarlen.bench.suites.attention.inputs import Inputs, Prepare, Prepared
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.measure.timing import wall_seconds
from flexvarlen.runner.failures import Unsupported

RAW_PREFIX = "raw:"
MOST_EAGER_TOKENS = 32_768
"""An eager create_block_mask takes about 10 bytes for each pair of tokens: 11 GB at this length."""


# --- flexvarlen's backends -----------------------------------------------------------------------


def ours(backend: str) -> Prepare:
    """`packed_attention` with a plan made beforehand, as the layers of a model share it.

    Measures: `capacity`, `max_seqlen_bound`, `plan_ms`; of "auto" `auto_s`, the seconds of its
    first call, and `resolved` and `resolved_compiled`, what it takes.
    """
    return partial(_ours, backend)


def _ours(name: str, inputs: Inputs, needs_grad: bool) -> Prepared:
    if name not in BACKENDS and name != "auto":
        raise Unsupported(f"this installation has no backend {name}")
    layout = inputs.layout()
    kind: dict[str, Any] = {
        "num_heads": inputs.q.shape[1],
        "num_kv_heads": inputs.k.shape[1],
        "head_dim": inputs.q.shape[2],
        "dtype": inputs.q.dtype,
        "causal": inputs.causal,
        "needs_grad": needs_grad,
    }
    measures: dict[str, Any] = {
        "capacity": layout.capacity,
        "max_seqlen_bound": layout.max_seqlen_bound,
    }
    leaves = inputs.leaves(needs_grad)
    packed = partial(fv.packed_attention, *leaves, layout, causal=inputs.causal, backend=name)
    resolved = name
    if name == "auto":
        measures["auto_s"] = wall_seconds(packed, inputs.q.device)
        chosen = fv.explain(layout, **kind)
        resolved = chosen.chosen
        measures |= {"resolved": resolved, "resolved_compiled": chosen.compiled}
    elif refusal := why_not(name, device=inputs.q.device, **kind):
        raise Unsupported(refusal)
    mask = DocumentMask.of(layout, causal=inputs.causal)
    make_plan = partial(get_backend(resolved).plan, mask)
    plan = make_plan()
    if plan is not None:
        measures["plan_ms"] = 1e3 * wall_seconds(make_plan, inputs.q.device)
    return Prepared(partial(packed, plan=plan), leaves, inputs.grad_out, measures=measures)


# --- the kernels ---------------------------------------------------------------------------------


def first_of(result: Any) -> Tensor:
    """The output of a function that may return the LSE too."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def packaged(module: str, inputs: Inputs, needs_grad: bool, **options: Any) -> Prepared:
    """`flash_attn_varlen_func` of a FlashAttention package; generations differ in its arguments."""
    function = importlib.import_module(module).flash_attn_varlen_func
    offered = {
        "cu_seqlens_q": inputs.cu_seqlens,
        "cu_seqlens_k": inputs.cu_seqlens,
        "max_seqlen_q": inputs.longest,
        "max_seqlen_k": inputs.longest,
        "causal": inputs.causal,
    }
    known = inspect.signature(function).parameters
    call = partial(function, **options, **{x: y for x, y in offered.items() if x in known})
    leaves = inputs.leaves(needs_grad)
    return Prepared(lambda: first_of(call(*leaves)), leaves, inputs.grad_out)


def torch_varlen(inputs: Inputs, needs_grad: bool) -> Prepared:
    from torch.nn.attention.varlen import varlen_attn

    if not inputs.q.is_cuda:
        raise Unsupported("varlen_attn has no kernel on the CPU")
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0 if inputs.causal else -1)}
    if "enable_gqa" in known:  # later versions see it from the shapes
        options["enable_gqa"] = inputs.grouped
    ends, longest = inputs.cu_seqlens, inputs.longest
    leaves = q, k, v = inputs.leaves(needs_grad)
    call = partial(varlen_attn, q, k, v, ends, ends, longest, longest, **options)
    return Prepared(lambda: first_of(call()), leaves, inputs.grad_out)


def flex(backend: str, inputs: Inputs, needs_grad: bool) -> Prepared:
    """Compiled flex_attention under a BlockMask of create_block_mask."""
    on_cpu = not inputs.q.is_cuda
    if backend == "FLASH":
        if on_cpu:
            raise Unsupported("BACKEND='FLASH' needs CUDA")
        importlib.import_module("flash_attn.cute")
    if on_cpu and needs_grad:
        raise Unsupported("flex_attention has no backward on the CPU")

    def as_BHTD(x_THD: Tensor) -> Tensor:
        x_BHTD = x_THD.detach().transpose(0, 1)[None]
        return x_BHTD.contiguous() if on_cpu else x_BHTD  # the C++ template takes no views

    leaves = [as_BHTD(x).requires_grad_(needs_grad) for x in (inputs.q, inputs.k, inputs.v)]
    tokens, heads, head_dim = inputs.q.shape
    kind = (backend, heads, inputs.k.shape[1], head_dim, inputs.causal, str(inputs.q.dtype))
    call = partial(
        compiled_flex((*kind, tokens if on_cpu else None)),
        block_mask=document_mask(inputs),
        enable_gqa=inputs.grouped,
        kernel_options=None if on_cpu else {"BACKEND": backend},
    )
    return Prepared(
        lambda: call(*leaves), leaves, as_BHTD(inputs.grad_out), lambda x: x[0].transpose(0, 1)
    )


def document_mask(inputs: Inputs) -> BlockMask:
    """Pack documents as torch's documentation does: by ids that must be equal."""
    ids = torch.repeat_interleave(inputs.cu_seqlens.diff(), output_size=inputs.q.shape[0])

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        same = ids[q] == ids[kv]
        return same & (q >= kv) if inputs.causal else same

    tokens = inputs.q.shape[0]
    create = create_block_mask if tokens <= MOST_EAGER_TOKENS else _compiled_create()
    return create(mask_mod, None, None, tokens, tokens, device=inputs.q.device)


@cache
def _compiled_create() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask, dynamic=False)


@cache
def compiled_flex(kind: tuple[object, ...]) -> Callable[..., Tensor]:
    """flex_attention compiled for one kind of call, in which only T varies (on the CPU nothing).

    Dynamo counts recompilations, and remembers which sizes vary, by a function's code and name.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return flex_attention(q, k, v, **options)

    name = "raw_flex_" + "_".join(map(str, kind))
    own = types.FunctionType(attend.__code__.replace(co_name=name), globals())
    return torch.compile(own, fullgraph=True, dynamic=None if kind[-1] is None else False)


def forget_compiled() -> None:
    """Reset Dynamo, so that the next case is compiled for its own shapes."""
    compiled_flex.cache_clear()
    _compiled_create.cache_clear()
    torch._dynamo.reset()


def nested(inputs: Inputs, needs_grad: bool) -> Prepared:
    """SDPA on jagged nested tensors, made beforehand.

    They have no grouped queries. K and V are new in every layer, so they are repeated inside the
    timed call, as in flexvarlen's backend "nested".
    """
    if not inputs.q.is_cuda:
        raise Unsupported("jagged nested tensors have no causal SDPA on the CPU")
    group = inputs.q.shape[1] // inputs.k.shape[1]
    jagged = partial(
        torch.nested.nested_tensor_from_jagged,
        offsets=inputs.cu_seqlens.long(),
        min_seqlen=min(inputs.lengths),
        max_seqlen=inputs.longest,
    )

    def leaf(x_THD: Tensor, repeated: bool) -> Tensor:
        x = x_THD.detach() if repeated else jagged(x_THD.detach()).detach()
        return x.requires_grad_(needs_grad)

    leaves = [leaf(inputs.q, False), leaf(inputs.k, group > 1), leaf(inputs.v, group > 1)]

    def forward() -> Tensor:
        q, k, v = leaves
        if group > 1:
            k, v = (jagged(x.repeat_interleave(group, dim=1)) for x in (k, v))
        q_BHJD, k_BHJD, v_BHJD = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q_BHJD, k_BHJD, v_BHJD, is_causal=inputs.causal)
        return out.transpose(1, 2).values()

    return Prepared(forward, leaves, inputs.grad_out, lambda x: x.values() if x.is_nested else x)


PACKAGES = {"fa2": "flash_attn", "fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
"""The modules of FlashAttention, by the name of the backend."""

RAW: dict[str, Prepare] = {
    "flex": partial(flex, "TRITON"),
    "flex_fa4": partial(flex, "FLASH"),
    "varlen": torch_varlen,
    **{name: partial(packaged, module) for name, module in PACKAGES.items()},
    "nested": nested,
}
"""Raw kernels by the name of the backend that wraps them."""


def sdpa_of_one(inputs: Inputs, needs_grad: bool) -> Prepared:
    if len(inputs.lengths) != 1:
        raise Unsupported("scaled_dot_product_attention takes one document at a time, not packed")
    leaves = inputs.leaves(needs_grad)

    def forward() -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (x.transpose(0, 1)[None] for x in leaves)
        out = scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, is_causal=inputs.causal, enable_gqa=inputs.grouped
        )
        return out[0].transpose(0, 1)

    return Prepared(forward, leaves, inputs.grad_out)


def packed_calls() -> dict[str, Prepare]:
    """Every backend, "auto", and every raw kernel, by variant."""
    backends = {name: ours(name) for name in (*BACKENDS, "auto")}
    return backends | {RAW_PREFIX + name: prepare for name, prepare in RAW.items()}


ON_CPU = ("sdpa", "reference")
"""The backends that suites measure on a CPU."""


def packed_variants(*, on_gpu: bool) -> list[str]:
    """The backends that a row of many documents is measured on."""
    return [name for name in BACKENDS if name != "reference"] if on_gpu else list(ON_CPU)
