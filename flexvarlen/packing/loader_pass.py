"""The state of accelerate's data loader (also used by `Trainer`) that the sampler needs.

Its iteration counter is the epoch, but a loader that skips batches (`skip_first_batches`, a
resumed `Trainer`) on several processes does not pass it on, and it prefetches one batch. Read from
accelerate's list of active loaders; accelerate itself is never imported.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LoaderPass:
    """A pass of accelerate's loader over a sampler.

    Attributes:
        loader: the loader.
        processes: number of processes that its batches are assigned to in turn.
        rows: number of rows that all processes get per step.
        skipped: number of batches that each process skips.
        dispatches: whether one process loads for all.
        draws: whether this process draws from the sampler.
    """

    loader: Any
    processes: int
    rows: int
    skipped: int
    dispatches: bool
    draws: bool

    @property
    def epoch(self) -> int:
        """The loader's counter."""
        return int(self.loader.iteration)

    def set_epoch(self, epoch: int) -> None:
        """Count on from this epoch."""
        self.loader.iteration = epoch

    def ahead(self, drawn: int) -> int:
        """The number of drawn rows that belong to the prefetched batch."""
        if drawn == 0 or self.loader.end_of_dataloader:
            return 0
        return (drawn - 1) % self.rows + 1


def current_pass(sampler: object, of: object = None) -> LoaderPass | None:
    """The most recent unfinished pass over the sampler; None without accelerate.

    Args:
        sampler: that it draws from.
        of: the loader whose pass it must be; None: any. One that was left with `break` stays in a
            pass for accelerate.
    """
    if (state := sys.modules.get("accelerate.state")) is None:
        return None
    for loader in reversed(state.GradientState().dataloader_references):
        if getattr(loader, "iteration", None) is None or (of is not None and loader is not of):
            continue
        if chain := _batch_samplers(loader, sampler):
            dispatches = hasattr(loader, "slice_fn")  # one process loads for all
            dealers = [loader.state] if dispatches else chain
            processes = max(getattr(each, "num_processes", 1) for each in dealers)
            splits = any(getattr(each, "split_batches", False) for each in [loader, *chain])
            rows = (getattr(chain[-1], "batch_size", None) or 1) * (1 if splits else processes)
            skipped = max(getattr(each, "skip_batches", 0) for each in chain)
            draws = not dispatches or loader.state.process_index == 0
            return LoaderPass(loader, processes, rows, skipped, dispatches, draws)
    return None


def _batch_samplers(loader: Any, sampler: object) -> list[Any]:
    """The chain of batch samplers from the loader to `sampler`; empty if there is none."""
    chain = []
    each = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while each is not None:
        chain.append(each)
        if getattr(each, "sampler", None) is sampler:
            return chain
        each = getattr(each, "batch_sampler", None)
    return []
