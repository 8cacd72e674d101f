"""`OpCase`: the documents and heads of one operator comparison; named suites; random inputs.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class OpCase:
    """Documents, heads and mask of one comparison.

    Attributes:
        name: for tables.
        lengths: tokens of each document, each at least 1.
        num_heads, num_kv_heads, head_dim: of the tensors.
        causal, window: as in `packed_attention`; a window is an int here.
    """

    name: str
    lengths: tuple[int, ...]
    num_heads: int = 24
    num_kv_heads: int = 24
    head_dim: int = 128
    causal: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(
                f"lengths must be at least one of at least 1 token, got {self.lengths}; leave "
                "empty documents out."
            )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}; change one."
            )

    @property
    def total_tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.head_dim**-0.5)

    def as_row_case(self, dtype: torch.dtype, **run: bool | int) -> dict[str, Any]:
        """What a row says of the case, but the backend and the comparison.

        Args:
            dtype: of the tensors.
            **run: what else decides the numbers of this run: `train` and `seed`, in drift.
        """
        case = {
            "name": self.name,
            "lengths": list(self.lengths),
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "causal": self.causal,
            "window": self.window,
            "dtype": str(dtype).removeprefix("torch."),
        }
        return case | run


def spans_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """First token, and the one past the last, of each document.

    >>> spans_of((3, 2))
    [(0, 3), (3, 5)]
    """
    return list(pairwise(accumulate(lengths, initial=0)))


@dataclass(frozen=True)
class Inputs:
    """What every backend of a case is given.

    Attributes:
        q, k, v: `[T, H, D]` and `[T, Hkv, D]` twice, without gradients.
        dout: `[T, H, D]`, the output's gradient.
        lengths: tokens of each document.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def random(
        cls, case: OpCase, dtype: torch.dtype, device: torch.device | str, seed: int
    ) -> Inputs:
        """Standard normal; rounded to bfloat16 first: every dtype gets the very same numbers."""
        chance = torch.Generator(device).manual_seed(seed)
        heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
        made = []
        for count in heads:
            shape = (case.total_tokens, count, case.head_dim)
            x = torch.randn(shape, generator=chance, device=device).to(torch.bfloat16)
            made.append(x.to(dtype))
        q, k, v, dout = made
        return cls(q, k, v, dout, case.lengths)

    def documents(self, order: Sequence[int]) -> Inputs:
        """Some of the documents, in another order, in a row of their own."""
        spans = spans_of(self.lengths)
        rows = [slice(*spans[document]) for document in order]
        q, k, v, dout = (
            torch.cat([x[row] for row in rows]) for x in (self.q, self.k, self.v, self.dout)
        )
        return Inputs(q, k, v, dout, tuple(self.lengths[document] for document in order))


def other_order(lengths: Sequence[int], seed: int) -> list[int]:
    """Documents so ordered that none starts where it did, as far as there is such an order.

    One document alone comes twice: the first of them is its neighbour.
    """
    count = len(lengths)
    if count == 1:
        return [0, 0]
    starts = [start for start, _ in spans_of(lengths)]
    order = [*range(1, count), 0]
    chance = random.Random(seed)
    for _ in range(100):
        tried = chance.sample(range(count), count)
        places = spans_of([lengths[document] for document in tried])
        if all(starts[d] != start for d, (start, _) in zip(tried, places, strict=True)):
            return tried
    return order


def _study() -> tuple[OpCase, ...]:
    """The 13 cases of the public study of FlashAttention 2 beside SDPA's varlen kernel."""
    lengths: list[tuple[int, ...]] = [
        (256,), (319,), (320,), (320, 320), (321,), (384,), (299, 1115), (1088, 2368),
        (1088, 4160), (4160,), (4160,) * 2, (4160,) * 4, (4160,) * 8,
    ]  # fmt: skip
    return tuple(OpCase(_name(each), each) for each in lengths)


def _name(lengths: tuple[int, ...]) -> str:
    if len(lengths) > 1 and len(set(lengths)) == 1 and lengths[0] > 1000:
        return f"{lengths[0]}×{len(lengths)}"
    return ",".join(map(str, lengths))


def _gqa() -> tuple[OpCase, ...]:
    """Causal, grouped heads, windows: what language models ask for."""
    heads: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "causal": True}
    many = (977, 64, 1, 1531, 300, 128, 2048, 95)
    return (
        OpCase("causal 2048", (2048,), **heads),
        OpCase("causal 1088,2368", (1088, 2368), **heads),
        OpCase("causal 8 documents", many, **heads),
        OpCase("causal 8 documents, window 512", many, window=512, **heads),
        OpCase("causal 4160×2, window 1024", (4160, 4160), window=1024, **heads),
    )


def _cpu() -> tuple[OpCase, ...]:
    """Small, and few rows of different T: FlexAttention compiles for each on the CPU."""
    small: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 32}
    grouped = small | {"num_kv_heads": 2, "causal": True, "window": 24}
    return (
        OpCase("37,91", (37, 91), **small),
        OpCase("causal 64,64, window 24", (64, 64), **grouped),
    )


SUITES: dict[str, tuple[OpCase, ...]] = {"varlen-study": _study(), "gqa": _gqa(), "cpu": _cpu()}
"""Cases by the name of their suite."""
