"""One configuration for each of fla's kernels: files that fla reads, and the option to use them."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path


def use_fla_configs() -> None:
    """Let fla take the configurations of this folder, unless its own variables ask for others.

    fla reads the variables when it is imported: call this before.
    """
    if not fla_variables_are_set():
        os.environ.update(FLA_CACHE_MODE="default", FLA_CONFIG_DIR=str(Path(__file__).parent))


def use_configs_from_environment() -> None:
    """Call `use_fla_configs` if FLEXVARLEN_FLA_CONFIGS is 1.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    asked = os.environ.get("FLEXVARLEN_FLA_CONFIGS", "")
    if asked not in ("", "0", "1"):
        raise ValueError(
            f"FLEXVARLEN_FLA_CONFIGS must be 0 or 1, got {asked!r}; set one of them or unset it."
        )
    if asked != "1" or fla_variables_are_set():
        return
    if "fla.ops.utils.cache" in sys.modules:
        warnings.warn(
            "FLEXVARLEN_FLA_CONFIGS=1 has no effect, as fla was imported first; import flexvarlen "
            "before it.",
            stacklevel=2,
        )
        return
    use_fla_configs()


def fla_variables_are_set() -> bool:
    """Whether fla's own variables say which configurations it takes."""
    return "FLA_CACHE_MODE" in os.environ or "FLA_CONFIG_DIR" in os.environ
