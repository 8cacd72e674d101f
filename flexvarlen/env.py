"""flexvarlen's environment variables, each read when it is first needed."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

import torch

DETERMINISTIC = "FLEXVARLEN_DETERMINISTIC"
"""Default of `deterministic=`: 1 or 0 (default 0). Read once per process."""

BATCH_INVARIANT = "FLEXVARLEN_BATCH_INVARIANT"
"""Default of `batch_invariant=`: 1 or 0 (default 0). Read once per process."""

FLA_CONFIGS = "FLEXVARLEN_FLA_CONFIGS"
"""Whether fla's kernels run in stored configurations: by default on Hopper GPUs."""
HUB_KERNELS = "USE_HUB_KERNELS"
"""transformers' variable, with which it takes kernels of the Hub, or none."""
CACHE = "FLEXVARLEN_CACHE"
"""Folder of the user's measurements and of the checks of "auto", and of FA4's compiled kernels."""

FA4_KEEPS = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
"""Variable of FA4: whether to cache compiled kernels, 1 or 0. If unset, flexvarlen enables it."""

FA4_FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
"""Variable of FA4: its cache folder. Default: one per GPU architecture in flexvarlen's cache."""


def resolve_flag(variable: str, asked: bool | None = None) -> bool:
    """Return `asked` or, if it is None, the value of the environment variable. Traces.

    Args:
        variable: `DETERMINISTIC` or `BATCH_INVARIANT`.
        asked: the argument that the caller passed, or None.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    if asked is not None:
        return asked
    said: bool = _flag_in_graph(variable)
    return said


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _flag_in_graph(variable: str) -> bool:
    return _flag(variable)


@cache
def _flag(variable: str) -> bool:
    return flag_of(variable) == "1"


def flag_of(variable: str) -> str:
    """The value of an environment variable that is 0, 1 or unset ("").

    Raises:
        ValueError: it is something else.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, got {value!r}; set one of them or unset it.")
    return value


def cache_folder() -> Path:
    """Return `CACHE`, or `flexvarlen` in XDG_CACHE_HOME, ~/.cache or the temporary folder."""
    own = os.environ.get(CACHE)
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        found = Path(shared) if shared else Path("~/.cache").expanduser()
    except RuntimeError:  # no home directory: in some containers the user has no passwd entry
        found = Path(tempfile.gettempdir())
    return found / "flexvarlen"


def flash_attention_impl() -> str | None:
    """Return torch's active FlashAttention implementation (torch >= 2.10); None: the default."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    name = current() if current is not None else None
    return None if name is None else str(name)


def torch_state() -> tuple[object, ...]:
    """Return torch's global settings that affect kernel support and what `varlen` runs."""
    return torch.are_deterministic_algorithms_enabled(), flash_attention_impl()
