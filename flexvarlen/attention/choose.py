"""Choose the backend of a call: the named backend, if it can serve the call, or that of "auto".

Choices are cached for the life of the process.
"""

from __future__ import annotations

import logging
from operator import index
from typing import Any

import torch

from flexvarlen.attention.auto import decide as auto
from flexvarlen.attention.auto.cache_keys import Sizes, bucket, describe, sizes, sizes_in_graph
from flexvarlen.attention.auto.decide import Decision
from flexvarlen.attention.backends.registry import named_refusal
from flexvarlen.attention.call import AttentionCall
from flexvarlen.env import torch_state
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.mask.spec import MaskSpec

_MAX_ENTRIES = 4096

_choices: dict[tuple[object, ...], Decision] = {}
"""Keys: requested backend, call, bucket of sizes (for "auto"), and torch's global settings."""

_log = logging.getLogger("flexvarlen")


def choose(backend: str, call: AttentionCall, mask: DocumentMask, *, training: bool = False) -> str:
    """Return the name of a backend that can serve the call.

    Args:
        backend: a name of `BACKENDS`, or "auto".
        call: the call.
        mask: its documents.
        training: let "auto" assume a backward, even if this call has none.

    Raises:
        ValueError: no backend has that name.
        NotImplementedError: the backend, or every candidate of "auto", cannot serve the call.

    A cached choice takes a few microseconds. Traces under `fullgraph=True` as a constant.
    """
    if torch.compiler.is_compiling():
        return _choose_in_graph(backend, call, mask, training)
    if backend != "auto":
        key: tuple[object, ...] = (backend, call, None, torch_state())
        if key not in _choices and _require_usable(backend, call, mask):
            _remember(key, Decision(backend, "named", checked=True))
        return backend
    if training:
        call = call._replace(needs_grad=True)
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
    known = _choices.get(key)
    if known is not None:
        return known
    kind = call.kind()
    kind_key = ("auto", kind, sizes_bucket, torch_state())
    known = _choices.get(kind_key) or auto.decide(kind, sizes_bucket, mask)
    if known.checked:
        if kind_key not in _choices:
            _log.info("auto takes %s for %s: %s", known.backend, describe(call), known.why)
        _remember(kind_key, known)
        _remember(key, known)
    return known


def forget_decisions() -> None:
    """Forget all choices: those of "auto" may change with new measurements."""
    _choices.clear()


def clear_cache() -> None:
    """Clear the choices and checks of this process; the cache file of "auto" is kept."""
    forget_decisions()
    auto.reset()


def _remember(key: tuple[object, ...], decision: Decision) -> None:
    if len(_choices) >= _MAX_ENTRIES:
        _choices.clear()
    _choices[key] = decision


def _require_usable(backend: str, call: AttentionCall, mask: DocumentMask | None) -> bool:
    """Load and check the named backend's kernel if needed; return whether the answer is final.

    Raises:
        NotImplementedError: it cannot serve the call.
    """
    reason = named_refusal(backend, call)
    if reason is not None:
        raise NotImplementedError(reason)
    return auto.check_named(backend, call, mask)


def _choose_in_graph(backend: str, call: AttentionCall, mask: DocumentMask, training: bool) -> str:
    # index() specializes dynamic head counts (dynamic=True) and adds a guard.
    heads = (index(call.num_heads), index(call.num_kv_heads), index(call.head_dim))
    sizes = sizes_in_graph(mask) if backend == "auto" else ()
    softcap = None if call.softcap is None else 1.0  # its value does not affect the choice
    device, graph = call.device, "training" if call.needs_grad else "inference"
    flags = (call.sinks, call.needs_grad, call.deterministic, call.batch_invariant)
    name: str = _choose_constant(
        *(backend, device.type, device.index, call.dtype, heads, tuple(call.spec.as_ints())),
        *(softcap, (*flags, call.return_lse, call.past_int32, graph), sizes, training),
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
    training: bool,
) -> str:
    """As `choose`, but takes only constants: Dynamo runs it while tracing."""
    device = torch.device(device_type if device_index is None else f"{device_type}:{device_index}")
    call = AttentionCall(device, dtype, *heads, MaskSpec.from_ints(spec), 1.0, softcap, *flags)
    if backend == "auto":
        call = call._replace(needs_grad=call.needs_grad or training)
        return decision_for(call, sizes, None).backend
    _require_usable(backend, call, None)
    return backend
