"""What `repr` says of a row."""

from __future__ import annotations

from flexvarlen.layout.document_row import DocumentRow

SHOWN_LENGTHS = 10  # of the documents


def described(row: DocumentRow) -> str:
    """The lengths of the documents, the first few of many, and the sizes."""
    shard = "" if row.shard.is_whole else f"shard={row.shard.rank} of {row.shard.ranks}, "
    return (
        f"PackedLayout({_documents(row)}, {shard}total_tokens={row.total_tokens}, "
        f"capacity={row.capacity}, max_seqlen_bound={row.max_seqlen_bound}, "
        f"device={row.device})"
    )


def _documents(row: DocumentRow) -> str:
    lengths = row.lengths
    if lengths is None:
        return f"at most {row.capacity} documents that only the device knows"
    documents = f"{len(lengths)} documents"
    if row.segments is not None:
        trees = "1 tree" if len(lengths) == 1 else f"{len(lengths)} trees"
        documents = f"{trees} of {len(row.segments.lengths)} segments"
    if not lengths:
        return documents
    shown = ", ".join(map(str, lengths[:SHOWN_LENGTHS]))
    more = f", ... (longest {max(lengths)})" if len(lengths) > SHOWN_LENGTHS else ""
    comma = "" if row.segments is None else ","
    return f"{documents}{comma} of {shown}{more} tokens"
