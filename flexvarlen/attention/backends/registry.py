"""Registry of the attention backends, by name.

A backend requested by name never falls back to another, but raises an error with the reason.
"""

from __future__ import annotations

import re

import torch

from flexvarlen.attention.backends import flex, flex_fa4, machines, nested, reference, sdpa
from flexvarlen.attention.backends.cu_seqlens import cudnn, fa2, fa3, fa4, hub, varlen
from flexvarlen.attention.call import INT32_ELEMENTS, AttentionCall, Backend, attention_call
from flexvarlen.mask.spec import Align, MaskSpec

_MODULES = (reference, sdpa, flex, flex_fa4, varlen, cudnn, nested, fa2, fa3, fa4)
_REGISTRY: dict[str, Backend] = {module.BACKEND.name: module.BACKEND for module in _MODULES}

_PACKAGED = {backend.name: backend for backend in (fa2.BACKEND, fa3.BACKEND, fa4.BACKEND)}
"""Backends whose kernel comes from an installed package, else from the Hub."""

BACKENDS: tuple[str, ...] = tuple(_REGISTRY)
"""The names of all backends."""

AUTO_ORDER = {"cuda": ("fa3", "fa2", "flex", "varlen", "sdpa"), "cpu": ("sdpa", "reference")}
"""Order in which `backend="auto"` tries backends without known times, by device type.

On the CPU, `reference` supports softcap and sinks, which `sdpa` does not, but needs O(T²) memory.
"""

WASTEFUL_ORDER = {"cuda": ("flex", "fa3", "fa2", "varlen", "sdpa")}
"""As `AUTO_ORDER`, if cu_seqlens kernels would be launched for far more tokens than the row has,
as in a compiled graph for a long row whose documents come from position_ids or document ids."""

_BLOCKS = "its blocks begin at multiples of their size, wherever a document does"
_NOT_MEASURED = "it was not measured"
NOT_SAME_BITS = {
    "reference": "its sums run over the whole row",
    "flex": _BLOCKS,
    "flex_fa4": _BLOCKS,
    "cudnn": _NOT_MEASURED,
    "nested": _NOT_MEASURED,
    "fa4": _NOT_MEASURED,
}
"""Backends whose results for a document may depend on its offset or neighbours, and why. The others
attend to each document alone, in an order of sums that its tokens decide."""

SAME_BITS = tuple(
    dict.fromkeys(
        name for order in AUTO_ORDER.values() for name in order if name not in NOT_SAME_BITS
    )
)
"""The others, in the order of `AUTO_ORDER`."""

IMPLEMENTATIONS = {
    # transformers refuses names with "sdpa" for models that its own sdpa does not support
    "flexvarlen_doc" if backend == "sdpa" else f"flexvarlen_{backend}": backend
    for backend in (*BACKENDS, "auto")
} | {"flexvarlen_sdpa": "sdpa"}
"""The backend of each of our `attn_implementation` names in transformers; `patch_model` sets the
first name of a backend."""

_TRANSFORMERS_NAMES = {
    "flash_attention_2": "fa2",
    "flash_attention_3": "fa3",
    "flash_attention_4": "fa4",
    "flex_attention": "flex",
    **hub.BACKEND_OF,
}
_HUB_NAME = re.compile(r"(?P<repository>[^/:@]+/[^/:@]+)(@[^/:]+)?(:[^/:]+)?")
"""A kernel of the Hub as transformers spells it, with a revision and a function."""


def our_name(name: str) -> str:
    """The backend that runs the kernel of this name in transformers; other names are unchanged.

    The revision and the function of a kernel of the Hub are chosen by the backend.

    >>> our_name("flash_attention_2"), our_name("sdpa"), our_name("auto")
    ('fa2', 'sdpa', 'auto')
    >>> our_name("kernels-community/vllm-flash-attn3@main:flash_attn_varlen_func")
    'fa3'
    """
    if not isinstance(name, str):
        raise ValueError(
            f"backend must be a name, got {name!r:.80}; choose one of {', '.join(BACKENDS)} "
            "or auto."
        )
    of_hub = _HUB_NAME.fullmatch(name.strip())
    return _TRANSFORMERS_NAMES.get(of_hub["repository"].strip() if of_hub else name, name)


