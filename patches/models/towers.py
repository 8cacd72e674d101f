"""Where a model keeps its attention layers: in itself, or in a text and a vision tower.

Gemma 3 has a vision tower too, but its images come in batches: that one is left alone.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

VISION = "vision_attention"
"""The layer type of a vision tower's layers, for mappings of backends."""

_LISTS = ("layers", "blocks", "layer")  # Llama, Qwen-VL's vision tower, BERT
_ATTENTION = ("self_attn", "attn", "attention")  # Llama, ModernBERT, BERT


def text_tower(base: nn.Module) -> nn.Module:
    """The part of a base model that runs over the tokens: most often all of it."""
    tower = base._modules.get("language_model")
    return base if tower is None else tower


def vision_tower(base: nn.Module) -> PreTrainedModel | None:
    """The part that runs over packed images, if there is one that is handed their sizes."""
    tower = base._modules.get("visual")
    return tower if isinstance(tower, PreTrainedModel) else None


def text_config_of(config: Any) -> Any:
    """The config of the text tower, or of all of the model."""
    return config.__dict__.get("text_config") or config


def first_layer(tower: nn.Module) -> nn.Module | None:
    """The first of a tower's layers, if it has any where they are looked for."""
    holder = tower._modules.get("encoder") or tower  # BERT
    for name in _LISTS:
        layers: Any = holder._modules.get(name)
        if layers:
            first: nn.Module = layers[0]
            return first
    return None


def first_attention(tower: nn.Module) -> nn.Module | None:
    """The attention of `first_layer`."""
    layer = first_layer(tower)
    if layer is None:
        return None
    return next((part for name in _ATTENTION if (part := layer._modules.get(name))), None)
