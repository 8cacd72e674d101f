"""What a patched model's forward refuses of its arguments, before they are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.attention.backends.registry import IMPLEMENTATIONS
from flexvarlen.layout.labels import why_not_ignore_index
from flexvarlen.patches.attention.other_sharding import why_not_sharded
from flexvarlen.patches.batch.given import Given, Inputs
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.batch.unsupported_keywords import refuse_unread
from flexvarlen.patches.models.layers import text_config_of
from flexvarlen.patches.refusal import Refusal, refuse
from flexvarlen.patches.state import CONTEXT, Patch
from flexvarlen.upstream import required


def check_inputs(module: Any, patch: Patch, inputs: Inputs, tokens: Tensor) -> None:
    """Refuse arguments that would be ignored or misread.

    The values of labels are not read: torch raises where one is neither a class nor -100.
    """
    if (why := why_not_sharded()) is not None:
        raise NotImplementedError(why)
    refuse_unread(inputs, inputs.get("attention_mask"), type(module))
    if "ignore_index" in inputs and (why := why_not_ignore_index(inputs["ignore_index"])):
        raise ValueError(why)
    kept = inputs.get("logits_to_keep")
    of_head = isinstance(inputs.get(CONTEXT), PaddedBatch)  # which was asked already
    if isinstance(kept, int) and kept == 1 and not of_head:
        refuse_next_token_after_padding(inputs.get("attention_mask"), tokens.shape[1])
    implementation: Any = text_config_of(module.config)._attn_implementation
    if IMPLEMENTATIONS.get(implementation) not in patch.backends:
        raise ValueError(
            "a patched model's attn_implementation must stay its own, got "
            f"{implementation!r}, set since; call unpatch_model before setting another, or "
            "patch_model again."
        )


def _sound(given: Given) -> str | None:
    encoded = given.inputs.get("mm_encoder_outputs") or {}
    if given.inputs.get("input_features") is None and encoded.get("audio") is None:
        return None
    return f"{given.parts.model_config.model_type} batch with it"


SOUND = (
    Refusal(
        _sound,
        "sound (input_features) is not supported in the batches of a patched model, got a {got}; "
        "remove it, or call unpatch_model and use the model's own attention, one document per row.",
        NotImplementedError,
    ),
)


def refuse_sound(given: Given) -> None:
    """Refuse a forward with sound, which is not verified."""
    refuse(given, SOUND)


def refuse_next_token_after_padding(mask: object, row_tokens: int) -> None:
    """Refuse rows padded on the right where only the last logits are kept, as `generate` does.

    They would be those of padding, whose hidden states are zero: token 0 in each such row.

    Raises:
        ValueError: a row ends in padding. Reads the device; not checked in a compiled graph.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2 or torch.compiler.is_compiling():
        return
    if mask.shape[1] != row_tokens:  # of decoding
        return
    real = mask != 0
    if bool((real.any(dim=1) & ~real[:, -1]).any()):  # a chunk of a prompt may be padding alone
        raise ValueError(
            "attention_mask must end in a real token in each row where only the last logits are "
            "kept (generate, logits_to_keep=1), got padding on the right; set "
            "tokenizer.padding_side='left'."
        )


def prepare_shared_keys(module: nn.Module, patch: Patch, inputs: Inputs) -> None:
    """Prepare a base model whose later layers attend to keys of earlier ones (Gemma 4).

    Raises:
        NotImplementedError: reentrant checkpoints.
    """
    refuse_reentrant_checkpoints(patch.parts.text_tower(module))
    # Else the last tokens alone run through the later layers, where windows start elsewhere.
    inputs["logits_to_keep"] = None


def refuse_reentrant_checkpoints(tower: nn.Module) -> None:
    """Refuse them in a tower that trains, and whose later layers attend to keys of earlier ones.

    They run the layers without gradients first, so that the later layers would get keys and values
    that no graph leads back from.

    Raises:
        NotImplementedError: they are on, patched or not.
    """
    if not (tower.training and tower.gradient_checkpointing):
        return
    name = "_gradient_checkpointing_func"
    checkpoint = required(tower, name, "refusing reentrant checkpoints")
    if getattr(checkpoint, "keywords", {}).get("use_reentrant"):  # transformers' own is a partial
        raise NotImplementedError(
            "gradient checkpointing must not be reentrant in a model whose layers share keys and "
            "values, got use_reentrant=True, under which their gradients are lost; call "
            'model.gradient_checkpointing_enable({"use_reentrant": False}).'
        )
