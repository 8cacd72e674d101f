"""Attention over one long row on all ranks, by Ulysses, against one GPU: equal, and how fast.

Outputs and gradients of both are compared, on sampled documents, with each document alone in fp64.
Then forward, and forward with backward, are timed in turns: each rank attends to the whole row
alone, and then all attend to their shards.
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
from flexvarlen.bench.suites.model.geometries import log_normal_lengths
from flexvarlen.bench.suites.training.ranks import Measured, largest, seconds_of
from flexvarlen.parallel import ulysses_attention
from flexvarlen.reference.acceptance import Error, why_wrong
from flexvarlen.reference.attention import Results, attend_alone, sampled_spans

if TYPE_CHECKING:
    from flexvarlen.bench.suites.training.scaling_ranks import UlyssesCase

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
WARMUP_CALLS, REPEATS = 2, 10
SIGMA = 1.0


def measure_ulysses(case: UlyssesCase, device: torch.device) -> Measured:
    """Status, reason and measures, the same on every rank."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    lengths = log_normal_lengths(case.tokens, case.mean_doc, SIGMA, case.seed)
    layout = fv.PackedLayout.from_lengths(lengths, device=device)
    generator = torch.Generator(device).manual_seed(case.seed)
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
    whole = [
        torch.randn(
            (case.tokens, count, case.head_dim), generator=generator, device=device, dtype=dtype
        )
        for count in heads
    ]
    share = case.tokens // case.ranks
    own = [x[dist.get_rank() * share :][:share].contiguous() for x in whole]

    def alone(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        out = fv.packed_attention(q_THD, k_THD, v_THD, layout, backend=case.backend)
        assert isinstance(out, Tensor)
        return out

    def shared(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        return ulysses_attention(q_THD, k_THD, v_THD, layout, backend=case.backend)

    single = _results(alone, whole)
    parts = _results(shared, own).named()
    together = Results(**{name: _gathered(x) for name, x in parts.items()})
    measures, reason = compare(whole, lengths, single, together)
    measures |= {"documents": len(lengths), "longest_document": max(lengths)}
    agreed: list[Any] = [reason]
    dist.broadcast_object_list(agreed, src=0)
    if agreed[0] is not None:
        return "wrong", agreed[0], measures
    calls: dict[str, Callable[[], object]] = {}
    for name, call, inputs in (("single", alone, whole), ("ulysses", shared, own)):
        calls[f"{name}_forward_ms"] = partial(_forward, call, inputs)
        calls[f"{name}_ms"] = partial(_results, call, inputs)
    return "ok", None, measures | _times(calls, device)


def compare(
    inputs: Sequence[Tensor], lengths: Sequence[int], single: Results, together: Results
) -> tuple[dict[str, Any], str | None]:
    """Errors of both, and the sentence that says where the ranks' is too large, or None.

    Args:
        inputs: q, k, v and the output's gradient of the whole row.
    """
    measures: dict[str, Any] = {"max_difference": 0.0}
    reason = None
    spans = sampled_spans(lengths)
    references, baselines = (
        Results.joined([_document(inputs, span, dtype) for span in spans])
        for dtype in (torch.float64, inputs[0].dtype)
    )
    for name in ("out", "dq", "dk", "dv"):
        reference = references.named()[name]
        one, all_ = (x.named()[name] for x in (single, together))
        errors = [
            Error.between(torch.cat([x[slice(*span)] for span in spans]), reference)
            for x in (one, all_)
        ]
        baseline = Error.between(baselines.named()[name], reference)
        difference = Error.between(all_, one)
        measures |= {
            f"single_error_{name}": errors[0].relative,
            f"error_{name}": errors[1].relative,
        }
        measures["max_difference"] = max(
            measures["max_difference"], difference.max_abs / difference.max_size
        )
        gradient = name != "out"
        wrong = why_wrong(name, errors[1], baseline, inputs[0].dtype, gradient=gradient)
        reason = reason or wrong
    return measures, reason


def _document(inputs: Sequence[Tensor], span: tuple[int, int], dtype: torch.dtype) -> Results:
    q, k, v, grad_out = (x[slice(*span)] for x in inputs)
    return attend_alone(q, k, v, [len(q)], dtype=dtype, grad_out=grad_out)


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
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARMUP_CALLS + REPEATS):
        for name, call in calls.items():
            (took,) = largest([seconds_of(call, device) * 1e3], device)
            if turn >= WARMUP_CALLS:
                samples[name].append(took)
    return {name: statistics.median(found) for name, found in samples.items()}
