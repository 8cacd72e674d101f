"""Check a kernel's results against dense attention before "auto" may choose the kernel.

A kernel may silently return wrong results, for example if a FlashAttention-2 build lacks this
head_dim. It runs on random tensors, and its output, LSE and gradients are compared for a sample of
the queries. grad_output is zero for all other queries, so dense attention over the sample alone
gives all gradients.

Shape legend: S = sampled queries, T, Tk = tokens of the query and the key row, H = num_heads,
Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flexvarlen.attention.auto.candidate_call import (
    GRADIENTS,
    CandidateCall,
    RandomTensors,
    in_own_thread,
)
from flexvarlen.attention.backends.reference import dense_attention
from flexvarlen.attention.call import AttentionCall
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.mask.vectors import runs_of, tree_bounds

_MOST_SCORES = 2**25
"""Maximum H x S x Tk of the dense attention: 128 MiB in fp32."""

_MOST_QUERIES = 256

TOLERANCE = dict.fromkeys((torch.float16, torch.float32, torch.float64), 2**-7)
TOLERANCE[torch.bfloat16] = 2**-4
"""Maximum relative error, ‖result − reference‖ / ‖reference‖: eight times the machine epsilon of
the inputs; for fp32 and fp64 the epsilon of TF32, which matmuls on GPUs may use."""

_LEAST = 2**-7
"""Lower limit for ‖reference‖, relative to the norm of grad_output: dq and dk of queries that
attend to only one key are 0 up to rounding."""


class WrongResultError(Exception):
    """A kernel's result differs from that of `reference`."""


