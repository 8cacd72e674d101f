"""Attention of each document alone, from lengths alone: in fp64 the reference, else the baseline.

It uses none of flexvarlen's masks, layouts or kernels. Gradients are in closed form, so that a long
document can be computed in pieces of heads and queries.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim; for one document: L
its tokens, n some of its queries; G = some KV heads, R = the query heads that share one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from flexvarlen.reference.acceptance import Error, why_wrong

# Elements that are handled at once, of scores or logits: 256 MiB in fp64, and about five such.
PIECE_ELEMENTS = 2**25

GRADIENTS = ("dq", "dk", "dv")

# Tokens of a sampled document: fp64 work grows with the square, and a few tokens tell little.
SHORTEST_SAMPLE, LONGEST_SAMPLE = 16, 16_384


@dataclass(frozen=True)
class Results:
    """The results of an attention call; None for results that were not requested.

    Attributes:
        out: `[T, H, D]`.
        lse: `[H, T]`, natural logarithm.
        dq, dk, dv: shaped as q, k and v.
    """

    out: Tensor
    lse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """The available results by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: x for name, x in found.items() if x is not None}

    def part(self, tokens: slice, kv_heads: slice, heads: slice) -> Results:
        """Some tokens and heads; views."""

        def cut(name: str, x: Tensor) -> Tensor:
            if name == "lse":
                return x[heads, tokens]
            return x[tokens, heads if name in ("out", "dq") else kv_heads]

        return Results(**{name: cut(name, x) for name, x in self.named().items()})

    def documents(self, lengths: Sequence[int]) -> list[Results]:
        """The results of each document; views."""
        everything = slice(None)
        return [
            self.part(slice(start, end), everything, everything) for start, end in spans_of(lengths)
        ]

    @classmethod
    def joined(cls, results: Sequence[Results]) -> Results:
        """Results of documents, one after another."""
        each = [x.named() for x in results]
        return cls(
            **{
                name: torch.cat([x[name] for x in each], dim=1 if name == "lse" else 0)
                for name in each[0]
            }
        )


