"""Convert exceptions of kernels to a record's status, and tell whether the device is lost."""

from __future__ import annotations

import torch

from flexvarlen.report.records import Status, one_line

# Messages of the CUDA runtime after which every later call of the process fails too.
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
    """Whether the device is unusable after this error; a CUDA device is tested.

    Messages are checked too, as kernels compiled outside torch wrap the error in other classes. A
    launch that is merely refused ("invalid argument") does not lose the device.
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
