"""`RowCost`: what a row's documents cost a model, by which rows are balanced over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexvarlen.mask.spec import UNLIMITED, MaskSpec

Lengths = NDArray[np.int64]
Costs = NDArray[np.float64]


@dataclass(frozen=True)
class RowCost:
    """What documents cost a model: `per_token` a token, `per_pair` a pair that attention computes.

    `fv.row_cost(model)` returns one in FLOPs. Any unit will do, as costs are only compared.

    Attributes:
        per_token: cost of a token, in all layers together, without attention's pairs.
        per_pair: for each mask of attention layers, the cost of a pair of a query and a key that it
            sees, in all layers with this mask together.

    Raises:
        ValueError: a cost is negative or not finite, all are zero, or a mask depends on more than
            a document's length.

    >>> causal = MaskSpec.of()
    >>> RowCost(per_token=10.0, per_pair={causal: 1.0}).of_documents(np.array([1, 4]))
    array([11., 50.])
    """

    per_token: float
    per_pair: Mapping[MaskSpec, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        costs = [self.per_token, *self.per_pair.values()]
        if not all(0 <= cost < float("inf") for cost in costs) or not any(costs):
            raise ValueError(
                f"costs must be finite, at least 0, and not all 0, got per_token={self.per_token} "
                f"and per_pair={[*self.per_pair.values()]}; pass FLOPs or milliseconds."
            )
        for spec in self.per_pair:
            if spec.prefix or spec.runs or spec.cross or spec.tree:
                raise ValueError(
                    "the masks of per_pair must depend on a document's length alone, got "
                    f"{spec!r}; make them with MaskSpec.of(causal=, window=, chunk=)."
                )

    def of_documents(self, lengths: Lengths) -> Costs:
        """The cost of each document.

        Args:
            lengths: int64 `[N]`, tokens of each document.

        Returns:
            float64 `[N]`.
        """
        total = self.per_token * lengths.astype(np.float64)
        for spec, cost in self.per_pair.items():
            total += cost * visible_pairs(spec, lengths)
        return total

    def of_rows(self, rows: Iterable[Iterable[int]]) -> Costs:
        """The cost of each row, float64 `[R]`, from the lengths of its documents."""
        listed = [list(row) for row in rows]
        owners = np.repeat(np.arange(len(listed)), [len(row) for row in listed])
        lengths = np.array([n for row in listed for n in row], np.int64)
        costs = np.bincount(owners, self.of_documents(lengths), len(listed))
        return costs.astype(np.float64)


SQUARES = RowCost(per_token=0.0, per_pair={MaskSpec.of(causal=False): 1.0})
"""Sum of squared lengths: attention over whole documents, and nothing else."""


def cost_or_squares(cost: RowCost | None) -> RowCost:
    """The cost given as an argument, `SQUARES` for None.

    Raises:
        ValueError: it is something else.
    """
    if cost is not None and not isinstance(cost, RowCost):
        raise ValueError(f"cost must be a RowCost, got {cost!r:.80}; pass fv.row_cost(model).")
    return SQUARES if cost is None else cost


def visible_pairs(spec: MaskSpec, lengths: Lengths) -> Costs:
    """Number of pairs of a query and a key that it sees, in each document: float64 `[N]`.

    The same as `DocumentMask.num_pairs` of each document alone.
    """
    tokens = lengths.astype(np.float64)
    if not spec.chunk:
        return tokens + _keys_beside(tokens, spec.left) + _keys_beside(tokens, spec.right)
    whole = MaskSpec(spec.causal, spec.left, spec.right)
    chunk = visible_pairs(whole, np.array([spec.chunk]))
    return lengths // spec.chunk * chunk + visible_pairs(whole, lengths % spec.chunk)


def _keys_beside(tokens: Costs, limit: int) -> Costs:
    """Pairs whose key is on one side of the query, at most `limit` tokens away."""
    furthest = tokens - 1 if limit == UNLIMITED else np.minimum(tokens - 1, limit)
    return furthest * (furthest + 1) / 2 + (tokens - 1 - furthest) * furthest
