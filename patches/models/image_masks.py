"""Refuse images in models whose attention is bidirectional inside an image.

Their mask does not follow from documents and causality alone: the placeholder that a patched model
passes would silently drop it, and transformers' own mask would join images across documents.
So batches that ask for it are refused; text alone is plain causal in Gemma 3.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.masking_utils import causal_mask_function, or_masks

_IMAGE_BLOCKS = ("gemma3",)  # tokens of an image see all of it; text is causal
_IMAGES = ("token_type_ids", "pixel_values", "mm_encoder_outputs")  # `generate` passes {} as last


def refuse_image_blocks(config: Any, inputs: dict[str, Any]) -> None:
    """Refuse a forward with images, in a model with bidirectional attention inside images.

    Args:
        config: of the whole model.
        inputs: the forward's keyword arguments.

    Raises:
        NotImplementedError: it has images, or token_type_ids that mark them.
    """
    if config.model_type not in _IMAGE_BLOCKS:
        return
    for name in _IMAGES:
        given = inputs.get(name)
        if given is not None and (isinstance(given, Tensor) or any(given.values())):
            raise NotImplementedError(
                "token_type_ids and images need their own mask (bidirectional attention inside "
                f"an image), which is not supported, got a {config.model_type} batch with {name}; "
                "leave them out where a batch has no image, or call unpatch_model and use the "
                "model's own attention, one document per row."
            )


_OVERLAY = or_masks(causal_mask_function).__code__


def has_overlay(mask_function: Any) -> bool:
    """Whether a mask function of transformers adds something to its causal mask."""
    return getattr(mask_function, "__code__", None) is _OVERLAY
