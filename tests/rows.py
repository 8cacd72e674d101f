"""Packed rows for the tests: as lengths, and as the layout that flexvarlen makes of them."""

from __future__ import annotations

from functools import cache

import torch
from hypothesis import strategies as st

from flexvarlen import PackedLayout
from tests.oracle import Documents

# Made once: hypothesis looks at each new strategy anew, which takes longer than to draw from it.
_length = st.integers(0, 90) | st.sampled_from([0, 1, 32, 64])
_tail = st.just(0) | st.integers(0, 70)
_flag = st.booleans()


@cache
def _lists(of, least, most):
    return st.lists(of, min_size=least, max_size=most)


@cache
def _below(end):
    return st.integers(0, end - 1)


@st.composite
def _rows(draw, max_tokens, padding_runs, count):
    lengths = draw(_lists(_length, *((1, 9) if count is None else (count, count))))
    while sum(lengths) > max_tokens:
        if count is None:
            lengths.pop()
        else:
            lengths[lengths.index(max(lengths))] //= 2
    total = max(sum(lengths) + draw(_tail), 1)
    padding = frozenset()
    if padding_runs and draw(_flag):
        flags = draw(_below(2 ** len(lengths)))
        padding = frozenset(i for i, n in enumerate(lengths) if n and flags >> i & 1)
    return Documents(tuple(lengths), total, padding)


@cache
def rows(max_tokens=400, padding_runs=True, count=None):
    """A row: documents of any length, empty ones too, a padding tail, padding runs inside.

    `count` documents; default: one to nine.
    """
    return _rows(max_tokens, padding_runs, count)


def layout_of(documents, *, device="cpu", capacity=None, max_seqlen_bound=None):
    """The layout of a row: from lengths, or, where padding lies inside it, from flags."""
    shapes = {"capacity": capacity, "max_seqlen_bound": max_seqlen_bound}
    if not documents.padding:
        return PackedLayout.from_lengths(
            documents.lengths, total_tokens=documents.total_tokens, device=device, **shapes
        )
    starts, padded = documents.starts(), documents.padded()
    return PackedLayout.from_starts(starts.to(device), padding_T=padded.to(device), **shapes)


def poison_spare_memory():
    """Leave NaN in the memory that the next allocations on the GPU will get."""
    torch.cuda.synchronize()
    blocks = [
        torch.full((2**power,), float("nan"), device="cuda")
        for power in range(7, 25)
        for _ in range(6)
    ]
    del blocks
