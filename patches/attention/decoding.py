"""Attention for forwards that are not packed: decoding, prefill onto a cache, or a 4D mask.

It uses transformers' sdpa and mask; softcap and sinks, which sdpa lacks, are computed in plain
torch.

Shapes: B rows of S queries and K keys; H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def attend_to_cache(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Attention of query `[B, H, S, D]` to key and value `[B, Hkv, K, D]`: `[B, S, H, D]`."""
    sinks: Tensor | None = kwargs.get("s_aux")
    if softcap is None and sinks is None:
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal
        )
        return out
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if attention_mask is None and is_causal and query.shape[2] > 1:
        shape = (query.shape[2], key.shape[2])
        attention_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    return _dense(query, key, value, attention_mask, scaling, softcap, sinks), None


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Return `[B, S, H, D]`; a bool mask keeps True positions, any other mask is added."""
    kv_heads = key.shape[1]
    q = rearrange(query, "b (g r) s d -> b g r s d", g=kv_heads)
    # Scale before the product, which may overflow in fp16.
    q = q * (query.shape[3] ** -0.5 if scaling is None else scaling)
    scores = rearrange(torch.einsum("bgrsd,bgkd->bgrsk", q, key), "b g r s k -> b (g r) s k")
    scores = scores.float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        mask = mask[..., : scores.shape[-1]]
        hidden = torch.finfo(torch.float32).min
        scores = scores.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores + mask
    if sinks_H is not None:
        sinks = repeat(sinks_H.float(), "h -> b h s 1", b=scores.shape[0], s=scores.shape[2])
        scores = torch.cat([scores, sinks], dim=-1)
    probabilities = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    p = rearrange(probabilities, "b (g r) s k -> b g r s k", g=kv_heads)
    return rearrange(torch.einsum("bgrsk,bgkd->bsgrd", p, value), "b s g r d -> b s (g r) d")
