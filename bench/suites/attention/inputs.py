"""`Inputs`: the tensors that all variants of a case share; `Prepared`: the call of a variant.

`Expected` is what its results must be close to.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import flexvarlen as fv
from flexvarlen.bench.suites import FrozenCase
from flexvarlen.reference.acceptance import Error, largest, why_apart
from flexvarlen.reference.attention import (
    GRADIENTS,
    Results,
    Sample,
    attend_alone,
    samples,
    spans_of,
)


@dataclass(frozen=True)
class Inputs:
    """One packed row.

    Attributes:
        q, k, v: `[T, H, D]` and `[T, Hkv, D]` twice, without gradients.
        grad_out: `[T, H, D]`, the gradient of the output that the backward starts from.
        lengths: tokens of each document; their sum is T.
        cu_seqlens: int32 `[num_docs + 1]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
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
        """Standard normal tensors for (num_heads, num_kv_heads) `heads`."""
        generator, tokens = torch.Generator(device).manual_seed(seed), sum(lengths)
        q, k, v, grad_out = (
            torch.randn((tokens, h, head_dim), dtype=dtype, device=device, generator=generator)
            for h in (heads[0], heads[1], heads[1], heads[0])
        )
        ends = [0, *(end for _, end in spans_of(lengths))]
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
        return cls(q, k, v, grad_out, lengths, cu_seqlens, causal)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def grouped(self) -> bool:
        return self.q.shape[1] != self.k.shape[1]

    def layout(self) -> fv.PackedLayout:
        return fv.PackedLayout.from_lengths(self.lengths, device=self.q.device)

    def samples(self) -> list[Sample]:
        """The fp64 reference of a few documents and heads, and the errors of the baseline."""
        qkv = (self.q, self.k, self.v, self.lengths)
        return samples(*qkv, causal=self.causal, grad_out=self.grad_out)

    def alone(self, dtype: torch.dtype) -> Results:
        """Each document alone, in plain torch: fp64 is the reference, `q.dtype` the baseline."""
        qkv = (self.q, self.k, self.v, self.lengths)
        return attend_alone(*qkv, dtype=dtype, causal=self.causal, grad_out=self.grad_out)

    def leaves(self, needs_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as tensors of their own on the same memory."""
        q, k, v = (x.detach().requires_grad_(needs_grad) for x in (self.q, self.k, self.v))
        return q, k, v

    def folded(self, found: Results) -> Results:
        """The results of `documents()`, one after another, as those of the row."""
        return found

    def documents(self) -> list[Inputs]:
        """Each document alone, on the same memory."""
        return [
            Inputs(
                self.q[start:end],
                self.k[start:end],
                self.v[start:end],
                self.grad_out[start:end],
                (end - start,),
                self.cu_seqlens.new_tensor([0, end - start]),
                self.causal,
            )
            for start, end in spans_of(self.lengths)
        ]


class Expected:
    """What the results of a row must be close to."""

    def __init__(self, inputs: Inputs) -> None:
        self.samples = inputs.samples()
        self.plain = inputs.alone(inputs.q.dtype).named()
        self.baseline = {
            name: largest([sample.baseline[name].relative for sample in self.samples])
            for name in ("out", *GRADIENTS)
        }

    def errors(self, found: Results) -> dict[str, float]:
        """`error_*` and `baseline_error_*`: relative errors, the worst sample's."""
        measures = {}
        errors = [sample.errors(found) for sample in self.samples]
        for name in found.named():
            measures[f"error_{name}"] = largest([x[name].relative for x in errors])
            measures[f"baseline_error_{name}"] = self.baseline[name]
        return measures

    def why_wrong(self, found: Results) -> str | None:
        """The sentence that says what is wrong, or None."""
        for sample in self.samples:
            if (reason := sample.why_wrong(found)) is not None:
                return reason
        for name, x in found.named().items():  # of the documents that are not sampled
            reason = why_apart(
                f"{name} of the whole row",
                Error.between(x, self.plain[name]).relative,
                self.baseline[name],
                x.dtype,
                gradient=name in GRADIENTS,
            )
            if reason is not None:
                return reason
        return None


@dataclass(frozen=True)
class AttentionCase(FrozenCase):
    """A case of one attention."""

    @property
    def name(self) -> str:
        raise NotImplementedError

    def inputs(self, device: torch.device) -> Inputs:
        raise NotImplementedError


@dataclass(frozen=True)
class Prepared:
    """A call that is ready to be timed.

    Attributes:
        forward: returns the output; differentiable in `leaves` if they require gradients.
        grad_out: of the output's shape.
        as_THD: turns the output, or the gradient of a leaf, into `[T, heads, D]`.
        measures: what the records of all passes should hold besides times and errors.
    """

    forward: Callable[[], Any]
    leaves: Sequence[Tensor]
    grad_out: Tensor
    as_THD: Callable[[Tensor], Tensor] = lambda x: x
    measures: Mapping[str, Any] = field(default_factory=dict)

    def backward(self, out: Any) -> tuple[Tensor, ...]:
        """Gradients of the leaves; the graph behind `out` stays."""
        return torch.autograd.grad(out, self.leaves, self.grad_out, retain_graph=True)

    def results(self, out: Any, gradients: Sequence[Tensor]) -> Results:
        """Output, and gradients if there are any, of the packed row."""
        found = [self.as_THD(x.detach()) for x in (out, *gradients)]
        return Results(found[0], None, *found[1:])


@dataclass(frozen=True)
class Serial(Prepared):
    """One call for each document, one after another; `forward` returns all outputs."""

    documents: Sequence[Prepared] = ()
    fold: Callable[[Results], Results] = lambda found: found

    def backward(self, out: Any) -> tuple[Tensor, ...]:
        pairs = zip(self.documents, out, strict=True)
        return tuple(gradient for one, own in pairs for gradient in one.backward(own))

    def results(self, out: Any, gradients: Sequence[Tensor]) -> Results:
        each = len(gradients) // len(self.documents)
        found = [
            one.results(own, gradients[each * i : each * (i + 1)])
            for i, (one, own) in enumerate(zip(self.documents, out, strict=True))
        ]
        return self.fold(Results.joined(found))


@dataclass(frozen=True)
class Switched(Prepared):
    """Its backward runs under torch's switch, without the filling of memory that comes with it."""

    def backward(self, out: Any) -> tuple[Tensor, ...]:
        switch: Any = torch.utils.deterministic
        torch.use_deterministic_algorithms(True)
        switch.fill_uninitialized_memory = False
        try:
            return super().backward(out)
        finally:
            torch.use_deterministic_algorithms(False)
            switch.fill_uninitialized_memory = True


Prepare = Callable[[Inputs, bool], Prepared]
"""Takes the inputs, and whether a backward follows. Raises `Unsupported` with the reason."""


def switched(prepare: Prepare, inputs: Inputs, needs_grad: bool) -> Prepared:
    """A call of torch's own kernels, with a deterministic backward."""
    return Switched(**vars(prepare(inputs, needs_grad)))


def serial(prepare: Prepare) -> Prepare:
    """A call for each document, one after another."""

    def prepare_all(inputs: Inputs, needs_grad: bool) -> Prepared:
        documents = [prepare(one, needs_grad) for one in inputs.documents()]
        return Serial(
            lambda: tuple(one.forward() for one in documents),
            [leaf for one in documents for leaf in one.leaves],
            inputs.grad_out,
            documents=documents,
            fold=inputs.folded,
        )

    return prepare_all
