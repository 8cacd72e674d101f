"""Warnings where compilation goes wrong in silence: graphs for too many sizes, or no graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch

SIZES_BEFORE_WARNING = 5
"""Graphs of one kind of layer for so many sizes of a batch: Dynamo's limit is 8 by default."""

SIZELESS = ("sdpa", "reference")
"""Backends whose graphs depend on no bound: to look at it would make them depend on it."""

_sizes: dict[Hashable, set[tuple[int, int]]] = {}
_told: set[Hashable] = set()


def note_sizes(layer: Hashable, total_tokens: int, capacity: int, max_seqlen_bound: int) -> None:
    """Remember, while a graph is traced, what sizes it is made for; warn at the fifth.

    Sizes that the graph leaves open (Dynamo does so once they have changed) do not count. Does
    nothing at run time. The graph is guarded on the sizes that it does not leave open.
    """
    from torch._dynamo.comptime import comptime

    comptime(_note)


def _note(context: Any) -> None:
    """Runs inside Dynamo, on the arguments of `note_sizes`."""
    names = ("layer", "total_tokens", "capacity", "max_seqlen_bound")
    local = [context.get_local(name) for name in names]
    try:
        layer, total, capacity, bound = (x.as_python_constant() for x in local)
    except NotImplementedError:  # a size that is left open
        return
    sizes = _sizes.setdefault((layer, total), set())
    sizes.add((capacity, bound))
    if len(sizes) < SIZES_BEFORE_WARNING or (layer, total) in _told:
        return
    _told.add((layer, total))
    pairs = ", ".join(str(pair) for pair in sorted(sizes))
    warnings.warn(
        f"flexvarlen: torch.compile has made graphs for {len(sizes)} sizes of a packed batch of "
        f"{total} tokens, (capacity, max_seqlen_bound) = {pairs}. Each costs a compilation, and "
        f"after {torch._dynamo.config.recompile_limit} Dynamo stops compiling. Give all batches "
        "one size: pass capacity= and max_seqlen_bound= to patch_model, or to the PackedLayout.",
        stacklevel=2,
    )


# Private: another torch may have none, and then nothing is known of Dynamo.
_callback: Callable[[], Any] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None
)


def warn_if_fallen_back() -> None:
    """Warn, once a process, if this eager call should have been in a compiled graph.

    Past its recompile limit Dynamo runs a function, and all that it calls, eagerly where no graph
    fits: one line in a log. Costs 0.1 µs. Not for use inside a compiled graph.
    """
    if _callback() is not False or "fallen_back" in _told:
        return
    stance = getattr(torch._dynamo.eval_frame, "_stance", None)
    if getattr(stance, "stance", "default") != "default":  # the user asked for it
        return
    _told.add("fallen_back")
    warnings.warn(
        "flexvarlen: attention runs eagerly inside torch.compile: Dynamo has made "
        f"{torch._dynamo.config.recompile_limit} graphs of one function (its recompile_limit) and "
        "stopped compiling. Give all batches one form and one size (capacity= and "
        "max_seqlen_bound= of patch_model or the PackedLayout), pass fullgraph=True to have this "
        "raised, see TORCH_LOGS=recompiles for what varied, or raise "
        "torch._dynamo.config.recompile_limit.",
        stacklevel=2,
    )
