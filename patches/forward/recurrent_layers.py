"""Recurrent layers of hybrid models: convolutions and scans by document.

A layer mixes tokens only in functions that it looks up in its modeling module: `causal_conv1d_fn`
and a scan. `patch_recurrent` replaces them there, once per process, by wrappers. A wrapper that
gets a `RecurrentDocuments` as `seq_idx` calls `flexvarlen.recurrent`; otherwise it calls
transformers' function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.attention.packed_forward import PackedForward, Unpacked
from flexvarlen.patches.models.layers import is_compiled_by_layer
from flexvarlen.patches.state import CONTEXT, LOST_DOCUMENTS, LostDocuments, Patch
from flexvarlen.patches.why_not import CONVOLUTION, SCANS, functions_of
from flexvarlen.recurrent.documents import RecurrentDocuments
from flexvarlen.recurrent.fla_kernels import let_fla_run
from flexvarlen.recurrent.fla_kernels.check import is_first_forward
from flexvarlen.recurrent.layer_functions import (
    convolve,
    gated_delta_rule,
    mamba2_scan,
)

DOCUMENTS = "seq_idx"
"""The keyword that passes the documents on to the functions of a recurrent layer."""

_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    CONVOLUTION: convolve,
    **dict(zip(SCANS, (gated_delta_rule, gated_delta_rule, mamba2_scan), strict=True)),
}
_FUSED = "mamba2_split_conv1d_scan_combined"
"""Convolution and scan in one kernel. Given documents its wrapper returns None, and the layer then
calls the two functions separately."""


def patch_recurrent(layer: nn.Module) -> None:
    """Make a recurrent layer run by document in a patched model. Safe to call twice."""
    let_fla_run()  # rows of one document each go to transformers' functions
    functions = functions_of(type(layer))
    for name in (*_REPLACEMENTS, _FUSED):
        if callable(functions.get(name)) and not hasattr(functions[name], "_flexvarlen"):
            functions[name] = _dispatching(functions[name], _REPLACEMENTS.get(name))
    if _documents_hook not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(_documents_hook, with_kwargs=True)
        layer.register_forward_hook(_output_hook, with_kwargs=True, prepend=True)


def recurrent_documents(tower: nn.Module, patch: Patch, layout: PackedLayout) -> RecurrentDocuments:
    """What the recurrent layers of one forward share."""
    group = patch.sequence_parallel_group
    name = "" if group is None else group.group_name
    return RecurrentDocuments(layout, group=name, for_any_row=is_compiled_by_layer(tower))


def compiles_at_once(documents: RecurrentDocuments) -> bool:
    """Whether the first layer is to check fla's kernels: in eager mode, on one rank."""
    if torch.compiler.is_compiling() or documents.for_any_row or documents.over_ranks:
        return False
    return is_first_forward(documents.layout.device)


def unpatch_recurrent(layer: nn.Module) -> None:
    """Undo `patch_recurrent`; the functions without documents are transformers' own."""
    for ours, hooks, with_kwargs in (
        (_documents_hook, layer._forward_pre_hooks, layer._forward_pre_hooks_with_kwargs),
        (_output_hook, layer._forward_hooks, layer._forward_hooks_with_kwargs),
    ):
        for number in [number for number, hook in hooks.items() if hook is ours]:
            del hooks[number]
            with_kwargs.pop(number, None)


def _dispatching(original: Callable[..., Any], ours: Callable[..., Any] | None) -> Any:
    """A wrapper that calls transformers' function, or ours where it gets documents."""
    plain_torch = inspect.unwrap(original)
    known = () if ours is None else tuple(inspect.signature(ours).parameters)

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        documents = kwargs.get(DOCUMENTS)
        if not isinstance(documents, RecurrentDocuments):
            plain = _needs_plain_torch(args, kwargs)
            return (plain_torch if plain else original)(*args, **kwargs)
        if ours is None:
            return None
        own = {name: value for name, value in kwargs.items() if name in known}
        return ours(plain_torch, documents, *args, **own)

    vars(dispatch)["_flexvarlen"] = True
    return dispatch


def _needs_plain_torch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an input is float64, which the kernels lack.

    False if the caller passes boundaries of its own, which plain torch would ignore.
    """
    if any(kwargs.get(name) is not None for name in (DOCUMENTS, "cu_seqlens")):
        return False
    return any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in args)


def _documents_hook(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass the documents on to the functions of a layer, and its tokens in their order.

    Raises:
        ValueError: it is called without documents.
    """
    context = kwargs.get(CONTEXT, kwargs.get(DOCUMENTS))
    kwargs[DOCUMENTS] = None
    if isinstance(context, Unpacked):
        return args, kwargs
    if not isinstance(context, PackedForward):
        raise LostDocuments(LOST_DOCUMENTS)
    hidden_states = args[0] if args else kwargs["hidden_states"]
    documents = context.recurrent
    if context.row.fills_cache:  # by rows of one document each, as transformers does
        kwargs["attention_mask"] = context.mask_of_rows(hidden_states.shape[0])
    elif documents is not None:
        documents.enter(layer)
        hidden_states = documents.tokens.enter(hidden_states)
        kwargs |= {DOCUMENTS: documents, "attention_mask": None}
    if args:
        return (hidden_states, *args[1:]), kwargs
    return args, kwargs | {"hidden_states": hidden_states}


def _output_hook(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor:
    """The output of a layer in the order of the row."""
    documents = kwargs[DOCUMENTS]
    return output if documents is None else documents.tokens.leave(output)
