"""`query_bounds` and `key_bounds` of `flexvarlen.mask.vectors`, in Triton.

Names: "own" is the row of the tokens, "other" the row that the bounds point into.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexvarlen.layout.triton.search import slots_of


@triton.jit
def token_bounds(
    own_cu,
    other_cu,
    own_padding,
    other_padding,
    prefix,
    tokens,
    shard_tokens,
    other_tokens,
    slots,
    search_steps,
    left,
    right,
    chunk,
    OF_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    PREFIX: tl.constexpr,
    SHIFTED: tl.constexpr,
    OWN_PADDING: tl.constexpr,
    OTHER_PADDING: tl.constexpr,
):
    """First and one past the last token of the other row, for each token of the own row."""
    slot = slots_of(own_cu, tokens, slots, search_steps)
    document = slot < slots
    own_start = tl.load(own_cu + slot)
    own_length = tl.load(own_cu + 1 + slot, mask=document, other=shard_tokens) - own_start
    other_start = tl.load(other_cu + slot)
    other_length = tl.load(other_cu + 1 + slot, mask=document, other=other_tokens) - other_start
    position = tokens - own_start

    if SHIFTED:
        shift = (own_length - other_length) if OF_KEYS else (other_length - own_length)
    else:
        shift = tl.zeros_like(tokens)
    if OF_KEYS:
        low = shift
        high = shift + other_length
        if LEFT:
            high = tl.minimum(high, position + (left + 1))
        if RIGHT:
            low = tl.maximum(low, position - right)
        if CAUSAL:
            first = position
            if PREFIX:
                in_prefix = position < tl.load(prefix + slot, mask=document, other=0)
                first = tl.where(in_prefix, low, first)
            low = tl.maximum(low, first)
    else:
        position += shift
        low = tl.zeros_like(tokens)
        high = other_length
        if LEFT:
            low = tl.maximum(low, position - left)
        if CAUSAL:
            last = position + 1
            if PREFIX:
                last = tl.maximum(last, tl.load(prefix + slot, mask=document, other=0))
            high = tl.minimum(high, last)
        if RIGHT:
            high = tl.minimum(high, position + (right + 1))
    if CHUNK:
        # Triton's remainder has the sign of the dividend.
        begin = position - ((position % chunk) + chunk) % chunk
        low = tl.maximum(low, begin)
        high = tl.minimum(high, begin + chunk)
    if OF_KEYS:
        low -= shift
        high -= shift

    dead = slot >= slots
    if OWN_PADDING:
        dead = dead | (tl.load(own_padding + tokens, mask=tokens < shard_tokens, other=0) != 0)
    if OTHER_PADDING:
        has_other = other_start < other_tokens
        dead = dead | (tl.load(other_padding + other_start, mask=has_other, other=0) != 0)
    low = tl.minimum(tl.maximum(low, 0), other_length)
    high = tl.minimum(tl.maximum(high, 0), other_length)
    low = tl.where(dead, other_length, low)
    high = tl.where(dead, 0, high)
    return other_start + low, other_start + high
