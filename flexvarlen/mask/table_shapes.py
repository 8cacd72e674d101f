"""The tables of a BlockMask, and the largest shapes they need for any documents.

Shapes: Tq, Tk = tokens; BQ, BK = block sizes; NQ = ceil(Tq / BQ), NK = ceil(Tk / BK).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from flexvarlen.layout.arguments import to_int_or_none
from flexvarlen.mask.spec import UNLIMITED, MaskSpec

DEFAULT_BLOCK_SIZE = 128


class Tables(NamedTuple):
    """Row bounds and block lists, int32; the names are BlockMask's.

    `*_num_blocks` `[1, 1, R]` count the blocks in `*_indices` `[1, 1, R, width]`, ascending, padded
    with zeros; R = NQ for kv, NK for q. `lo`, `hi` `[Tq]` bound the keys that each query sees.
    """

    lo: Tensor
    hi: Tensor
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


def table_shapes(
    total_tokens: Sequence[int], block_size: Sequence[int], width: Sequence[int]
) -> list[tuple[int, ...]]:
    """The shapes of `Tables`, in order; `width` is `[of kv tables, of q tables]`."""
    shapes: list[tuple[int, ...]] = [(total_tokens[0],), (total_tokens[0],)]
    for tokens, block, columns in zip(total_tokens, block_size, width, strict=True):
        rows = -(-tokens // block)
        shapes += [(1, 1, rows), (1, 1, rows, columns)] * 2
    return shapes


def table_widths(
    mask: MaskSpec,
    total_tokens: tuple[int, int],
    longest: tuple[int, int],
    capacity: int,
    block_size: tuple[int, int],
) -> tuple[int, int]:
    """Columns needed for any documents of up to `longest` (query, key) tokens."""
    (block_q, block_k), (longest_q, longest_k) = block_size, longest
    num_q, num_k = (-(-t // b) for t, b in zip(total_tokens, block_size, strict=True))
    # How far a query can see on each side: limited by its window, chunk and document. In a tree,
    # siblings in between are not part of a window.
    chunk, left = (0, UNLIMITED) if mask.tree else (mask.chunk, mask.left)
    furthest = max(longest) - 1 if chunk == 0 else min(max(longest), chunk) - 1
    before = furthest if left == UNLIMITED else min(left, furthest)
    after = furthest if mask.right == UNLIMITED else min(mask.right, furthest)
    if mask.cross and not mask.tree:
        sees = before + 1 + after
        width_k = _most_cross_blocks(capacity, block_q, sees, longest_k, block_k)
        width_q = _most_cross_blocks(capacity, block_k, sees, longest_q, block_q)
    else:
        width_k = _most_blocks(before, after, block_q, block_k)
        width_q = _most_blocks(after, before, block_k, block_q)
    return min(num_k, width_k), min(num_q, width_q)


def _most_blocks(before: int, after: int, block: int, other: int) -> int:
    """Maximum number of `other`-token blocks that a block of `block` tokens can see."""
    if block % other == 0:  # the block's edges are aligned with the other grid
        return block // other + -(-before // other) + -(-after // other)
    return (before + block + after - 1) // other + 2


def _most_cross_blocks(capacity: int, block: int, sees: int, longest: int, other: int) -> int:
    """As `_most_blocks`, for cross-attention: each document has its own range of keys."""
    documents = min(capacity, block)
    tokens = min(longest, sees + block - 1)  # of one document
    return documents * (-(-tokens // other) + 1)


def block_pair(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """`(query, key)` block sizes.

    Raises:
        ValueError: `block_size` is not one or two integers of at least 1.
    """
    given = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    pair = [n for n in map(to_int_or_none, given) if n is not None and n >= 1]
    if len(pair) != 2 or len(given) != 2:
        raise ValueError(
            "block_size must be an integer of at least 1, or a pair (query, key) of such "
            f"integers, got {block_size}; FlexAttention's default is 128."
        )
    return pair[0], pair[1]
