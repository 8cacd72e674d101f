"""Gemma 4: later layers attend to the keys and values of earlier ones.

Where only the last logits are asked for, transformers passes those tokens alone through the later
layers. There the queries are no longer the tokens of the packed batch, and a sliding window would
start at another token.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def prepare_shared_keys(tower: nn.Module, inputs: dict[str, Any]) -> None:
    """Let all tokens run through all layers; the head still selects the logits.

    Args:
        tower: whose layers share keys and values.
        inputs: keyword arguments of the base model's forward. It uses `logits_to_keep` only to
            drop tokens; None keeps all.

    Raises:
        NotImplementedError: the tower is in training with reentrant checkpoints, patched or not.
            They run the layers without gradients first, so that the later layers would get keys
            and values that no graph leads back from.
    """
    checkpoint: Any = tower.__dict__.get("_gradient_checkpointing_func")
    is_reentrant = getattr(checkpoint, "keywords", {}).get("use_reentrant")
    if is_reentrant and tower.training and tower.gradient_checkpointing:
        raise NotImplementedError(
            "gradient checkpointing must not be reentrant in a model whose layers share keys and "
            "values, got use_reentrant=True, under which their gradients are lost; call "
            'model.gradient_checkpointing_enable({"use_reentrant": False}).'
        )
    inputs["logits_to_keep"] = None


def shares_keys(text_config: Any) -> bool:
    """Whether later layers attend to the keys and values of earlier ones."""
    return bool(text_config.__dict__.get("num_kv_shared_layers"))
