"""Caches that a packed forward filled: decoding from them is refused.

A new token would see every document of its row. A patched model notes on the cache what it holds.
By a plugin name alone a layer gets no cache; it marks its keys, the very tensor that the cache
keeps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from flexvarlen.layout import PackedLayout
from flexvarlen.patches.documents import check

ONE_A_ROW = "_flexvarlen_one_document_a_row"  # on a cache

ONE_DOCUMENT_A_ROW = (
    "decoding needs a cache with one document a row, got one that a packed batch filled: a new "
    "token would see every document of its row; prefill each document in a row of its own."
)


def remember_documents(outputs: Any, layout: PackedLayout, batch: int) -> None:
    """Note on the cache among a forward's outputs whether its rows now hold one document each.

    No sync; traces, and the graph leaves the note behind at each run.
    """
    for output in outputs if isinstance(outputs, tuple) else outputs.values():
        if isinstance(output, Cache):
            setattr(output, ONE_A_ROW, one_document_a_row(layout, batch))


def refuse_packed_documents(cache: Any) -> None:
    """Raise if a row of the cache holds more than one document, as far as it was noted.

    Raises:
        ValueError: it does. Inside a compiled graph the device asserts that it does not.

    Reads the device once a cache, and not if the host knew its documents.
    """
    one_a_row: Tensor | None = getattr(cache, ONE_A_ROW, None)
    if one_a_row is None:
        return
    check(one_a_row, ONE_DOCUMENT_A_ROW)
    if not torch.compiler.is_compiling():
        setattr(cache, ONE_A_ROW, None)


def one_document_a_row(layout: PackedLayout, batch: int) -> Tensor:
    """bool 0-dim: whether no row holds more than one document (padding is none).

    On the host, if it knows. No sync; traces.
    """
    boundaries = layout.cu_seqlens
    if layout.cu_seqlens_host is not None and layout.padding is None:
        boundaries = layout.cu_seqlens_host
    starts, ends = boundaries[:-1], boundaries[1:]
    documents = starts < ends
    if layout.padding is not None:
        first_token = starts.clamp(max=layout.total_tokens - 1).long()
        documents = documents & ~layout.padding[first_token]
    return documents.sum() <= batch


class PackedKeys(Tensor):
    """The keys of several documents in a row: to append to them, as decoding does, is refused."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """What is made of such keys (a cache reordered, copied, cropped) are such keys too."""
        if func is torch.cat:
            raise ValueError(ONE_DOCUMENT_A_ROW)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = copy.deepcopy(self.as_subclass(Tensor), memo)
        mark_keys(copied)
        return copied


def mark_keys(keys: Tensor) -> None:
    """Turn the keys of a layer, in place, as a cache may keep them, into `PackedKeys`."""
    if type(keys) is Tensor:
        keys.__class__ = PackedKeys
