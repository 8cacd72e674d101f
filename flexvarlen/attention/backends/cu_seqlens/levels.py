"""Attention over trees with cu_seqlens kernels: one call for the segments and one per level.

The tokens below a segment follow it directly and see all of it. So one causal call attends inside
each segment; then, for each level, one call without a mask attends from the tokens below the
level's segments (queries) to these segments (keys). No key is copied. The calls' outputs are added
up with weights exp(LSE of the call − LSE of all). A backward kernel recomputes probabilities from
the LSE it is given; with the merged LSE and output, each call returns its part of the gradients.

The queries may be the last tokens of the row alone, those of a part of a tree: others have none.

Shape legend: T = tokens of the row, H = num_heads, D = head_dim, S = segment slots, L = levels that
may have segments below them, `max_depth - 1`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexvarlen.attention.backends.cu_seqlens import kernel as kernels
from flexvarlen.attention.backends.cu_seqlens.kernel import KernelSizes
from flexvarlen.attention.backends.sinks import share_without_sink
from flexvarlen.attention.call import AttentionCall
from flexvarlen.layout.boundaries import HAS_TRITON
from flexvarlen.layout.segments import Segments
from flexvarlen.mask.spec import MaskSpec


class Levels(NamedTuple):
    """The boundaries of the calls.

    Attributes:
        inside: int32 `[2, S + 1]`, the segments' boundaries of queries and of keys.
        above: int32 `[L, 2, R]`, for each level the boundaries of queries and of keys; R is
            2 * S + 1, rounded up to a multiple of 4, so that each row is 16-byte aligned.
    """

    inside: Tensor
    above: Tensor

    @classmethod
    def of(cls, segments: Segments, keys_before: int = 0) -> Levels:
        """Make the boundaries of these trees. No sync; traces under `fullgraph=True`.

        Args:
            segments: of the row of keys.
            keys_before: how many of its first tokens are no queries.
        """
        make = _operator if torch.compiler.is_compiling() else _boundaries
        above = make(segments.table, segments.max_depth - 1)
        starts = segments.table[0]
        if not keys_before:
            return cls(starts.expand(2, -1), above)
        above[:, 0] = (above[:, 0] - keys_before).clamp(min=0)
        inside = torch.stack([(starts - keys_before).clamp(min=0), starts])
        # Both rows 16-byte aligned, as those of `above`.
        return cls(pad(inside, (0, -len(starts) % 4))[:, : len(starts)], above)


def _boundaries(table: Tensor, levels: int) -> Tensor:
    """Make `Levels.above`.

    Two slots for each segment. The first: its tokens as queries, unless it lies below the level,
    and no keys. The second: its tokens as keys; as queries the tokens below it, if it is on the
    level. A prompt of 3 tokens with answers of 2 and 1 has one level, queries 0 3 6 6 6 6 6 and
    keys 0 0 3 3 5 5 6 (before they are rounded up): the tokens 3 to 6 attend to 0 to 3.
    """
    starts, ends, _, depths = (row[:-1] for row in table)
    stops, level = table[0, 1:], torch.arange(levels, device=table.device)[:, None]
    queries = torch.where(depths <= level, stops, 0), torch.where(depths == level, ends, 0)
    keys = starts.expand(levels, -1), stops.expand(levels, -1)
    slots = torch.stack([torch.stack(x, dim=-1).flatten(1) for x in (queries, keys)], dim=1)
    spare = _row_length(table) - 1 - slots.shape[2]
    return pad(slots, (1, spare)).cummax(2).values


def _row_length(table: Tensor) -> int:
    """Length of a row of `Levels.above`: ends of two slots per segment, a multiple of 16 bytes."""
    ends = 2 * table.shape[1] - 1
    return ends + -ends % 4


_operator = torch.library.custom_op("flexvarlen::level_boundaries", mutates_args=())(_boundaries)


@_operator.register_fake
def _(table: Tensor, levels: int) -> Tensor:
    return table.new_empty(levels, 2, _row_length(table))


_UNMASKED = MaskSpec.of(causal=False, cross=True)


class _LevelCall(NamedTuple):
    """The arguments of one kernel call, after its tensors."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    sizes: KernelSizes
    call: AttentionCall