class Expected(NamedTuple):
    """The reference's results for a sample of queries.

    Attributes:
        queries: the sample, int64 `[S]`.
        grad_THD: the output's gradient, zero at all other queries.
        results: by name, output `[S, H, D]` and LSE `[H, S]` of the sample, and the full gradients.
    """

    queries: Tensor
    grad_THD: Tensor
    results: dict[str, Tensor]

    @classmethod
    def of(cls, call: AttentionCall, mask: DocumentMask, tensors: RandomTensors) -> Expected:
        """Compute the results by dense attention in fp32, or for wider inputs in fp64. Syncs."""
        lo, hi = mask.bounds()
        seeing = (lo < hi).nonzero()[:, 0]
        keys = mask.layout_k.total_tokens
        most = max(1, min(_MOST_QUERIES, _MOST_SCORES // (call.num_heads * keys), len(seeing)))
        evenly = torch.linspace(0, len(seeing) - 1, most, dtype=torch.float64).round().long()
        queries = seeing[evenly.to(lo.device)] if len(seeing) else seeing
        grad_THD = torch.zeros_like(tensors.grad_THD)
        grad_THD[queries] = tensors.grad_THD[queries]

        wide = torch.float32 if call.dtype.itemsize < 4 else _widest(call.device)
        q, k, v, *sinks = (
            x.detach().to(wide).requires_grad_(call.needs_grad)
            for x in (tensors.q_THD[queries], *tensors.inputs[1:])
        )
        tokens = torch.arange(keys, device=lo.device)
        seen = (lo[queries, None] <= tokens) & (tokens < hi[queries, None])
        if mask.spec.tree:
            seen &= tree_bounds(mask.inputs).sees(queries[:, None], tokens[None])
        sinks_H = sinks[0] if sinks else None
        out_SHD, lse_HS = dense_attention(q, k, v, sinks_H, seen, call)
        results = {"output": out_SHD.detach(), "LSE": lse_HS.detach()}
        if call.needs_grad:
            grads = torch.autograd.grad(out_SHD, (q, k, v, *sinks), grad_THD[queries].to(wide))
            results |= zip(GRADIENTS, grads, strict=False)
            results["dq"] = (
                results["dq"].new_zeros(tensors.q_THD.shape).index_copy_(0, queries, results["dq"])
            )
        return cls(queries, grad_THD, results)

    def check(self, candidate: CandidateCall) -> None:
        """Raise unless the candidate's results match the reference.

        Raises:
            WrongResultError: a result differs by more than `TOLERANCE`, or is not finite.
        """
        least = _LEAST * float(self.grad_THD.float().norm())
        for name, result in candidate.results(self.grad_THD).items():
            expected, found = self.results[name], result.detach()
            if name != "LSE" and not bool(found.isfinite().all()):
                raise WrongResultError(f"wrong results: its {name} has NaN or infinity")
            if name == "output":
                found = found[self.queries]
            elif name == "LSE":
                found = found[:, self.queries]
            error = float((found.to(expected.dtype) - expected).norm())
            size = max(float(expected.norm()), least)
            if not error <= TOLERANCE[candidate.call.dtype] * size:
                raise WrongResultError(
                    f"wrong results: its {name} is off by {error / size:.2g} times the reference's "
                    "norm"
                )


_HAVE_FLOAT64 = ("cuda", "cpu")
"""Types of devices: MPS has none, and not every XPU has."""


def _widest(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type in _HAVE_FLOAT64 else torch.float32


def compare_with_reference(
    name: str, call: AttentionCall, mask: DocumentMask | None = None
) -> None:
    """Compare a backend's results with the reference.

    Args:
        name: name of the backend.
        call: the kind of call.
        mask: the documents; None: a small row, which is cheap, but does not show errors that only
            long rows have, and for which a backend that uses Dynamo would compile once more.

    Raises:
        WrongResultError: the results differ; or, for a deterministic call, their bits differ from
            run to run; or, for a batch-invariant call, from row to row.
    """

    def work() -> None:
        documents = _small_mask(call) if mask is None else mask
        tensors = RandomTensors.of(call, documents)
        expected = Expected.of(call, documents, tensors)
        candidate = CandidateCall(name, call, documents, tensors)
        expected.check(candidate)
        if call.deterministic:
            first, second = (candidate.results(tensors.grad_THD) for _ in range(2))
            _check_bits(first, second, "is not deterministic: two runs differ")
        if call.batch_invariant and mask is None:
            _check_invariance(candidate)

    in_own_thread(call.device, work, needs_grad=call.needs_grad)


def _check_bits(found: dict[str, Tensor], expected: dict[str, Tensor], problem: str) -> None:
    for name, result in found.items():
        if not torch.equal(result, expected[name]):
            raise WrongResultError(f"its {name} {problem} in bits")


def _check_invariance(candidate: CandidateCall) -> None:
    """Raise WrongResultError unless the documents in reverse order get the same bits."""
    call, mask, tensors = candidate.call, candidate.mask, candidate.tensors
    order_q, order_k = (_reversed(layout) for layout in (mask.layout, mask.layout_k))
    orders = (order_q, order_k, order_k)
    q, k, v = (
        x.detach()[order].requires_grad_(call.needs_grad)
        for x, order in zip(tensors[:3], orders, strict=True)
    )
    other = RandomTensors(q, k, v, tensors.sinks_H, tensors.grad_THD[order_q])
    again = CandidateCall(candidate.backend.name, call, _small_mask(call, reverse=True), other)
    found, expected = again.results(other.grad_THD), candidate.results(tensors.grad_THD)
    expected.pop("dsinks", None)  # a sum over all documents
    found.pop("dsinks", None)
    for name, order in (("output", order_q), *zip(GRADIENTS, orders, strict=False)):
        if name in expected:
            expected[name] = expected[name][order]
    if "LSE" in expected:
        expected["LSE"] = expected["LSE"][:, order_q]
    _check_bits(found, expected, "is not batch invariant: in another row it differs")


def _reversed(layout: PackedLayout) -> Tensor:
    """The tokens of the layout with its documents in reverse order, int64 `[T]`."""
    tokens = torch.arange(layout.total_tokens, device=layout.device)
    return torch.cat(layout.split(tokens)[::-1])


class CannotCheckError(Exception):
    """There is not enough memory to check a kernel, which is no reason to reject it."""


def failure(check: Callable[[], None]) -> str | None:
    """Run a check of a kernel. Return why the kernel failed, or None if it is right.

    Raises:
        CannotCheckError: there is not enough memory.
    """
    try:
        check()
    except torch.OutOfMemoryError as error:
        raise CannotCheckError from error
    except WrongResultError as error:
        return str(error)
    # A third-party kernel may raise anything: report it, and choose another kernel.
    except Exception as error:
        line = str(error).strip().partition("\n")[0]  # compiler errors can be very long
        return f"{type(error).__name__}: {line[:300]}" if line else type(error).__name__
    return None


def _small_mask(call: AttentionCall, *, reverse: bool = False) -> DocumentMask:
    """Build a mask of three documents of up to 300 tokens, one of them with a single token.

    For trees, the first document has two branches. `reverse`: the documents in reverse order.
    """
    if call.spec.tree:
        lengths, parents = [100, 20, 30, 1, 300], [-1, 0, 0, -1, -1]
        row = PackedLayout.from_tree(lengths, parents, device=call.device)
        if not call.spec.cross:
            return DocumentMask(row, call.spec)
        below = PackedLayout.from_lengths(lengths[1:], device=call.device)
        return DocumentMask(below, call.spec, layout_k=row)
    step = -1 if reverse else 1
    layout = PackedLayout.from_lengths([150, 1, 300][::step], device=call.device)
    cross, prefix = call.spec.cross, call.spec.prefix
    keys = [200, 5, 300][::step]
    layout_k = PackedLayout.from_lengths(keys, device=call.device) if cross else None
    prefixes = torch.full_like(layout.cu_seqlens[1:], 20) if prefix else None
    runs = None
    if call.spec.runs:  # every third group of 8 tokens
        marked = torch.arange(layout.total_tokens, device=call.device) // 8 % 3 == 1
        runs = runs_of(marked)
    return DocumentMask(layout, call.spec, layout_k=layout_k, prefix=prefixes, runs=runs)
