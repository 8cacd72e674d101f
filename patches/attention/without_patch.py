"""Find a layer's documents without `patch_model`, from the attention function's arguments.

It uses what reaches the layer: position_ids, cu_seq_lens, seq_idx and 2D padding masks, but neither
labels nor masks of document ids, which transformers converts to bool. Layers of a forward are
recognized by their index, which increases through a forward: a layer whose index does not increase
starts the next forward.

With a cache, several documents among the new tokens of a row raise an error. The documents in a
cache are not known here: decoding after a forward with several documents in a row is not supported
without `patch_model`, under which such a forward cannot fill a cache.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.env import BATCH_INVARIANT, DETERMINISTIC, resolve_flag
from flexvarlen.patches.attention.other_sharding import why_not_sharded
from flexvarlen.patches.attention.packed_forward import PackedForward, Unpacked
from flexvarlen.patches.batch.find_layout import find_layout
from flexvarlen.patches.batch.given_documents import BOUNDARIES, GivenDocuments
from flexvarlen.patches.batch.unpacked_rows import OTHER_KEYS, check_one_document
from flexvarlen.patches.batch.unsupported_keywords import refuse_unread
from flexvarlen.patches.models.layers import chunk_size_of, has_temperature
from flexvarlen.patches.models.rope import why_not_by_layer
from flexvarlen.patches.models.verified import why_not_by_name
from flexvarlen.patches.names import check_layer


def refuse_by_name(attention_mask: Any, kwargs: dict[str, Any]) -> None:
    """Refuse inputs that a layer cannot handle without `patch_model`.

    Raises:
        ValueError: documents are given under an unsupported name or in an unsupported form.
        NotImplementedError: another library shards the tokens of a row.
    """
    if (why := why_not_sharded()) is not None:
        raise NotImplementedError(why)
    refuse_unread(kwargs, attention_mask)


def is_unpacked(query: Tensor, key: Tensor, attention_mask: Tensor | None) -> bool:
    """Whether a layer is decoding: its keys are not its own tokens, or it has a 4D mask."""
    return query.shape[2] != key.shape[2] or (
        attention_mask is not None and attention_mask.ndim == 4
    )


def check_unpacked(
    layer: nn.Module, row_tokens: int, attention_mask: Any, kwargs: dict[str, Any]
) -> None:
    """Raise for several documents in a row; a forward's first layer reads the tensors."""
    described = any(kwargs.get(name) is not None for name in BOUNDARIES)
    if described or torch.compiler.is_compiling() or _is_first_unpacked(layer):
        check_one_document(
            row_tokens,
            position_ids=kwargs.get("position_ids"),
            attention_mask=attention_mask,
            with_what=OTHER_KEYS,
            boundaries=kwargs,
        )


def packed_by_name(
    layer: nn.Module,
    query: Tensor,
    attention_mask: Tensor | None,
    backend: str,
    checked: Unpacked | None,
    kwargs: dict[str, Any],
) -> PackedForward:
    """Find the documents from a layer's own arguments.

    Args:
        layer: the attention layer.
        query: `[B, H, S, D]`.
        attention_mask: as `_mask_function` made it.
        backend: the name behind the attn_implementation.
        checked: from the patched model, if there is one; provides the settings.
        kwargs: all other arguments of the attention function.

    Raises:
        ValueError: boundaries that break the contract.
        NotImplementedError: this model's documents do not reach its layers.
    """
    if checked is None:
        config: Any = layer.config
        why = why_not_by_name(config.model_type) or why_not_by_layer(config)
        if why is not None:
            raise NotImplementedError(why)
        check_layer(layer)
        checked = Unpacked(backend, resolve_flag(DETERMINISTIC), resolve_flag(BATCH_INVARIANT))
    given: Any = {name: kwargs.get(name) for name in (*BOUNDARIES, "position_ids")}
    shape = (query.shape[0], query.shape[2])
    documents = GivenDocuments(*shape, query.device, attention_mask=attention_mask, **given)
    if torch.compiler.is_compiling():
        return _packed_forward(layer, checked, documents)
    return _shared_between_layers(layer, checked, documents)


def _packed_forward(
    layer: nn.Module, settings: Unpacked, documents: GivenDocuments
) -> PackedForward:
    layout = find_layout(documents)
    if layout.segments is not None:
        raise ValueError(
            "a packed_layout of trees needs a patched model, whose positions count along each "
            "path; attn_implementation alone is not enough: call flexvarlen.patch_model."
        )
    return PackedForward(
        layout,
        settings.backend,
        deterministic=settings.deterministic,
        batch_invariant=settings.batch_invariant,
        training=torch.is_grad_enabled() or layer.training,
        chunk_size=chunk_size_of(layer.config),
        has_temperature=has_temperature(layer.config),
    )


# ---- what the layers of one forward share ----


class _LastLayer(threading.local):
    """The last layer of this thread that looked for documents, and the result."""

    index: int | None = None
    key: tuple[object, ...] = ()
    tensors: tuple[weakref.ref[Tensor], ...] = ()
    packed: PackedForward | None = None
    checked_unpacked: bool = False


_last = _LastLayer()


def _begin_layer(layer: nn.Module) -> None:
    """Clear the result of an earlier forward if this is the first layer of a new one.

    A layer without an index counts as first.
    """
    index = getattr(layer, "layer_idx", None)
    continues = isinstance(index, int) and _last.index is not None and index > _last.index
    _last.index = index if isinstance(index, int) else None
    if not continues:
        _last.packed, _last.checked_unpacked = None, False


def _is_first_unpacked(layer: nn.Module) -> bool:
    """Whether this is the first decoding layer of a forward; earlier layers may be packed."""
    _begin_layer(layer)
    first = not _last.checked_unpacked
    _last.checked_unpacked = True
    return first


def _shared_between_layers(
    layer: nn.Module, settings: Unpacked, documents: GivenDocuments
) -> PackedForward:
    """Return the result of the forward's first layer.

    A later layer computes it anew only if it gets other tensors, as layers of two interleaved
    forwards do.
    """
    _begin_layer(layer)
    given = documents._asdict()
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    # Tensors made under inference_mode carry no version.
    versions = ((name, None if x.is_inference() else x._version) for name, x in tensors.items())
    others = ((name, x) for name, x in given.items() if name not in tensors)
    key = (*settings, *versions, *others)
    refs = tuple(weakref.ref(x) for x in tensors.values())
    # References are compared by `is`: `==` would compare the values of the tensors.
    if (
        _last.packed is not None
        and _last.key == key
        and all(a is b for a, b in zip(_last.tensors, refs, strict=True))
    ):
        return _last.packed
    _last.packed = _packed_forward(layer, settings, documents)
    _last.key, _last.tensors = key, refs
    return _last.packed
