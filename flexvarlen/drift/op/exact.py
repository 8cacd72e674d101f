"""Attention of each document alone, from lengths alone: in fp64 the truth, else the plain peer.

Nothing of flexvarlen's masks, layouts or kernels is used here. Gradients in closed form, so that a
long document is done in pieces of heads and queries.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim; of one document: L
its tokens, n some of its queries; G = some KV heads, R = the query heads that share one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from flexvarlen.drift.op.cases import Inputs, spans_of

# Elements of one matrix of scores: 256 MiB in fp64. A piece keeps about five such matrices.
_PIECE = 1 << 25

GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Answer:
    """What one way of attention gave; None where it has no such thing.

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

    def parts(self) -> dict[str, Tensor]:
        """What there is, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: x for name, x in named.items() if x is not None}

    def documents(self, lengths: tuple[int, ...]) -> list[Answer]:
        """The answer cut at documents of these lengths."""
        return [
            Answer(**{name: x[_rows(name, start, end)] for name, x in self.parts().items()})
            for start, end in spans_of(lengths)
        ]

    @classmethod
    def joined(cls, answers: list[Answer]) -> Answer:
        """Answers of documents, one after another."""
        names = answers[0].parts()
        return cls(
            **{
                name: torch.cat([x.parts()[name] for x in answers], dim=1 if name == "lse" else 0)
                for name in names
            }
        )


def _rows(name: str, start: int, end: int) -> tuple[slice, ...]:
    tokens = slice(start, end)
    return (slice(None), tokens) if name == "lse" else (tokens,)


@dataclass(frozen=True)
class Sight:
    """Which keys of its document a query sees: those from `least` to `most` tokens behind it.

    None is no limit; keys ahead are negative.

    >>> Sight.of(causal=True, window=4)
    Sight(least=0, most=3)
    """

    least: int | None
    most: int | None

    @classmethod
    def of(cls, *, causal: bool, window: int | None) -> Sight:
        """In the words of `packed_attention`: a window keeps |q - k| < window."""
        reach = None if window is None else window - 1
        ahead = None if reach is None else -reach
        return cls(0 if causal else ahead, reach)

    @property
    def is_everything(self) -> bool:
        """Whether each query sees the whole document."""
        return self.least is None and self.most is None

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool `[n, L]`, of positions int `[n]` and `[L]`."""
        behind = queries[:, None] - keys
        seen = torch.ones_like(behind, dtype=torch.bool)
        if self.least is not None:
            seen &= behind >= self.least
        if self.most is not None:
            seen &= behind <= self.most
        return seen


def keys_seen(lengths: Sequence[int], sight: Sight, device: torch.device) -> Tensor:
    """int64 `[T]`: how many keys each query sees, by definition."""
    parts = []
    for length in lengths:
        places = torch.arange(length, device=device)
        last = torch.full_like(places, length - 1)
        first_key = places * 0 if sight.most is None else (places - sight.most).clamp(min=0)
        last_key = last if sight.least is None else torch.minimum(places - sight.least, last)
        parts.append(last_key - first_key + 1)
    return torch.cat(parts)


def each_alone(
    inputs: Inputs, sight: Sight, scale: float, dtype: torch.dtype, *, gradients: bool
) -> Answer:
    """Attention of each document to itself.

    In fp64 the truth. In a low precision the plain peer: matrix products in the dtype, softmax in
    fp32, probabilities and the gradients of the scores in the dtype.

    Args:
        inputs: any dtype; each piece is converted.
        sight: which keys a query sees; at least its own.
        scale: factor on the scores.
        dtype: of the arithmetic and the answer; the LSE is at least fp32.
        gradients: whether dq, dk and dv are wanted.
    """
    wide = torch.promote_types(dtype, torch.float32)
    tokens, heads, _ = inputs.q.shape
    out = torch.empty_like(inputs.q, dtype=dtype)
    lse = inputs.q.new_empty((heads, tokens), dtype=wide)
    grads = [torch.empty_like(x, dtype=dtype) for x in (inputs.q, inputs.k, inputs.v)]
    for start, end in spans_of(inputs.lengths):
        for groups in _pieces_of_heads(inputs, end - start):
            piece = _Piece.of(inputs, slice(start, end), groups, dtype)
            found_out, found_lse, *found_grads = piece.attend(sight, scale, gradients)
            own = slice(groups.start * piece.repeats, groups.stop * piece.repeats)
            out[start:end, own] = found_out
            lse[own, start:end] = found_lse
            for grad, found, of in zip(grads, found_grads, (own, groups, groups), strict=False):
                grad[start:end, of] = found
    return Answer(out, lse, *(grads if gradients else ()))