def _calls(
    inside: Tensor, above: Tensor, sizes: KernelSizes, call: AttentionCall
) -> list[_LevelCall]:
    # Past the last boundary the LSE is -inf if asked for, else unwritten.
    call = call._replace(return_lse=sizes.tail > 0)
    of_segments = sizes._replace(longest_q=min(sizes.longest_q, sizes.longest_k))
    inside_q, inside_k = inside.unbind()
    calls = [_LevelCall(inside_q, inside_k, of_segments, call._replace(spec=MaskSpec()))]
    sizes = sizes._replace(documents=2 * sizes.documents)
    call = call._replace(spec=_UNMASKED)
    queries, keys = above.unbind(1)
    return calls + [
        _LevelCall(*each, sizes, call) for each in zip(queries.unbind(), keys.unbind(), strict=True)
    ]


def forward(
    kernel: str,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    sinks_H: Tensor | None,
    inside: Tensor,
    above: Tensor,
    sizes: KernelSizes,
    call: AttentionCall,
) -> tuple[Tensor, Tensor]:
    """As `kernel.forward`, with the fields of `Levels` instead of cu_seqlens.

    In `sizes`, `documents` counts segments, `longest_q` is the longest tree and `longest_k` the
    longest segment.
    """
    first, *others = _calls(inside, above, sizes, call)
    out_THD, lse_HT = kernels.forward(kernel, q_THD, k_THD, v_THD, None, *first)
    for index, each in enumerate(others, 1):
        of_call = kernels.forward(kernel, q_THD, k_THD, v_THD, None, *each)
        more = index < len(others) or sinks_H is not None
        dtype = torch.float32 if more else q_THD.dtype  # round once
        out_THD, lse_HT = merge(out_THD, lse_HT, *of_call, dtype)
    if sinks_H is not None:
        out_THD = out_THD * share_without_sink(lse_HT, sinks_H)
    return out_THD.to(q_THD.dtype), lse_HT


def merge(
    out_THD: Tensor, lse_HT: Tensor, next_out_THD: Tensor, next_lse_HT: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Merge the next call into the previous ones; return the output, in `dtype`, and the LSE.

    For queries that see no keys in a call, its LSE may be +inf, as FA2's is.

    Returns new tensors: several threads of a Triton program may hold the same token, so that an
    in-place store could be read back by a slower one.
    """
    if out_THD.is_cuda and HAS_TRITON:
        from flexvarlen.attention.backends.cu_seqlens.triton.merge import merge_in_one_launch

        return merge_in_one_launch(out_THD, lse_HT, next_out_THD, next_lse_HT, dtype)
    each_HT = [x.masked_fill(x == float("inf"), float("-inf")) for x in (lse_HT, next_lse_HT)]
    both_HT = torch.logaddexp(*each_HT)
    share, next_share = (  # 0 for queries that see nothing; NaN stays
        torch.where(x == float("-inf"), 0, (x - both_HT).exp()).T[..., None] for x in each_HT
    )
    return (out_THD * share + next_out_THD * next_share).to(dtype), both_HT


def backward(
    kernel: str,
    grad_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    sinks_H: Tensor | None,
    out_THD: Tensor,
    lse_HT: Tensor,
    inside: Tensor,
    above: Tensor,
    sizes: KernelSizes,
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `kernel.backward`."""
    if not grad_THD.is_contiguous():
        grad_THD = grad_THD.contiguous()
    dsinks_H = None
    if sinks_H is not None:
        lse_HT, dsinks_H = kernels.include_sinks(
            sinks_H, grad_THD, out_THD, lse_HT, inside[0], sizes
        )
    tensors = (grad_THD, q_THD, k_THD, v_THD, None, out_THD, lse_HT)
    sums: list[Tensor] = []
    calls = _calls(inside, above, sizes, call)
    for each in calls:
        *grads, _ = kernels.backward(kernel, *tensors, *each)
        if not sums:
            sums = [x.float() for x in grads] if len(calls) > 2 else grads  # round once
        else:
            sums = [x.add_(y) for x, y in zip(sums, grads, strict=True)]
    dq, dk, dv = (x.to(q_THD.dtype) for x in sums)
    return dq, dk, dv, dsinks_H
