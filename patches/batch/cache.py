"""A forward's cache: which argument it is, how much it holds, and which forward may fill one.

A new token would see every document of its row. So rows that hold several documents fill no cache,
and a patched model's cache has one document a row. Without `patch_model`, where a model only names
its attn_implementation, nothing checks this, and decoding after a packed row is not supported.
"""

from __future__ import annotations

from typing import Any

from transformers import Cache

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""A model's keyword for its cache: `cache` from transformers 5.24 on, which still takes the other
two; before, `past_key_values`, or `cache_params` in Mamba-2."""

ONE_DOCUMENT_PER_ROW = (
    "a cache must be filled by rows of one document each, as a new token sees its whole row, got "
    "rows that hold several (or a compiled graph of recurrent layers, where they may); pass "
    "use_cache=False and no cache, or prefill each document in a row of its own."
)


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
