"""Import FlashAttention-4 (`flash_attn.cute`), or report why it cannot be used.

It compiles a kernel for each kind of call, which takes seconds, and stores it in the cache folder.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch

from flexvarlen.env import FA4_FOLDER, FA4_KEEPS, cache_folder

INSTALL = "install it with: pip install 'flash-attn-4>=4.0.0b36'."
REINSTALL = (
    "install it again after flash-attn, which overwrites it with an old copy: pip "
    "install --force-reinstall --no-deps flash-attn-4."
)
INTERFACE = "flash_attn.cute.interface"
_NEEDED = ("cu_seqlens_q", "softcap", "window_size_left", "deterministic")
"""Required arguments of the backward, some of which are missing in versions before 4.0.0b36."""


def package_refusal(name: str, device: torch.device) -> str | None:
    """Return why the installed FlashAttention-4 cannot run on this machine, or None."""
    problem = package_problem(device)
    if problem is None:
        return None
    remedy = REINSTALL if is_installed() else INSTALL
    return f"{name} needs flash_attn.cute, FlashAttention-4: {problem}; {remedy}"


def package_problem(device: torch.device) -> str | None:
    """Return why the installed FlashAttention-4 cannot be used, as part of a sentence, or None."""
    return _import_problem(device) if is_installed() else "it is not installed"


def is_installed() -> bool:
    """Return whether the package is there; FA2 ships an old copy, but only FA4 installs cutlass."""
    return find_spec("cutlass") is not None and find_spec("flash_attn") is not None


_IMPORTING = threading.Lock()
"""Held while the environment variables are set, so that only one thread changes them at a time."""


@cache
def _import_problem(device: torch.device) -> str | None:
    """Return why the installed `flash_attn.cute` cannot be used, as part of a sentence, or None."""
    try:
        with importing(device):
            from flash_attn.cute.interface import _flash_attn_bwd
    except Exception as error:  # incompatible versions of the two packages may raise anything
        return f"it cannot be imported here ({type(error).__name__}: {error})"
    missing = [
        name for name in _NEEDED if name not in inspect.signature(_flash_attn_bwd).parameters
    ]
    return f"it is too old here (it lacks {', '.join(missing)})" if missing else None


@contextmanager
def importing(device: torch.device) -> Iterator[None]:
    """Context for importing FlashAttention-4, from the package or the Hub."""
    with _IMPORTING, _keeping_kernels(device):
        yield


@contextmanager
def _keeping_kernels(device: torch.device) -> Iterator[None]:
    """Enable FA4's kernel cache while importing `flash_attn.cute`, which reads the setting once.

    The kernels go to the cache folder, unless the environment already configures FA4's cache. The
    variables are unset again afterwards. A folder that another user owns, or that cannot be written
    or locked, is not used. There is one folder per GPU architecture, and no caching if the machine
    has more than one, because not all of FA4's cache keys include the architecture.
    """
    if device.type != "cuda":
        yield
        return
    kinds = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    if FA4_KEEPS in os.environ or FA4_FOLDER in os.environ or len(kinds) != 1:
        yield
        return
    major, minor = torch.cuda.get_device_capability(device)
    folder = _own_folder(f"fa4-sm{major}{minor}")
    if folder is None:
        yield
        return
    os.environ |= {FA4_KEEPS: "1", FA4_FOLDER: folder}
    try:
        yield
    finally:
        for name in (FA4_KEEPS, FA4_FOLDER):
            os.environ.pop(name, None)


def _own_folder(name: str) -> str | None:
    """Create a subfolder of the cache folder and return it, or None if it cannot be used."""
    import fcntl  # available only on POSIX, like FA4

    try:
        folder = cache_folder() / name
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return str(folder) if folder.stat().st_uid == os.geteuid() else None
    except (OSError, RuntimeError):  # expanduser raises RuntimeError if there is no such user
        return None
