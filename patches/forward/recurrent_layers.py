"""Recurrent layers of hybrid models: short convolutions and scans start anew at each document.

A layer mixes tokens only in functions that it looks up in its modeling module: `causal_conv1d_fn`
and a scan. `patch_recurrent` replaces them there, once per process, by wrappers. A wrapper that
gets a `RecurrentDocuments` as `seq_idx` calls `flexvarlen.recurrent`; otherwise it calls
transformers' function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flexvarlen.patches.attention.context import PackedForward, Unpacked
from flexvarlen.patches.models.layers import text_config_of
from flexvarlen.patches.state import CONTEXT, LOST_DOCUMENTS
from flexvarlen.recurrent.documents import RecurrentDocuments
from flexvarlen.recurrent.fla_kernels import let_fla_run
from flexvarlen.recurrent.functions import (
    TransformersFunction,
    convolve,
    gated_delta_rule,
    mamba2_scan,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DOCUMENTS = "seq_idx"
"""The keyword that passes the documents on to the functions of a recurrent layer."""

_RECURRENT_TYPES = ("linear_attention", "conv", "hybrid")  # in config.layer_types
_CONVOLUTION = "causal_conv1d_fn"
_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    _CONVOLUTION: convolve,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
}
_FUSED = "mamba2_split_conv1d_scan_combined"
"""Convolution and scan in one kernel. Given documents its wrapper returns None, and the layer then
calls the two functions separately."""


def recurrent_layers(tower: nn.Module) -> list[nn.Module]:
    """The layers of a text tower that hold a short convolution, also inside PEFT's wrapper."""
    found = []
    for layer in tower.modules():
        children = (layer._modules.get(name) for name in ("conv1d", "conv"))
        weights = (getattr(child, "weight", None) for child in children)
        if any(isinstance(weight, Tensor) and weight.ndim == 3 for weight in weights):
            found.append(layer)
    return found


def named_recurrent_layers(model: Any) -> int:
    """How many recurrent layers the config names."""
    types = getattr(text_config_of(model.config), "layer_types", None) or ()
    return sum(x in _RECURRENT_TYPES for x in types)


def head_drops_keywords(model: Any) -> bool:
    """Whether a model's head passes its base model no keywords (Mamba-2).

    The documents then travel as its attention_mask.
    """
    return bool(model.config.model_type == "mamba2")


def refuse_recurrent(
    model: Any, layers: list[nn.Module], *, unpad: bool, group: ProcessGroup | None
) -> None:
    """Refuse what recurrent layers cannot do by document.

    Raises:
        NotImplementedError: other layers than the config names, layers whose forward does not call
            the functions that are known here, or that kernels of the hub replaced; rows sharded
            over ranks; or `unpad` where the head passes no keywords on.
    """
    expected = named_recurrent_layers(model)
    if len(layers) != expected:
        raise NotImplementedError(
            "a model must have as many layers with a convolution conv1d or conv as recurrent ones "
            f"that its config.layer_types names, {expected}, got {len(layers)}; use the model's "
            "own implementation, one document per row."
        )
    for layer in layers:
        if _CONVOLUTION not in _functions_of(layer):
            raise NotImplementedError(
                f"a recurrent layer must call transformers' {_CONVOLUTION}, got a "
                f"{type(layer).__name__} that does not, whose state would run over all documents; "
                "use the model's own implementation, one document per row."
            )
    if unpad and head_drops_keywords(model):
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
    let_fla_run()  # rows of one document each go to transformers' functions
    functions = _functions_of(layer)
    for name in (*_REPLACEMENTS, _FUSED):
        if callable(functions.get(name)) and not hasattr(functions[name], "_flexvarlen"):
            functions[name] = _dispatching(functions[name], _REPLACEMENTS.get(name))
    if _documents_hook not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(_documents_hook, with_kwargs=True)


def unpatch_recurrent(layer: nn.Module) -> None:
    """Undo `patch_recurrent`; the functions without documents are transformers' own."""
    for number, hook in tuple(layer._forward_pre_hooks.items()):
        if hook is _documents_hook:
            del layer._forward_pre_hooks[number]
            layer._forward_pre_hooks_with_kwargs.pop(number, None)


def _functions_of(layer: nn.Module) -> dict[str, Any]:
    """The names that a layer's forward finds in its module."""
    found: dict[str, Any] = inspect.unwrap(type(layer).forward).__globals__
    return found


def _dispatching(original: Callable[..., Any], ours: Callable[..., Any] | None) -> Any:
    """A wrapper that calls transformers' function, or ours where it gets documents."""
    both = TransformersFunction.of(original)
    known = () if ours is None else tuple(inspect.signature(ours).parameters)

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        documents = kwargs.get(DOCUMENTS)
        if not isinstance(documents, RecurrentDocuments):
            plain = _needs_plain_torch(args, kwargs)
            return (both.plain_torch if plain else original)(*args, **kwargs)
        if ours is None:
            return None
        own = {name: value for name, value in kwargs.items() if name in known}
        return ours(both, documents, *args, **own)

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