@dataclass(frozen=True)
class MaskRange:
    """Which keys of its document a query sees: keys from `least` to `most` tokens before it.

    None is no limit; keys after the query count as negative.

    >>> MaskRange.of(causal=True, window=4)
    MaskRange(least=0, most=3)
    """

    least: int | None
    most: int | None

    @classmethod
    def of(cls, *, causal: bool = True, window: int | None = None) -> MaskRange:
        """Make it from the arguments of `packed_attention`: a window keeps |q - k| < window."""
        reach = None if window is None else window - 1
        ahead = None if reach is None else -reach
        return cls(0 if causal else ahead, reach)

    @property
    def is_everything(self) -> bool:
        """Whether each query sees the whole document."""
        return self.least is None and self.most is None

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys are seen, bool `[n, L]`, for positions int `[n]` and `[L]`."""
        behind = queries[:, None] - keys
        seen = torch.ones_like(behind, dtype=torch.bool)
        if self.least is not None:
            seen &= behind >= self.least
        if self.most is not None:
            seen &= behind <= self.most
        return seen


def spans_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """First token, and the one past the last, of each document.

    >>> spans_of((3, 2))
    [(0, 3), (3, 5)]
    """
    return list(pairwise(accumulate(lengths, initial=0)))


def sampled_spans(
    lengths: Sequence[int], shortest: int = SHORTEST_SAMPLE, longest: int = LONGEST_SAMPLE
) -> list[tuple[int, int]]:
    """The spans of a few documents: near the start, middle and end, the longest, the shortest.

    Only documents of `shortest` to `longest` tokens; else the document nearest to that range.
    """
    every = [span for span in spans_of(lengths) if span[1] > span[0]]

    def size(span: tuple[int, int]) -> int:
        return span[1] - span[0]

    spans = [span for span in every if shortest <= size(span) <= longest]
    if not spans:
        return [min(every, key=lambda span: abs(math.log(size(span) / longest)))]
    middle = min(spans, key=lambda span: abs(span[0] - every[-1][1] // 2))
    return sorted({spans[0], middle, spans[-1], max(spans, key=size), min(spans, key=size)})


def attend_alone(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    lengths: Sequence[int],
    *,
    dtype: torch.dtype = torch.float64,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    grad_out: Tensor | None = None,
) -> Results:
    """Attention of each document to itself.

    In fp64 this is the reference. In a low precision it is the baseline: matmuls in the dtype,
    softmax in fp32, probabilities and the gradients of the scores in the dtype.

    Args:
        q_THD, k_THD, v_THD: `[T, H, D]` and `[T, Hkv, D]` twice; each piece is converted.
        lengths: tokens of each document; their sum is T.
        dtype: dtype of the arithmetic and the results; the LSE is at least fp32.
        causal, window: which keys of its document a query sees.
        scale: factor on the scores; None: D**-0.5.
        grad_out: `[T, H, D]`, the output's gradient; None: no gradients.
    """
    scale = q_THD.shape[2] ** -0.5 if scale is None else scale
    mask = MaskRange.of(causal=causal, window=window)
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.empty_like(q_THD, dtype=dtype)
    lse = q_THD.new_empty((q_THD.shape[1], q_THD.shape[0]), dtype=wide)
    inputs = [q_THD, k_THD, v_THD] + ([] if grad_out is None else [grad_out])
    grads = [torch.empty_like(x, dtype=dtype) for x in inputs[:3]] if len(inputs) > 3 else []
    kv_heads, repeats = k_THD.shape[1], q_THD.shape[1] // k_THD.shape[1]
    with torch.no_grad(), torch.autocast(q_THD.device.type, enabled=False):
        for start, end in spans_of(lengths):
            if start == end:
                continue
            for groups in _pieces_of_heads(kv_heads, repeats, end - start):
                piece = _Piece(
                    *(_heads_first(x[start:end], kv_heads, groups, dtype) for x in inputs)
                )
                found_out, found_lse, *found_grads = piece.attend(mask, scale)
                own = slice(groups.start * repeats, groups.stop * repeats)
                out[start:end, own] = found_out
                lse[own, start:end] = found_lse
                for grad, found, of in zip(grads, found_grads, (own, groups, groups), strict=False):
                    grad[start:end, of] = found
    return Results(out, lse, *grads)


def _pieces_of_heads(kv_heads: int, repeats: int, length: int) -> Iterator[slice]:
    """Runs of KV heads whose scores, for all queries, fit one piece; at least one head each."""
    step = max(1, PIECE_ELEMENTS // max(1, repeats * length * length))
    for first in range(0, kv_heads, step):
        yield slice(first, min(first + step, kv_heads))


def _heads_first(x_LHD: Tensor, kv_heads: int, groups: slice, dtype: torch.dtype) -> Tensor:
    x_LGRD: Tensor = x_LHD.unflatten(1, (kv_heads, -1))[:, groups]  # type: ignore[no-untyped-call]
    return x_LGRD.permute(1, 2, 0, 3).to(dtype).contiguous()


@dataclass(frozen=True)
class _Piece:
    """Some KV heads of one document: q and dout `[G, R, L, D]`, k and v `[G, 1, L, D]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None = None

    def attend(self, mask: MaskRange, scale: float) -> list[Tensor]:
        """Output `[L, GR, D]`, LSE `[GR, L]`; with gradients dq `[L, GR, D]`, dk, dv `[L, G, D]`.

        Sums over queries and heads of a group are kept at least in fp32.
        """
        groups, repeats, length, _ = self.q.shape
        step = max(1, PIECE_ELEMENTS // max(1, groups * repeats * length))
        wide = torch.promote_types(self.q.dtype, torch.float32)
        dk, dv = (torch.zeros_like(x, dtype=wide) for x in (self.k, self.v))
        parts = [
            self._queries(slice(first, min(first + step, length)), mask, scale, dk, dv)
            for first in range(0, length, step)
        ]
        out, lse, *dq = (torch.cat(found, 2) for found in zip(*parts, strict=True))
        tokens_first = [_tokens_first(x) for x in (out, *dq, *((dk, dv) if dq else ()))]
        return [tokens_first[0], lse.flatten(0, 1), *tokens_first[1:]]

    def _queries(
        self, rows: slice, mask: MaskRange, scale: float, dk: Tensor, dv: Tensor
    ) -> tuple[Tensor, ...]:
        """Output, LSE and dq of some queries; adds their contributions to dk and dv."""
        q, dtype = self.q[:, :, rows], self.q.dtype
        wide = torch.promote_types(dtype, torch.float32)
        scores = (q @ self.k.mT).to(wide) * scale
        if not mask.is_everything:
            positions = torch.arange(self.q.shape[2], device=q.device)
            scores.masked_fill_(~mask.seen(positions[rows], positions), float("-inf"))
        lse = scores.logsumexp(-1)
        exact = scores.sub_(lse[..., None]).exp_()
        rounded = exact.to(dtype)
        out = rounded @ self.v
        if self.dout is None:
            return out, lse
        dout = self.dout[:, :, rows]
        dv += (rounded.mT @ dout).sum(1, keepdim=True, dtype=wide)
        grad_scores = (dout @ self.v.mT).to(wide)
        grad_scores -= (exact * grad_scores).sum(-1, keepdim=True)
        grad_scores = grad_scores.mul_(exact).mul_(scale).to(dtype)
        dk += (grad_scores.mT @ q).sum(1, keepdim=True, dtype=wide)
        return out, lse, grad_scores @ self.k


def _tokens_first(x_GRLD: Tensor) -> Tensor:
    return x_GRLD.flatten(0, 1).transpose(0, 1)


@dataclass(frozen=True)
class Sample:
    """Some tokens and heads of a row, their reference, and the errors of the baseline."""

    tokens: slice
    kv_heads: slice
    heads: slice
    reference: Results
    baseline: dict[str, Error]

    def errors(self, found: Results) -> dict[str, Error]:
        """Errors of the results that both have, by name; `found` is for the whole row."""
        part = found.part(self.tokens, self.kv_heads, self.heads).named()
        reference = self.reference.named()
        return {name: Error.between(x, reference[name]) for name, x in part.items()}

    def why_wrong(self, found: Results) -> str | None:
        """A sentence on what is wrong with the whole row's results at this sample, or None."""
        tokens = f"tokens {self.tokens.start} to {self.tokens.stop - 1}"
        where = f"{tokens}, heads {self.heads.start} to {self.heads.stop - 1}"
        named = found.named()
        for name, error in self.errors(found).items():
            reason = why_wrong(
                f"{name} of {where}",
                error,
                self.baseline[name],
                named[name].dtype,
                gradient=name in GRADIENTS,
            )
            if reason is not None:
                return reason
        return None


def samples(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    lengths: Sequence[int],
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    grad_out: Tensor | None = None,
    spans: Sequence[tuple[int, int]] | None = None,
    kv_heads: Sequence[int] | None = None,
) -> list[Sample]:
    """The reference, and the baseline in the inputs' dtype, for a few documents and heads.

    Args:
        spans: first token, and the one past the last, of the documents; None: `sampled_spans`.
        kv_heads: with the query heads that share them; None: the first and the last.
    """
    repeats = q_THD.shape[1] // k_THD.shape[1]
    found = []
    for start, end in sampled_spans(lengths) if spans is None else spans:
        for head in sorted({0, k_THD.shape[1] - 1}) if kv_heads is None else kv_heads:
            tokens, own = slice(start, end), slice(head, head + 1)
            heads = slice(head * repeats, (head + 1) * repeats)
            reference, errors = with_baseline(
                q_THD[tokens, heads],
                k_THD[tokens, own],
                v_THD[tokens, own],
                [end - start],
                causal=causal,
                window=window,
                scale=scale,
                grad_out=None if grad_out is None else grad_out[tokens, heads],
            )
            found.append(Sample(tokens, own, heads, reference, errors))
    return found


def with_baseline(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, lengths: Sequence[int], **options: Any
) -> tuple[Results, dict[str, Error]]:
    """The reference, and the errors of the baseline in the inputs' dtype, by name.

    Args:
        options: of `attend_alone`.
    """
    reference, baseline = (
        attend_alone(q_THD, k_THD, v_THD, lengths, dtype=dtype, **options)
        for dtype in (torch.float64, q_THD.dtype)
    )
    expected = reference.named()
    errors = {name: Error.between(x, expected[name]) for name, x in baseline.named().items()}
    return reference, errors
