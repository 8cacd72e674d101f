"""The kernels that flexvarlen's backends wrap, called as their own users call them.

Tight cu_seqlens, the exact longest document, no flexvarlen between. Each entry of `RAW` imports its
package, makes what a user makes once a batch (a BlockMask, a list of document ids) and returns the
call to be timed. Where a package is missing it raises ImportError; where a kernel cannot take such
documents, `Unsupported`.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim.
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

from flexvarlen.bench.attention.inputs import Inputs, Prepare, Prepared, Serial, serial
from flexvarlen.env import flash_attention_impl
from flexvarlen.equivalence.variants import Unsupported

__all__ = [
    "RAW",
    "Inputs",
    "Prepare",
    "Prepared",
    "Serial",
    "Unsupported",
    "behind_varlen",
    "deterministic_argument",
    "forget_compiled",
    "sdpa_of_one",
    "serial",
]

# Evaluated pair by pair, an eager create_block_mask takes about 10 bytes a pair: 11 GB here.
MOST_EAGER_TOKENS = 32_768


def first_of(result: Any) -> Tensor:
    """The output of a function that may also return the LSE."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def packaged(
    module: str, inputs: Inputs, needs_grad: bool, *, deterministic: bool = False
) -> Prepared:
    """`flash_attn_varlen_func` of a FlashAttention package; generations differ in its arguments."""
    function = importlib.import_module(module).flash_attn_varlen_func
    known = inspect.signature(function).parameters
    offered = {
        "cu_seqlens_q": inputs.cu_seqlens,
        "cu_seqlens_k": inputs.cu_seqlens,
        "max_seqlen_q": inputs.longest,
        "max_seqlen_k": inputs.longest,
        "causal": inputs.causal,
    }
    arguments = {name: value for name, value in offered.items() if name in known}
    if deterministic:
        arguments |= deterministic_argument(function)
    leaves = inputs.leaves(needs_grad)
    return Prepared(
        lambda: first_of(function(*leaves, **arguments)),
        leaves,
        inputs.cotangent,
        deterministic=deterministic,
    )


def deterministic_argument(function: Callable[..., Any]) -> dict[str, Any]:
    """What asks a kernel's function for a deterministic backward.

    Raises:
        Unsupported: it has no such argument.
    """
    if "deterministic" not in inspect.signature(function).parameters:
        raise Unsupported(f"{function.__module__}.{function.__name__} takes no `deterministic`")
    return {"deterministic": True}


def torch_varlen(inputs: Inputs, needs_grad: bool) -> Prepared:
    """`varlen_attn` of torch."""
    from torch.nn.attention.varlen import varlen_attn

    if not inputs.q.is_cuda:
        raise Unsupported("varlen_attn has no kernel on the CPU")
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {}
    if "window_size" in known:
        options["window_size"] = (-1, 0 if inputs.causal else -1)
    else:  # torch 2.10
        options["is_causal"] = inputs.causal
    if "enable_gqa" in known:  # before torch 2.13: by the shapes
        options["enable_gqa"] = inputs.grouped
    ends, longest = inputs.cu_seqlens, inputs.longest
    leaves = inputs.leaves(needs_grad)

    def forward() -> Tensor:
        q, k, v = leaves
        return first_of(varlen_attn(q, k, v, ends, ends, longest, longest, **options))

    return Prepared(forward, leaves, inputs.cotangent)


def behind_varlen(device: torch.device, *, raw: bool) -> dict[str, Any]:
    """What torch runs for `varlen`, for its rows.

    `flash_attention_impl` None: the kernel that torch ships. The raw call may take cuDNN's instead
    (torch 2.14 and later, where cuDNN can serve it); ours never does.
    """
    from torch.nn.attention import varlen

    prefers_cudnn = getattr(varlen, "_should_use_cudnn", None)
    prefers = False
    if raw and device.type == "cuda" and prefers_cudnn is not None:
        index = torch.cuda.current_device() if device.index is None else device.index
        prefers = bool(prefers_cudnn(index))
    return {"flash_attention_impl": flash_attention_impl(), "prefers_cudnn": prefers}


def flex(backend: str, inputs: Inputs, needs_grad: bool) -> Prepared:
    """Compiled flex_attention under a BlockMask from create_block_mask, on the same memory."""
    on_cpu = not inputs.q.is_cuda
    if backend == "FLASH":
        if on_cpu:
            raise Unsupported("BACKEND='FLASH' needs CUDA")
        importlib.import_module("flash_attn.cute")
    if on_cpu and needs_grad:
        raise Unsupported("flex_attention has no backward on the CPU")
    mask = document_mask(inputs)

    def as_BHTD(x_THD: Tensor) -> Tensor:
        x_BHTD = x_THD.detach().transpose(0, 1)[None]
        # The C++ template takes no views.
        return x_BHTD.contiguous() if on_cpu else x_BHTD

    leaves = [as_BHTD(x).requires_grad_(needs_grad) for x in (inputs.q, inputs.k, inputs.v)]
    tokens, heads, head_dim = inputs.q.shape
    kind = (backend, heads, inputs.k.shape[1], head_dim, inputs.causal, str(inputs.q.dtype))
    call = compiled_flex((*kind, tokens if on_cpu else None))
    options = None if on_cpu else {"BACKEND": backend}
    return Prepared(
        lambda: call(*leaves, block_mask=mask, enable_gqa=inputs.grouped, kernel_options=options),
        leaves,
        as_BHTD(inputs.cotangent),
        lambda x: x[0].transpose(0, 1),
    )


