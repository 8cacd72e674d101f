"""Packed rows for the tests: as lengths, and as the layout that flexvarlen makes of them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from flexvarlen import PackedLayout
from tests.oracle import Documents


@st.composite
def rows(draw, max_tokens=400, padding_runs=True, count=None):
    """A row: documents of any length, empty ones too, a padding tail, padding runs inside.

    `count` documents; default: one to nine.
    """
    length = st.integers(0, 90) | st.sampled_from([0, 1, 32, 64])
    least, most = (1, 9) if count is None else (count, count)
    lengths = draw(st.lists(length, min_size=least, max_size=most))
    while sum(lengths) > max_tokens:
        if count is None:
            lengths.pop()
        else:
            lengths[lengths.index(max(lengths))] //= 2
    tail = draw(st.just(0) | st.integers(0, 70))
    total = max(sum(lengths) + tail, 1)
    padding = frozenset()
    if padding_runs and draw(st.booleans()):
        candidates = [i for i, n in enumerate(lengths) if n]
        padding = frozenset(draw(st.sets(st.sampled_from(candidates)))) if candidates else padding
    return Documents(tuple(lengths), total, padding)


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