def get_backend(name: str) -> Backend:
    """Return the backend with the given name.

    Raises:
        ValueError: no backend has that name.
    """
    if name not in _REGISTRY:
        raise ValueError(
            f"backend must be one of {', '.join(BACKENDS)} or auto, got {name!r}; choose one."
        )
    return _REGISTRY[name]


def refusal(name: str, call: AttentionCall) -> str | None:
    """Return why the backend cannot serve the call, or None; does not access the network."""
    return machines.refusal(name, call) or get_backend(name).why_not(call)


def named_refusal(name: str, call: AttentionCall) -> str | None:
    """As `refusal`, for a backend that the user named: its kernel may be loaded from the Hub."""
    reason = machines.refusal(name, call)
    if reason is not None:
        return reason
    if name in _PACKAGED and _PACKAGED[name].why_missing(call.device) is not None:
        hub.download(name)
    return get_backend(name).why_not(call)


def must_be_checked(name: str, device: torch.device) -> bool:
    """Whether a backend, even if named, serves no call before its results passed the check.

    This holds for kernels of the Hub, and on machines where the backend was never tried.
    """
    return hub.origin(name) is not None or not machines.is_tried(name, device)


def fixed_order(call: AttentionCall, *, wasteful: bool = False) -> tuple[str, ...]:
    """The backends of `AUTO_ORDER`, or of `WASTEFUL_ORDER` if `wasteful`, for a call's device."""
    order = AUTO_ORDER | WASTEFUL_ORDER if wasteful else AUTO_ORDER
    return order.get(call.device.type, ("sdpa",))


def why_not(
    name: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    num_heads: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 64,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    chunk: int | None = None,
    prefix: bool = False,
    cross: bool = False,
    align: Align = "bottom_right",
    softcap: float | None = None,
    sinks: bool = False,
    needs_grad: bool = True,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    return_lse: bool = False,
    tree: bool = False,
    total_tokens: int = 0,
    compiled: bool = False,
) -> str | None:
    """Return why a backend cannot serve calls of this kind on this machine, or None if it can.

    `packed_attention` raises an error with the same message; if it is None, the call runs. A kernel
    of the Hub that is not on disk is a reason, although a call that names its backend loads it; a
    kernel on disk is compared with the reference at its first call, which may refuse it.

    Args:
        name: one of `BACKENDS`, or transformers' name for the same kernel.
        device, dtype, num_heads, num_kv_heads, head_dim: properties of the tensors.
        causal, window, chunk, align: as in `packed_attention`.
        prefix, cross, tree: whether the call passes `prefix` and `layout_k`, and whether its
            documents are trees. `align` matters only with `cross`.
        total_tokens: length of the longer of the query and key rows; 0: short enough for every
            kernel.
        compiled: whether the call is inside your own torch.compile graph; with needs_grad=False,
            one without a backward.
        softcap, sinks, deterministic, batch_invariant, return_lse: as in `packed_attention`; if
            None, the environment variables apply.
        needs_grad: whether a backward will follow; False for tensors that require no gradient and
            under `torch.no_grad()`, where a kernel without such a backward runs.

    Returns:
        A sentence that says why not and what to do instead, or None if the backend can serve them.

    Raises:
        ValueError: no backend has that name, or a window, chunk, softcap or number of heads is
            invalid.
        NotImplementedError: no backend supports this mask for trees.

    >>> why_not("sdpa") is None
    True
    >>> why_not("flash_attention_2") == why_not("fa2")
    True
    """
    kind = {"causal": causal, "window": window, "chunk": chunk}
    spec = MaskSpec.of(**kind, prefix=prefix, cross=cross, align=align)  # type: ignore[arg-type]
    call = attention_call(
        torch.device(device),
        dtype,
        num_heads,
        num_kv_heads,
        head_dim,
        spec.with_trees() if tree else spec,
        softcap=softcap,
        sinks=sinks,
        needs_grad=needs_grad,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
        past_int32=total_tokens * num_heads * head_dim >= INT32_ELEMENTS,
    )
    return refusal(our_name(name), call.in_graph() if compiled else call)


def available_backends(
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    num_heads: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 64,
    needs_grad: bool = True,
) -> list[str]:
    """Return the backends that can serve such calls on this machine.

    Arguments and errors as in `why_not`.
    """
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    kind = {"device": device, "dtype": dtype, "needs_grad": needs_grad, **heads}
    return [name for name in BACKENDS if why_not(name, **kind) is None]  # type: ignore[arg-type]
