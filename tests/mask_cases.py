"""Every kind of document mask, drawn at random: the row, its keys, and what they may see."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hypothesis import strategies as st

from flexvarlen import DocumentMask, PackedLayout
from tests import oracle
from tests.oracle import Documents
from tests.rows import rows


@dataclass(frozen=True)
class MaskCase:
    """A mask, in the words of `DocumentMask.of`; `keys` are the documents of its `layout_k`."""

    documents: Documents | None
    options: dict[str, Any] = field(default_factory=dict)
    keys: Documents | None = None

    def mask(self, device="cpu", **shapes):
        """flexvarlen's."""
        layout = slots_of(self.documents, device, **shapes)
        layout_k = None if self.keys is None else slots_of(self.keys, device, **shapes)
        return DocumentMask.of(layout, layout_k=layout_k, **self.options)

    def on(self, layout):
        """The same kind of mask on a layout of the caller's."""
        return DocumentMask.of(layout, **self.options)

    def dense(self):
        """bool `[Tq, Tk]`, by brute force."""
        return oracle.dense(self.documents, self.keys, **self.options)


def slots_of(documents, device="cpu", **shapes):
    """A layout with a slot for each length, padding runs and empty documents alike.

    `from_starts` would drop the empty ones, and the documents of two rows would no longer pair.
    """
    layout = PackedLayout.from_lengths(
        documents.lengths, total_tokens=documents.total_tokens, device=device, **shapes
    )
    if documents.padding:
        layout = layout.replace(padding=documents.padded().to(device), has_padding=True)
    return layout


side = st.just(-1) | st.integers(0, 60) | st.sampled_from([127, 128])
windows = st.integers(1, 100) | st.tuples(side, side)
chunks = st.integers(1, 40) | st.sampled_from([64, 128, 2**30, 2**31 - 1, 2**40])
alignments = st.sampled_from(["bottom_right", "top_left"])


@cache
def options_of(kind, count):
    """A strategy for the options of a mask over so many documents."""
    prefixes = st.lists(st.integers(0, 100), min_size=count, max_size=count)
    every = {
        "causal": st.booleans(),
        "window": st.none() | windows,
        "chunk": st.none() | chunks,
        "align": alignments,
    }
    options = {
        "causal": {},
        "bidirectional": {"causal": st.just(False)},
        "causal_window": {"window": windows},
        "two_sided_window": {"causal": st.just(False), "window": windows},
        "chunked": {"chunk": chunks, "causal": st.booleans()},
        "prefix": {"prefix": prefixes},
        "prefix_and_window": {"prefix": prefixes, "window": windows, "chunk": st.none() | chunks},
        "cross": {"causal": st.booleans(), "align": alignments},
        "cross_prefix": {"prefix": prefixes, "align": alignments, "window": st.none() | windows},
        "intersection": every,
        "cross_intersection": every,
    }[kind]
    return st.fixed_dictionaries(options)


@st.composite
def _cases(draw, kind):
    documents = draw(rows())
    count = len(documents.lengths)
    drawn = draw(options_of(kind, count))
    keys = draw(rows(count=count)) if kind.startswith("cross") else None
    return MaskCase(documents, drawn, keys)


@cache
def cases(kind):
    """A `MaskCase` of one of `KINDS`."""
    return _cases(kind)


KINDS = (
    "causal",
    "bidirectional",
    "causal_window",
    "two_sided_window",
    "chunked",
    "prefix",
    "prefix_and_window",
    "cross",
    "cross_prefix",
    "intersection",
    "cross_intersection",
)

BLOCK_SIZES = (
    (16, 16),
    (32, 64),
    (64, 32),
    (128, 128),
    (256, 128),
    (128, 256),
    (48, 80),
    (4, 4),
    (3, 2),
)
