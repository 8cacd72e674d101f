"""Attention over one long row on all ranks, against one GPU: equal, and how fast.

The row is cut by documents, or by heads (Ulysses). Outputs and gradients are compared, on sampled
documents and heads, with each document alone in fp64; those of all heads with one GPU's. Then
forward, and forward with backward, are timed in turns: each rank attends to the whole row alone,
and then all attend to their shards.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import flexvarlen as fv
from flexvarlen.bench.suites.attention.inputs import Inputs
from flexvarlen.bench.suites.model.geometries import log_normal_lengths
from flexvarlen.bench.suites.training.ranks import Measured, first_reason, largest, seconds_of
from flexvarlen.parallel.documents import documents_attention
from flexvarlen.parallel.plan import plan_row
from flexvarlen.parallel.sharded_layout import sharded_layout
from flexvarlen.parallel.ulysses import ulysses_attention
from flexvarlen.reference.acceptance import Error
from flexvarlen.reference.acceptance import largest as largest_of
from flexvarlen.reference.attention import Results, samples

if TYPE_CHECKING:
    from flexvarlen.bench.suites.training.scaling_ranks import AttentionCase

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
WARMUP_CALLS, REPEATS = 2, 10
SIGMA = 1.0
MOST_DIFFERENT = 0.05
"""Of the largest number, over all heads; rounding to bfloat16 makes 0.005."""


def measure_attention(case: AttentionCase, method: str, device: torch.device) -> Measured:
    """Status, reason and measures, the same on every rank.

    Args:
        method: "documents" or "ulysses".
    """
    dtype: torch.dtype = getattr(torch, case.dtype)
    lengths = [case.tokens]
    if case.mean_doc < case.tokens:
        lengths = log_normal_lengths(case.tokens, case.mean_doc, SIGMA, case.seed)
    heads = case.num_heads, case.num_kv_heads
    row = Inputs.random(lengths, heads, case.head_dim, dtype, device, causal=True, seed=case.seed)
    layout, whole = row.layout(), (row.q, row.k, row.v, row.grad_out)
    order, of_shards = torch.arange(case.tokens, device=device), layout
    attention: Callable[..., Any] = ulysses_attention
    if method == "documents":
        plan, rank = plan_row(lengths, case.ranks, total_tokens=case.tokens), dist.get_rank()
        order, attention = torch.from_numpy(plan.order()).to(device), documents_attention
        of_shards = sharded_layout(plan, rank, device=device)
    here = order.view(case.ranks, -1)[dist.get_rank()]
    own = [x[here] for x in whole]

    def alone(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        out = fv.packed_attention(q_THD, k_THD, v_THD, layout, backend=case.backend)
        assert isinstance(out, Tensor)
        return out

    def shared(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        out = attention(q_THD, k_THD, v_THD, of_shards, backend=case.backend)
        assert isinstance(out, Tensor)
        return out

    single = _results(alone, whole)
    parts = _results(shared, own).named()
    together = Results(**{name: _gathered(x)[order.argsort()] for name, x in parts.items()})
    kv_head = dist.get_rank() * case.num_kv_heads // case.ranks
    errors, reason = compare(whole, lengths, single, together, kv_head)
    measures: dict[str, Any] = dict(zip(errors, largest([*errors.values()], device), strict=True))
    measures |= {"documents": len(lengths), "longest_document": max(lengths)}
    reason = first_reason(reason)
    if reason is not None:
        return "wrong", reason, measures
    calls: dict[str, Callable[[], object]] = {}
    for name, call, inputs in (("single", alone, whole), (method, shared, own)):
        calls[f"{name}_forward_ms"] = partial(_forward, call, inputs)
        calls[f"{name}_ms"] = partial(_results, call, inputs)
    return "ok", None, measures | _times(calls, device)


def compare(
    inputs: Sequence[Tensor],
    lengths: Sequence[int],
    single: Results,
    together: Results,
    kv_head: int,
) -> tuple[dict[str, float], str | None]:
    """The worst sample's errors of both, and the sentence that says where the ranks' is too large.

    Args:
        inputs: q, k, v and the output's gradient of the whole row.
        kv_head: that this rank compares, as fp64 takes minutes for all heads of a long document.
    """
    q, k, v, grad_out = inputs
    found = samples(q, k, v, lengths, grad_out=grad_out, kv_heads=[kv_head])
    reasons = (sample.why_wrong(together) for sample in found)
    reason = next((text for text in reasons if text is not None), None)
    measures: dict[str, float] = {}
    for prefix, results in (("single_error", single), ("error", together)):
        errors = [sample.errors(results) for sample in found]
        for name in results.named():
            measures[f"{prefix}_{name}"] = largest_of(x[name].relative for x in errors)
    differences = [Error.between(x, single.named()[name]) for name, x in together.named().items()]
    measures["max_difference"] = largest_of(x.max_abs / x.max_size for x in differences)
    if measures["max_difference"] > MOST_DIFFERENT:
        reason = reason or f"the ranks differ from one GPU by {measures['max_difference']:.2g}"
    return measures, reason


def _forward(attend: Attend, inputs: Sequence[Tensor]) -> None:
    with torch.no_grad():
        attend(*inputs[:3])


def _results(attend: Attend, inputs: Sequence[Tensor]) -> Results:
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attend(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, inputs[3])
    return Results(out.detach(), dq=dq, dk=dk, dv=dv)


def _gathered(x: Tensor) -> Tensor:
    """`[T/P, …]` -> `[T, …]`, of all ranks in order."""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def _times(calls: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Medians; each call begins on all ranks at once, and takes as long as on the slowest."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARMUP_CALLS + REPEATS):
        for name, call in calls.items():
            (took,) = largest([seconds_of(call, device) * 1e3], device)
            if turn >= WARMUP_CALLS:
                times[name].append(took)
    return {name: statistics.median(found) for name, found in times.items()}
