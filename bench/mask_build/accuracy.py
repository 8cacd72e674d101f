"""Some documents of a packed row, each alone in fp64, and how far off an answer is on them.

The peer is the document alone in the answer's own dtype, in plain torch: matrix products in the
dtype, softmax in fp32. An answer is right within twice the peer's error in its output, three times
in its gradients.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim, L = tokens of one
document, G = H / Hkv.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flexvarlen.bench.model.accuracy import GRADIENT_FACTOR, OUTPUT_FACTOR, relative_error

SHORTEST_SAMPLE, LONGEST_SAMPLE = 16, 4096  # dense fp64 scores of 4 heads then take 512 MiB
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Answer:
    """Output `[T, H, D]` and, after a backward, the gradients of q, k and v; views are fine."""

    tensors: Sequence[Tensor]

    def named(self) -> dict[str, Tensor]:
        return dict(zip(NAMES, self.tensors, strict=False))


def sampled_spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """First token and token past the last of a document near the start, middle and end."""
    ends = list(accumulate(lengths))
    spans = [
        (end - length, end)
        for length, end in zip(lengths, ends, strict=True)
        if SHORTEST_SAMPLE <= length <= LONGEST_SAMPLE
    ]
    middle = min(range(len(spans)), key=lambda i: abs(spans[i][0] - ends[-1] // 2))
    return [spans[i] for i in sorted({0, middle, len(spans) - 1})]


def sampled_errors(
    answer: Answer, qkv: Sequence[Tensor], cotangent: Tensor, lengths: Sequence[int]
) -> dict[str, Any]:
    """`error_*` and `peer_error_*` of out, dq, dk, dv: ‖x − exact‖ / ‖exact‖, the worst sample's.

    Args:
        qkv: `[T, H, D]`, `[T, Hkv, D]` twice.
        cotangent: `[T, H, D]`, what the backward started from.
        lengths: tokens of each document; their sum is T.

    Also `samples`, how many documents and groups of heads were looked at. Syncs.
    """
    q, k, v = qkv
    group = q.shape[1] // k.shape[1]
    measures: dict[str, Any] = {"samples": 0}
    for start, end in sampled_spans(lengths):
        for head in sorted({0, k.shape[1] - 1}):  # of k and v
            heads, rows = slice(head * group, (head + 1) * group), slice(start, end)
            inputs = (q[rows, heads], k[rows, head : head + 1], v[rows, head : head + 1])
            gradient = cotangent[rows, heads]
            exact = alone(inputs, gradient, torch.float64, len(answer.tensors) > 1)
            peer = alone(inputs, gradient, q.dtype, len(answer.tensors) > 1)
            for name, found in answer.named().items():
                own = heads if name in ("out", "dq") else slice(head, head + 1)
                for key, value in (
                    (f"error_{name}", found[rows, own]),
                    (f"peer_error_{name}", peer[name]),
                ):
                    error = relative_error(value, exact[name])
                    before = measures.get(key, 0.0)
                    measures[key] = error if not error <= before else before  # keeps NaN
            measures["samples"] += 1
    return measures


def alone(
    inputs: Sequence[Tensor], cotangent: Tensor, dtype: torch.dtype, gradients: bool
) -> dict[str, Tensor]:
    """Causal attention of one document in `dtype`: q `[L, G, D]`, k and v `[L, 1, D]`."""
    leaves = [x.detach().to(dtype).requires_grad_(gradients) for x in inputs]
    q_GLD, k_GLD, v_GLD = (x.transpose(0, 1) for x in leaves)
    wide = torch.promote_types(dtype, torch.float32)
    scores = (q_GLD @ k_GLD.transpose(1, 2)).to(wide) * q_GLD.shape[2] ** -0.5
    future = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
    probabilities = scores.masked_fill(future, float("-inf")).softmax(-1)
    out = (probabilities.to(dtype) @ v_GLD).transpose(0, 1)
    found = torch.autograd.grad(out, leaves, cotangent.to(dtype)) if gradients else ()
    return dict(zip(NAMES, (out.detach(), *found), strict=False))


def why_wrong(measures: dict[str, Any], dtype: torch.dtype) -> str | None:
    """The sentence that says which error is too large, or None."""
    rounding = torch.finfo(dtype).eps / 2
    for name in NAMES:
        if f"error_{name}" not in measures:
            continue
        factor = OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR
        error, peer = measures[f"error_{name}"], measures[f"peer_error_{name}"]
        limit = factor * (peer + rounding)
        if not error <= limit:  # also when the error is NaN
            return (
                f"relative error of {name} is {error:.2g}, more than {limit:.2g} ({factor:g} x the "
                f"error of a document alone in {dtype}, and its rounding)"
            )
    return None


def disagreement(answer: Answer, other: Answer) -> dict[str, Any]:
    """`difference_*`: ‖x − y‖ / ‖y‖ over the whole row; `max_difference`: max |x − y| / max |y|."""
    measures: dict[str, Any] = {"max_difference": 0.0}
    for (name, mine), theirs in zip(answer.named().items(), other.tensors, strict=True):
        apart = mine.float() - theirs.float()
        measures[f"difference_{name}"] = float(apart.norm() / theirs.float().norm())
        largest = float(apart.abs().max() / theirs.abs().max())
        before = measures["max_difference"]
        measures["max_difference"] = largest if not largest <= before else before  # keeps NaN
    return measures


def why_apart(measures: dict[str, Any], dtype: torch.dtype) -> str | None:
    """The sentence that says where two answers differ by more than one of them may err, or None."""
    errors = {
        key.replace("difference_", "error_"): value
        for key, value in measures.items()
        if key.startswith("difference_")
    }
    peers = {key: value for key, value in measures.items() if key.startswith("peer_error_")}
    reason = why_wrong(errors | peers, dtype)
    return None if reason is None else f"another answer than under flexvarlen's mask: {reason}"
