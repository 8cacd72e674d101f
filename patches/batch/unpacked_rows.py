"""Check that each row holds at most one document, for forwards without a document mask.

Such a forward (decoding, prefill onto a cache, a 4D mask) uses
transformers' own sdpa, where documents of one row would see one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexvarlen.layout.arguments import whole_numbers
from flexvarlen.layout.boundaries import raise_or_assert
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.batch.given_documents import BOUNDARIES

OTHER_KEYS = "a cache that holds, or makes room for, other tokens, or a 4D attention_mask"
"""Describes a forward that is not packed, in error messages of layers."""


def one_document_per_row(layout: PackedLayout, batch: int) -> Tensor:
    """bool 0-dim: whether each row holds at most one document (padding does not count).

    On the host, if it knows. No sync; traces.
    """
    boundaries = layout.cu_seqlens
    if layout.cu_seqlens_host is not None and layout.padding is None:
        boundaries = layout.cu_seqlens_host
    starts, ends = boundaries[:-1], boundaries[1:]
    documents = starts < ends
    if layout.padding is not None:
        first_token = starts.clamp(max=layout.total_tokens - 1).long()
        documents = documents & ~layout.padding[first_token]
    if batch == 1:
        return documents.sum() <= 1
    row = starts // max(layout.total_tokens // batch, 1)
    rows = torch.arange(batch, device=boundaries.device)[:, None]
    return ((documents & (row == rows)).sum(dim=-1) <= 1).all()


def check_one_document(
    row_tokens: int,
    *,
    position_ids: Tensor | None,
    attention_mask: Any,
    with_what: str,
    seen: int | Tensor | None = None,
    boundaries: Mapping[str, Any] | None = None,
) -> None:
    """Refuse rows of several documents in a forward without a document mask.

    Args:
        row_tokens: S, the new tokens of a row.
        position_ids: integer `[B, S]` or `[1, S]`.
        attention_mask: as transformers lays it out: `[B, keys]`, one column for each token of the
            cache, then for each new one, then perhaps for the room left; or a bool `[B, H, S,
            keys]`, where nobody sees padding; or a dict of such by kind of layer. Anything else is
            taken to hide no token.
        with_what: why the forward is not packed, for the error message.
        seen: number of tokens in the cache; None if only a 4D mask shows it.
        boundaries: keyword arguments, among which none may describe documents.

    Raises:
        ValueError: boundaries; positions that do not increase by 1 between two tokens that are not
            padding, or that begin at 0 after cached tokens; padding between two such tokens; or a
            mask that holds document ids. Inside a compiled graph the device asserts this, but for
            boundaries.

    Reads the device once, if there is anything to look at.
    """
    if boundaries is not None and any(boundaries.get(name) is not None for name in BOUNDARIES):
        raise ValueError(
            f"a packed batch must not have {with_what}; pass use_cache=False and no cache, and no "
            "4D attention_mask."
        )
    masks = attention_mask.values() if isinstance(attention_mask, dict) else (attention_mask,)
    mask = next((x for x in masks if isinstance(x, Tensor)), None)
    if position_ids is not None:
        position_ids = whole_numbers("position_ids", position_ids)
    wrong = []
    if mask is not None and mask.ndim == 2 and mask.dtype != torch.bool:
        wrong.append(((mask != 0) & (mask != mask.amax(dim=-1, keepdim=True))).any())
    real = None if mask is None or row_tokens == 1 else _real_tokens(mask, row_tokens, seen)
    if real is not None:
        runs = real[:, 0] + (real[:, 1:] & ~real[:, :-1]).sum(dim=-1)
        wrong.append((runs > 1).any())
    if position_ids is not None and row_tokens > 1:
        jumps = position_ids.diff(dim=-1) != 1
        if real is not None:
            jumps = jumps & real[:, 1:] & real[:, :-1]
        wrong.append(jumps.any())
        wrong += _begins_anew(position_ids, mask, real, seen)
    if wrong:
        raise_or_assert(
            ~torch.stack(wrong).any(),
            f"a packed batch must not have {with_what}, got position_ids that do not increase by "
            "1 in a row or begin at 0 after cached tokens, or an attention_mask that holds "
            "document ids or padding between tokens; pass use_cache=False and no cache, and no 4D "
            "attention_mask.",
        )


def _begins_anew(
    position_ids: Tensor, mask: Tensor | None, real: Tensor | None, seen: int | Tensor | None
) -> list[Tensor]:
    """Whether a row's new tokens count from 0 though its cache holds some; empty if unknown."""
    if seen is None or (isinstance(seen, int) and seen == 0):
        return []
    if mask is not None and mask.ndim != 2:
        return []
    first = position_ids[:, 0]
    if real is not None:  # the first that is no padding; of a row without any, a padding one
        at = real.to(torch.uint8).argmax(dim=-1, keepdim=True)
        first = position_ids.expand(len(real), -1).gather(1, at)[:, 0]
    if mask is None:
        held = torch.as_tensor(seen, device=first.device) > 0
    else:
        columns = torch.arange(mask.shape[1], device=mask.device)
        held = ((mask != 0) & (columns < seen)).any(dim=-1)
        if real is not None:
            held = held & real.any(dim=-1)
    return [((first == 0) & held).any()]


def _real_tokens(mask: Tensor, row_tokens: int, seen: int | Tensor | None) -> Tensor | None:
    """bool `[B, S]`: False at padding among the new tokens; None if the mask does not tell."""
    tokens = torch.arange(row_tokens, device=mask.device)
    if mask.ndim == 2:
        # What lies past the end of a short mask is no padding: transformers hides it as keys, but
        # as queries these tokens see all that is before them.
        filled_up = torch.nn.functional.pad(mask != 0, (0, 1), value=True)
        columns = tokens if seen is None else tokens + seen
        return filled_up.index_select(1, columns.clamp(max=mask.shape[1]))
    most = mask.shape[-1] - row_tokens  # first column of the new tokens, if no room is left
    if mask.ndim != 4 or mask.dtype != torch.bool or most < 0:
        return None
    sees_BSK = mask.any(dim=1)
    seen_BK = sees_BSK.any(dim=1)
    if seen is not None:
        first = seen.clamp(max=most) if isinstance(seen, Tensor) else min(seen, most)
        return seen_BK.index_select(1, tokens + first)
    # Under a causal mask a token sees no later column, and a real token sees its own column.
    last = mask.shape[-1] - 1 - sees_BSK.flip(-1).to(torch.uint8).argmax(dim=-1)
    last = torch.where(sees_BSK.any(dim=-1), last, -1)
    first = (last - torch.arange(last.shape[1], device=mask.device)).amax().clamp(0, most)
    real = seen_BK.index_select(1, tokens + first)
    if last.shape[1] < row_tokens:
        return real
    # Padding never sees further than the tokens before it, unless the mask is of another kind.
    further = last[:, 1:] > last.cummax(dim=-1).values[:, :-1]
    return real | torch.nn.functional.pad(further, (1, 0))


def why_not_whole_rows(cache: Any, attention_mask: Any, row_tokens: int) -> str | None:
    """Why the forward has keys other than its own tokens, or a 4D mask; None otherwise."""
    if attention_mask is not None and (
        not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2
    ):
        return "a 4D attention_mask"
    if cache is None:
        return None
    for layer in cache.layers:  # one that slides may have no room, others some, or only a state
        keys = layer.get_mask_sizes(row_tokens)[0] if hasattr(layer, "get_mask_sizes") else None
        state = any(getattr(layer, "has_previous_state", {}).values())
        if state or keys not in (None, row_tokens):
            return "a cache that holds, or makes room for, other tokens"
    return None
