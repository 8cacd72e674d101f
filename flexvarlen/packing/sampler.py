"""`BalancedSampler`: an order of rows in which no rank waits for another's attention."""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from flexvarlen.packing.loader_pass import LoaderPass, pass_over


class BalancedSampler(Sampler[int]):
    """Shuffled rows, such that those of one step, one a rank, cost about the same attention.

    Rows of equal tokens cost the same but for attention, which grows with the sum of the squares of
    their documents' lengths; a step takes as long as its slowest rank. Rows are shuffled, and
    within each `window` of them sorted by cost; neighbours go to the ranks as one step, in random
    order, and the steps of a window are shuffled.

    Args:
        rows: the lengths of each row's documents, in tokens.
        num_replicas: ranks that share each step.
        rank: yield this rank's rows. None: all, those of a step one after another, as accelerate
            and `Trainer` want it, which deal batches of one row to the ranks in turn.
        seed: of the order, together with the epoch; at least 0.
        window: rows that are sorted together, per rank: more balance better, fewer shuffle better.
        drop_last: leave out rows that fill no last step; else rows are repeated to fill it.

    Raises:
        ValueError: no rows, a rank or a number that cannot be.

    `set_epoch` gives each epoch an order of its own; `state_dict` and `load_state_dict` go on in
    the middle of one. accelerate's loader counts epochs by itself, from 0: what was set or loaded
    last before a pass goes on counting there.

    >>> list(BalancedSampler([[4], [2, 2], [4], [2, 2]], num_replicas=2, rank=0, seed=1))
    [3, 2]
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        *,
        num_replicas: int,
        rank: int | None = None,
        seed: int = 0,
        window: int = 64,
        drop_last: bool = False,
    ) -> None:
        for name, value, least in (
            ("num_replicas", num_replicas, 1),
            ("window", window, 1),
            ("seed", seed, 0),
            ("rank", rank or 0, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{name} must be an integer of at least {least}, got {value!r}; mend it."
                )
        if rank is not None and not 0 <= rank < num_replicas:
            raise ValueError(
                f"rank must be None or from 0 to {num_replicas - 1}, got {rank}; pass the "
                "process's own."
            )
        if len(rows) < (num_replicas if drop_last else 1):
            raise ValueError(
                f"rows must fill a step of {num_replicas} ranks, got {len(rows)}; pass more rows."
            )
        self.costs = np.array([sum(int(n) ** 2 for n in row) for row in rows], np.float64)
        self.num_replicas, self.rank, self.seed = num_replicas, rank, seed
        self.window, self.drop_last = window, drop_last
        # Rows that were yielded, where the pass over them began, and where the next one does.
        self.epoch = self._taken = self._start = self._begin = 0
        self._asked: int | None = None  # the epoch that no pass of accelerate's loader knows yet
        self._drawer: weakref.ref[Any] | None = None  # accelerate's loader whose pass this is

    def __len__(self) -> int:
        """Rows of an epoch: of this rank, or of all."""
        steps = self._steps()
        return steps if self.rank is not None else steps * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Rows from where a state left off, else from the start of the epoch.

        Raises:
            ValueError: accelerate's loader would lose rows, or give some twice.
        """
        loader = pass_over(self)
        self._drawer = None if loader is None else weakref.ref(loader.loader)
        if loader is not None:
            self._check(loader)
            self._follow(loader)
            self._asked = None
            if self._begin == len(self):
                loader.set_epoch(self.epoch + 1)  # it does not count an empty pass
        order = [row for step in self.steps() for row in self._own(step)]
        self._taken = self._start = self._begin
        self._begin = 0
        for row in order[self._taken :]:
            self._taken += 1
            yield row

    def steps(self) -> list[list[int]]:
        """The epoch's steps: the row of each rank."""
        generator = np.random.default_rng([self.seed, self.epoch])
        order = np.resize(generator.permutation(len(self.costs)), self._steps() * self.num_replicas)
        found: list[list[int]] = []
        window = self.window * self.num_replicas
        for rows in np.split(order, range(window, order.size, window)):
            by_cost = rows[self.costs[rows].argsort(kind="stable")].reshape(-1, self.num_replicas)
            found += generator.permuted(generator.permutation(by_cost), axis=1).tolist()
        return found

    def imbalance(self) -> float:
        """Of this epoch: the slowest ranks' cost, summed over the steps, over the mean rank's.

        1 is perfect; an attention-bound run takes so many times as long as it must.
        """
        costs = self.costs[np.array(self.steps())]
        return float(costs.max(1).sum() / costs.mean(1).sum())

    def set_epoch(self, epoch: int) -> None:
        """Another order; the place that a state of this very epoch restored stays.

        accelerate's loader calls it as a pass begins, with its own counter. It gets the epoch that
        was set or loaded since the last pass began, and counts on from there.

        Raises:
            ValueError: a state restored a place in another epoch, whose rows would be lost.
        """
        loader = pass_over(self)
        if loader is not None and loader.epoch == epoch:
            self._follow(loader)
            if not loader.draws:
                self._begin, self._asked = 0, None
        else:
            self._go_to(epoch)
            self._asked = epoch

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_drawer": None}

    def state_dict(self) -> dict[str, Any]:
        """The epoch and how many of its rows were yielded.

        A `DataLoader` with workers asks for rows ahead of the batches that it gives: set "taken" to
        the rows of the batches that were trained on, on all ranks if `rank` is None. The one batch
        that accelerate's loader looks ahead to is not counted.
        """
        drawer = None if self._drawer is None else self._drawer()
        loader = None if drawer is None else pass_over(self, drawer)
        ahead = 0 if loader is None else loader.ahead(self._taken - self._start)
        state = {"epoch": self.epoch, "taken": self._taken - ahead, "seed": self.seed}
        return state | self._order()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after these rows; a state of a whole pass goes on with an empty one.

        Raises:
            ValueError: it is of other rows, ranks or options: the order would be another.
        """
        for name, mine in self._order().items():
            if state[name] != mine:
                raise ValueError(
                    f"state must be of the same {name}, {mine}, got {state[name]}; make it "
                    "as it was, or begin the epoch anew."
                )
        if not 0 <= state["taken"] <= len(self):
            raise ValueError(
                f"taken must be from 0 to {len(self)} rows, got {state['taken']}; mend the state."
            )
        self.epoch, self.seed = state["epoch"], state["seed"]
        self._taken = self._start = self._begin = state["taken"]
        self._asked = self.epoch

    def _go_to(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        if 0 < self._begin < len(self):
            raise ValueError(
                f"epoch must be {self.epoch}, which load_state_dict went into the middle of, got "
                f"{epoch}; begin the loop over epochs at sampler.epoch."
            )
        self.epoch, self._taken, self._start, self._begin = epoch, 0, 0, 0

    def _follow(self, loader: LoaderPass) -> None:
        """One epoch for both: what was asked of this sampler, else the loader's."""
        if self._asked is None:
            self._go_to(loader.epoch)
        else:
            loader.set_epoch(self._asked)

    def _check(self, loader: LoaderPass) -> None:
        """Nobody else deals the rows, or passes over some."""
        if self.rank is not None and loader.processes > 1:
            raise ValueError(
                f"rank must be None where accelerate deals rows to {loader.processes} processes, "
                f"got {self.rank}; leave it out."
            )
        if self._begin and loader.skipped:
            raise ValueError(
                f"skip_first_batches must not be called after load_state_dict, got {loader.skipped}"
                f" batches to skip after {self._begin} rows; leave one of them out (Trainer skips "
                "by itself where it resumes, unless ignore_data_skip=True)."
            )
        if loader.dispatches and loader.processes > 1 and loader.skipped:
            warnings.warn(
                "skip_first_batches counts batches of one process under dispatch_batches=True, "
                f"got {loader.skipped} for {loader.processes} processes; skip {loader.processes} "
                "times those of a process, or rows come again (Trainer: dispatch_batches=False).",
                stacklevel=2,
            )
        if self._begin % loader.rows and self._begin < len(self):
            raise ValueError(
                f"taken must be a multiple of {loader.rows}, the rows of a batch on each process, "
                f"got {self._begin}; count the rows of all processes."
            )

    def _order(self) -> dict[str, Any]:
        """What the order depends on, besides the seed and the epoch."""
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
