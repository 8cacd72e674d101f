"""Attention over trees by cu_seqlens kernels: one call for each level, merged by log-sum-exp.

The tokens below a segment lie right behind it and see all of it. So one call attends inside each
segment, and one call for each level from the tokens below the level's segments to these: no key is
copied. The calls' outputs are weighted by their shares of the softmax. A backward kernel makes
probabilities from the LSE, so that given the merged LSE and output it computes its call's part.

Shape legend: T = tokens of the row, H = num_heads, D = head_dim, S = segment slots, L = levels that
may have segments below them, `max_depth - 1`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens import kernel as kernels
from flexvarlen.attention.backends.cu_seqlens.kernel import KernelSizes
from flexvarlen.attention.backends.cu_seqlens.operator import QKV, SETTINGS, call_of, settings_of
from flexvarlen.attention.backends.sinks import share_without_sink
from flexvarlen.attention.call import AttentionCall
from flexvarlen.layout.boundaries import HAS_TRITON
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.segments import Segments
from flexvarlen.mask.spec import MaskSpec

_SLOTS = 3
_FIELDS = len(KernelSizes._fields)


class Levels(NamedTuple):
    """The boundaries of the calls.

    Attributes:
        own: int32 `[S + 1]`, the segments.
        above: int32 `[L, 2, 3 * S + 3]`, for each level the boundaries of queries and of keys.
    """

    own: Tensor
    above: Tensor

    @classmethod
    def of(cls, segments: Segments) -> Levels:
        """The boundaries of these trees. No sync; traces under `fullgraph=True`."""
        make = _operator if torch.compiler.is_compiling() else _boundaries
        return cls(segments.table[0], make(segments.table, segments.max_depth - 1))


def _boundaries(table: Tensor, levels: int) -> Tensor:
    """`Levels.above`.

    Three slots for each segment of the level: queries up to its end, which see nothing here; keys
    up to its start, which nobody sees; the tokens below it with its own as keys. Two slots more for
    what is left of queries and of keys. Slots of other levels' segments are empty.
    """
    starts, ends, _, depths = table
    stops, total = starts[1:], starts[-1:]
    of_level = depths[:-1] == torch.arange(levels, device=table.device)[:, None]

    def boundaries(*slots: Tensor) -> Tensor:
        """Cumulative, from the ends of the three slots of each segment, and those of the rest."""
        *of_segments, rest = slots
        each = torch.stack([x.expand_as(stops) for x in of_segments], dim=-1)
        each = torch.where(of_level[..., None], each, 0).flatten(1)
        first, last = each.new_zeros(levels, 1), rest.expand(levels, -1)
        return torch.cat([first, each, last], dim=1).cummax(1).values

    none = torch.zeros_like(total)
    queries = boundaries(stops, stops, ends[:-1], torch.cat([total, total]))
    keys = boundaries(none, starts[:-1], stops, torch.cat([none, total]))
    return torch.stack([queries, keys], dim=1).to(torch.int32)


_operator = torch.library.custom_op("flexvarlen::level_boundaries", mutates_args=())(_boundaries)


@_operator.register_fake
def _(table: Tensor, levels: int) -> Tensor:
    return table.new_empty(levels, 2, _SLOTS * (table.shape[1] - 1) + 3)


def level_sizes(layout: PackedLayout, *, any_row: bool) -> list[KernelSizes]:
    """The sizes of the calls: inside segments, then for each level.

    Args:
        any_row: for all trees of the layout's sizes, as in a compiled graph.
    """
    segments, bound, total = layout.segments, layout.max_seqlen_bound, layout.total_tokens
    assert segments is not None
    slots = segments.table.shape[1] - 1
    tail = int(any_row or layout.has_padding is not False)
    longest = bound if any_row else max(segments.lengths, default=0)
    own = KernelSizes(slots, longest, longest, bound, bound, tail)
    # The slots without keys are as long as the row may be, and kernels write them.
    above = KernelSizes(_SLOTS * slots + 2, total, total, total, total, tail)
    return [own, *[above] * (segments.max_depth - 1)]


def attend_levels(
    kernel: str,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    sinks_H: Tensor | None,
    levels: Levels,
    sizes: list[KernelSizes],
    call: AttentionCall,
) -> tuple[Tensor, Tensor]:
    """Return the output `[T, H, D]` and the LSE fp32 `[H, T]` of the scores, without a gradient."""
    numbers = [number for each in sizes for number in each]
    tensors = (q_THD, k_THD, v_THD, sinks_H, *levels)
    found: tuple[Tensor, Tensor] = _forward(kernel, *tensors, numbers, *settings_of(call))
    return found


class _LevelCall(NamedTuple):
    """The arguments of one call of a kernel, behind its tensors."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    sizes: KernelSizes
    call: AttentionCall


