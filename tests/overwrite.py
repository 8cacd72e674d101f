"""Other documents written into a layout's tensors, which a program that outlives its call reads."""

from __future__ import annotations


def overwrite(layout, other):
    """The sizes stay those of `layout`, so that it is used by what was traced or captured alone."""
    layout.cu_seqlens.copy_(other.cu_seqlens)
    if layout.segments is not None:
        layout.segments.table.copy_(other.segments.table)
        layout.segments.by_level.table.copy_(other.segments.by_level.table)
