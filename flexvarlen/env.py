"""Environment variables of flexvarlen, each read when it is first needed."""

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

AUTO = "FLEXVARLEN_AUTO"
"""How `backend="auto"` chooses: "measure" (the default) or "static", the documented order."""

CACHE = "FLEXVARLEN_CACHE"
"""Folder where "auto" caches its measurements and FA4 its compiled kernels."""

FA4_KEEPS = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
"""FA4's own variable: cache compiled kernels, 1 or 0. flexvarlen enables it if it is not set."""

FA4_FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
"""FA4's own variable: its cache folder. Default: one per GPU architecture in flexvarlen's."""


def resolve_flag(variable: str, asked: bool | None = None) -> bool:
    """Return the argument of a call or, if it is None, the value of `variable`. Traces.

    Args:
        variable: `DETERMINISTIC` or `BATCH_INVARIANT`.
        asked: the argument of the call, or None.

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
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, got {value!r}; set one of them or unset it.")
    return value == "1"


def auto_is_static() -> bool:
    """Whether `AUTO` disables measuring.

    Raises:
        ValueError: a value that is neither "measure" nor "static".
    """
    value = os.environ.get(AUTO) or "measure"
    if value not in ("measure", "static"):
        raise ValueError(
            f"{AUTO} must be measure or static, got {value!r}; set one of them or unset it."
        )
    return value == "static"


def cache_folder() -> Path:
    """`CACHE`, or `flexvarlen` in XDG_CACHE_HOME, in ~/.cache or in the temporary folder."""
    own = os.environ.get(CACHE)
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        found = Path(shared) if shared else Path("~/.cache").expanduser()
    except RuntimeError:  # no home: a user without an entry, as in some containers
        found = Path(tempfile.gettempdir())
    return found / "flexvarlen"


def flash_attention_impl() -> str | None:
    """The FlashAttention implementation inside torch, or None for its default (torch >= 2.10)."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    name = current() if current is not None else None
    return None if name is None else str(name)


def torch_state() -> tuple[object, ...]:
    """torch's global settings that affect which calls kernels support and what `varlen` runs."""
    return torch.are_deterministic_algorithms_enabled(), flash_attention_impl()