def _calls(
    own: Tensor, above: Tensor, numbers: list[int], call: AttentionCall
) -> Iterator[_LevelCall]:
    sizes = [KernelSizes(*numbers[i : i + _FIELDS]) for i in range(0, len(numbers), _FIELDS)]
    call = call._replace(return_lse=True)
    yield _LevelCall(own, own, sizes[0], call._replace(spec=MaskSpec()))
    everything = MaskSpec.of(causal=False, cross=True)
    for (queries, keys), each in zip(above, sizes[1:], strict=True):
        yield _LevelCall(queries, keys, each, call._replace(spec=everything))


_LEVELS = f"Tensor own, Tensor above, SymInt[] sizes, {SETTINGS}"


@torch.library.custom_op(
    "flexvarlen::levels_forward",
    mutates_args=(),
    schema=f"(str kernel, {QKV}, {_LEVELS}) -> (Tensor, Tensor)",
)
def _forward(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    own: Tensor,
    above: Tensor,
    sizes: list[int],
    *settings: Any,
) -> tuple[Tensor, Tensor]:
    call = call_of(q, k, sinks_H, settings)
    first, *others = _calls(own, above, sizes, call)
    out_THD, lse_HT = kernels.forward(kernel, q, k, v, None, *first)
    if len(others) > 1:  # round once
        out_THD = out_THD.float()
    for each in others:
        merge(out_THD, lse_HT, *kernels.forward(kernel, q, k, v, None, *each))
    if sinks_H is not None:
        out_THD = out_THD * share_without_sink(lse_HT, sinks_H)
    return out_THD.to(q.dtype), lse_HT


def merge(out_THD: Tensor, lse_HT: Tensor, own_out_THD: Tensor, own_lse_HT: Tensor) -> None:
    """Merge a call's output and LSE into those of the calls before it, in place."""
    if out_THD.is_cuda and HAS_TRITON:
        from flexvarlen.attention.backends.cu_seqlens.triton.merge import merge_in_one_launch

        merge_in_one_launch(out_THD, lse_HT, own_out_THD, own_lse_HT)
        return
    both_HT = torch.logaddexp(lse_HT, own_lse_HT)
    # A token that sees nothing has an LSE of -inf in each call.
    share, own_share = (
        (x - both_HT).exp().nan_to_num(0).T[..., None] for x in (lse_HT, own_lse_HT)
    )
    out_THD.copy_(out_THD * share + own_out_THD * own_share)
    lse_HT.copy_(both_HT)


@_forward.register_fake
def _(kernel: str, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op(
    "flexvarlen::levels_backward",
    mutates_args=(),
    schema=f"(str kernel, Tensor grad, {QKV}, Tensor out, Tensor lse, {_LEVELS}) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    kernel: str,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    out: Tensor,
    lse: Tensor,
    own: Tensor,
    above: Tensor,
    sizes: list[int],
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = call_of(q, k, sinks_H, settings)
    sums: list[Tensor] = []
    dsinks_H: Tensor | None = None
    calls = list(_calls(own, above, sizes, call))
    for each in calls:
        *grads, own_dsinks = kernels.backward(kernel, grad, q, k, v, sinks_H, out, lse, *each)
        if not sums:  # that of the sinks is whole in each call
            sums, dsinks_H = list(grads), own_dsinks
            if len(calls) > 2:  # round once
                sums = [x.float() for x in sums]
        else:
            sums = [x.add_(y) for x, y in zip(sums, grads, strict=True)]
    dq, dk, dv = (x.to(q.dtype) for x in sums)
    return dq, dk, dv, q.new_empty(0) if dsinks_H is None else dsinks_H


@_backward.register_fake
def _(
    kernel: str, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks_H is None else sinks_H.new_empty(sinks_H.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.kernel, *tensors = inputs[:7]
    ctx.numbers = inputs[7:]
    q, k, v, sinks_H, own, above = tensors
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sinks_H, *output, own, above)


def _gradients(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    rest = (None,) * (2 + len(ctx.numbers))
    if grad is None:
        return (None,) * 5 + rest
    saved = ctx.saved_tensors
    dq, dk, dv, dsinks_H = _backward(ctx.kernel, grad, *saved, *ctx.numbers)
    return None, dq, dk, dv, None if saved[3] is None else dsinks_H, *rest


_forward.register_autograd(_gradients, setup_context=_keep)
