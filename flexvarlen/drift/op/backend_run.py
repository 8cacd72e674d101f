"""One backend on one case: its answers in batch, alone, elsewhere and compiled; its calls to time.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor

import flexvarlen as fv
from flexvarlen.attention.backends.registry import get_backend
from flexvarlen.drift.op.cases import Inputs, OpCase, other_order, spans_of
from flexvarlen.drift.op.exact import Answer
from flexvarlen.mask.document_mask import DocumentMask

Attend = Callable[..., Any]

_COMPILED = count()


@dataclass(frozen=True)
class Abilities:
    """What a backend can do of a case.

    Attributes:
        refusal: why it can do nothing, or None.
        lse: whether it returns the LSE.
        no_backward: why it has no backward, or None.
    """

    refusal: str | None
    lse: bool
    no_backward: str | None

    @classmethod
    def of(cls, backend: str, case: OpCase, dtype: torch.dtype, device: torch.device) -> Abilities:
        """Ask the backend."""

        def why_not(**asked: Any) -> str | None:
            return fv.why_not(
                backend,
                device=device,
                dtype=dtype,
                num_heads=case.num_heads,
                num_kv_heads=case.num_kv_heads,
                head_dim=case.head_dim,
                causal=case.causal,
                window=case.window,
                **asked,
            )

        refusal, no_backward = why_not(needs_grad=False), why_not(needs_grad=True)
        lse = why_not(needs_grad=no_backward is None, return_lse=True) is None
        return cls(refusal, lse, no_backward)


class BackendRun:
    """A backend on the inputs of a case."""

    def __init__(
        self, backend: str, case: OpCase, inputs: Inputs, *, lse: bool, train: bool, seed: int
    ) -> None:
        """`lse`, `train`: whether answers have the LSE, and gradients."""
        self.backend, self.case, self.inputs = backend, case, inputs
        self.lse, self.train, self.seed = lse, train, seed

    @cached_property
    def batch(self) -> Answer:
        """All documents in one call."""
        return self.answer(self.inputs)

    @cached_property
    def serial(self) -> Answer:
        """One call a document."""
        each = [self.inputs.documents([d]) for d in range(len(self.inputs.lengths))]
        return Answer.joined([self.answer(inputs) for inputs in each])

    def drop(self, *answers: str) -> None:
        """Free the answers "batch" or "serial"; they are run again when they are asked for."""
        for name in answers:
            self.__dict__.pop(name, None)

    def pairs_of_places(self) -> list[tuple[Answer, Answer]]:
        """Each document of the batch, first in another order of the documents, then as it was."""
        order = other_order(self.inputs.lengths, self.seed)
        moved = self.inputs.documents(order)
        found = self.answer(moved).documents(moved.lengths)
        usual = self.batch.documents(self.inputs.lengths)
        # A document that comes twice is looked at where it comes last.
        places = {document: place for place, document in enumerate(order)}
        return [(found[places[document]], usual[document]) for document in sorted(places)]

    def compiled(self) -> Answer:
        """The batch under torch.compile(fullgraph=True)."""
        layout = self._layout(self.inputs)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return self._packed(q, k, v, layout, return_lse=self.lse)

        # Dynamo keeps and counts graphs by a function's code: a code of its own for each call here,
        # so that none is served another backend's graph, and no limit is met.
        code = attend.__code__.replace(co_name=f"attend_{next(_COMPILED)}")
        own = types.FunctionType(code, attend.__globals__, closure=attend.__closure__)
        return self._answer(torch.compile(own, fullgraph=True, dynamic=False), self.inputs)

    def answer(self, inputs: Inputs) -> Answer:
        """One call, and its backward."""
        layout = self._layout(inputs)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return self._packed(q, k, v, layout, return_lse=self.lse)

        return self._answer(attend, inputs)

    def calls(self) -> dict[str, Callable[[], object]]:
        """What is timed: forward, both passes, and the forward with one call a document.

        What a backend derives from the documents (`plan`) is made ahead: layers share it.
        """
        inputs = self.inputs
        whole = self._planned(inputs)
        each = [self._planned(inputs.documents([d])) for d in range(len(inputs.lengths))]

        def forward() -> None:
            with torch.no_grad():
                whole(inputs.q, inputs.k, inputs.v)

        def serial() -> None:
            with torch.no_grad():
                for attend, (start, end) in zip(each, spans_of(inputs.lengths), strict=True):
                    attend(*(x[start:end] for x in (inputs.q, inputs.k, inputs.v)))

        calls: dict[str, Callable[[], object]] = {"forward": forward, "serial": serial}
        if self.train:
            leaves = _leaves(inputs)

            def both() -> None:
                torch.autograd.grad(whole(*leaves), leaves, inputs.dout)

            calls["both"] = both
        return calls

    def _planned(self, inputs: Inputs) -> Attend:
        layout = self._layout(inputs)
        mask = DocumentMask.of(layout, causal=self.case.causal, window=self.case.window)
        plan = get_backend(self.backend).plan(mask)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return self._packed(q, k, v, layout, plan=plan)

        return attend

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, layout: fv.PackedLayout, **options: Any
    ) -> Any:
        case = self.case
        return fv.packed_attention(
            q,
            k,
            v,
            layout,
            causal=case.causal,
            window=case.window,
            backend=self.backend,
            **options,
        )

    def _layout(self, inputs: Inputs) -> fv.PackedLayout:
        return fv.PackedLayout.from_lengths(inputs.lengths, device=inputs.q.device)

    def _answer(self, attend: Attend, inputs: Inputs) -> Answer:
        if not self.train:
            with torch.no_grad():
                out, lse = _split(attend(inputs.q, inputs.k, inputs.v))
            return Answer(out, lse)
        leaves = _leaves(inputs)
        out, lse = _split(attend(*leaves))
        grads = torch.autograd.grad(out, leaves, inputs.dout)
        return Answer(out.detach(), None if lse is None else lse.detach(), *grads)


def _leaves(inputs: Inputs) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]


def _split(result: Any) -> tuple[Tensor, Tensor | None]:
    return result if isinstance(result, tuple) else (result, None)
