"""Hypotheses computed in fp64, on some tokens alone.

These are the tokens that are furthest off, both ends of documents, and others at random.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim, n = tokens tried, h
= some heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flexvarlen.drift.op.cases import spans_of
from flexvarlen.drift.op.hypotheses import Hypothesis
from flexvarlen.drift.op.judge import Truth

_PIECE = 1 << 25  # scores at once, as in exact.py
_WORST, _ENDS, _RANDOM = 32, 16, 24


def tokens_to_try(truth: Truth, error_T: Tensor, seed: int = 0) -> Tensor:
    """int64 `[n]`, ascending: the tokens with the largest errors, ends of documents, others."""
    tokens = len(error_T)
    worst = error_T.nan_to_num(torch.inf).topk(min(_WORST, tokens)).indices.cpu()
    ends = [token for start, end in spans_of(truth.case.lengths) for token in (start, end - 1)]
    chance = torch.Generator().manual_seed(seed)
    others = torch.randint(tokens, (_RANDOM,), generator=chance, device="cpu")
    chosen = {*worst.tolist(), *ends[:_ENDS], *others.tolist()}
    return torch.tensor(sorted(chosen), device=error_T.device)


class Trial:
    """Some tokens of a case, on which hypotheses are tried: as queries, or as keys."""

    def __init__(self, truth: Truth, rows: Tensor) -> None:
        """`rows`: int64 `[n]`, the tokens."""
        self.truth, self.rows = truth, rows
        self.places = torch.arange(truth.case.total_tokens, device=rows.device)

    def outputs(self, hypothesis: Hypothesis) -> Tensor:
        """fp64 `[n, H, D]`, of the tokens as queries; 0 where one sees nothing."""
        unseen = ~self._seen(hypothesis, self.rows, self.places)
        parts = []
        for heads in self._pieces_of_heads():
            q, k, v = self._qkv(hypothesis, heads)
            scores = q[:, self.rows] @ k.mT * hypothesis.scale
            probabilities = scores.masked_fill_(unseen, float("-inf")).softmax(-1)
            parts.append(probabilities.nan_to_num_(0.0) @ v)
        return torch.cat(parts).transpose(0, 1)

    def gradient(self, name: str, hypothesis: Hypothesis) -> Tensor:
        """fp64 `[n, H, D]` or `[n, Hkv, D]`: of a backward that differs so, its forward right.

        Args:
            name: dq, of the tokens as queries; or dk or dv, of the tokens as keys.
            hypothesis: how it differs.
        """
        queries, keys = (self.rows, self.places) if name == "dq" else (self.places, self.rows)
        seen = self._seen(hypothesis, queries, keys)
        exact, scale = self.truth.exact, hypothesis.scale
        assert exact.lse is not None
        parts = []
        for heads in self._pieces_of_heads():
            q, k, v = self._qkv(hypothesis, heads)
            q, k, v = q[:, queries], k[:, keys], v[:, keys]
            grad = self.truth.inputs.dout[queries, heads].transpose(0, 1).double()
            p = (q @ k.mT * scale - exact.lse[heads][:, queries, None]).exp_() * seen
            if name == "dv":
                parts.append(p.mT @ grad)
                continue
            out = exact.out[queries, heads].transpose(0, 1)
            slopes = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
            parts.append(slopes @ k if name == "dq" else slopes.mT @ q)
        found = torch.cat(parts).transpose(0, 1)
        if name == "dq":
            return found
        owners = hypothesis.k_heads if name == "dk" else hypothesis.v_heads
        kv_heads = self.truth.case.num_kv_heads
        sums = found.new_zeros((len(self.rows), kv_heads, found.shape[2]))
        return sums.index_add_(1, torch.tensor(owners, device=sums.device), found)

    def _pieces_of_heads(self) -> Iterator[slice]:
        num_heads = self.truth.case.num_heads
        step = max(1, _PIECE // (len(self.rows) * len(self.places)))
        for first in range(0, num_heads, step):
            yield slice(first, min(first + step, num_heads))

    def _qkv(self, hypothesis: Hypothesis, heads: slice) -> list[Tensor]:
        """fp64 `[h, T, D]`, K and V repeated as the hypothesis has it."""
        inputs = self.truth.inputs
        found = (
            inputs.q[:, heads],
            inputs.k[:, list(hypothesis.k_heads[heads])],
            inputs.v[:, list(hypothesis.v_heads[heads])],
        )
        return [x.transpose(0, 1).double() for x in found]

    def _seen(self, hypothesis: Hypothesis, queries: Tensor, keys: Tensor) -> Tensor:
        """bool `[queries, keys]`."""
        counts = torch.tensor(hypothesis.lengths, device=queries.device)
        document_T = torch.arange(len(counts), device=queries.device).repeat_interleave(counts)
        same = document_T[queries][:, None] == document_T[keys]
        return same & hypothesis.sight.seen(queries, keys)


_OCTAVES, _POINTS, _ROUNDS = 5.0, 9, 12


def best_scale(trial: Trial, found: Tensor, right: Hypothesis) -> Hypothesis:
    """The truth with the scale under which the outputs are nearest to `found`, `[n, H, D]`.

    Between 1/32 and 32 times the right one: a grid, then finer ones around its best point, down to
    about 1e-8 of an octave.
    """

    def error(octave: float) -> float:
        out = trial.outputs(replace(right, scale=right.scale * 2**octave))
        return float((out - found).square().mean())

    centre, reach = 0.0, _OCTAVES
    points = 4 * _POINTS + 1  # the first grid is fine enough to find the right valley
    for _ in range(_ROUNDS):
        step = 2 * reach / (points - 1)
        centre = min((centre - reach + i * step for i in range(points)), key=error)
        reach, points = step, _POINTS
    return replace(right, scale=right.scale * 2**centre)
