"""What a patched model's forward refuses before it looks for documents."""

from __future__ import annotations

from typing import Any

import torch

from flexvarlen.attention.backends.registry import IMPLEMENTATIONS
from flexvarlen.patches.attention.context import PackedForward
from flexvarlen.patches.attention.context_parallel import refuse_context_parallel
from flexvarlen.patches.batch.checks import refuse_next_token_after_padding
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.batch.unsupported_keywords import (
    refuse_mask_of_another_kind,
    refuse_other_names,
)
from flexvarlen.patches.forward.heads import HEAD, HeadReference
from flexvarlen.patches.forward.inputs import ForwardInputs
from flexvarlen.patches.forward.wrapper import arguments_of_running_call
from flexvarlen.patches.models.image_masks import refuse_images
from flexvarlen.patches.state import CONTEXT

KEPT_BY_HEAD = (
    "a patched head's forward must pass its **kwargs on to its base model, as they carry the "
    "documents to the layers, got one that did not: its outputs may mix documents; call the base "
    "model with **kwargs, and patch_model again if another forward was set on it since."
)
"""Raised where a head passes its documents to nobody."""


def refuse_inputs(forward: ForwardInputs) -> None:
    """Refuse inputs that would be ignored or misread."""
    module, inputs = forward.module, forward.inputs
    mask, row_tokens = inputs.get("attention_mask"), forward.tokens.shape[1]
    refuse_context_parallel()
    refuse_other_names(inputs, type(module))
    refuse_mask_of_another_kind(mask)
    refuse_images(module.config, inputs)
    refuse_next_token_after_padding(mask, row_tokens, inputs.get("logits_to_keep"))
    implementation: Any = forward.config._attn_implementation
    if IMPLEMENTATIONS.get(implementation) not in forward.patch.backends:
        raise ValueError(
            "a patched model's attn_implementation must stay its own, got "
            f"{implementation!r}, set since; call unpatch_model before setting another, or "
            "patch_model again."
        )


def refuse_head_without_documents(forward: ForwardInputs) -> None:
    """Raise if a base model gets no documents although its head is running with some.

    A head whose wrapper is gone did not mask its labels either. A head that calls its base model
    with another batch must pass that batch's documents explicitly.
    """
    reference: HeadReference | None = forward.module.__dict__.get(HEAD)
    if reference is None or forward.padded_by_head:
        return
    if reference.is_unwrapped():
        raise ValueError(
            "a patched model's forward must stay the one that patch_model wrapped, got another "
            "that was set since (by a library, or by taking hooks off), under which labels cross "
            "documents; call patch_model again, after all else that changes forward, or, as "
            "Trainer's use_liger_kernel changes it when training starts, apply Liger to the model "
            "before patch_model and leave use_liger_kernel out."
        )
    if torch.compiler.is_compiling() or reference.module is None:
        return
    of_head = arguments_of_running_call(reference.module).get(CONTEXT)
    packs = isinstance(of_head, PackedForward) and of_head.packs and not forward.is_explicit
    if packs or isinstance(of_head, PaddedBatch):
        raise ValueError(KEPT_BY_HEAD)
