"""What kernels raise, as rows; and when no row after it could be trusted."""

from __future__ import annotations

import torch

from flexvarlen.rows import Status, one_line

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


REFUSED = "refused"
"""The measure, True, of a row whose backend cannot serve the case at all: no pair has it."""

LOST = "device_lost"
"""The measure, True, of a row after which the device was lost."""


class DeviceLostError(RuntimeError):
    """A kernel broke the device for the whole process: what runs after it fails through no fault.

    Its row is written before this is raised, with `LOST` among its measures.
    """

    @classmethod
    def after(cls, where: str, error: BaseException) -> DeviceLostError:
        """With the sentence that says after what, and what to do; to be raised from `error`."""
        return cls(
            f"the device is lost after {where}: {one_line(error)}; what runs after it in this "
            "process would fail through no fault of its own: run the others in a new process, "
            "without this backend."
        )


def status_of(error: BaseException) -> tuple[Status, str]:
    """What an exception makes of a row: its status and reason."""
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
