"""What the layers of one forward share where nobody hands it to them: by a plugin name alone.

A layer knows its index, and no more of the forward than what reaches its attention function. The
indices grow through a forward: one that does not begins the next.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.patches.attention.context import PackedForward
from flexvarlen.patches.attention.routing import row_wide
from flexvarlen.patches.batch.find_layout import find_layout
from flexvarlen.patches.batch.one_document import one_document_a_row


class _LastLayer(threading.local):
    """The last layer of this thread that asked, and what was found for it."""

    index: int | None = None
    key: tuple[object, ...] = ()
    tensors: tuple[weakref.ref[Tensor], ...] = ()
    packed: PackedForward | None = None
    checked_unpacked: bool = False


_last = _LastLayer()


def begins_forward(layer: nn.Module) -> bool:
    """Whether this is the first layer of a forward that asks; True too if it has no index.

    What an earlier forward found is forgotten. Not for use inside a compiled graph.
    """
    index = getattr(layer, "layer_idx", None)
    goes_on = isinstance(index, int) and _last.index is not None and index > _last.index
    _last.index = index if isinstance(index, int) else None
    if not goes_on:
        _last.packed, _last.checked_unpacked = None, False
    return not goes_on


def first_unpacked(layer: nn.Module) -> bool:
    """Whether this is the first layer of a forward that asks so; layers before it may be packed."""
    begins_forward(layer)
    first = not _last.checked_unpacked
    _last.checked_unpacked = True
    return first


def shared_between_layers(
    layer: nn.Module,
    backend: str,
    batch: int,
    row_tokens: int,
    device: torch.device,
    **given: Any,
) -> PackedForward:
    """`find_layout` once a forward, and the plans that its layers make.

    Found by the forward's first layer; by a later one only if it gets other tensors, as layers of
    two interleaved forwards do. Inside a compiled graph nothing is kept. Reads the device once more
    if there is padding.
    """
    if torch.compiler.is_compiling():
        layout = find_layout(batch, row_tokens, device, **given)
        return PackedForward(layout, backend, **row_wide(layer.config))
    begins_forward(layer)  # and if so, nothing is kept any more
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    # Tensors made under inference_mode carry no version.
    versions = ((name, None if x.is_inference() else x._version) for name, x in tensors.items())
    others = ((name, x) for name, x in given.items() if name not in tensors)
    key = (backend, batch, row_tokens, device, *versions, *others)
    refs = tuple(weakref.ref(x) for x in tensors.values())
    # References are compared by `is`: `==` would compare the values of the tensors.
    if (
        _last.packed is not None
        and _last.key == key
        and all(a is b for a, b in zip(_last.tensors, refs, strict=True))
    ):
        return _last.packed
    layout = find_layout(batch, row_tokens, device, **given)
    several = not bool(one_document_a_row(layout, batch))
    packed = PackedForward(layout, backend, several_a_row=several, **row_wide(layer.config))
    _last.key, _last.tensors, _last.packed = key, refs, packed
    return packed
