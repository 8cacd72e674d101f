"""The state of accelerate's data loader that the sampler and the collators need.

`Trainer` uses this loader too. Its iteration counter is the epoch, but on several processes a
loader that skips batches (`skip_first_batches`, a resumed `Trainer`) does not forward it. The
loader also prefetches one batch. The state is read from accelerate's list of active loaders,
without importing accelerate.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexvarlen.upstream import required

DISPATCH_NOTHING = (
    'set dispatch_batches=False (in Trainer accelerator_config={"dispatch_batches": False})'
)
"""What to do where a batch cannot be sent to other processes."""


@dataclass(frozen=True)
class LoaderPass:
    """A pass of accelerate's data loader over a sampler.

    Attributes:
        loader: the loader.
        processes: number of processes to which its batches are assigned in turn.
        rows: number of rows per step, summed over processes.
        skipped: number of batches that each process skips.
        dispatches: whether one process loads the batches of all processes.
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
        """Return the loader's iteration counter."""
        return int(self.loader.iteration)

    def set_epoch(self, epoch: int) -> None:
        """Set the loader's iteration counter."""
        self.loader.iteration = epoch

    def ahead(self, drawn: int) -> int:
        """Return how many of the drawn rows belong to the prefetched batch."""
        if drawn == 0 or self.loader.end_of_dataloader:
            return 0
        return (drawn - 1) % self.rows + 1


def current_pass(sampler: object, of: object = None) -> LoaderPass | None:
    """Return the most recent unfinished pass over the sampler; None without accelerate.

    Args:
        sampler: the sampler that the loader draws from.
        of: the loader whose pass is wanted; None: any. To accelerate, a loop that was left with
            `break` is still an unfinished pass.
    """
    if (state := sys.modules.get("accelerate.state")) is None:
        return None
    for loader in reversed(state.GradientState().dataloader_references):
        dispatches = _dispatches(loader)
        has_epochs = dispatches or _instances([loader], "DataLoaderShard")
        if not has_epochs or (of is not None and loader is not of):
            continue
        if chain := _batch_samplers(loader, sampler):
            _of_pass(loader, "iteration")
            shards = _instances(chain, "BatchSamplerShard")
            dealers = [loader.state] if dispatches else shards
            processes = max((_of_pass(each, "num_processes") for each in dealers), default=1)
            splitters = [loader, *shards] if dispatches else shards
            splits = any(_of_pass(each, "split_batches") for each in splitters)
            rows = (getattr(chain[-1], "batch_size", None) or 1) * (1 if splits else processes)
            skippers = _instances(chain, "SkipBatchSampler")
            skipped = max((_of_pass(each, "skip_batches") for each in skippers), default=0)
            draws = not dispatches or loader.state.process_index == 0
            return LoaderPass(loader, processes, rows, skipped, dispatches, draws)
    return None


def rows_skipped_beyond_pass(stream: object, rows: int) -> int:
    """Return the rows that accelerate skips, if more than the stream's pass has; else 0."""
    loader, shards = _loader_of_stream(stream)
    if loader is None:
        return 0
    dealers = [(loader.state, loader)] if _dispatches(loader) else [(x, x) for x in shards]
    processes = max((_of_pass(x, "num_processes") for x, _ in dealers), default=1)
    splits = any(_of_pass(x, "split_batches") for _, x in dealers)
    step = (loader.batch_size or 1) * (1 if splits else processes)
    skipped = int(_of_pass(loader, "skip_batches"))
    return skipped * step if skipped > -(-rows // step) else 0


def reads_ahead(stream: object) -> bool:
    """Whether accelerate's loader has drawn a batch of a stream's pass that it has not yielded.

    With `use_stateful_dataloader` it keeps the stream's state of before that batch.
    """
    loader, _ = _loader_of_stream(stream)
    return loader is not None and not _of_pass(loader, "use_stateful_dataloader")


def _loader_of_stream(stream: object) -> tuple[Any, list[Any]]:
    """The loader of the latest unfinished pass over a stream, or None, and its shards of it."""
    if (state := sys.modules.get("accelerate.state")) is None:
        return None, []
    for loader in reversed(state.GradientState().dataloader_references):
        if _dispatches(loader) or _instances([loader], "DataLoaderShard"):
            shards = _instances([loader.dataset], "IterableDatasetShard")
            if any(stream is each for each in (loader.dataset, *(x.dataset for x in shards))):
                return loader, shards
    return None, []


def is_dispatched(loaders: Sequence[Any] | None = None) -> bool:
    """Whether accelerate loads batches in one process for all, and sends only tensors.

    Args:
        loaders: accelerate's loaders; None: the loaders of unfinished passes.
    """
    if loaders is None:
        if (state := sys.modules.get("accelerate.state")) is None:
            return False
        loaders = state.GradientState().dataloader_references
    return any(_dispatches(x) and x.state.num_processes > 1 for x in loaders)


def _instances(objects: Sequence[Any], name: str) -> list[Any]:
    """The instances of a class of accelerate's loaders; empty if accelerate is not imported."""
    module = sys.modules.get("accelerate.data_loader")
    kind = None if module is None else required(module, name, "the state of a loader")
    return [] if kind is None else [each for each in objects if isinstance(each, kind)]


def _dispatches(loader: Any) -> bool:
    """Whether one process loads the batches of all."""
    return bool(_instances([loader], "DataLoaderDispatcher"))


def _of_pass(owner: Any, name: str) -> Any:
    return required(owner, name, "the rows that a loader has drawn")


def _batch_samplers(loader: Any, sampler: object) -> list[Any]:
    """Return the chain of batch samplers from the loader to `sampler`; empty if there is none."""
    chain = []
    each = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while each is not None:
        chain.append(each)
        if getattr(each, "sampler", None) is sampler:
            return chain
        each = getattr(each, "batch_sampler", None)
    return []
