"""The oracle: attention of each document by itself, in fp64, from lengths alone.

It imports nothing of flexvarlen.

Shape legend: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim, L = tokens of
one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

Window = int | tuple[int, int] | None


@dataclass(frozen=True)
class Documents:
    """A packed row, as a list of lengths; what they leave of `total_tokens` is padding.

    Attributes:
        lengths: tokens of each document, or padding run, in order.
        total_tokens: T.
        padding: the indices of `lengths` that are padding runs.
    """

    lengths: tuple[int, ...]
    total_tokens: int
    padding: frozenset[int] = field(default_factory=frozenset)

    def spans(self) -> list[tuple[int, int]]:
        """First token and token past the last, of each document that is not padding."""
        spans, start = [], 0
        for i, length in enumerate(self.lengths):
            if i not in self.padding:
                spans.append((start, start + length))
            start += length
        return spans

    def starts(self) -> Tensor:
        """bool `[T]`: True where a document, or a padding run, begins."""
        flags = torch.zeros(self.total_tokens + 1, dtype=torch.bool)
        flags[0] = True
        start = 0
        for length in self.lengths:
            flags[start] = True
            start += length
        flags[start] = True  # padding after the last document
        return flags[:-1]

    def padded(self) -> Tensor:
        """bool `[T]`: True at padding."""
        flags = torch.ones(self.total_tokens, dtype=torch.bool)
        for start, end in self.spans():
            flags[start:end] = False
        return flags


def seen(
    length: int,
    keys: int | None = None,
    *,
    causal: bool = True,
    window: Window = None,
    chunk: int | None = None,
    prefix: int = 0,
    align: str = "bottom_right",
    device: torch.device | str = "cpu",
) -> Tensor:
    """bool `[L, Lk]`: the keys that each query of a document sees, by definition."""
    keys = length if keys is None else keys
    query = torch.arange(length, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    if align == "bottom_right":
        query = query + keys - length
    behind = query - key  # how far the key lies before the query
    mask = torch.ones(length, keys, dtype=torch.bool, device=device)
    if causal:
        mask &= (behind >= 0) | (key < prefix)
    if chunk is not None:
        mask &= query.div(chunk, rounding_mode="floor") == key // chunk
    if isinstance(window, int):
        mask &= behind.abs() < window
    elif window is not None:
        left, right = window
        if left >= 0:
            mask &= behind <= left
        if right >= 0:
            mask &= -behind <= right
    return mask


def _pairs(
    documents: Documents, keys: Documents | None, prefix: Sequence[int] | None
) -> list[tuple[int, tuple[int, int], tuple[int, int], int]]:
    """Number, span of queries, span of keys and prefix of each document that is no padding."""
    keys = documents if keys is None else keys
    prefixes = [0] * len(documents.lengths) if prefix is None else prefix
    dead = documents.padding | keys.padding
    spans, start, start_k = [], 0, 0
    for i, (n, n_k) in enumerate(zip(documents.lengths, keys.lengths, strict=True)):
        if i not in dead:
            spans.append((i, (start, start + n), (start_k, start_k + n_k), prefixes[i]))
        start, start_k = start + n, start_k + n_k
    return spans


def dense(
    documents: Documents,
    keys: Documents | None = None,
    *,
    prefix: Sequence[int] | None = None,
    **options: Any,
) -> Tensor:
    """bool `[T, Tk]`: the mask of the whole row, by brute force; `options` as in `seen`."""
    tokens_k = documents.total_tokens if keys is None else keys.total_tokens
    mask = torch.zeros(documents.total_tokens, tokens_k, dtype=torch.bool)
    for _, (start, end), (start_k, end_k), own in _pairs(documents, keys, prefix):
        mask[start:end, start_k:end_k] = seen(end - start, end_k - start_k, prefix=own, **options)
    return mask


def attend(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    documents: Documents,
    keys: Documents | None = None,
    *,
    prefix: Sequence[int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Output `[T, H, D]` and LSE `[H, T]`, a document at a time; differentiable.

    `keys` are the documents of k and v, if not the same; `options` as in `seen`. In fp64 the
    oracle. In a low precision the plain baseline: matrix products in the dtype, softmax in fp32,
    probabilities in the dtype.
    """
    heads, groups = q_THD.shape[1], k_THD.shape[1]
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    scale = q_THD.shape[2] ** -0.5 if scale is None else scale
    own_kv_head = torch.arange(heads, device=q_THD.device) // (heads // groups)
    outs, lses, done = [], [], 0

    def skip_to(token: int) -> None:
        outs.append(0 * q_THD[done:token])  # not plain zeros: padding alone has gradients too
        empty = q_THD.new_full((heads, token - done), float("-inf"), dtype=wide)
        lses.append(empty)

    for _, (start, end), (start_k, end_k), own in _pairs(documents, keys, prefix):
        if end_k == start_k:
            continue
        skip_to(start)
        done = end
        q_HLD = rearrange(q_THD[start:end], "l h d -> h l d")
        k_HLD, v_HLD = (
            rearrange(x[start_k:end_k, own_kv_head], "l h d -> h l d") for x in (k_THD, v_THD)
        )
        mask = seen(end - start, end_k - start_k, prefix=own, device=q_THD.device, **options)
        scores = (q_HLD @ rearrange(k_HLD, "h k d -> h d k")).to(wide) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        # A query that sees nothing: finite scores, and then probabilities of zero.
        sees = mask.any(-1)
        scores = scores.masked_fill(~mask & sees[:, None], float("-inf"))
        lse = scores.logsumexp(-1)
        lses.append(lse.masked_fill(~sees, float("-inf")))
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(wide)[:, None])
        probabilities = (scores - lse[..., None]).exp() * sees[:, None]
        outs.append(rearrange(probabilities.to(q_THD.dtype) @ v_HLD, "h l d -> l h d"))
    skip_to(documents.total_tokens)
    return torch.cat(outs), torch.cat(lses, dim=1)


