"""`OpCase`: documents, heads and mask of a call of attention; named suites; random inputs.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flexvarlen.reference.attention import spans_of
from flexvarlen.verify.study import PACKINGS, packing_name


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

    @classmethod
    def of(cls, lengths: tuple[int, ...], *others: Any) -> OpCase:
        """Named after its lengths; `others` are the fields behind them.

        >>> OpCase.of((4160, 4160)).name, OpCase.of((3, 5), 8, 2).name
        ('4160×2', '3,5')
        """
        return cls(packing_name(lengths), lengths, *others)

    @property
    def total_tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    def as_record_case(self, dtype: torch.dtype) -> dict[str, Any]:
        """What a record's case says of it."""
        case = asdict(self) | {"lengths": list(self.lengths)}
        return case | {"dtype": str(dtype).removeprefix("torch.")}


@dataclass(frozen=True)
class Inputs:
    """The tensors that every backend of a case gets.

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
        """Standard normal; rounded to bfloat16 first, so that every dtype gets the same numbers."""
        rng = torch.Generator(device).manual_seed(seed)
        heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
        made = []
        for count in heads:
            shape = (case.total_tokens, count, case.head_dim)
            x = torch.randn(shape, generator=rng, device=device).to(torch.bfloat16)
            made.append(x.to(dtype))
        q, k, v, dout = made
        return cls(q, k, v, dout, case.lengths)

    def each_document(self) -> list[Inputs]:
        """Every document in a row of its own; copies, so that each begins an allocation."""
        rows = [slice(*span) for span in spans_of(self.lengths)]
        return [
            Inputs(
                self.q[row].clone(),
                self.k[row].clone(),
                self.v[row].clone(),
                self.dout[row].clone(),
                (length,),
            )
            for row, length in zip(rows, self.lengths, strict=True)
        ]


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


SUITES: dict[str, tuple[OpCase, ...]] = {
    "varlen-study": tuple(map(OpCase.of, PACKINGS)),
    "gqa": _gqa(),
    "cpu": _cpu(),
}
"""Cases by the name of their suite."""


def suite_cases(name: str) -> tuple[OpCase, ...]:
    """The cases of a suite; raises a ValueError for an unknown one."""
    if name not in SUITES:
        raise ValueError(
            f"suite must be one of {', '.join(SUITES)}, got {name!r}; choose one, or give lengths."
        )
    return SUITES[name]
