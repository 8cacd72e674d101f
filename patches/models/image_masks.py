"""Refuse images, video and sound in the models whose text alone is packed.

Gemma's attention is bidirectional inside an image. That mask does not follow from documents and
causality alone: the placeholder that a patched model passes would silently drop it, and
transformers' own mask would join images across documents. Text alone is plain causal. Mistral 3's
images are not verified.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import and_masks, causal_mask_function, or_masks

from flexvarlen.patches.batch.checks import raise_or_assert

_TEXT_ALONE = ("gemma3", "gemma4", "mistral3")
_IMAGES = (
    "token_type_ids",
    "mm_token_type_ids",
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "mm_encoder_outputs",  # `generate` passes {}
)


def refuse_images(config: Any, inputs: dict[str, Any]) -> None:
    """Refuse a forward with images, in a model whose text alone is packed.

    Args:
        config: of the whole model.
        inputs: the forward's keyword arguments.

    Raises:
        NotImplementedError: it has images, or token_type_ids that mark them.
    """
    if config.model_type not in _TEXT_ALONE:
        return
    for name in _IMAGES:
        given = inputs.get(name)
        if given is not None and (isinstance(given, Tensor) or any(given.values())):
            raise NotImplementedError(
                "token_type_ids, images, video and sound must be left out of the batches of a "
                "patched model whose text alone is packed (inside an image attention may be "
                f"bidirectional), got a {config.model_type} batch with {name}; leave them out "
                "where a batch has none, or call unpatch_model and use the model's own attention, "
                "one document per row."
            )


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
