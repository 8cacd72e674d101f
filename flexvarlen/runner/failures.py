"""What kernels raise, as a record's status; and whether the device is lost after it."""

from __future__ import annotations

import torch

from flexvarlen.report.records import Status, one_line

# What the CUDA runtime says when every later call of the process fails too, whoever makes it.
_LOST = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "hardware stack error",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "launch timed out",
    "uncorrectable ECC error",
)


class Unsupported(Exception):
    """A variant that cannot run here; the message is the reason."""


def status_of(error: BaseException) -> tuple[Status, str]:
    """The status and the reason of a record, from an exception."""
    if isinstance(error, Unsupported):
        return "unsupported", str(error)
    if isinstance(error, NotImplementedError | ImportError):
        return "unsupported", one_line(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "oom", one_line(error)
    return "failed", one_line(error)


def is_lost(error: BaseException, device: torch.device) -> bool:
    """Whether the device is of no use after this error; asks it if it is a CUDA device.

    By the words too: kernels that are compiled outside torch wrap the error in classes of their
    own. A launch that is merely refused ("invalid argument") loses nothing.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if any(words in str(error) for words in _LOST):
        return True
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
