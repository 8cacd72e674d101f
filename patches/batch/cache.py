"""Refuse decoding from a cache that a packed forward filled.

A new token would see every document of its row. Each layer marks the key tensor that the cache
keeps, so that appending to it, or to tensors derived from it, raises. A patched model also sets a
flag on the cache, which also covers sliding layers (whose cache keeps a slice of
the keys) and compiled forwards (which cannot mark a tensor); the flag is lost
if a new cache is built from the old one's tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from flexvarlen.patches.batch.checks import raise_or_assert

ONE_PER_ROW = "_flexvarlen_one_document_a_row"  # on a cache

ONE_DOCUMENT_PER_ROW = (
    "decoding needs a cache with one document per row, got one that a packed batch filled: a new "
    "token would see every document of its row; prefill each document in a row of its own."
)


CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""A model's keyword for its cache: `cache` from transformers 5.24 on, which still takes the other
two; before, `past_key_values`, or `cache_params` in Mamba-2."""


def cache_of(inputs: dict[str, Any]) -> Any:
    """The cache among a model's keyword arguments, or None.

    Raises:
        ValueError: it is no `transformers.Cache`, such as that of continuous batching.
    """
    for name in CACHE_NAMES:
        cache = inputs.get(name)
        if cache is not None and not isinstance(cache, Cache):
            raise ValueError(
                f"{name} must be a transformers.Cache, got {type(cache).__name__}; pass a "
                "DynamicCache, or leave it out."
            )
        if cache is not None:
            return cache
    return None


def tokens_seen(cache: Any) -> int:
    """Tokens of a row in a cache; 0 where it holds only states, which count none."""
    counts = cache is not None and any(hasattr(x, "get_seq_length") for x in cache.layers)
    return cache.get_seq_length() if counts else 0


def note_documents(cache: Any, one_per_row: Tensor | bool) -> None:
    """Set a flag on a cache: whether a forward has at most one document in each row.

    Args:
        cache: a transformers `Cache`; anything else is left alone.
        one_per_row: in a compiled graph a 0-dim bool tensor, which each run of the graph sets.
    """
    if isinstance(cache, Cache):
        setattr(cache, ONE_PER_ROW, one_per_row)


def mark_cache(outputs: Any, one_per_row: Tensor | bool) -> None:
    """Set the flag on the cache in a forward's outputs, and mark its keys."""
    for output in outputs if isinstance(outputs, tuple) else outputs.values():
        if isinstance(output, Cache):
            note_documents(output, one_per_row)
            for layer in output.layers if one_per_row is False else ():
                mark_keys(getattr(layer, "keys", None))


def refuse_packed_documents(cache: Any) -> None:
    """Raise if the cache's flag says that a row holds more than one document.

    Raises:
        ValueError: it does. Inside a compiled graph the device asserts that it does not.

    Reads the device once per cache, if a compiled forward filled it.
    """
    one_per_row: Tensor | bool = getattr(cache, ONE_PER_ROW, True)
    if one_per_row is True:
        return
    length = cache.get_seq_length()  # 0: it may have been reset
    if torch.compiler.is_compiling():
        raise_or_assert(torch.as_tensor(one_per_row) | (length == 0), ONE_DOCUMENT_PER_ROW)
        return
    if not bool(one_per_row) and length > 0:
        raise ValueError(ONE_DOCUMENT_PER_ROW)
    setattr(cache, ONE_PER_ROW, True)


class PackedKeys(Tensor):
    """Keys of several documents in a row; appending to them, as decoding does, raises."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Keep the mark on derived tensors (a reordered, copied or cropped cache)."""
        # Nothing is appended where a new cache is made of them, which starts with an empty tensor.
        if func in _CONCATENATIONS and _appends(*args, **kwargs or {}):
            raise_or_assert(torch.zeros((), dtype=torch.bool), ONE_DOCUMENT_PER_ROW)
        if func is Tensor.zero_:  # a static cache is reset
            args[0].__class__ = Tensor
            return args[0].zero_()
        made = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if torch.compiler.is_compiling():  # does not trace
            return made
        if isinstance(made, PackedKeys) and made.ndim != _KEYS_NDIM:  # a sum or a norm, not keys
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
    """Whether a concatenation appends tokens to tokens; arguments of `torch.cat`."""
    along = dim if axis is None else axis
    of_tokens = any(x.ndim == _KEYS_NDIM and along % x.ndim == _KEYS_NDIM - 2 for x in tensors)
    return of_tokens and sum(x.numel() > 0 for x in tensors) > 1


def mark_keys(keys: Tensor | None) -> None:
    """Turn a layer's keys into `PackedKeys`, in place, as a cache may hold the same tensor."""
    if type(keys) is Tensor:
        keys.__class__ = PackedKeys


def set_apart(keys: Tensor) -> Tensor:
    """Mark the keys of a layer, which a cache may hold, and return an unmarked alias of them.

    Called first, as the cache already has the keys and later steps may fail.
    """
    unmarked = keys.as_subclass(Tensor)
    mark_keys(keys)
    return unmarked


def refuse_packed_keys(keys: Tensor) -> None:
    """Raise for marked keys in a cache that does not append (static or sliding).

    Raises:
        ValueError: it did. Inside a compiled graph the device asserts that it did not.
    """
    if isinstance(keys, PackedKeys):
        raise_or_assert(torch.zeros((), dtype=torch.bool), ONE_DOCUMENT_PER_ROW)
