"""Fewer guards on a compiled model: none on what flexvarlen's own modules define.

Dynamo guards a graph on each function, class, module and constant that it met while tracing, and
looks at all of them before every call. One in twenty or so of a patched model's are on our own
functions and constants, which do not change once they are imported; on a short row the host's time
is the call's time.

Torch and transformers, which Dynamo may have come to through our modules, stay guarded: others may
change what these hold.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType, NoneType
from typing import Any

from torch._dynamo.comptime import comptime

_US = __name__.partition(".")[0]


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
    except (AttributeError, KeyError, TypeError):  # another torch
        return


def _is_ours(source: Any) -> bool:
    """Whether it is one of our modules, or below a function, class or constant that one defines."""
    names: list[str] = []
    while hasattr(source, "base"):
        if type(source).__name__ == "TypeMROSource":  # a class of ours may have others' above it
            return False
        names.append(getattr(source, "member", ""))
        source = source.base
    return _is_defined_by_us(getattr(source, "global_name", ""), tuple(names[-3:][::-1]))


@functools.cache
def _is_defined_by_us(imported: str, members: tuple[str, ...]) -> bool:
    """Of a module by the name of the global that Dynamo holds it in, and of members below it."""
    name = imported.removeprefix("__import_").replace("_dot_", ".")
    if name == imported or name.partition(".")[0] != _US:
        return False
    held: Any = sys.modules[name]
    for member in members:
        if not hasattr(held, member):  # what leads on is no attribute
            return False
        held = getattr(held, member)
        if not isinstance(held, ModuleType):
            break
        if held.__name__.partition(".")[0] != _US:
            return False
    if isinstance(held, (ModuleType, *_CONSTANTS)):
        return True
    return (getattr(held, "__module__", None) or "").partition(".")[0] == _US


_CONSTANTS = (bool, int, float, str, tuple, NoneType)
