"""What prepares a call of one variant: `ours`, by the name of a backend, and `raw`, its kernel."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import flexvarlen as fv
from flexvarlen.attention.backends.registry import BACKENDS, get_backend, why_not
from flexvarlen.bench.attention.raw_kernels import (
    RAW,
    Inputs,
    Prepare,
    Prepared,
    Unsupported,
    behind_varlen,
)
from flexvarlen.mask.document_mask import DocumentMask

RAW_PREFIX = "raw:"  # of a variant: the kernel itself, not flexvarlen's backend


def ours(name: str, **options: Any) -> Prepare:
    """`packed_attention`, its plan made ahead, as a model shares it among its layers.

    Args:
        name: a backend, or "auto", which measures first if it has to.
        options: `deterministic`, `batch_invariant`, `softcap`, as in `packed_attention`.

    What it gives raises `Unsupported` with the backend's own sentence. Its measures say what shapes
    were made for (`capacity`, `max_seqlen_bound`), `plan_ms`, and of "auto" how long the first call
    took and what it takes (`auto_s`, `resolved`, `resolved_compiled`).
    """

    def prepare(inputs: Inputs, needs_grad: bool) -> Prepared:
        return _Ours(inputs, options).prepared(name, needs_grad)

    return prepare


def raw(name: str, *, deterministic: bool = False) -> Prepare:
    """The raw kernel of `RAW`; where asked for, with a deterministic backward.

    What it gives raises `Unsupported` where there is none, or where it takes no such argument.
    """

    def prepare(inputs: Inputs, needs_grad: bool) -> Prepared:
        if name not in RAW:
            raise Unsupported(f"no raw kernel is known for {name}")
        function = RAW[name]
        more: dict[str, Any] = {}
        if deterministic:
            if "deterministic" not in inspect.signature(function).parameters:
                raise Unsupported(f"the function of {RAW_PREFIX}{name} takes no `deterministic`")
            more = {"deterministic": True}
        prepared = function(inputs, needs_grad, **more)
        if name != "varlen":
            return prepared
        behind = behind_varlen(inputs.q.device, raw=True)
        return dataclasses.replace(prepared, measures={**prepared.measures, **behind})

    return prepare


def ways_of(variants: Sequence[str], known: Mapping[str, Prepare]) -> dict[str, Prepare]:
    """The ways of the named variants, in that order.

    Raises:
        ValueError: a name that the suite does not know.
    """
    for name in variants:
        if name not in known:
            names = ", ".join(known)
            raise ValueError(f"variants must be of {names}, got {name!r}; choose from these.")
    return {name: known[name] for name in variants}


class _Ours:
    """Calls of `packed_attention` on one set of inputs."""

    def __init__(self, inputs: Inputs, options: Mapping[str, Any]) -> None:
        self.inputs, self.options = inputs, dict(options)
        self.layout = fv.PackedLayout.from_lengths(inputs.lengths, device=inputs.q.device)
        self.mask = DocumentMask.of(self.layout, causal=inputs.causal)

    def prepared(self, name: str, needs_grad: bool) -> Prepared:
        measures: dict[str, Any] = {
            "capacity": self.layout.capacity,
            "max_seqlen_bound": self.layout.max_seqlen_bound,
        }
        if name == "varlen":
            measures |= behind_varlen(self.inputs.q.device, raw=False)
        if name != "auto":
            refusal = self.refusal(name, needs_grad=needs_grad)
            if refusal is not None:
                raise Unsupported(refusal)
        leaves = self.inputs.leaves(needs_grad)
        resolved = name
        if name == "auto":
            measures["auto_s"] = self.seconds(lambda: self.packed("auto", leaves, None))
            resolved = self.chosen_by_auto(leaves)
            kind = {**self.kind_of_call(), **self.options, "needs_grad": needs_grad}
            explained = fv.explain(self.layout, measure=False, **kind)
            measures |= {"resolved": resolved, "resolved_compiled": explained.compiled}
            if explained.layer is not None:
                measures["layer_ms"] = list(explained.layer)
        backend = get_backend(resolved)
        invariant = bool(self.options.get("batch_invariant"))
        plan = backend.plan(self.mask, batch_invariant=invariant)
        if plan is not None:
            again = self.seconds(lambda: backend.plan(self.mask, batch_invariant=invariant))
            measures["plan_ms"] = 1e3 * again
        return Prepared(
            lambda: self.packed(name, leaves, plan),
            leaves,
            self.inputs.cotangent,
            deterministic=bool(self.options.get("deterministic")),
            measures=measures,
        )

    def refusal(self, name: str, *, needs_grad: bool) -> str | None:
        if name not in BACKENDS:
            return f"flexvarlen has no backend {name}"
        kind = self.kind_of_call() | self.options
        return why_not(name, device=self.inputs.q.device, needs_grad=needs_grad, **kind)

    def kind_of_call(self) -> dict[str, Any]:
        """The call as `why_not` and `explain` take it."""
        _, heads, head_dim = self.inputs.q.shape
        return {
            "num_heads": heads,
            "num_kv_heads": self.inputs.k.shape[1],
            "head_dim": head_dim,
            "dtype": self.inputs.q.dtype,
            "causal": self.inputs.causal,
        }

    def packed(self, backend: str, leaves: list[Tensor], plan: Any) -> Tensor:
        q, k, v = leaves
        out = fv.packed_attention(
            q,
            k,
            v,
            self.layout,
            causal=self.inputs.causal,
            backend=backend,
            plan=plan,
            **self.options,
        )
        assert isinstance(out, Tensor)
        return out

    def chosen_by_auto(self, leaves: list[Tensor]) -> str:
        """Which backend really ran, seen from below: the first whose `attend` is called."""
        called: list[str] = []
        with contextlib.ExitStack() as stack:
            for cls in {type(get_backend(name)) for name in BACKENDS}:
                stack.enter_context(mock.patch.object(cls, "attend", _noting(cls.attend, called)))
            self.packed("auto", leaves, None)
        return called[0]

    def seconds(self, call: Callable[[], object]) -> float:
        """Wall seconds of one call, to the end of its device work."""
        synchronize(self.inputs.q.device)
        begin = time.perf_counter()
        call()
        synchronize(self.inputs.q.device)
        return time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; nothing elsewhere."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _noting(attend: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(self.name)
        return attend(self, *args, **kwargs)

    return noted
