"""Gemma 4: later layers attend to the keys and values of earlier ones.

Where only the last logits are asked for, transformers passes those tokens alone through the later
layers. There the queries are no longer the tokens of the packed batch, and a sliding window would
start at another token.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def keep_all_queries(text_config: Any, inputs: dict[str, Any]) -> None:
    """Let all tokens run through all layers; the head still selects the logits.

    Args:
        text_config: of the text tower.
        inputs: the keyword arguments of a base model's forward, which reads `logits_to_keep` for
            nothing else and drops tokens only for a number.
    """
    if _shares_keys(text_config):
        inputs["logits_to_keep"] = None


def refuse_reentrant_checkpoints(text_config: Any, tower: nn.Module) -> None:
    """Refuse checkpoints that lose gradients of shared keys and values, patched or not.

    A reentrant checkpoint runs the layers without gradients first, so the later layers get keys
    and values that no graph leads back from.

    Raises:
        NotImplementedError: the tower is in training with such checkpoints.
    """
    checkpoint = tower.__dict__.get("_gradient_checkpointing_func")
    if not (_shares_keys(text_config) and tower.training and tower.gradient_checkpointing):
        return
    if getattr(checkpoint, "keywords", {}).get("use_reentrant"):
        raise NotImplementedError(
            "gradient checkpointing must not be reentrant in a model whose layers share keys and "
            "values, got use_reentrant=True, under which their gradients are lost; call "
            'model.gradient_checkpointing_enable({"use_reentrant": False}).'
        )


def refuse_windows_both_ways(text_config: Any) -> None:
    """Refuse bidirectional text, in whose windows transformers' own attentions disagree.

    Raises:
        NotImplementedError: its eager and sdpa see one token more on each side than its flash.
    """
    if text_config.model_type == "gemma4_text" and text_config.use_bidirectional_attention == "all":
        raise NotImplementedError(
            "use_bidirectional_attention must not be 'all' in a gemma4 model: transformers' own "
            "attentions disagree by a token about its sliding windows; use the model's own "
            "attention, one document per row."
        )


def _shares_keys(text_config: Any) -> bool:
    return bool(text_config.__dict__.get("num_kv_shared_layers"))
