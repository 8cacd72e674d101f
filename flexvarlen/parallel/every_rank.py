"""A failure of one rank is raised on every rank, so that none waits for another."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch.distributed as dist


class EveryRank:
    """A `with` block at whose end the ranks learn whether one failed; if so, all raise.

    Every rank of the default group enters it, also those that have nothing to do in it. Without a
    process group it does nothing. Syncs the device under NCCL.

    Raises:
        RuntimeError: another rank failed; it names the rank and holds its message. A rank that
            failed raises its own error.

    >>> with EveryRank():
    ...     pass  # what rank 0 checks for all
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            return
        failures: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, None if kind is None else f"{kind.__name__}: {error}")
        for rank, failure in enumerate(failures):
            if kind is None and failure is not None:
                raise RuntimeError(f"rank {rank} raised {failure}")
