"""Warn when torch.compile builds graphs for too many batch sizes."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from flexvarlen.attention.recompile_limit import reset_since

SIZES_BEFORE_WARNING = 5
"""Number of sizes with graphs for one kind of layer; Dynamo's default limit is 8."""

SIZELESS = ("sdpa", "reference")
"""Backends whose graphs do not depend on the sizes; reading these would add guards on them."""

_sizes: dict[tuple[int, Hashable, int], set[tuple[int, int]]] = {}  # by config's id, kind, total
_told: set[Hashable] = set()
_SINCE_RESET = "flexvarlen: graphs noted"


def note_sizes(
    module: nn.Module, layer: Hashable, total_tokens: int, capacity: int, max_seqlen_bound: int
) -> None:
    """Record, while a graph is traced, the sizes it is specialized on; warn at a model's fifth.

    Dynamic sizes do not count (Dynamo makes a size dynamic after its first change). Does
    nothing at run time. Adds guards on the sizes that are not dynamic.
    """
    from torch._dynamo.comptime import comptime

    comptime(_note)


def _note(context: Any) -> None:
    """Runs inside Dynamo, on the arguments of `note_sizes`."""
    names = ("layer", "total_tokens", "capacity", "max_seqlen_bound")
    # comptime's API is private to torch and may change. A failure to warn must not break the
    # compilation.
    try:
        layer, total, capacity, bound = (context.get_local(x).as_python_constant() for x in names)
        module = context.get_local("module")._i_will_not_complain_if_bc_breaks_VariableTracker()
        config = module.realize().value.config
    except NotImplementedError:  # a dynamic size
        return
    except (AttributeError, LookupError, TypeError):  # another torch version
        return
    if reset_since(_SINCE_RESET):
        _forget()
    key = (id(config), layer, total)
    if not any(owner == id(config) for owner, *_ in _sizes):
        weakref.finalize(config, _forget, id(config)).atexit = False
    sizes = _sizes.setdefault(key, set())
    sizes.add((capacity, bound))
    if len(sizes) < SIZES_BEFORE_WARNING or key in _told:
        return
    _told.add(key)
    pairs = ", ".join(str(pair) for pair in sorted(sizes))
    warnings.warn(
        f"flexvarlen: torch.compile has made graphs for {len(sizes)} sizes of a packed batch of "
        f"{total} tokens, (capacity, max_seqlen_bound) = {pairs}. Each costs a compilation, and "
        f"after {torch._dynamo.config.recompile_limit} Dynamo stops compiling. Give all batches "
        "one size: pass capacity= and max_seqlen_bound= to patch_model, or to the PackedLayout.",
        stacklevel=2,
    )


def _forget(owner: int | None = None) -> None:
    """Clear the records of the model whose config has this id, or of all models."""
    for key in [key for key in _sizes if owner is None or key[0] == owner]:
        del _sizes[key]
        _told.discard(key)
