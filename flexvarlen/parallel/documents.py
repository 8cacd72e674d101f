"""`documents_attention`: attention over a row whose documents are spread over the ranks of a group.

Each rank attends with its own queries to its own keys, and of documents that are cut to those that
other ranks send. All heads stay on the rank, so ranks need not divide them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from flexvarlen.attention.api import packed_attention
from flexvarlen.attention.check_arguments import check_tensors
from flexvarlen.layout.packed_layout import PackedLayout

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
        options: as in `packed_attention`, except `layout_k`, `align`, `prefix`, `batch_invariant`
            and a window `(left, right)`; without `causal` no `chunk`, and with a window no
            `return_lse`.

    Returns:
        As `packed_attention`, of this rank's tokens. Differentiable. The gradient of a replicated
        parameter, including sinks, is partial; sum it over the ranks. If the row has a cut
        document, all ranks exchange keys once per forward and once per backward; if not, nothing.
        No sync; traces under `fullgraph=True`.

    Raises:
        ValueError: the layout is no shard of this group, or one for another kind of attention; or
            tensors that do not match one another or the layout.
        NotImplementedError: one of these options.
    """
    shard, here = layout.shard, (dist.get_rank(group), dist.get_world_size(group))
    if shard.is_whole or (shard.rank, shard.ranks) != here:
        raise ValueError(
            f"layout must be the shard of rank {here[0]} of {here[1]}, got {layout!r}; make it "
            "with sharded_layout or fv.shard_row."
        )
    causal, window = options.get("causal", True), options.get("window")
    names = ["layout_k", "align", "prefix", "batch_invariant"]
    names += [] if causal else ["chunk"]
    names += ["return_lse"] if window is not None and not causal else []
    given = {name for name, x in options.items() if x is not None and x is not False}
    refused = [name for name in names if name in given]
    refused += ["window (left, right)"] if isinstance(window, tuple | list) else []
    if refused:
        raise NotImplementedError(
            f"documents_attention does not support {', '.join(refused)}; remove it, or attend to "
            "whole rows on each rank."
        )
    why = shard.why_not(causal=causal, window=window)
    if why is not None:
        raise ValueError(why)
    check_tensors(q, k, v, layout, layout, options.get("sinks"))
    keys = shard.keys(window, options.get("chunk"), group)
    layout_q, layout_k = keys.layouts(layout)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Any:
        return packed_attention(q, k, v, layout_q, layout_k=layout_k, sinks=sinks, **options)

    out: Tensor | tuple[Tensor, Tensor] = keys.attend(attend, q, k, v, options.pop("sinks", None))
    return out
