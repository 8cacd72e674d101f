"""`BalancedSampler`: shuffles rows so that the ranks of each step have equal work."""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from flexvarlen.layout.arguments import integers, require_int_at_least
from flexvarlen.packing.loader_pass import LoaderPass, current_pass
from flexvarlen.packing.row_cost import RowCost, cost_or_squares

WINDOW = 64


def balanced_steps(
    costs: NDArray[np.float64],
    order: NDArray[np.int64],
    size: int,
    window: int,
    generator: np.random.Generator,
) -> list[list[int]]:
    """Cut shuffled rows into steps of `size` rows, of about equal cost within each step.

    Args:
        costs: of each row.
        order: indices of rows; a multiple of `size`.
        size: number of rows in a step.
        window: fewest steps whose rows are sorted together: in a small window the longest rows have
            no equals.
        generator: shuffles the steps of a window, and the rows of a step.
    """
    found: list[list[int]] = []
    in_steps = order.reshape(-1, size)
    for steps in np.array_split(in_steps, max(len(in_steps) // window, 1)):
        rows = steps.ravel()
        by_cost = rows[costs[rows].argsort(kind="stable")].reshape(-1, size)
        found += generator.permuted(generator.permutation(by_cost), axis=1).tolist()
    return found


class BalancedSampler(Sampler[int]):
    """Shuffles rows so that the rows of a step, one per rank, cost about the same.

    A step takes as long as its slowest rank. The rows are shuffled, then sorted by cost within each
    `window`. Consecutive rows form a step and are assigned to ranks in random order, and the steps
    of a window are shuffled.

    Args:
        rows: for each row, the lengths of its documents in tokens.
        num_replicas: number of ranks.
        rank: yield only this rank's rows. None: yield all rows, step by step, for accelerate,
            which distributes batches of one row to the ranks in turn.
        cost: what a row costs the model, `fv.row_cost(model)`. None: the sum of its documents'
            squared lengths, by which full attention grows, for rows of equally many tokens.
        seed: random seed, combined with the epoch; at least 0.
        window: minimum number of steps whose rows are sorted together; a larger window balances
            better, but shuffles less.
        drop_last: whether to drop an incomplete last step; otherwise rows are repeated to fill it.

    Raises:
        ValueError: there are too few rows, or an argument is invalid.

    For `Trainer`, pass `rows_per_step` to `PackedDataset` instead.

    `set_epoch` reshuffles for an epoch; `state_dict` and `load_state_dict` allow resuming in
    the middle of one. accelerate's loader counts epochs itself, from 0; its counter is replaced by
    the epoch that was last set or loaded before a pass.

    >>> list(BalancedSampler([[4], [2, 2], [4], [2, 2]], num_replicas=2, rank=0, seed=1))
    [3, 2]
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        *,
        num_replicas: int,
        rank: int | None = None,
        cost: RowCost | None = None,
        seed: int = 0,
        window: int = WINDOW,
        drop_last: bool = False,
    ) -> None:
        num_replicas = require_int_at_least("num_replicas", num_replicas, 1)
        window = require_int_at_least("window", window, 1)
        seed = require_int_at_least("seed", seed, 0)
        rank = None if rank is None else require_int_at_least("rank", rank, 0)
        if rank is not None and not 0 <= rank < num_replicas:
            raise ValueError(
                f"rank must be None or from 0 to {num_replicas - 1}, got {rank}; pass the "
                "process's rank."
            )
        if isinstance(rows, str) or not isinstance(rows, Collection):
            raise ValueError(
                f"rows must be a list of rows, got {rows!r:.80}; pass the document lengths of each."
            )
        if len(rows) < (num_replicas if drop_last else 1):
            raise ValueError(
                f"rows must fill a step of {num_replicas} ranks, got {len(rows)}; pass more rows."
            )
        lengths = (integers(f"rows[{i}]", row) for i, row in enumerate(rows))
        self.costs = cost_or_squares(cost).of_rows(lengths)
        self.num_replicas, self.rank, self.seed = num_replicas, rank, seed
        self.window, self.drop_last = window, drop_last
        # The epoch, the rows yielded so far, and where this pass and the next one begin.
        self.epoch = self._taken = self._start = self._begin = 0
        self._requested: int | None = None  # epoch not yet passed on to accelerate's loader
        self._drawer: weakref.ref[Any] | None = None  # accelerate's loader of this pass

    def __len__(self) -> int:
        """Return the number of rows in an epoch, for this rank or for all ranks."""
        steps = self._steps()
        return steps if self.rank is not None else steps * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Yield row indices from the loaded state, or from the start of the epoch.

        Raises:
            ValueError: accelerate's loader would skip or repeat rows.
        """
        loader = current_pass(self)
        self._drawer = None if loader is None else weakref.ref(loader.loader)
        if loader is not None:
            self._check(loader)
            self._follow(loader)
            self._requested = None
            if self._begin == len(self):
                loader.set_epoch(self.epoch + 1)  # the loader does not count an empty pass
        order = [row for step in self.steps() for row in self._own(step)]
        self._taken = self._start = self._begin
        self._begin = 0
        for row in order[self._taken :]:
            self._taken += 1
            yield row

    def steps(self) -> list[list[int]]:
        """Return the steps of the epoch, each a list with one row index per rank."""
        generator = np.random.default_rng([self.seed, self.epoch])
        order = np.resize(generator.permutation(len(self.costs)), self._steps() * self.num_replicas)
        return balanced_steps(self.costs, order, self.num_replicas, self.window, generator)

    def imbalance(self) -> float:
        """Return the maximum cost over ranks, summed over steps, relative to the mean over ranks.

        The run takes this many times as long as with perfect balance, by this cost.
        """
        costs = self.costs[np.array(self.steps())]
        return float(costs.max(1).sum() / costs.mean(1).sum())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch. An offset restored from a state of the same epoch is kept.

        accelerate's loader calls this with its counter as a pass begins. The counter is then set to
        the epoch that was set or loaded since the last pass began, if any.

        Raises:
            ValueError: a loaded state has an offset in another epoch, whose rows would be skipped.
        """
        loader = current_pass(self)
        if loader is not None and loader.epoch == epoch:
            self._follow(loader)
            if not loader.draws:
                self._begin, self._requested = 0, None
        else:
            self._go_to(epoch)
            self._requested = epoch

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_drawer": None}

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of its rows that were yielded.

        A `DataLoader` with workers prefetches rows, so set "taken" to
        the number of rows trained on (over all ranks if `rank` is None). The batch
        that accelerate's loader prefetches is not counted.
        """
        drawer = None if self._drawer is None else self._drawer()
        loader = None if drawer is None else current_pass(self, drawer)
        ahead = 0 if loader is None else loader.ahead(self._taken - self._start)
        state = {"epoch": self.epoch, "taken": self._taken - ahead, "seed": self.seed}
        return state | self._order()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; if it was saved at the end of an epoch, the next pass is empty.

        Raises:
            ValueError: the state has other rows, ranks or options, so the order would differ.
        """
        for name, expected in self._order().items():
            if state[name] != expected:
                raise ValueError(
                    f"the state's {name} must be {expected}, got {state[name]}; use that {name} "
                    "again, or restart the epoch."
                )
        if not 0 <= state["taken"] <= len(self):
            raise ValueError(
                f"taken must be from 0 to {len(self)} rows, got {state['taken']}; fix the state."
            )
        self.epoch, self.seed = state["epoch"], state["seed"]
        self._taken = self._start = self._begin = state["taken"]
        self._requested = self.epoch

    def _go_to(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        if 0 < self._begin < len(self):
            raise ValueError(
                f"epoch must be {self.epoch}, which load_state_dict resumed in the middle, got "
                f"{epoch}; start the loop over epochs at sampler.epoch."
            )
        self.epoch, self._taken, self._start, self._begin = epoch, 0, 0, 0

    def _follow(self, loader: LoaderPass) -> None:
        """Synchronize epochs: use the one set on this sampler, or else the loader's."""
        if self._requested is None:
            self._go_to(loader.epoch)
        else:
            loader.set_epoch(self._requested)

    def _check(self, loader: LoaderPass) -> None:
        """Raise if the loader also shards or skips rows."""
        if self.rank is not None and loader.processes > 1:
            raise ValueError(
                f"rank must be None if accelerate shards rows over {loader.processes} processes, "
                f"got {self.rank}; remove it."
            )
        if self._begin and loader.skipped:
            raise ValueError(
                f"skip_first_batches must not be called after load_state_dict, got {loader.skipped}"
                f" batches to skip after {self._begin} rows; remove one of the calls (Trainer "
                "skips batches itself when it resumes, unless ignore_data_skip=True)."
            )
        if loader.dispatches and loader.processes > 1 and loader.skipped:
            warnings.warn(
                "skip_first_batches counts batches of one process under dispatch_batches=True, "
                f"got {loader.skipped} for {loader.processes} processes; skip {loader.processes} "
                "times as many, or rows repeat (in Trainer, set dispatch_batches=False).",
                stacklevel=2,
            )
        if self._begin % loader.rows and self._begin < len(self):
            raise ValueError(
                f"taken must be a multiple of {loader.rows}, the rows of a batch on each process, "
                f"got {self._begin}; count the rows of all processes."
            )

    def _order(self) -> dict[str, Any]:
        """Return everything that the order depends on, except the seed and the epoch."""
        return {
            "num_replicas": self.num_replicas,
            "window": self.window,
            "drop_last": self.drop_last,
            "rows": [len(self.costs), zlib.crc32(self.costs.tobytes())],
        }

    def _steps(self) -> int:
        rows = len(self.costs)
        return rows // self.num_replicas if self.drop_last else -(-rows // self.num_replicas)

    def _own(self, step: Sequence[int]) -> Sequence[int]:
        return step if self.rank is None else [step[self.rank]]
