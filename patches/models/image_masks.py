"""Masks that transformers adds to a causal one, in models that only name their attn_implementation.

Gemma's attention is bidirectional inside an image. That mask does not follow from documents and
causality alone, and transformers' own mask would join images across documents.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import and_masks, causal_mask_function, or_masks

from flexvarlen.layout.boundaries import raise_or_assert

_UNION = or_masks(causal_mask_function).__code__
_INTERSECTION = and_masks(causal_mask_function).__code__


def has_overlay(mask_function: Any) -> bool:
    """Whether a mask function of transformers adds something to its causal mask.

    The union of both may lie inside an intersection with the documents, which transformers finds
    in position_ids. A graph that is compiled cannot look inside: see `assert_causal`.
    """
    code = getattr(mask_function, "__code__", None)
    if code is _INTERSECTION and not torch.compiler.is_compiling():
        return any(map(has_overlay, mask_function.__closure__[0].cell_contents))
    return code is _UNION


def assert_causal(mask_function: Any, batch: int, row_tokens: int, device: Any) -> None:
    """Let the device assert, in a compiled graph, that no token sees the next one."""
    if getattr(mask_function, "__code__", None) is _INTERSECTION:
        rows = torch.arange(batch, device=device)[:, None]
        tokens = torch.arange(1, row_tokens, device=device)
        sees_next = mask_function(rows, torch.zeros_like(rows), tokens - 1, tokens)
        raise_or_assert(
            ~sees_next.any(),
            "images and prefixes whose tokens see later ones must not be in a compiled model that "
            "only names its attn_implementation; run it eagerly, or use the model's own attention.",
        )
