"""One backend on one case: its results in one call, in one call per document, and compiled.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

import flexvarlen as fv
from flexvarlen.reference.attention import Results
from flexvarlen.runner.failures import Unsupported
from flexvarlen.verify.drift.op.cases import Inputs, OpCase

_COMPILED = count()


@dataclass(frozen=True)
class BackendCalls:
    """A backend on a case.

    Attributes:
        backend, case: which.
        returns_lse: whether results have the LSE.
        train: whether they have gradients; not where the backend has no backward.
    """

    backend: str
    case: OpCase
    returns_lse: bool
    train: bool

    @classmethod
    def of(cls, backend: str, case: OpCase, inputs: Inputs, *, train: bool) -> BackendCalls:
        """Ask the backend what it can do; raises `Unsupported` if it cannot serve the case."""

        def why_not(**asked: Any) -> str | None:
            return fv.why_not(
                backend,
                device=inputs.q.device,
                dtype=inputs.q.dtype,
                num_heads=case.num_heads,
                num_kv_heads=case.num_kv_heads,
                head_dim=case.head_dim,
                causal=case.causal,
                window=case.window,
                **asked,
            )

        refusal = why_not(needs_grad=False)
        if refusal is not None:
            raise Unsupported(refusal)
        trains = train and why_not(needs_grad=True) is None
        returns_lse = why_not(needs_grad=trains, return_lse=True) is None
        return cls(backend, case, returns_lse, trains)

    def together(self, inputs: Inputs) -> Results:
        """All documents in one call."""
        return self._results(self._attend(inputs), inputs)

    def alone(self, inputs: Inputs) -> Results:
        """One call per document."""
        return Results.joined([self.together(document) for document in inputs.each_document()])

    def compiled(self, inputs: Inputs) -> Results:
        """All documents in one call, under torch.compile(fullgraph=True)."""
        attend = self._attend(inputs)
        # Dynamo keeps and counts graphs by a function's code: each call gets a code of its own, so
        # that none is served another backend's graph, and no limit is met.
        code = attend.__code__.replace(co_name=f"attend_{next(_COMPILED)}")
        own = types.FunctionType(code, attend.__globals__, closure=attend.__closure__)
        return self._results(torch.compile(own, fullgraph=True, dynamic=False), inputs)

    def _attend(self, inputs: Inputs) -> types.FunctionType:
        layout = fv.PackedLayout.from_lengths(inputs.lengths, device=inputs.q.device)
        case = self.case

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return fv.packed_attention(
                q,
                k,
                v,
                layout,
                causal=case.causal,
                window=case.window,
                backend=self.backend,
                return_lse=self.returns_lse,
            )

        assert isinstance(attend, types.FunctionType)
        return attend

    def _results(self, attend: Callable[..., Any], inputs: Inputs) -> Results:
        leaves = [x.detach().requires_grad_(self.train) for x in (inputs.q, inputs.k, inputs.v)]
        with torch.set_grad_enabled(self.train):
            result = attend(*leaves)
        out, lse = result if isinstance(result, tuple) else (result, None)
        grads = torch.autograd.grad(out, leaves, inputs.dout) if self.train else ()
        return Results(out.detach(), None if lse is None else lse.detach(), *grads)