def document_mask(inputs: Inputs) -> BlockMask:
    """As torch's documentation packs documents: ids that must be equal."""
    lengths = torch.tensor(inputs.lengths, device=inputs.q.device)
    documents = torch.arange(len(inputs.lengths), device=inputs.q.device)
    ids = documents.repeat_interleave(lengths, output_size=inputs.q.shape[0])

    def document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ids[q] == ids[kv]

    def causal_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (ids[q] == ids[kv]) & (q >= kv)

    tokens = inputs.q.shape[0]
    create = create_block_mask if tokens <= MOST_EAGER_TOKENS else _compiled_create()
    which = causal_document if inputs.causal else document
    return create(which, None, None, tokens, tokens, device=inputs.q.device)


@cache
def _compiled_create() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask, dynamic=False)


@cache
def compiled_flex(kind: tuple[object, ...]) -> Callable[..., Tensor]:
    """flex_attention compiled for one kind, in which only T varies (on the CPU nothing does).

    Dynamo counts recompilations, and remembers which sizes vary, by a function's code and name.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return flex_attention(q, k, v, **options)

    name = "raw_flex_" + "_".join(map(str, kind))
    own = types.FunctionType(attend.__code__.replace(co_name=name), globals())
    return torch.compile(own, fullgraph=True, dynamic=None if kind[-1] is None else False)


def forget_compiled() -> None:
    """Of all compiled functions, here and elsewhere: what comes next is compiled for its shapes."""
    compiled_flex.cache_clear()
    _compiled_create.cache_clear()
    torch._dynamo.reset()


def nested(inputs: Inputs, needs_grad: bool) -> Prepared:
    """SDPA on jagged nested tensors, which are made ahead, as a model shares them among layers.

    They know no grouped queries: K and V are then repeated and made into nested tensors inside the
    timed call.
    """
    # K and V are fresh in every layer of every step, so that whoever calls this kernel pays for the
    # repeats each time, and for the sum over groups in the backward. So does flexvarlen's backend
    # "nested", beside which this is timed: made ahead, they would be counted against it alone.
    if not inputs.q.is_cuda:
        raise Unsupported("jagged nested tensors have no causal SDPA on the CPU")
    group = inputs.q.shape[1] // inputs.k.shape[1]
    jagged = partial(
        torch.nested.nested_tensor_from_jagged,
        offsets=inputs.cu_seqlens.long(),
        min_seqlen=min(inputs.lengths),
        max_seqlen=inputs.longest,
    )

    leaves = [
        jagged(x.detach()).detach().requires_grad_(needs_grad)
        if x is inputs.q or group == 1
        else x.detach().requires_grad_(needs_grad)
        for x in (inputs.q, inputs.k, inputs.v)
    ]

    def forward() -> Tensor:
        q, k, v = leaves
        if group > 1:
            k, v = (jagged(x.repeat_interleave(group, dim=1)) for x in (k, v))
        q_BHJD, k_BHJD, v_BHJD = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q_BHJD, k_BHJD, v_BHJD, is_causal=inputs.causal)
        return out.transpose(1, 2).values()

    return Prepared(forward, leaves, inputs.cotangent, lambda x: x.values() if x.is_nested else x)


RAW: dict[str, Prepare] = {
    "flex": partial(flex, "TRITON"),
    "flex_fa4": partial(flex, "FLASH"),
    "varlen": torch_varlen,
    "fa2": partial(packaged, "flash_attn"),
    "fa3": partial(packaged, "flash_attn_interface"),
    "fa4": partial(packaged, "flash_attn.cute"),
    "nested": nested,
}
"""By the name of the backend that wraps it."""


def sdpa_of_one(inputs: Inputs, needs_grad: bool) -> Prepared:
    """`scaled_dot_product_attention` of a document alone, `[1, heads, tokens, head_dim]` views.

    Raises:
        Unsupported: there are several; `serial` makes a call of each.
    """
    if len(inputs.lengths) != 1:
        raise Unsupported("scaled_dot_product_attention takes one document at a time, not packed")
    leaves = inputs.leaves(needs_grad)
    causal, grouped = inputs.causal, inputs.grouped

    def forward() -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (x.transpose(0, 1)[None] for x in leaves)
        out = scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, is_causal=causal, enable_gqa=grouped
        )
        return out[0].transpose(0, 1)

    return Prepared(forward, leaves, inputs.cotangent)
