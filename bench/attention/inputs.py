"""`Inputs` of a benchmark of attention, and `Prepared`: a call on them that is ready to be timed.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """What every kernel of a cell is given.

    Attributes:
        q, k, v: `[T, H, D]` and `[T, Hkv, D]` twice, without gradients.
        cotangent: `[T, H, D]`, what the backward starts from.
        lengths: tokens of each document; their sum is T.
        cu_seqlens: int32 `[num_docs + 1]`, no spare slots.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cotangent: Tensor
    lengths: Sequence[int]
    cu_seqlens: Tensor
    causal: bool

    @classmethod
    def random(
        cls,
        lengths: Sequence[int],
        heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        causal: bool,
        seed: int = 0,
    ) -> Inputs:
        """Normal tensors."""
        generator = torch.Generator(device).manual_seed(seed)
        tokens = sum(lengths)
        q, k, v, cotangent = (
            torch.randn((tokens, h, head_dim), dtype=dtype, device=device, generator=generator)
            for h in (heads[0], heads[1], heads[1], heads[0])
        )
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return cls(q, k, v, cotangent, lengths, ends, causal)

    @classmethod
    def equally_long(
        cls,
        batch: int,
        tokens: int,
        num_heads: int,
        head_dim: int,
        dtype: str,
        device: torch.device,
        causal: bool,
    ) -> Inputs:
        """Normal tensors of `batch` documents of `tokens` tokens each, without grouped queries.

        Args:
            dtype: torch's name of it.
        """
        lengths, heads = (tokens,) * batch, (num_heads, num_heads)
        return cls.random(lengths, heads, head_dim, getattr(torch, dtype), device, causal)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def grouped(self) -> bool:
        return self.q.shape[1] != self.k.shape[1]

    def documents(self) -> list[Inputs]:
        """Each document alone, on the same memory."""
        ends = list(accumulate(self.lengths, initial=0))
        return [
            Inputs(
                self.q[begin:end],
                self.k[begin:end],
                self.v[begin:end],
                self.cotangent[begin:end],
                (end - begin,),
                self.cu_seqlens.new_tensor([0, end - begin]),
                self.causal,
            )
            for begin, end in pairwise(ends)
        ]

    def leaves(self, needs_grad: bool) -> list[Tensor]:
        """q, k, v as tensors of their own on the same memory."""
        return [x.detach().requires_grad_(needs_grad) for x in (self.q, self.k, self.v)]


@dataclass(frozen=True)
class Prepared:
    """A call ready to be timed.

    Attributes:
        forward: gives the output; differentiable in `leaves` if they require gradients.
        cotangent: of the output's shape.
        as_THD: the output, or the gradient of a leaf, as `[T, heads, D]`.
        deterministic: two backwards must give the same bits.
        measures: what is to stand in the rows of all passes.
    """

    forward: Callable[[], Any]
    leaves: Sequence[Tensor]
    cotangent: Tensor
    as_THD: Callable[[Tensor], Tensor] = lambda x: x
    deterministic: bool = False
    measures: Mapping[str, Any] = field(default_factory=dict)

    def backward(self, out: Any) -> tuple[Tensor, ...]:
        """Gradients of the leaves; the graph behind `out`, from `forward`, can be used again."""
        return torch.autograd.grad(out, self.leaves, self.cotangent, retain_graph=True)

    def answer(self, out: Any, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Output, and gradients if there are any, as `[T, heads, D]` each."""
        return [self.as_THD(x.detach()) for x in (out, *gradients)]


@dataclass(frozen=True)
class Serial(Prepared):
    """A call a document, one after another; `forward` gives their outputs."""

    documents: Sequence[Prepared] = ()

    def backward(self, out: Any) -> tuple[Tensor, ...]:
        pairs = zip(self.documents, out, strict=True)
        return tuple(gradient for one, own in pairs for gradient in one.backward(own))

    def answer(self, out: Any, gradients: Sequence[Tensor]) -> list[Tensor]:
        each = len(gradients) // len(self.documents)
        parts = [
            one.answer(own, gradients[each * i : each * (i + 1)])
            for i, (one, own) in enumerate(zip(self.documents, out, strict=True))
        ]
        return [torch.cat(column) for column in zip(*parts, strict=True)]


Prepare = Callable[[Inputs, bool], Prepared]
"""Of the inputs, and whether a backward will follow."""


def serial(prepare: Prepare) -> Prepare:
    """A call a document, one after another, each prepared alone."""

    def prepare_all(inputs: Inputs, needs_grad: bool) -> Prepared:
        documents = [prepare(one, needs_grad) for one in inputs.documents()]
        return Serial(
            lambda: tuple(one.forward() for one in documents),
            [leaf for one in documents for leaf in one.leaves],
            inputs.cotangent,
            deterministic=documents[0].deterministic,
            measures=documents[0].measures,
            documents=documents,
        )

    return prepare_all
