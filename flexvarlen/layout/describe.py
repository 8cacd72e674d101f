"""What `repr` says of a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexvarlen.layout.packed_layout import PackedLayout

SHOWN_LENGTHS = 10  # of the documents


def described(layout: PackedLayout) -> str:
    """The lengths of the documents, the first few of many, and the sizes."""
    shard = layout.shard
    of_row = "" if shard.is_whole else f"shard={shard.rank} of {shard.ranks}, "
    return (
        f"PackedLayout({_documents(layout)}, {of_row}total_tokens={layout.total_tokens}, "
        f"capacity={layout.capacity}, max_seqlen_bound={layout.max_seqlen_bound}, "
        f"device={layout.device})"
    )


def _documents(layout: PackedLayout) -> str:
    lengths = layout.lengths
    if lengths is None:
        return f"at most {layout.capacity} documents that only the device knows"
    documents = f"{len(lengths)} documents"
    if layout.segments is not None:
        trees = "1 tree" if len(lengths) == 1 else f"{len(lengths)} trees"
        documents = f"{trees} of {len(layout.segments.lengths)} segments"
    if not lengths:
        return documents
    shown = ", ".join(map(str, lengths[:SHOWN_LENGTHS]))
    more = f", ... (longest {max(lengths)})" if len(lengths) > SHOWN_LENGTHS else ""
    comma = "" if layout.segments is None else ","
    return f"{documents}{comma} of {shown}{more} tokens"
