"""`documents_attention`: attention over a row whose documents are spread over the ranks of a group.

Each rank attends with its own queries to its own keys, and of documents that are cut to those that
other ranks send. All heads stay on the rank, so ranks need not divide them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from flexvarlen.attention.api import packed_attention
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.parallel.gather_keys import gather_keys

if TYPE_CHECKING:  # not available in a torch built without distributed
    from torch.distributed import ProcessGroup


def documents_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    *,
    group: ProcessGroup | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `packed_attention` of one rank's shard of a row.

    Args:
        q: `[T/P, H, D]`, in the order of the layout.
        k, v: `[T/P, Hkv, D]`.
        layout: of this rank's pieces, as `shard_row` or `sharded_layout` makes it.
        group: the ranks; None: all.
        options: as in `packed_attention`, except `layout_k`, `align` and `prefix`.

    Returns:
        As `packed_attention`, of this rank's tokens. Differentiable. The gradient of a replicated
        parameter, including sinks, is partial; sum it over the ranks. If the row has a cut
        document, all ranks exchange keys once per forward and once per backward; if not, nothing.
        No sync; traces under `fullgraph=True`.

    Raises:
        ValueError: the layout is no shard of this group, or one for another kind of attention.
        NotImplementedError: an option is given that pieces of documents cannot have.
    """
    shard, here = layout.shard, (dist.get_rank(group), dist.get_world_size(group))
    if shard is None or (shard.rank, shard.ranks) != here:
        raise ValueError(
            f"layout must be the shard of rank {here[0]} of {here[1]}, got {layout!r}; make it "
            "with sharded_layout or fv.shard_row."
        )
    causal, window = options.get("causal", True), options.get("window")
    why = shard.why_not(causal=causal, window=window if isinstance(window, int) else None)
    if why is not None:
        raise ValueError(why)
    if shard.exchange is None:
        return packed_attention(q, k, v, layout, **options)
    two_sided = window is not None and not causal
    refused = [name for name in ("layout_k", "align", "prefix") if options.get(name) is not None]
    if two_sided and not isinstance(window, int):
        refused.append("window (left, right)")
    if two_sided and options.get("return_lse"):
        refused.append("return_lse")
    if refused:
        raise NotImplementedError(
            f"documents_attention has no {', '.join(refused)} where a document is cut; use "
            "ulysses_attention."
        )
    if two_sided:
        assert shard.windows is not None  # as why_not says
        attend = partial(packed_attention, layout=shard.windows.layout, **options)
        return shard.windows.attend(q, k, v, attend, group)
    k, v = gather_keys(k, v, shard.exchange, group)
    return packed_attention(q, k, v, layout, layout_k=shard.exchange.layout_k, **options)
