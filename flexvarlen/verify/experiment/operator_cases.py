"""The calls of attention that `drift op` compares, as data, and their random inputs.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The packings of a public study of varlen kernels, which the benchmarks measure too; 24 heads of
# 128, not causal: https://github.com/vllm-project/vllm-omni/issues/4418
PACKINGS: tuple[tuple[int, ...], ...] = (
    (256,),
    (319,),
    (320,),
    (320, 320),
    (321,),
    (384,),
    (299, 1115),
    (1088, 2368),
    (1088, 4160),
    (4160,),
    (4160,) * 2,
    (4160,) * 4,
    (4160,) * 8,
)


def packing_name(lengths: tuple[int, ...]) -> str:
    """The name of a packing, as the study writes it.

    >>> packing_name((4160, 4160)), packing_name((320, 320)), packing_name((3, 5))
    ('4160×2', '320,320', '3,5')
    """
    is_long = len(lengths) > 1 and len(set(lengths)) == 1 and lengths[0] > 1000
    return f"{lengths[0]}×{len(lengths)}" if is_long else ",".join(map(str, lengths))


@dataclass(frozen=True)
class OpCase:
    """One comparison of one call of attention.

    Attributes:
        lengths: tokens of each document, each at least 1.
        num_heads, num_kv_heads, head_dim: of the tensors.
        causal, window: as in `packed_attention`; a window is an int here.
        label: for tables; by default `packing_name`.
        dtype: of the tensors.
        comparison: of `flexvarlen.verify.experiment.operator.COMPARISONS`.
        train: whether gradients are compared.
        seed: of the inputs.
    """

    lengths: tuple[int, ...]
    num_heads: int = 24
    num_kv_heads: int = 24
    head_dim: int = 128
    causal: bool = False
    window: int | None = None
    label: str = ""
    dtype: torch.dtype = torch.bfloat16
    comparison: str = "exact"
    train: bool = True
    seed: int = 0

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
    def name(self) -> str:
        """For the progress bar."""
        return f"{self._label} {self.data()['dtype']} {self.comparison}"

    @property
    def _label(self) -> str:
        return self.label or packing_name(self.lengths)

    def data(self) -> dict[str, Any]:
        """As in a record."""
        fields = {name: value for name, value in vars(self).items() if name != "label"}
        return fields | {
            "name": self._label,
            "lengths": list(self.lengths),
            "dtype": str(self.dtype).removeprefix("torch."),
            "other": BASELINE if self.comparison == "backend-backend" else None,
        }


BASELINE = "sdpa"
"""What "backend-backend" compares with: it runs anywhere."""

_GQA: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "causal": True}
_MANY = (977, 64, 1, 1531, 300, 128, 2048, 95)
_SMALL: dict[str, Any] = {"num_heads": 4, "head_dim": 32}

SUITES: dict[str, tuple[OpCase, ...]] = {
    "varlen-study": tuple(map(OpCase, PACKINGS)),
    # Causal, grouped heads, windows: what language models ask for.
    "gqa": (
        OpCase((2048,), **_GQA, label="causal 2048"),
        OpCase((1088, 2368), **_GQA, label="causal 1088,2368"),
        OpCase(_MANY, **_GQA, label="causal 8 documents"),
        OpCase(_MANY, **_GQA, window=512, label="causal 8 documents, window 512"),
        OpCase((4160, 4160), **_GQA, window=1024, label="causal 4160×2, window 1024"),
    ),
    # Small, and few rows of different T: FlexAttention compiles for each on the CPU.
    "cpu": (
        OpCase((37, 91), **_SMALL, num_kv_heads=4),
        OpCase(
            (64, 64),
            **_SMALL,
            num_kv_heads=2,
            causal=True,
            window=24,
            label="causal 64,64, window 24",
        ),
    ),
}
"""Cases by the name of their suite."""


def suite_cases(name: str) -> tuple[OpCase, ...]:
    """The cases of a suite; raises a ValueError for an unknown one."""
    if name not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {name!r}; choose one.")
    return SUITES[name]


class Inputs(NamedTuple):
    """The tensors that every backend of a case gets, without gradients.

    `q` and `grad_out` are `[T, H, D]`, `k` and `v` `[T, Hkv, D]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor

    @classmethod
    def random(cls, case: OpCase, device: torch.device | str) -> Inputs:
        """Standard normal; rounded to bfloat16 first, so that every dtype gets the same numbers."""
        rng = torch.Generator(device).manual_seed(case.seed)

        def normal(heads: int) -> Tensor:
            shape = (sum(case.lengths), heads, case.head_dim)
            x = torch.randn(shape, generator=rng, device=device)
            return x.to(torch.bfloat16).to(case.dtype)

        heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
        return cls(*map(normal, heads))

    def documents(self, lengths: tuple[int, ...]) -> list[Inputs]:
        """Every document in a row of its own; copies, so that each begins an allocation."""
        each = zip(*(x.split(list(lengths)) for x in self), strict=True)
        return [Inputs(*(x.clone() for x in document)) for document in each]
