"""Attention over one long row on all ranks, by Ulysses, against one GPU: equal, and how fast.

Outputs and gradients of both are held against sampled documents alone in fp64
(`flexvarlen.bench.attention.accuracy`): those of the ranks may be off by twice what one GPU's are
(and by rounding), no more. Then forward, and forward with backward, are timed in turns: each rank
attends to the whole row alone, and then all do to their shares.

Shapes: P ranks, T tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flexvarlen as fv
from flexvarlen.bench.attention.accuracy import Oracle
from flexvarlen.bench.attention.inputs import Inputs
from flexvarlen.bench.attention.kernels_cells import document_lengths
from flexvarlen.bench.mask_build.accuracy import NAMES, Answer, disagreement
from flexvarlen.bench.model.accuracy import OUTPUT_FACTOR
from flexvarlen.bench.model.step import synchronize
from flexvarlen.bench.model.utilisation import noting_auto
from flexvarlen.bench.training.ranks import largest
from flexvarlen.bench.training.resumable import Measured
from flexvarlen.parallel import ulysses_attention

WARMUP_CALLS = 2


@dataclass(frozen=True)
class UlyssesCase:
    """One row on so many ranks; documents are log-normal."""

    ranks: int
    tokens: int
    mean_doc: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    backend: str
    dtype: str
    seed: int

    def data(self) -> dict[str, Any]:
        """The case of a row."""
        return {"variant": "ulysses", **asdict(self)}


def measure_ulysses(case: UlyssesCase, device: torch.device, repeats: int) -> Measured:
    """Status, reason and measures, the same on every rank."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    lengths = document_lengths(case.tokens, "log-normal", case.mean_doc, case.seed)
    heads = (case.num_heads, case.num_kv_heads)
    inputs = Inputs.random(lengths, heads, case.head_dim, dtype, device, True, case.seed)
    layout = fv.PackedLayout.from_lengths(lengths, device=device)
    whole = (inputs.q, inputs.k, inputs.v)
    share = case.tokens // case.ranks
    here = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = fv.packed_attention(q, k, v, layout, backend=case.backend)
        assert isinstance(out, Tensor)
        return out

    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ulysses_attention(q, k, v, layout, backend=case.backend)

    own = [x[here].contiguous() for x in whole]
    with noting_auto() as attends:
        one = _answer(alone, whole, inputs.cotangent)
        all_ = [_gathered(x) for x in _answer(shared, own, inputs.cotangent[here])]
    measures, reason = _judged(inputs, Answer(one), Answer(all_))
    measures["attends"] = ", ".join(dict.fromkeys(attends)) or case.backend
    del one, all_
    if reason is not None:
        return "wrong", reason, measures
    calls: dict[str, Callable[[], object]] = {}
    for name, call, given, cotangent in (
        ("single", alone, whole, inputs.cotangent),
        ("ulysses", shared, own, inputs.cotangent[here]),
    ):
        calls[f"{name}_forward_ms"] = partial(_forward, call, given)
        calls[f"{name}_ms"] = partial(_answer, call, given, cotangent)
    measures |= _times(calls, device, repeats)
    measures |= {"documents": len(lengths), "longest_document": max(lengths)}
    return "ok", None, measures


def _forward(call: Callable[..., Tensor], qkv: Sequence[Tensor]) -> None:
    with torch.no_grad():
        call(*qkv)


def _answer(call: Callable[..., Tensor], qkv: Sequence[Tensor], cotangent: Tensor) -> list[Tensor]:
    """Output, and gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def _gathered(x: Tensor) -> Tensor:
    """`[T/P, …]` -> `[T, …]`, of all ranks in order."""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def _judged(inputs: Inputs, one: Answer, all_: Answer) -> tuple[dict[str, Any], str | None]:
    """Errors of both, and the sentence that says where the ranks' is too large; rank 0's."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        oracle = Oracle((inputs.q, inputs.k, inputs.v), inputs.cotangent, inputs.lengths, True)
        single, shared = oracle.errors(one), oracle.errors(all_)
        measures = disagreement(all_, one) | {"samples": shared["samples"]}
        reason = None
        rounding = torch.finfo(inputs.q.dtype).eps / 2
        for name in NAMES:
            error, own = shared[f"error_{name}"], single[f"error_{name}"]
            measures |= {f"error_{name}": error, f"single_error_{name}": own}
            limit = OUTPUT_FACTOR * (own + rounding)
            if not error <= limit and reason is None:  # also when it is NaN
                reason = (
                    f"relative error of {name} is {error:.2g}, more than {limit:.2g} "
                    f"({OUTPUT_FACTOR:g} x that of one GPU, and rounding)"
                )
        if not all(math.isfinite(x) for x in measures.values()):
            reason = reason or "the ranks' answer is not finite"
        found = [(measures, reason)]
    dist.broadcast_object_list(found, src=0)
    measures, reason = found[0]
    return measures, reason


def _times(
    calls: dict[str, Callable[[], object]], device: torch.device, repeats: int
) -> dict[str, float]:
    """Medians; each call begins on all ranks at once, and takes as long as on the slowest."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(WARMUP_CALLS + repeats):
        for name, call in calls.items():
            dist.barrier()
            synchronize(device)
            begin = time.perf_counter()
            call()
            synchronize(device)
            (took,) = largest([(time.perf_counter() - begin) * 1e3], device)
            if round_ >= WARMUP_CALLS:
                samples[name].append(took)
    return {name: statistics.median(found) for name, found in samples.items()}
