"""Caches that a packed forward filled: decoding from them is refused.

A new token would see every document of its row. Each layer marks its keys, the very tensor that the
cache keeps, so that no model can append to them, nor to what is made of them. A patched model also
notes on the cache what it holds, which reaches further: its caches of sliding layers (these keep a
slice of the keys), and what a compiled forward filled (no graph marks a tensor); the note is lost
where a new cache is made of the old one's tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from flexvarlen.patches.batch.checks import check

ONE_A_ROW = "_flexvarlen_one_document_a_row"  # on a cache

ONE_DOCUMENT_A_ROW = (
    "decoding needs a cache with one document a row, got one that a packed batch filled: a new "
    "token would see every document of its row; prefill each document in a row of its own."
)


def note_documents(cache: Any, one_a_row: Tensor | bool) -> None:
    """Note on a cache whether a forward gives, or gave, each of its rows one document at most.

    Args:
        cache: a transformers `Cache`; anything else is left alone.
        one_a_row: in a compiled graph a bool tensor, 0-dim: the graph leaves it behind at each run.
    """
    if isinstance(cache, Cache):
        setattr(cache, ONE_A_ROW, one_a_row)


def mark_cache(outputs: Any, one_a_row: Tensor | bool) -> None:
    """Note on the cache among a forward's outputs what it holds now, and mark the keys it kept."""
    for output in outputs if isinstance(outputs, tuple) else outputs.values():
        if isinstance(output, Cache):
            note_documents(output, one_a_row)
            for layer in output.layers if one_a_row is False else ():
                mark_keys(getattr(layer, "keys", None))


def refuse_packed_documents(cache: Any) -> None:
    """Raise if a row of the cache holds more than one document, as far as it was noted.

    Raises:
        ValueError: it does. Inside a compiled graph the device asserts that it does not.

    Reads the device once a cache, if a compiled forward filled it.
    """
    one_a_row: Tensor | bool = getattr(cache, ONE_A_ROW, True)
    if one_a_row is True:
        return
    length = cache.get_seq_length()  # 0: it may have been reset
    if torch.compiler.is_compiling():
        check(torch.as_tensor(one_a_row) | (length == 0), ONE_DOCUMENT_A_ROW)
        return
    if not bool(one_a_row) and length > 0:
        raise ValueError(ONE_DOCUMENT_A_ROW)
    setattr(cache, ONE_A_ROW, True)


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
        # Nothing is appended where a new cache is made of them, which starts with an empty tensor.
        if func in _CONCATENATIONS and _appends(*args, **kwargs or {}):
            check(torch.zeros((), dtype=torch.bool), ONE_DOCUMENT_A_ROW)
        if func is Tensor.zero_:  # a static cache is reset
            args[0].__class__ = Tensor
            return args[0].zero_()
        made = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if torch.compiler.is_compiling():  # does not trace
            return made
        if isinstance(made, PackedKeys) and made.ndim != _KEYS_NDIM:  # a sum, a norm: keys no more
            return made.as_subclass(Tensor)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = copy.deepcopy(self.as_subclass(Tensor), memo)
        mark_keys(copied)
        return copied


# Marked keys that a user saves can be loaded again, as long as flexvarlen is imported.
torch.serialization.add_safe_globals([PackedKeys])

_KEYS_NDIM = 4  # [B, Hkv, S, D]
_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)


def _appends(
    tensors: Sequence[Tensor], dim: int = 0, *, axis: int | None = None, **kwargs: Any
) -> bool:
    """Whether a concatenation puts tokens behind tokens; arguments of `torch.cat`."""
    along = dim if axis is None else axis
    of_tokens = any(x.ndim == _KEYS_NDIM and along % x.ndim == _KEYS_NDIM - 2 for x in tensors)
    return of_tokens and sum(x.numel() > 0 for x in tensors) > 1


def mark_keys(keys: Tensor | None) -> None:
    """Turn the keys of a layer, in place, as a cache may keep them, into `PackedKeys`."""
    if type(keys) is Tensor:
        keys.__class__ = PackedKeys


def set_apart(keys: Tensor) -> Tensor:
    """Mark the keys of a layer, as a cache may keep them; the same, unmarked, to compute with.

    Before anything else, as the cache has them already, and what follows may fail.
    """
    unmarked = keys.as_subclass(Tensor)
    mark_keys(keys)
    return unmarked


def refuse_packed_keys(keys: Tensor) -> None:
    """Raise if a cache that does not append (a static one, sliding) kept the keys.

    Raises:
        ValueError: it did. Inside a compiled graph the device asserts that it did not.
    """
    if isinstance(keys, PackedKeys):
        check(torch.zeros((), dtype=torch.bool), ONE_DOCUMENT_A_ROW)
