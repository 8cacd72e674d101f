"""One configuration for each of fla's kernels, found on an H200.

Without them, fla times dozens of configurations per kernel, for minutes at a machine's first steps.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flexvarlen.env import FLA_CONFIGS, flag_of
from flexvarlen.import_hook import after_import

FLA_VARIABLES = ("FLA_CACHE_MODE", "FLA_CONFIG_DIR")
TRITON_TIMES = ("fla.ops.common.chunk_h", "fla.ops.common.chunk_o")
"""Modules with kernels that fla lets Triton's own autotuner time, which reads no files."""


def fla_configs_are_wanted() -> bool:
    """Whether fla should use the configurations of this folder: on Hopper GPUs by default.

    With FLEXVARLEN_FLA_CONFIGS=1 on other GPUs too; not with 0, nor if fla's own variables choose
    its configurations.

    Raises:
        ValueError: the option is neither 0 nor 1.
    """
    setting = flag_of(FLA_CONFIGS)
    if setting == "0" or fla_variables_are_set():
        return False
    return setting == "1" or _on_hopper()


def use_fla_configs_once_imported() -> None:
    """Call `use_fla_configs` as soon as something imports fla."""
    after_import("fla.ops.utils.cache", _use)


def _use(_: ModuleType) -> None:
    use_fla_configs()


def use_fla_configs() -> None:
    """Make fla use the configurations of this folder from now on, if wanted. Imports fla.

    Raises:
        ValueError: the option is neither 0 nor 1.
    """
    if not fla_configs_are_wanted():
        return
    from fla.ops.utils import cache

    if cache.get_fla_config_dir is not _folder:
        cache.get_fla_config_dir = _folder
        cache.FLA_CACHE_MODE = cache.FlaCacheMode.DEFAULT
        _forget_choices(cache)  # choices for kernels that ran before
        for name in TRITON_TIMES:
            after_import(name, _let_kernels_read_files)


def fla_configs_are_used() -> bool:
    """Whether `use_fla_configs` gave fla the configurations of this folder."""
    cache: Any = sys.modules.get("fla.ops.utils.cache")
    if cache is None or cache.get_fla_config_dir is not _folder:
        return False
    return cache.FLA_CACHE_MODE is not cache.FlaCacheMode.DISABLED


def let_fla_time_its_own() -> bool:
    """Undo `use_fla_configs` if a kernel fails with it; return whether it was in effect."""
    if not fla_configs_are_used():
        return False
    from fla.ops.utils import cache

    cache.FLA_CACHE_MODE = cache.FlaCacheMode.DISABLED
    _forget_choices(cache)
    return True


def _forget_choices(cache: Any) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for kernel in _kernels(module):
                if isinstance(kernel, cache.CachedAutotuner):
                    kernel.cache.clear()


def _let_kernels_read_files(module: ModuleType) -> None:
    from fla.ops.utils import cache

    for kernel in _kernels(module):
        if type(kernel) is cache.Autotuner:
            kernel.__class__ = cache.CachedAutotuner
            kernel.kernel_name = kernel.base_fn.__name__
            kernel.cache.clear()


def _kernels(module: ModuleType) -> list[Any]:
    found = list(vars(module).values())
    return [*found, *(getattr(x, "fn", None) for x in found)]  # also below heuristics


def fla_variables_are_set() -> bool:
    """Whether fla's own variables choose its configurations."""
    return any(name in os.environ for name in FLA_VARIABLES)


def whose_configs() -> str:
    """Whose configurations fla's kernels run in, as part of a sentence; "" if it times its own."""
    if fla_configs_are_used():
        return ", in the configurations of flexvarlen"
    variables = [f"{name}={os.environ[name]}" for name in FLA_VARIABLES if name in os.environ]
    return f", with {' and '.join(variables)}" if variables else ""


def _folder() -> Path:
    return Path(__file__).parent


def _on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
