"""A warning where Dynamo has given up on a function, of which else one line in a log tells.

Imports: torch alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

_told: set[str] = set()
_SINCE_RESET = "flexvarlen: fallen back"

# Private: another torch may have none, and then nothing is known of Dynamo.
_callback: Callable[[], Any] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None
)


def warn_if_fallen_back(whose: str = "") -> None:
    """Warn if this eager call should have been in a compiled graph.

    Past its recompile limit Dynamo runs a function, and all that it calls, eagerly where no graph
    fits. Costs 0.1 µs. Not for use inside a compiled graph.

    Args:
        whose: whose attention it is. Each is told of once until `torch._dynamo.reset()`; "", which
            nobody knows more of, not where another was.
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
        "recompile_limit) and stopped compiling. Give all batches one form and one size "
        "(capacity= and max_seqlen_bound= of patch_model or the PackedLayout), pass "
        "fullgraph=True to have this raised, see TORCH_LOGS=recompiles for what varied, or raise "
        "torch._dynamo.config.recompile_limit.",
        stacklevel=3,
    )


def reset_since(word: str) -> bool:
    """Whether `torch._dynamo.reset()` came since this was last asked; True when first asked.

    Args:
        word: the asker's own, kept in what the reset clears.
    """
    cleared: set[str] | None = getattr(torch._dynamo.utils, "warn_once_cache", None)
    if cleared is None or word in cleared:  # private: another torch may have none
        return False
    cleared.add(word)
    return True
