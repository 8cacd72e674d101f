"""`BalancedSampler`: an order of rows in which no rank waits for another's attention."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler


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
    the middle of one.

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
        self.epoch = self._taken = self._begin = 0

    def __len__(self) -> int:
        """Rows of an epoch: of this rank, or of all."""
        steps = self._steps()
        return steps if self.rank is not None else steps * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Rows from where a state left off, else from the start of the epoch."""
        order = [row for step in self.steps() for row in self._own(step)]
        self._taken, self._begin = self._begin, 0
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
        """Another order; `DataLoader`s of accelerate call it."""
        if epoch != self.epoch:
            self.epoch, self._taken, self._begin = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch and how many of its rows were yielded.

        A `DataLoader` with workers asks for rows ahead of the batches that it gives: set "taken" to
        the rows of the batches that were trained on.
        """
        return {"epoch": self.epoch, "taken": self._taken, "seed": self.seed} | self._order()

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
        self._taken = self._begin = state["taken"]

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
