"""Where an iteration of `StreamPacker` is, and what its state keeps of it."""

from __future__ import annotations

import sys
import zlib
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from flexvarlen.packing.examples import Columns

SEGMENT = 32_768
"""The buffer is emptied each time this number of examples (at least four buffers) was read, so that
resuming packs at most two segments again."""


class Mark(NamedTuple):
    """The beginning of a segment: what was read and yielded before, and the dataset's state."""

    read: int = 0
    rows: int = 0
    crc: int = 0
    source: Any = None


@dataclass
class Position:
    """Where an iteration is: how many rows of a pass it has yielded, and their checksum."""

    epoch: int
    passes: int = 0  # before this one
    rows: int = 0
    crc: int = 0
    # The last two segments: packing both again checks that the dataset has resumed.
    marks: deque[Mark] = field(default_factory=lambda: deque([Mark()], maxlen=2))
    has_ended: bool = False  # with its last pass
    workers: int | None = None  # of the run whose state was loaded

    @property
    def has_begun(self) -> bool:
        """Whether a row was yielded."""
        return self.rows + self.passes > 0

    def count(self, row: list[Columns]) -> list[Columns]:
        """Count a row, which is returned."""
        for document in row:
            tokens = np.asarray(document["input_ids"], np.int64)
            self.crc = zlib.crc32(tokens.tobytes(), self.crc)
        self.crc = zlib.crc32(b"row", self.crc)
        self.rows += 1
        return row


def loader_workers() -> int:
    """The number of loader workers, of which this process is one; 0 in the main process."""
    worker = get_worker_info()
    return 0 if worker is None else worker.num_workers


def share_of(dataset: Any, worker: Any) -> Any:
    """The examples of this loader worker, or of the main process."""
    if worker is None or isinstance(dataset, IterableDataset):
        return dataset
    return islice(dataset, worker.id, None, worker.num_workers)


def has_state(dataset: Any) -> bool:
    """Whether a copy of it continues from its state: a `datasets.IterableDataset`."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(dataset, datasets.IterableDataset)
