"""The attention kernels, by name.

A kernel the user names never falls back to another: it says why it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flexvarlen.attention.backends import flex, flex_fa4, nested, reference, sdpa
from flexvarlen.attention.backends.cu_seqlens import cudnn, fa2, fa3, fa4, varlen
from flexvarlen.attention.call import INT32_ELEMENTS, AttentionCall, Backend
from flexvarlen.env import BATCH_INVARIANT, DETERMINISTIC, promised
from flexvarlen.mask.spec import Align, MaskSpec

_MODULES = (reference, sdpa, flex, flex_fa4, varlen, cudnn, nested, fa2, fa3, fa4)
_REGISTRY: dict[str, Backend] = {module.BACKEND.name: module.BACKEND for module in _MODULES}

BACKENDS: tuple[str, ...] = tuple(_REGISTRY)
"""Every backend's name."""

AUTO_ORDER = {"cuda": ("fa3", "fa2", "flex", "varlen", "sdpa"), "cpu": ("sdpa", "reference")}
"""`backend="auto"` where it has not measured: the first usable of these, by device type.

On the CPU `reference` has what `sdpa` lacks (softcap, sinks), in memory that grows with T squared.
"""

WASTEFUL_ORDER = {"cuda": ("flex", "fa3", "fa2", "varlen", "sdpa")}
"""The same where kernels over cu_seqlens would be launched for far more than the row holds: in a
compiled graph that alone sees the documents (position_ids, document ids) of a long row."""


def get_backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        ValueError: no backend has that name.
    """
    if name not in _REGISTRY:
        raise ValueError(
            f"backend must be one of {', '.join(BACKENDS)} or auto, got {name!r}; choose one of "
            "these."
        )
    return _REGISTRY[name]


def refusal(name: str, call: AttentionCall) -> str | None:
    """Why the backend cannot serve the call, or None if it can."""
    return get_backend(name).why_not(call)


def first_usable(
    call: AttentionCall, *, wasteful: bool = False, failed: Mapping[str, str] | None = None
) -> str:
    """The first usable backend in `AUTO_ORDER`, or `WASTEFUL_ORDER`.

    Args:
        call: the kind of call.
        wasteful: whether the second order is to be used.
        failed: backends that fail, and how.

    Raises:
        NotImplementedError: none is usable; the sentence gives each one's reason.
    """
    reasons = []
    order = AUTO_ORDER | WASTEFUL_ORDER if wasteful else AUTO_ORDER
    for name in order.get(call.device.type, ("sdpa",)):
        reason = (failed or {}).get(name) or refusal(name, call)
        if reason is None:
            return name
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError("no backend can serve this call. " + " ".join(reasons))


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
    total_tokens: int = 0,
) -> str | None:
    """Why a backend cannot serve calls of this kind on this machine.

    `packed_attention` raises this very sentence, and runs where there is none.

    Args:
        name: one of `BACKENDS`.
        device, dtype, num_heads, num_kv_heads, head_dim: of the tensors.
        causal, window, chunk, align: as in `packed_attention`.
        prefix, cross: whether a call is given `prefix` and `layout_k`.
        total_tokens: of the longer of the rows of queries and of keys; 0: not so many that a kernel
            would mind.
        softcap, sinks, deterministic, batch_invariant, return_lse: as in `packed_attention`; where
            None says nothing, the environment variables do.
        needs_grad: whether a backward will follow.

    Returns:
        One sentence that says why not and what to do, or None if the backend can.

    Raises:
        ValueError: no backend has that name.

    >>> why_not("sdpa") is None
    True
    """
    kind = {"causal": causal, "window": window, "chunk": chunk}
    call = AttentionCall(
        device=torch.device(device),
        dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        spec=MaskSpec.of(**kind, prefix=prefix, cross=cross, align=align),  # type: ignore[arg-type]
        softcap=softcap,
        sinks=sinks,
        needs_grad=needs_grad,
        deterministic=promised(DETERMINISTIC, deterministic),
        batch_invariant=promised(BATCH_INVARIANT, batch_invariant),
        return_lse=return_lse,
        past_int32=total_tokens * num_heads * head_dim >= INT32_ELEMENTS,
    )
    return refusal(name, call)


def available_backends(
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    num_heads: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 64,
    needs_grad: bool = True,
) -> list[str]:
    """The backends that can serve such calls on this machine; arguments as in `why_not`."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    kind = {"device": device, "dtype": dtype, "needs_grad": needs_grad, **heads}
    return [name for name in BACKENDS if why_not(name, **kind) is None]  # type: ignore[arg-type]
