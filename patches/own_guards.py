"""Fewer guards on a compiled model: none on what flexvarlen's own modules hold.

Dynamo guards a graph on each function, class, module and constant that it met while tracing, and
looks at all of them before every call. A tenth of a patched model's are on flexvarlen's, which do
not change once it is imported; on a short row the host's time is the call's time.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.comptime import comptime

_OURS = "__import_flexvarlen"
"""How Dynamo begins the name of the global that holds one of our modules."""


def drop_own_guards() -> None:
    """Take back those of the graph that is being traced so far; call it in a graph alone."""
    comptime(_drop)


def _drop(context: Any) -> None:
    """Runs inside Dynamo."""
    # What comptime hands out is private to torch; without it the guards stay, which costs time.
    try:
        guards = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.guards
        ours = [guard for guard in guards.inner if _is_ours(guard.originating_source)]
        for guard in ours:
            guards.inner.discard(guard)
    except (AttributeError, TypeError):  # another torch
        return


def _is_ours(source: Any) -> bool:
    """Whether Dynamo came to it through one of our modules. (`source.name` takes much longer.)"""
    while hasattr(source, "base"):
        source = source.base
    return getattr(source, "global_name", "").startswith(_OURS)