def _pieces_of_heads(inputs: Inputs, length: int) -> Iterator[slice]:
    """Runs of KV heads whose scores, for all queries, fit one piece; at least one head each."""
    kv_heads = inputs.k.shape[1]
    repeats = inputs.q.shape[1] // kv_heads
    step = max(1, _PIECE // (repeats * length * length))
    for first in range(0, kv_heads, step):
        yield slice(first, min(first + step, kv_heads))


@dataclass(frozen=True)
class _Piece:
    """Some KV heads of one document: q and dout `[G, R, L, D]`, k and v `[G, 1, L, D]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def of(cls, inputs: Inputs, rows: slice, groups: slice, dtype: torch.dtype) -> _Piece:
        kv_heads = inputs.k.shape[1]

        def heads_first(x_LHD: Tensor) -> Tensor:
            grouped: Tensor = x_LHD.unflatten(1, (kv_heads, -1))[:, groups]  # type: ignore[no-untyped-call]
            return grouped.permute(1, 2, 0, 3).to(dtype).contiguous()

        found = (heads_first(x[rows]) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        return cls(*found)

    @property
    def repeats(self) -> int:
        return self.q.shape[1]

    def attend(self, sight: Sight, scale: float, gradients: bool) -> list[Tensor]:
        """Output `[L, GR, D]`, LSE `[GR, L]`; with gradients dq `[L, GR, D]`, dk, dv `[L, G, D]`.

        Sums over queries and heads of a group are kept at least in fp32.
        """
        groups, repeats, length, _ = self.q.shape
        step = max(1, _PIECE // (groups * repeats * length))
        parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
        wide = torch.promote_types(self.q.dtype, torch.float32)
        sums = [torch.zeros_like(x, dtype=wide) for x in (self.k, self.v)]
        for first in range(0, length, step):
            queries = slice(first, min(first + step, length))
            parts.append(self._queries(queries, sight, scale, sums if gradients else None))
        out, lse = torch.cat([x[0] for x in parts], 2), torch.cat([x[1] for x in parts], 2)
        found = [_tokens_first(out), lse.flatten(0, 1)]
        if gradients:
            dq = torch.cat([x[2] for x in parts if x[2] is not None], 2)
            found += [_tokens_first(dq), *(_tokens_first(x) for x in sums)]
        return found

    def _queries(
        self, rows: slice, sight: Sight, scale: float, sums: list[Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Output, LSE and dq of some queries; what they add to dk and dv is added to `sums`."""
        q, dtype = self.q[:, :, rows], self.q.dtype
        wide = torch.promote_types(dtype, torch.float32)
        scores = (q @ self.k.mT).to(wide) * scale
        if not sight.is_everything:
            places = torch.arange(self.q.shape[2], device=q.device)
            scores.masked_fill_(~sight.seen(places[rows], places), float("-inf"))
        lse = scores.logsumexp(-1)
        exact = scores.sub_(lse[..., None]).exp_()
        rounded = exact.to(dtype)
        out = rounded @ self.v
        if sums is None:
            return out, lse, None
        dout = self.dout[:, :, rows]
        sums[1] += (rounded.mT @ dout).sum(1, keepdim=True, dtype=wide)
        slopes = (dout @ self.v.mT).to(wide)
        slopes -= (exact * slopes).sum(-1, keepdim=True)
        slopes = slopes.mul_(exact).mul_(scale).to(dtype)
        sums[0] += (slopes.mT @ q).sum(1, keepdim=True, dtype=wide)
        return out, lse, slopes @ self.k


def _tokens_first(x_GRLD: Tensor) -> Tensor:
    return x_GRLD.flatten(0, 1).transpose(0, 1)
