"""Refuse images, video and sound in the models whose text alone is packed.

Gemma's attention is bidirectional inside an image. That mask does not follow from documents and
causality alone: the placeholder that a patched model passes would silently drop it, and
transformers' own mask would join images across documents. Text alone is plain causal. Mistral 3's
images are not verified.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.masking_utils import causal_mask_function, or_masks

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


_OVERLAY = or_masks(causal_mask_function).__code__


def has_overlay(mask_function: Any) -> bool:
    """Whether a mask function of transformers adds something to its causal mask."""
    return getattr(mask_function, "__code__", None) is _OVERLAY
