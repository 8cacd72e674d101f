"""What a measurement ran on: hardware, versions, commit. No paths, no host name, no user.

Imports only torch and the standard library. Versions of transformers and kernel packages are read
from the installed metadata, without importing them.
"""

from __future__ import annotations

import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flexvarlen._version import __version__
from flexvarlen.env import flash_attention_impl

_PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "flash_attn": "flash-attn",
    "flash_attn_3": "flash-attn-3",
    "flash_attn_4": "flash-attn-4",
    "cutlass_dsl": "nvidia-cutlass-dsl",
}


def environment(device: torch.device | str | None = None) -> dict[str, Any]:
    """What a measurement ran on: hardware, versions, commit. No paths, no host name, no user.

    Args:
        device: whose name to record; default: the current CUDA device, else the CPU.

    Returns:
        A flat dict that JSON can hold. Versions of packages that are not installed are None; so is
        `git_commit` outside a checkout. `git_dirty` is True when tracked files differ from the
        commit. `flash_attention_impl` is the implementation torch's own varlen and SDPA kernels use
        (None: the implementation that torch ships, or a torch too old to report it).
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    commit, dirty = _git_state()
    info: dict[str, Any] = {
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu": _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "cuda": torch.version.cuda,
    }
    info |= {name: _version(dist) for name, dist in _PACKAGES.items()}
    info["torch"] = torch.__version__  # with its local part, "+cu130", which the metadata can lack
    info["flexvarlen"] = __version__  # of the code that runs, installed or not
    info["flash_attention_impl"] = flash_attention_impl()
    return info | {"git_commit": commit, "git_dirty": dirty}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()


def _git_state() -> tuple[str | None, bool | None]:
    """The commit of this file's checkout and whether it has changes; (None, None) elsewhere."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None, None
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


_HOME = re.compile(
    r"(?<![\w./~])(?:file://)?(?:/home|/Users)/[\w@+-]+(?:\.[\w@+-]+)*|(?<![\w./])~[A-Za-z_][\w-]*"
)
# Two parts or more after a slash: neither 24/24 heads nor an address of the web.
_ABSOLUTE_PATH = re.compile(
    r"(?<![\w./~])(?:file://)?(?:~|/[\w.@+~-]+)(?:/[\w.@+~-]+)*/([\w.@+~-]+)"
)


def without_paths(text: str) -> str:
    """Shorten absolute paths to their last part, as they only describe the machine.

    >>> without_paths("no /usr/lib/x/libcuda.so for 24/24 heads")
    'no libcuda.so for 24/24 heads'
    >>> without_paths("path:/home/me/x.py, ~/y/z.py, https://pytorch.org/a/b.html")
    'path:x.py, z.py, https://pytorch.org/a/b.html'
    >>> without_paths("file:///home/me.too/x.py, ~me/y/z.py in /home/me. It took ~5 ms")
    'x.py, z.py in ~. It took ~5 ms'
    """
    return _ABSOLUTE_PATH.sub(r"\1", _HOME.sub("~", text))
