"""Choose the backend of a call: the named backend, if it can serve the call, or that of "auto".

Choices are cached for the life of the process.
"""

from __future__ import annotations

import logging
from operator import index
from typing import Any

import torch

from flexvarlen.attention.auto import decide as auto
from flexvarlen.attention.auto.decide import Decision
from flexvarlen.attention.auto.keys import Sizes, bucket, describe, sizes, sizes_in_graph
from flexvarlen.attention.backends.registry import named_refusal
from flexvarlen.attention.call import AttentionCall
from flexvarlen.env import torch_state
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.mask.spec import MaskSpec

_MOST_ENTRIES = 4096

_table: dict[tuple[object, ...], Decision] = {}
"""Keys: requested backend, call, bucket of sizes (for "auto"), and torch's global settings."""

_log = logging.getLogger("flexvarlen")


def choose(backend: str, call: AttentionCall, mask: DocumentMask) -> str:
    """Return the name of a backend that can serve the call.

    Args:
        backend: a name of `BACKENDS`, or "auto".
        call: the call.
        mask: its documents.

    Raises:
        ValueError: no backend has that name.
        NotImplementedError: the backend, or every candidate of "auto", cannot serve the call.

    A cached choice takes a few microseconds. Traces under `fullgraph=True` as a constant.
    """
    if torch.compiler.is_compiling():
        return _choose_in_graph(backend, call, mask)
    if backend != "auto":
        key: tuple[object, ...] = (backend, call, None, torch_state())
        if key not in _table and _require_usable(backend, call, mask):
            _remember(key, Decision(backend, "named", checked=True))
        return backend
    return decision_for(call, sizes(mask), mask).backend


def decision_for(call: AttentionCall, sizes: Sizes, mask: DocumentMask | None) -> Decision:
    """What "auto" chooses and why; runs a kernel once if it was not checked on this machine.

    Args:
        call: the call.
        sizes: sizes of the mask's layouts; 0 for a size that a compiled graph does not know.
        mask: the documents of the call; None while a compiled graph is traced.

    Raises:
        NotImplementedError: no backend can serve the call.
    """
    sizes_bucket = None if 0 in sizes else bucket(sizes)
    key = ("auto", call, sizes_bucket, torch_state())
    known = _table.get(key)
    if known is not None:
        return known
    kind = call.kind()
    kind_key = ("auto", kind, sizes_bucket, torch_state())
    known = _table.get(kind_key) or auto.decide(kind, sizes_bucket, mask)
    if known.checked:
        if kind_key not in _table:
            _log.info("auto takes %s for %s: %s", known.backend, describe(call), known.why)
        _remember(kind_key, known)
        _remember(key, known)
    return known


def forget_decisions() -> None:
    """Forget the choices of "auto", as measurements have changed."""
    _table.clear()


def clear_cache() -> None:
    """Clear the choices and checks of this process; the cache file of "auto" is kept."""
    forget_decisions()
    auto.reset()


def _remember(key: tuple[object, ...], decision: Decision) -> None:
    if len(_table) >= _MOST_ENTRIES:
        _table.clear()
    _table[key] = decision


def _require_usable(backend: str, call: AttentionCall, mask: DocumentMask | None) -> bool:
    """Load and check the named backend's kernel if needed; return whether the answer is final.

    Raises:
        NotImplementedError: it cannot serve the call.
    """
    reason = named_refusal(backend, call)
    if reason is not None:
        raise NotImplementedError(reason)
    return auto.check_named(backend, call, mask)


def _choose_in_graph(backend: str, call: AttentionCall, mask: DocumentMask) -> str:
    # index() specializes dynamic head counts (dynamic=True) and adds a guard.
    heads = (index(call.num_heads), index(call.num_kv_heads), index(call.head_dim))
    sizes = sizes_in_graph(mask) if backend == "auto" else ()
    softcap = None if call.softcap is None else 1.0  # its value does not affect the choice
    device, flags = call.device, tuple(call[8:])
    # "auto" chooses for a model in training mode as if a backward followed.
    has_backward = call.needs_grad and torch.is_grad_enabled()
    name: str = _choose_constant(
        *(backend, device.type, device.index, call.dtype, heads),
        *(tuple(call.spec.as_ints()), softcap, flags, sizes, has_backward),
    )
    return name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choose_constant(
    backend: str,
    device_type: str,
    device_index: int | None,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    spec: tuple[int, ...],
    softcap: float | None,
    flags: tuple[Any, ...],
    sizes: Sizes,
    has_backward: bool,
) -> str:
    """As `choose`, but takes only constants: Dynamo runs it while tracing."""
    device = torch.device(device_type if device_index is None else f"{device_type}:{device_index}")
    call = AttentionCall(device, dtype, *heads, MaskSpec.from_ints(spec), 1.0, softcap, *flags)
    call = call._replace(graph="training" if has_backward else "inference")
    if backend == "auto":
        return decision_for(call, sizes, None).backend
    _require_usable(backend, call, None)
    return backend
