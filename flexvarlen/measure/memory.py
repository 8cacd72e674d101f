"""`peak_memory_mib`: the peak memory of a call, on the GPU or of the process."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch


def peak_memory_mib(call: Callable[[], object], device: torch.device | str) -> float | None:
    """Run `call` once and return its peak memory in MiB; `memory_meaning` says of what.

    CUDA: the maximum that torch's allocator held during the call, including weights and everything
    else allocated before. CPU: the increase of the process's peak resident memory over its resident
    memory before the call. Free memory of the C allocator is released first if possible (glibc);
    memory that it keeps is reused unnoticed, so this is a lower bound. None if the system does not
    report it (not Linux, or the peak cannot be reset).
    """
    device = torch.device(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) / 2**20
    _give_back_free_memory()
    before = _resident_kib("VmRSS") if _reset_peak_resident() else None
    call()
    peak = _resident_kib("VmHWM")
    return None if before is None or peak is None else max(0, peak - before) / 2**10


def memory_growth_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """As `peak_memory_mib`, minus the memory allocated before the call."""
    gc.collect()
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    peak = peak_memory_mib(call, device)
    return None if peak is None else peak - allocated / 2**20


def memory_meaning(device: torch.device | str) -> str:
    """What `peak_memory_mib` measures on this device, for the heading of a table.

    >>> memory_meaning("cuda")
    'peak allocated by torch, weights included'
    """
    if torch.device(device).type == "cuda":
        return "peak allocated by torch, weights included"
    return "growth of peak resident memory (lower bound)"


def _give_back_free_memory() -> None:
    """Make glibc return free pages to the system; does nothing with other C libraries."""
    with suppress(OSError, AttributeError, TypeError):  # no C library by that name, or not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _reset_peak_resident() -> bool:
    """Set VmHWM to VmRSS (Linux: writing 5 to clear_refs); False where that is not possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    hwm, rss = _resident_kib("VmHWM"), _resident_kib("VmRSS")
    # Some sandboxes accept the write and ignore it. 1 MiB allows for changes between two reads.
    return hwm is not None and rss is not None and hwm - rss <= 1024


def _resident_kib(key: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    match = re.search(rf"^{key}:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
    return int(match[1]) if match else None
