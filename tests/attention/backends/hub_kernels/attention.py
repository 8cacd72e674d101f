"""Attention over cu_seqlens in plain torch, for the kernels that tests lay out as repositories.

It imports torch alone, as it is copied into each repository. Tokens past the last boundary are left
NaN, as FlashAttention leaves them unwritten.
"""

import torch


@torch.no_grad()
def forward(q, k, v, cu_q, cu_k, scale, causal, left, right, softcap):
    """Output and LSE `[H, T]`."""
    out = torch.full_like(q, float("nan"))
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
    for rows, keys in documents(cu_q, cu_k):
        x, lse[:, rows] = attend(q[rows], k[keys], v[keys], scale, causal, left, right, softcap)
        out[rows] = x.to(q.dtype)
    return out, lse


@torch.no_grad()
def backward(grad, q, k, v, out, lse, cu_q, cu_k, scale, causal, left, right, softcap):
    """Gradients of q, k and v, from the output and the LSE as FlashAttention computes them."""
    grads = tuple(torch.full_like(x, float("nan")) for x in (q, k, v))
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    for rows, keys in documents(cu_q, cu_k):
        dout = grad[rows].float()
        wide_k, wide_v = (repeated(x[keys], q.shape[1]) for x in (k, v))
        scores = scores_of(q[rows], k[keys], scale, causal, left, right, softcap)
        p = (scores - lse[:, rows, None]).exp().nan_to_num()
        delta = (dout * out[rows].float()).sum(-1).T[..., None]
        ds = p * (torch.einsum("qhd,khd->hqk", dout, wide_v) - delta) * scale
        if softcap:
            ds = (ds * (1 - (scores / softcap) ** 2)).nan_to_num()
        dq = torch.einsum("hqk,khd->qhd", ds, wide_k)
        dk = torch.einsum("hqk,qhd->khd", ds, q[rows].float()).unflatten(1, groups).sum(2)
        dv = torch.einsum("hqk,qhd->khd", p, dout).unflatten(1, groups).sum(2)
        for x, part, at in zip(grads, (dq, dk, dv), (rows, keys, keys), strict=True):
            x[at] = part.to(x.dtype)
    return grads


def documents(cu_q, cu_k):
    """Slices of the queries and of the keys of each document."""
    spans = (zip(cu.tolist(), cu.tolist()[1:], strict=False) for cu in (cu_q, cu_k))
    for (a, b), (c, d) in zip(*spans, strict=True):
        yield slice(a, b), slice(c, d)


def repeated(x, heads):
    """K or V for each query head."""
    return x.float().repeat_interleave(heads // x.shape[1], 1)


def scores_of(q, k, scale, causal, left, right, softcap):
    """Scores `[H, T, Tk]`, -inf where a query does not see a key."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), repeated(k, q.shape[1])) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    last = torch.arange(len(q))[:, None] + len(k) - len(q)
    keys = torch.arange(len(k))
    right = 0 if causal else right
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    seen &= (keys <= last + right) if right >= 0 else seen
    seen &= (keys >= last - left) if left >= 0 else seen
    return scores.masked_fill(~seen, float("-inf"))


def attend(q, k, v, scale, causal, left, right, softcap):
    """Output and LSE of a document."""
    scores = scores_of(q, k, scale, causal, left, right, softcap)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp().nan_to_num()
    return torch.einsum("hqk,khd->qhd", p, repeated(v, q.shape[1])), lse
