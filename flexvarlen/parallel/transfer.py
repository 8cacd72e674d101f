"""What travels between ranks: keys and values of cut documents, and their gradients back.

Gradients of a key come from each piece that attends to it. They are summed on the rank that holds
it, in fp32 (fp64 of fp64 inputs), in a fixed order.

Shapes: C = tokens of a rank, S = tokens sent, K = gathered keys, H = num_kv_heads, D = head_dim (Dv
of values). Token indices count the C own tokens, then those received.

Imports: torch. Never transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Ranges = Sequence[Sequence[int]]
"""Rows of a table of `KeyExchange`."""
Pair = tuple[Tensor, Tensor]
"""Keys and values, or their gradients."""


def send(own: Pair, sends: Ranges, receive_counts: list[int], group: str) -> Tensor:
    """`[S, H · (D + Dv)]`, on its way from the other ranks."""
    sent = _pack(own, [(token, n) for token, _, n in sends])
    return _all_to_all(sent, receive_counts, _tokens_per_rank(sends, len(receive_counts)), group)


def receive(own: Pair, arriving: Tensor, key_ranges: Ranges, num_keys: int) -> Pair:
    """The keys of `key_ranges`, of the own tokens and of those that arrive."""
    k, v = (x.new_empty(num_keys, *x.shape[1:]) for x in own)
    _copy_ranges((k, v), own, key_ranges, first_token=0)  # overlaps with the all-to-all
    last = max((key + tokens for *_, tokens, key in key_ranges), default=0)
    for x in (k, v):
        x[last:] = 0  # a kernel may multiply masked values by 0, and 0 · NaN is NaN
    received = _unpack(_wait_for(arriving), own)
    _copy_ranges((k, v), received, key_ranges, first_token=len(own[0]))
    return k, v


def own_and_others(key_ranges: Ranges, tokens: int) -> tuple[Ranges, Ranges]:
    own = [each for each in key_ranges if each[0] < tokens]
    return own, key_ranges[len(own) :]


def of_own(gradients: Pair, own: Ranges) -> list[tuple[int, Pair]]:
    """The first token of each range, and its gradients."""
    dk, dv = gradients
    return [(token, (dk[key : key + n], dv[key : key + n])) for token, _, n, key in own]


def send_back(
    gradients: Pair, of_others: Ranges, arrivals: Ranges, ranks: int, group: str
) -> Tensor:
    sent = _pack(gradients, [(key, n) for *_, n, key in of_others])
    sizes = _tokens_per_rank(arrivals, ranks), _tokens_per_rank(of_others, ranks)
    return _all_to_all(sent, *sizes, group)


def sum_gradients(
    own: list[tuple[int, Pair]], arriving: Tensor, arrivals: Ranges, like: Pair, tokens: int
) -> Pair:
    """`[C, H, D]` and `[C, H, Dv]`: the gradients of ranges of own tokens, and those that arrive.

    Tokens that have only one are copied, without rounding.
    """
    ranges = [(token, len(parts[0])) for token, parts in own]
    first, stop = _span_of_overlaps([*ranges, *((token, n) for token, _, n in arrivals)])
    found = [x.new_zeros(tokens, *x.shape[1:]) for x in like]
    dtype = torch.promote_types(like[0].dtype, torch.float32)
    summed = like[0].new_zeros(stop - first, sum(x.shape[1:].numel() for x in found), dtype=dtype)
    for (token, parts), (_, n) in zip(own, ranges, strict=True):
        for target, sums, x in zip(found, _unpack(summed, found), parts, strict=True):
            target[token : token + n] = x
            low, high = max(token, first), min(token + n, stop)
            if low < high:
                sums[low - first : high - first] += x[low - token : high - token]
    from_others, done = _wait_for(arriving), 0
    for token, _, n in arrivals:  # rank after rank
        summed[token - first :][:n] += from_others[done : done + n]
        done += n
    for target, sums in zip(found, _unpack(summed, found), strict=True):
        target[first:stop] = sums
    return found[0], found[1]


def _span_of_overlaps(ranges: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The tokens from the first that two ranges (first, tokens) have in common to the last.

    >>> _span_of_overlaps([(0, 8), (2, 3), (7, 4), (20, 1)]), _span_of_overlaps([(0, 8), (8, 1)])
    ((2, 8), (0, 0))
    """
    first, stop, end = None, 0, 0
    for token, n in sorted(ranges):
        if n and token < end:
            first, stop = token if first is None else first, max(stop, min(token + n, end))
        end = max(end, token + n)
    return first or 0, stop


def _pack(sources: Sequence[Tensor], ranges: Sequence[tuple[int, int]]) -> Tensor:
    """`[S, H · (D + Dv)]`: ranges (first, tokens) of keys and of values, each token's in a row."""
    width = sum(x.shape[1:].numel() for x in sources)
    packed = sources[0].new_empty(sum(n for _, n in ranges), width)
    for target, x in zip(_unpack(packed, sources), sources, strict=True):
        done = 0
        for first, n in ranges:
            target[done : done + n] = x[first : first + n]
            done += n
    return packed


def _unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`[S, H · (D + Dv)]` -> keys `[S, H, D]` and values `[S, H, Dv]`, views."""
    widths = [x.shape[1:].numel() for x in like]
    parts = zip(packed.split(widths, 1), like, strict=True)
    return [part.unflatten(1, x.shape[1:]) for part, x in parts]


def _copy_ranges(
    targets: Sequence[Tensor], sources: Sequence[Tensor], ranges: Ranges, *, first_token: int
) -> None:
    """Copy the ranges that lie in the sources, whose first token has index `first_token`."""
    for token, _, n, key in ranges:
        first = token - first_token
        if 0 <= first < len(sources[0]):
            for target, x in zip(targets, sources, strict=True):
                target[key : key + n] = x[first : first + n]


def rows(table: Tensor) -> list[list[int]]:
    """Without spare rows, of no tokens."""
    return [row for row in table.tolist() if row[2]]


def _tokens_per_rank(ranges: Ranges, ranks: int) -> list[int]:
    """How many tokens of each rank the ranges have."""
    counts = [0] * ranks
    for _, rank, n, *_ in ranges:
        counts[rank] += n
    return counts


def _all_to_all(x: Tensor, receives: list[int], sends: list[int], group: Any) -> Tensor:
    from torch.distributed._functional_collectives import all_to_all_single

    return all_to_all_single(x, receives, sends, group)


def _wait_for(x: Tensor) -> Tensor:
    from torch.distributed._functional_collectives import wait_tensor

    arrived: Tensor = wait_tensor(x)
    return arrived
