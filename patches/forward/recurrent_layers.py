"""Recurrent layers of hybrid models: short convolutions and scans start anew at each document.

transformers writes all of them alike. The layer projects, calls functions of its module through
which tokens meet (`causal_conv1d_fn`, and a scan), and projects again. A patched model passes its
layers the documents under the name `seq_idx`, which they pass on to these functions. In their place
stand ours, which run by document where they get documents, and else are transformers' own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.patches.attention.context import PackedForward, Unpacked
from flexvarlen.patches.state import CONTEXT, LOST_DOCUMENTS
from flexvarlen.recurrent.documents import RecurrentDocuments
from flexvarlen.recurrent.functions import Theirs, convolve, gated_delta_rule, mamba2_scan

DOCUMENTS = "seq_idx"
"""The keyword that passes the documents on to the functions of a recurrent layer."""

_CONVOLUTION = "causal_conv1d_fn"
_OURS: dict[str, Callable[..., Any]] = {
    _CONVOLUTION: convolve,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
}
_FUSED = "mamba2_split_conv1d_scan_combined"
"""Convolution and scan in one kernel; None makes the layer call them one after the other."""


def recurrent_layers(tower: nn.Module) -> list[nn.Module]:
    """The layers of a text tower that hold a short convolution, in order."""
    named = ("conv1d", "conv")
    return [
        layer
        for layer in tower.modules()
        if any(isinstance(layer._modules.get(name), nn.Conv1d) for name in named)
    ]


def keeps_keywords(model: Any) -> bool:
    """Whether a head passes its base model no keywords, so that documents go as attention_mask."""
    return bool(model.config.model_type == "mamba2")


def refuse_recurrent(model: Any, layers: list[nn.Module], *, unpad: bool, group: object) -> None:
    """Refuse what recurrent layers cannot do by document.

    Raises:
        NotImplementedError: layers whose forward does not call the functions that are known here,
            or that kernels of the hub replaced; rows sharded over ranks; or `unpad` where the head
            passes no keywords on.
    """
    for layer in layers:
        if _CONVOLUTION not in _functions_of(layer):
            raise NotImplementedError(
                f"a recurrent layer must call transformers' {_CONVOLUTION}, got a "
                f"{type(layer).__name__} that does not, whose state would run over all documents; "
                "use the model's own implementation, one document per row."
            )
    if unpad and keeps_keywords(model):
        raise NotImplementedError(
            f"unpad=True is not supported with {type(model).__name__}, whose head passes no "
            "keywords on to its base model; pack its batches, or leave unpad out."
        )
    if group is not None:
        raise NotImplementedError(
            "sequence_parallel_group is not supported with recurrent layers, whose state would "
            "have to pass from rank to rank; leave it out."
        )
    if getattr(model, "_use_kernels", False):
        raise NotImplementedError(
            "use_kernels=True replaces recurrent layers by kernels that may not keep documents "
            "apart; load the model without it."
        )


def patch_recurrent(layer: nn.Module) -> None:
    """Make a recurrent layer run by document in a patched model. Safe to call twice."""
    functions = _functions_of(layer)
    for name in (*_OURS, _FUSED):
        if name in functions and not hasattr(functions[name], "_flexvarlen"):
            functions[name] = _by_document(functions[name], _OURS.get(name))
    if _pass_documents not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(_pass_documents, with_kwargs=True)


def unpatch_recurrent(layer: nn.Module) -> None:
    """Undo `patch_recurrent`; the functions without documents are transformers' own."""
    for number, hook in tuple(layer._forward_pre_hooks.items()):
        if hook is _pass_documents:
            del layer._forward_pre_hooks[number]
            layer._forward_pre_hooks_with_kwargs.pop(number, None)


def _functions_of(layer: nn.Module) -> dict[str, Any]:
    """The names that a layer's forward finds in its module."""
    found: dict[str, Any] = inspect.unwrap(type(layer).forward).__globals__
    return found


def _by_document(original: Callable[..., Any], ours: Callable[..., Any] | None) -> Any:
    """A function of transformers, or ours where it gets documents."""
    theirs = Theirs(original, inspect.unwrap(original))
    known = () if ours is None else tuple(inspect.signature(ours).parameters)

    @functools.wraps(original)
    def by_document(*args: Any, **kwargs: Any) -> Any:
        documents = kwargs.get(DOCUMENTS)
        if not isinstance(documents, RecurrentDocuments):
            plain = _needs_plain_torch(args, kwargs)
            return (theirs.plain if plain else original)(*args, **kwargs)
        if ours is None:
            return None
        own = {name: value for name, value in kwargs.items() if name in known}
        return ours(theirs, documents, *args, **own)

    vars(by_document)["_flexvarlen"] = True
    return by_document


def _needs_plain_torch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether tensors are float64, which kernels lack; not so if boundaries of others are given."""
    if any(kwargs.get(name) is not None for name in (DOCUMENTS, "cu_seqlens")):
        return False
    return any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in args)


def _pass_documents(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass the documents on to the functions of a layer.

    Raises:
        ValueError: it is called without documents.
    """
    context = kwargs.get(CONTEXT, kwargs.get(DOCUMENTS))
    kwargs[DOCUMENTS] = None
    if isinstance(context, PackedForward):
        if context.one_per_row is None:
            kwargs[DOCUMENTS] = context.recurrent
            kwargs["attention_mask"] = None
        else:  # the rows of a prefill: the layer fills the cache as transformers does
            hidden_states = args[0] if args else kwargs["hidden_states"]
            kwargs["attention_mask"] = context.mask_of_rows(hidden_states.shape[0])
    elif not isinstance(context, Unpacked):
        raise ValueError(LOST_DOCUMENTS)
    return args, kwargs