def random_qkv(
    total_tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the output's gradient: standard normal, equal in every dtype and device."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(total_tokens, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    # Rounded to bfloat16 first, so that each dtype gets the very same values.
    made = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    q, k, v, grad = (x.to(device=device, dtype=dtype) for x in made)
    return q, k, v, grad


def differentiate(function, inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    """`function(*inputs)` and the gradients of its inputs under `grad`, on leaves of their own."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    grads = torch.autograd.grad(
        out, leaves, grad.to(out.dtype), allow_unused=True, materialize_grads=True
    )
    return out.detach(), list(grads)


FEW_ELEMENTS = 128  # too few for the largest error among them to say how accurate the baseline is


def assert_gradients_as_accurate(
    found: dict[str, Tensor], exact: dict[str, Tensor], baseline: dict[str, Tensor]
) -> None:
    """Each parameter's gradient is at most 3 times as far from the exact one as the baseline's.

    Parameters of few elements share the baseline's largest relative error among them.
    """
    assert found.keys() == exact.keys()
    few = [name for name, x in exact.items() if x.numel() <= FEW_ELEMENTS and x.any()]
    errors = (
        (baseline[name].double() - exact[name]).abs().max() / exact[name].abs().max()
        for name in few
    )
    worst = max((x.item() for x in errors), default=0.0)
    for name, gradient in found.items():
        least = worst * exact[name].abs().max().item() if name in few else 0.0
        assert_as_accurate(gradient, exact[name], baseline[name], 3, name, least_error=least)


def assert_as_accurate(
    out: Tensor,
    exact: Tensor,
    baseline: Tensor,
    factor: float,
    name: str = "out",
    *,
    least_error: float = 0.0,
) -> None:
    """`out` is at most `factor` times as far from `exact` as the baseline and one rounding.

    Args:
        least_error: of the baseline, where its own may be small by chance.
    """
    assert out.shape == exact.shape, f"{name}: shape {tuple(out.shape)}, not {tuple(exact.shape)}"
    assert out.dtype == baseline.dtype, f"{name}: {out.dtype}, not {baseline.dtype}"
    assert torch.isfinite(out).all(), f"{name}: {int((~torch.isfinite(out)).sum())} non-finite"
    if out.numel() == 0:
        return
    error = (out.double() - exact.double()).abs().max().item()
    baseline_error = max((baseline.double() - exact.double()).abs().max().item(), least_error)
    # Half a unit in the last place of the largest value: what rounding the exact answer costs. And
    # kernels sum in fp32: where the exact answer is 0 as a difference of sums of order one (the
    # gradient of q in a document of one token), a few of its units are left.
    rounding = torch.finfo(out.dtype).eps / 2 * exact.abs().max().item()
    rounding += 8 * torch.finfo(torch.float32).eps
    allowed = factor * (baseline_error + rounding)
    assert error <= allowed, (
        f"{name}: error {error:.3g} exceeds {factor} x (the baseline's {baseline_error:.3g} + "
        f"rounding {rounding:.3g})"
    )
