"""`DocumentMask`: which keys each query of a packed row sees, as one object.

Shapes: Tq, Tk = tokens of the query and the key row (equal in self-attention).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexvarlen.layout.arguments import require_layout
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.arguments import Prefix, check_pair, check_runs, read_prefix
from flexvarlen.mask.spec import Align, MaskSpec
from flexvarlen.mask.table_shapes import DEFAULT_BLOCK_SIZE, Tables, block_pair, table_widths
from flexvarlen.mask.tables import build_tables, build_tables_operator
from flexvarlen.mask.vectors import (
    MaskInputs,
    dense_mask,
    query_bounds,
    query_bounds_operator,
    runs_of,
    tree_bounds,
)

_MOST_DENSE_PAIRS = 2**30


class BlockCounts(NamedTuple):
    """Number of partial (masked), full (unmasked) and all blocks of a BlockMask."""

    partial: int
    full: int
    total: int


class DocumentMask:
    """The documents of a row (of queries, and of keys) and the kind of mask inside each.

    Make one with `DocumentMask.of`. It stores no mask: bounds, tables, dense mask, counts and
    picture are computed on request. Two masks are equal, with equal hashes, if the layouts,
    the prefix and the runs are the same objects and the kinds are equal.

    Attributes:
        layout: the documents of the queries.
        layout_k: the documents of the keys; `layout` in self-attention. If it has trees, the
            queries are its last tokens: those of a part of a tree, with the keys above them.
        spec: the kind of mask.
        prefix: int32 `[capacity]`, tokens of each document's prefix, or None.
        runs: int32 `[2, T]`, start and end of each token's run, of `runs_of`; or None.

    Raises:
        ValueError: the spec has `cross` but there is no `layout_k`, `prefix` but no prefix, `runs`
            but no runs, `tree` but no trees, or the other way round.
    """

    def __init__(
        self,
        layout: PackedLayout,
        spec: MaskSpec,
        *,
        layout_k: PackedLayout | None = None,
        prefix: Tensor | None = None,
        runs: Tensor | None = None,
    ) -> None:
        cross = layout_k is not None
        keys = layout if layout_k is None else layout_k
        if spec.tree != (keys.segments is not None):
            raise ValueError(f"{spec} does not match {keys}; make the mask with DocumentMask.of().")
        if (spec.cross, spec.prefix) != (cross, prefix is not None):
            raise ValueError(
                f"{spec} does not match {'a' if cross else 'no'} layout_k and "
                f"{'no' if prefix is None else 'a'} prefix; make the mask with DocumentMask.of()."
            )
        if spec.runs != (runs is not None):
            raise ValueError(
                f"{spec} does not match {'no' if runs is None else 'the'} runs; make the mask with "
                "DocumentMask.of()."
            )
        self.layout = layout
        self.layout_k = keys
        self.spec = spec
        self.prefix = prefix
        self.runs = runs

    @classmethod
    def of(
        cls,
        layout: PackedLayout,
        *,
        causal: bool = True,
        window: int | tuple[int, int] | None = None,
        chunk: int | None = None,
        prefix: Prefix | None = None,
        runs: Tensor | None = None,
        layout_k: PackedLayout | None = None,
        align: Align = "bottom_right",
    ) -> DocumentMask:
        """Build the intersection of all the given masks, inside each document.

        `prefix` and `runs` let queries see more keys.

        Args:
            layout: the documents. In trees a query only sees its path, along which a window and
                chunks are counted.
            causal: no key after the query (except keys of the prefix).
            window: an int W keeps |q - kv| < W (transformers' meaning); a pair `(left, right)`
                counts keys on each side (FlashAttention's meaning), -1 for no limit.
            chunk: keys in the query's own chunk of N tokens, counted from the start of the
                document (Llama 4).
            prefix: tokens at the start of each document that all its queries see (prefix-LM): one
                number, one per document, or an int32 tensor `[capacity]` on the layout's device,
                which is never read back. (In a compiled graph numbers are constants: pass a tensor
                if they change.)
            runs: bool `[T]`, causal only: adjacent True tokens of a document also see one another
                in both directions, as those of an image do in Gemma 3, inside the window on the
                left.
            layout_k: the documents of the keys, for cross-attention: document i attends to document
                i of these. Default: self-attention.
            align: with `layout_k`, where the diagonal of `causal`, `window` and `chunk` lies: the
                last query meets the last key ("bottom_right", as in FlashAttention), or the first
                the first ("top_left").

        Raises:
            ValueError: an invalid window, chunk, prefix or runs, or layouts that do not match.
            NotImplementedError: documents are trees, and the mask is not causal, or has a prefix,
                runs or `layout_k`; or runs come with a prefix or `layout_k`.

        No sync; traces under `fullgraph=True`.

        >>> mask = DocumentMask.of(PackedLayout.from_lengths([2, 3]), window=2)
        >>> mask
        DocumentMask(causal, window=(1, 0), 2 documents in 5 tokens)
        >>> mask.to_dense().int().tolist()[4]
        [0, 0, 0, 1, 1]
        """
        require_layout("layout", layout)
        if layout_k is None and layout.shard.exchanges_keys:
            raise ValueError(
                "layout must describe whole documents, got one rank's shard of a row that "
                "splits documents; call a model patched with sequence_parallel_group=, or pack "
                "whole documents on each rank."
            )
        if runs is not None:
            check_runs(runs, layout, causal=causal)
            mask = cls.of(
                layout, causal=causal, window=window, chunk=chunk, prefix=prefix, layout_k=layout_k
            )
            return cls(layout, mask.spec.with_runs(), runs=runs_of(runs))
        if layout_k is None and prefix is None and not isinstance(window, tuple | list):
            spec = _plain_spec(causal, window, chunk, align)
            return cls(layout, spec if layout.segments is None else spec.with_trees())
        if layout_k is not None:
            require_layout("layout_k", layout_k)
        spec = MaskSpec.of(
            causal=causal,
            window=window,
            chunk=chunk,
            prefix=prefix is not None,
            cross=layout_k is not None,
            align=align,
        )
        if layout_k is not None:
            check_pair(layout, layout_k)
        if layout.segments is not None or (layout_k is not None and layout_k.segments is not None):
            if layout_k is not None:
                raise NotImplementedError(
                    "trees need causal attention of a row to itself, got layout_k; pack each path "
                    "as a document."
                )
            spec = spec.with_trees()
        prefixes = None if prefix is None else read_prefix(prefix, layout)
        return cls(layout, spec, layout_k=layout_k, prefix=prefixes if spec.prefix else None)

    # ---- bounds and tables ----

    @property
    def inputs(self) -> MaskInputs:
        """The tensors and integers that the bounds and tables are computed from."""
        q, k = self.layout, self.layout_k
        return MaskInputs(
            *(q.cu_seqlens, k.cu_seqlens, q.padding, k.padding, self.prefix),
            None if k.segments is None else k.segments.table,
            self.runs,
            [q.total_tokens, k.total_tokens],
            self.spec.as_ints(),
        )

    def bounds(self) -> tuple[Tensor, Tensor]:
        """The keys that each query sees, `lo[q] <= kv < hi[q]`: int32 `[Tq]`, never decreasing.

        In a tree, the query sees those of these keys that are on its path. A padding query sees
        nothing: `lo` is the end of its run and `hi` the start. No sync; traces under
        `fullgraph=True`.
        """
        if not torch.compiler.is_compiling():
            return query_bounds(self.inputs)
        lo, hi = query_bounds_operator(*self.inputs)
        return lo, hi

    def dense(self) -> Tensor:
        """As `to_dense`, of any size, for the backend `reference`. No sync; traces."""
        mask = dense_mask(*self.bounds(), self.layout_k.total_tokens)
        if self.spec.tree:
            queries, keys = (
                torch.arange(x.total_tokens, device=x.device) for x in (self.layout, self.layout_k)
            )
            mask &= tree_bounds(self.inputs).sees(queries[:, None], keys[None])
        return mask

    def tables(self, block_size: tuple[int, int], *, compact: bool) -> Tables:
        """The tables of its BlockMask; see `document_block_mask`."""
        q, k = self.layout, self.layout_k
        tokens = (q.total_tokens, k.total_tokens)
        if compact:
            longest = (q.max_seqlen_bound, k.max_seqlen_bound)
            widths = table_widths if torch.compiler.is_compiling() else _remembered_widths
            width = widths(self.spec, tokens, longest, q.capacity, block_size)
        else:
            width = -(-tokens[1] // block_size[1]), -(-tokens[0] // block_size[0])
        sizes = list(block_size), list(width)
        if torch.compiler.is_compiling():
            return Tables._make(build_tables_operator(*self.inputs, *sizes))
        return Tables._make(build_tables(self.inputs, *sizes))

    # ---- inspection; each of these reads from the device ----

    def to_dense(self) -> Tensor:
        """bool `[Tq, Tk]`, True where the query sees the key. For debugging on small rows.

        Raises:
            ValueError: there are more than 2³⁰ pairs (1 GiB).
        """
        pairs = self.layout.total_tokens * self.layout_k.total_tokens
        if pairs > _MOST_DENSE_PAIRS:
            raise ValueError(
                f"to_dense needs at most {_MOST_DENSE_PAIRS:,} pairs of tokens, got {pairs:,}; "
                "use bounds(), or save_picture() to look at it."
            )
        return self.dense()

    def num_pairs(self) -> int:
        """Number of visible pairs of a query and a key. Syncs."""
        lo, hi = self.bounds()
        if self.spec.tree:
            _, position, first, keys_before = tree_bounds(self.inputs)
            keys = position[keys_before:] + 1
            keys = keys if first is None else keys - first
            return int((keys * (lo < hi)).sum(dtype=torch.int64))
        return int((hi - lo).clamp(min=0).sum(dtype=torch.int64))

    def num_blocks(self, block_size: int | tuple[int, int] = DEFAULT_BLOCK_SIZE) -> BlockCounts:
        """Number of blocks that a kernel visits under this mask. Syncs.

        >>> DocumentMask.of(PackedLayout.from_lengths([256, 256])).num_blocks()
        BlockCounts(partial=4, full=2, total=16)
        """
        size = block_pair(block_size)
        tables = self.tables(size, compact=True)
        return BlockCounts(
            partial=int(tables.kv_num_blocks.sum()),
            full=int(tables.full_kv_num_blocks.sum()),
            total=tables.kv_num_blocks.numel() * tables.q_num_blocks.numel(),
        )

    def sparsity(self, block_size: int | tuple[int, int] = DEFAULT_BLOCK_SIZE) -> float:
        """Percentage of blocks that no kernel visits, as `BlockMask.sparsity`. Syncs."""
        partial, full, total = self.num_blocks(block_size)
        return 100.0 * (1 - (partial + full) / total) if total else 100.0

    def flops(self, head_dim: int, num_heads: int, *, backward: bool = False) -> int:
        """Floating-point operations of attention under this mask: unmasked work only. Syncs.

        Two matrix products in the forward, 4 · pairs · head_dim · num_heads, and 2.5 times that in
        the backward, as FlashAttention counts.

        >>> DocumentMask.of(PackedLayout.from_lengths([2, 1])).flops(head_dim=8, num_heads=2)
        256
        """
        forward = 4 * self.num_pairs() * head_dim * num_heads
        return forward * 5 // 2 if backward else forward

    def save_picture(
        self, path: str | Path, *, block_size: int | tuple[int, int] | None = None
    ) -> Path:
        """Save a PNG of the full, partial and empty blocks and the document boundaries. Syncs.

        Args:
            path: where to write it.
            block_size: tokens per block, or (query, key); default: 128, or more if needed to
                show at most 512 blocks a side.

        Returns:
            The path.
        """
        from flexvarlen.mask.picture import save_picture  # brings matplotlib

        return save_picture(self, Path(path), block_size)

    # ---- as a value ----

    def _key(self) -> tuple[object, ...]:
        return id(self.layout), id(self.layout_k), self.spec, id(self.prefix), id(self.runs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DocumentMask) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        q, k = self.layout, self.layout_k
        kind = repr(self.spec)[len("MaskSpec(") : -1]
        docs = "?" if q.num_docs is None else q.num_docs
        where = f"{docs} document{'' if docs == 1 else 's'} in {q.total_tokens:,} tokens"
        if self.spec.cross:
            where += f" on {k.total_tokens:,}"
        return f"DocumentMask({kind}, {where})"


# Cached to save host time: masks are made at every call, and BlockMasks at every step.
_remembered_widths = lru_cache(maxsize=1024)(table_widths)


def _plain_spec(causal: bool, window: int | None, chunk: int | None, align: Align) -> MaskSpec:
    """The spec of self-attention without a prefix; cached in eager mode."""
    if not torch.compiler.is_compiling():
        try:
            return _remembered_spec(causal, window, chunk, align)
        except TypeError:  # an argument is not hashable: MaskSpec.of raises the right error
            pass
    return MaskSpec.of(causal=causal, window=window, chunk=chunk, align=align)


@lru_cache(maxsize=256, typed=True)
def _remembered_spec(causal: bool, window: int | None, chunk: int | None, align: Align) -> MaskSpec:
    return MaskSpec.of(causal=causal, window=window, chunk=chunk, align=align)
