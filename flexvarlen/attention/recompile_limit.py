"""Warn when Dynamo has stopped compiling a function, which it only reports in a log line.

Imports: torch alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

_told: set[str] = set()
_SINCE_RESET = "flexvarlen: fallen back"

# Private API: if this torch lacks it, no warning is given.
_callback: Callable[[], Any] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None
)


def warn_if_fallen_back(whose: str = "") -> None:
    """Warn if this eager call should have been in a compiled graph.

    Past its recompile limit Dynamo runs a function and its callees eagerly if no compiled graph
    matches. Takes 0.1 µs. Not for use inside a compiled graph.

    Args:
        whose: name of the caller. Each name is warned about once until `torch._dynamo.reset()`;
            an empty name only if no other name has been.
    """
    if _callback() is not False:
        return
    if reset_since(_SINCE_RESET):
        _told.clear()
    stance = getattr(torch._dynamo.eval_frame, "_stance", None)
    if getattr(stance, "stance", "default") != "default":  # the user asked for it
        return
    if whose in _told or (not whose and _told):
        return
    _told.add(whose)
    warnings.warn(
        f"flexvarlen: attention{f' of {whose}' * bool(whose)} runs eagerly inside torch.compile: "
        f"Dynamo has made {torch._dynamo.config.recompile_limit} graphs of one function (its "
        "recompile_limit) and stopped compiling. Give all batches the same inputs and sizes "
        "(capacity= and max_seqlen_bound= of patch_model or the PackedLayout), pass "
        "fullgraph=True to have this raised, see TORCH_LOGS=recompiles for what varied, or raise "
        "torch._dynamo.config.recompile_limit.",
        stacklevel=3,
    )


def reset_since(word: str) -> bool:
    """Whether `torch._dynamo.reset()` ran since the last call; True at the first call.

    Args:
        word: the caller's own key, stored in a cache that the reset clears.
    """
    cleared: set[str] | None = getattr(torch._dynamo.utils, "warn_once_cache", None)
    if cleared is None or word in cleared:  # private: another torch may have none
        return False
    cleared.add(word)
    return True
