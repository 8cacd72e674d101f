"""The package `flash_attn.cute`, FlashAttention-4: whether it can be used, and its import.

It compiles a kernel for each kind of call, which takes seconds, and keeps it in the cache folder.
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

INSTALL = "install it with: pip install 'flexvarlen[fa4]'."
REINSTALL = (
    "install it again, after flash-attn, which puts an old copy of the folder in its place: pip "
    "install --force-reinstall --no-deps flash-attn-4."
)
_HOPPER, _BLACKWELL = (9,), (10, 11)
_NEEDED = ("cu_seqlens_q", "softcap", "window_size_left", "deterministic")
"""Arguments of the backward that versions before 4.0.0b36 lack, some or all."""


def package_refusal(name: str, device: torch.device) -> str | None:
    """Why FlashAttention-4 cannot run on this machine, or None."""
    # FA2's package brings an old copy of the folder: what FA4 is written in tells them apart.
    if find_spec("cutlass") is None or find_spec("flash_attn") is None:
        return f"{name} needs flash_attn.cute, FlashAttention-4, which is not installed; {INSTALL}"
    if torch.cuda.get_device_capability(device)[0] not in (*_HOPPER, *_BLACKWELL):
        return f"{name} needs a Hopper or Blackwell GPU; use backend='fa2' or 'flex'."
    problem = _import_problem(device)
    if problem is not None:
        return f"{name} needs flash_attn.cute, FlashAttention-4, {problem}; {REINSTALL}"
    return None


def is_hopper(device: torch.device) -> bool:
    """Whether FlashAttention-4 runs its kernels for Hopper there."""
    return torch.cuda.get_device_capability(device)[0] in _HOPPER


_IMPORTING = threading.Lock()
"""One thread at a time puts variables into the environment, and takes them out."""


@cache
def _import_problem(device: torch.device) -> str | None:
    """Why the installed `flash_attn.cute` is not usable, without a full stop, or None."""
    try:
        with _IMPORTING, _keeping_kernels(device):
            from flash_attn.cute.interface import _flash_attn_bwd
    except Exception as error:  # of two packages that do not fit each other, anything
        return f"which does not import here ({type(error).__name__}: {error})"
    missing = [
        name for name in _NEEDED if name not in inspect.signature(_flash_attn_bwd).parameters
    ]
    return f"which is too old here (it lacks {', '.join(missing)})" if missing else None


@contextmanager
def _keeping_kernels(device: torch.device) -> Iterator[None]:
    """Around the import of `flash_attn.cute`, which looks once: FA4 keeps compiled kernels.

    In the cache folder, as inductor and Triton do theirs, unless the environment says anything
    about it, which it does not to other processes. Not in a folder that is another user's, or that
    cannot be written or locked. A folder a kind of GPU, and none where there are two kinds: not all
    of FA4's keys name it.
    """
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
    """A folder of this user's in the cache folder, made if need be; None if it cannot be locked."""
    import fcntl  # POSIX alone, as FA4

    try:
        folder = cache_folder() / name
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return str(folder) if folder.stat().st_uid == os.geteuid() else None
    except (OSError, RuntimeError):  # the latter of a folder of ~somebody who is nobody
        return None
