"""`PackedLayout`, the only object that carries the document boundaries of a packed row.

Its constructors; `document_row.py` has its fields and methods, `layout_fields.py` the checks.

Shapes: T = total_tokens (padding included), N = number of document slots (`capacity`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexvarlen.layout import layout_fields
from flexvarlen.layout.boundaries import Condition
from flexvarlen.layout.describe import described
from flexvarlen.layout.document_row import DocumentRow


class PackedLayout(DocumentRow):
    """The documents of one packed row of T tokens; `cu_seqlens[i]:cu_seqlens[i + 1]` is document i.

    Make one with `from_lengths`, `from_cu_seqlens` or `from_position_ids`, or with `from_tree` if
    documents share their beginnings: they validate. Kernels, table widths and compiled graphs
    depend only on `total_tokens`, `capacity` and `max_seqlen_bound` (and a tree's `max_depth`):
    other documents with the same sizes cause no recompilation.

    Attributes:
        cu_seqlens: int32 `[capacity + 1]`, on the device of the tokens; starts at 0, never
            decreases, and repeats its last value in the spare slots. Tokens from the last value on
            are padding.
        cu_seqlens_host: the same values on the CPU, or None when only the device knows them.
        total_tokens: T, padding included.
        max_seqlen_bound: upper bound on document length that kernels and tables are sized for.
        num_docs: number of documents (empty ones count), or None when only the device knows.
        max_seqlen: tokens of the longest document, or None when only the device knows.
        padding: bool `[T]`, True at tokens of padding runs inside the row, or None when there are
            none. Each run is a slot of its own in `cu_seqlens`; its tokens attend to nothing, and
            their outputs are zero.
        has_padding: whether any token is padding, or None when only the device knows.
        launch: the sizes that cu_seqlens kernels are launched with.
        segments: the segments of documents that are trees, or None.
        shard: how the row is split over ranks, and which part of it this is, as `shard_row` makes
            it; `WHOLE` of a row that is not split.
    """

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | Tensor,
        *,
        total_tokens: int | None = None,
        device: torch.device | str = "cpu",
        capacity: int | None = None,
        max_seqlen_bound: int | None = None,
    ) -> PackedLayout:
        """Build a layout of consecutive documents, starting at token 0.

        Args:
            lengths: tokens of each document, each at least 0.
            total_tokens: T; default: the sum. Tokens past the last document are padding.
            device: where `cu_seqlens` goes.
            capacity: number of document slots to allocate; default: the number of documents,
                rounded up to a power of two.
            max_seqlen_bound: upper bound on document length; default: the longest document,
                rounded up to a power of two, at most T.

        Raises:
            ValueError: a negative or non-integer length, more tokens than `total_tokens`, more
                documents than `capacity`, or a document longer than `max_seqlen_bound`.

        Syncs only if `lengths` is a tensor on a device.

        >>> PackedLayout.from_lengths([3, 0, 2]).cu_seqlens
        tensor([0, 3, 3, 5, 5], dtype=torch.int32)
        """
        return cls(
            **layout_fields.from_lengths(
                lengths,
                total_tokens=total_tokens,
                device=device,
                capacity=capacity,
                max_seqlen_bound=max_seqlen_bound,
            )
        )

    @classmethod
    def from_tree(
        cls,
        lengths: Sequence[int] | Tensor,
        parents: Sequence[int] | Tensor,
        *,
        total_tokens: int | None = None,
        device: torch.device | str = "cpu",
        capacity: int | None = None,
        max_seqlen_bound: int | None = None,
        max_depth: int | None = None,
    ) -> PackedLayout:
        """Build a layout of trees: segments that continue others, and share them with siblings.

        A token sees its own segment up to itself, and the segments above it, never a sibling's.
        Each tree is one document of the layout.

        Args:
            lengths: tokens of each segment, in the order of the row: depth first.
            parents: for each segment the index of the one that it continues, -1 at a root.
            total_tokens, device: as in `from_lengths`.
            capacity: number of segment slots; default: the segments, rounded up to a power of two.
            max_seqlen_bound: upper bound on the tokens of a whole tree; default as in
                `from_lengths`.
            max_depth: upper bound on the segments of a path; default: those of the longest.

        Raises:
            ValueError: as `from_lengths`, and for parents that are no trees laid out depth first.

        Where all segments are roots it is the layout that `from_lengths` makes, unless a larger
        `max_depth` asks for the same compiled graph as trees have.

        >>> tree = PackedLayout.from_tree([3, 2, 1], parents=[-1, 0, 0])
        >>> tree.position_ids()
        tensor([0, 1, 2, 3, 4, 3])
        """
        return cls(
            **layout_fields.from_tree(
                lengths,
                parents,
                total_tokens=total_tokens,
                device=device,
                capacity=capacity,
                max_seqlen_bound=max_seqlen_bound,
                max_depth=max_depth,
            )
        )

    @classmethod
    def from_rows(
        cls,
        batch: int,
        row_tokens: int,
        *,
        device: torch.device,
        capacity: int | None = None,
        max_seqlen_bound: int | None = None,
    ) -> PackedLayout:
        """Build a layout of `batch` rows of `row_tokens` tokens (T = B·S), one document per row.

        Args:
            batch, row_tokens: B and S.
            device, capacity, max_seqlen_bound: as in `from_lengths`; inside a compiled graph the
                defaults are B and S.

        Raises:
            ValueError: more rows than `capacity`, or longer ones than `max_seqlen_bound`.

        Does not sync; traces under `fullgraph=True`, also with dynamic B and S.
        """
        return cls(
            **layout_fields.from_rows(
                batch,
                row_tokens,
                device=device,
                capacity=capacity,
                max_seqlen_bound=max_seqlen_bound,
            )
        )

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor | Sequence[int],
        *,
        total_tokens: int | None = None,
        capacity: int | None = None,
        max_seqlen_bound: int | None = None,
    ) -> PackedLayout:
        """Build a layout from cumulative lengths, as used by FlashAttention and transformers.

        Args:
            cu_seqlens: int32 or int64 `[num_docs + 1]`, on the device of the tokens, or a list;
                starts at 0, never decreases.
            total_tokens: T; default: the last boundary. Required inside a compiled graph.
            capacity, max_seqlen_bound: as in `from_lengths`. Inside a compiled graph the
                defaults are the slots of `cu_seqlens` and T; pass a bound, as tables grow with it.

        Raises:
            ValueError: the boundaries are not valid. A compiled graph asserts it on the device.

        One sync if the boundaries are on a device; none inside a compiled graph.

        >>> PackedLayout.from_cu_seqlens([0, 3, 5]).lengths
        (3, 2)
        """
        return cls(
            **layout_fields.from_cu_seqlens(
                cu_seqlens,
                total_tokens=total_tokens,
                capacity=capacity,
                max_seqlen_bound=max_seqlen_bound,
            )
        )

    @classmethod
    def from_position_ids(
        cls,
        position_ids_BT: Tensor,
        *,
        capacity: int | None = None,
        max_seqlen_bound: int | None = None,
    ) -> PackedLayout:
        """A layout from positions that restart at each document; rows follow one another, T = B·S.

        A document begins at each row's start and wherever a position is not the previous one + 1. A
        document whose positions continue the previous document's cannot be detected: pass lengths
        or cu_seqlens for such data.

        Args:
            position_ids_BT: `[B, S]` (or `[S]`), of any integer dtype.
            capacity, max_seqlen_bound: as in `from_lengths`.

        Raises:
            ValueError: wrong shape or dtype, or documents that exceed the capacity or the bound.

        A device tensor is read back once (one sync).

        >>> PackedLayout.from_position_ids(torch.tensor([[0, 1, 2, 0, 1]])).lengths
        (3, 2)
        """
        return cls(
            **layout_fields.from_position_ids(
                position_ids_BT, capacity=capacity, max_seqlen_bound=max_seqlen_bound
            )
        )

    @classmethod
    def from_starts(
        cls,
        starts_T: Tensor,
        *,
        padding_T: Tensor | None = None,
        capacity: int | None = None,
        max_seqlen_bound: int | None = None,
        conditions: Sequence[Condition] = (),
    ) -> PackedLayout:
        """A layout from flags: a document (or a padding run) begins at each True.

        Args:
            starts_T: bool `[T]`; the first is taken as True.
            padding_T: bool `[T]`, True at padding tokens; a run of them is a slot of its own.
            capacity, max_seqlen_bound: as in `from_lengths`; inside a compiled graph the defaults
                are `default_capacity(T)` and T.
            conditions: read together with the flags. A compiled graph asserts them on the device.

        Raises:
            ValueError: flags that are not bool, a condition that does not hold, or documents that
                exceed the capacity or the bound.

        One sync if the flags are on a device; none inside a compiled graph.
        """
        return cls(
            **layout_fields.from_starts(
                starts_T,
                padding_T=padding_T,
                capacity=capacity,
                max_seqlen_bound=max_seqlen_bound,
                conditions=conditions,
            )
        )

    def __repr__(self) -> str:
        """The lengths of the documents, the first few of many.

        >>> PackedLayout.from_lengths([3, 1, 5])
        PackedLayout(3 documents of 3, 1, 5 tokens, total_tokens=9, capacity=4, \
max_seqlen_bound=8, device=cpu)
        """
        return described(self)
