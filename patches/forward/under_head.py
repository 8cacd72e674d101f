"""A base model below its head: it runs with the documents that the head has found."""

from __future__ import annotations

import torch
from torch import nn

from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.batch.given import Given, Inputs
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.batch.row import PackedRow
from flexvarlen.patches.forward.head_checks import HEAD, HeadReference
from flexvarlen.patches.forward.padding import run_packed, unpad_batch
from flexvarlen.patches.forward.wrapper import arguments_of_running_call
from flexvarlen.patches.state import CONTEXT, LostDocuments, Patch

HEAD_DROPPED_DOCUMENTS = (
    "a patched head's forward must pass its **kwargs on to its base model, as they carry the "
    "documents to the layers, got one that did not: its outputs may mix documents; call the base "
    "model with **kwargs, and patch_model again if another forward was set on it since."
)
"""Raised where a head passes its documents to nobody."""


def documents_of_head(given: Given) -> Given:
    """The packed row of a head's padded batch; else what was given, unpadded if that is asked for.

    Raises:
        ValueError: the head runs with documents that it did not pass on. One that calls its base
            model with another batch must pass that batch's documents explicitly.
    """
    padded = given.inputs.get(CONTEXT)
    if isinstance(padded, PaddedBatch) and padded.shape == given.shape:
        return run_packed(given, padded)
    found = unpad_batch(given) if given.patch.unpad else given
    _refuse_lost_documents(found)
    return found


def _refuse_lost_documents(given: Given) -> None:
    """Raise if the head runs with documents, or without its wrapper, which masks labels."""
    reference: HeadReference | None = given.module.__dict__.get(HEAD)
    if reference is None:
        return
    if reference.is_unwrapped():
        raise ValueError(
            "a patched model's forward must stay the one that patch_model wrapped, got another "
            "that was set since (by a library, or by taking hooks off), under which labels cross "
            "documents; call patch_model again, after all else that changes forward, or, as "
            "Trainer's use_liger_kernel changes it when training starts, apply Liger to the model "
            "before patch_model and remove use_liger_kernel."
        )
    if torch.compiler.is_compiling() or reference.module is None:
        return
    of_head = arguments_of_running_call(reference.module).get(CONTEXT)
    is_packed = isinstance(of_head, PackedForward) and of_head.row.several
    if (is_packed and not given.is_explicit) or isinstance(of_head, PaddedBatch):
        raise LostDocuments(HEAD_DROPPED_DOCUMENTS)


# ---- heads that pass their base model no keywords (Mamba-2), but an attention_mask ----


def context_from_mask(module: nn.Module, patch: Patch, inputs: Inputs) -> None:
    """Take what such a head has found out of its base model's attention_mask."""
    if isinstance(inputs.get("attention_mask"), PackedForward | PaddedBatch):
        inputs[CONTEXT] = inputs.pop("attention_mask")


def context_into_mask(given: Given, row: PackedRow, packed: PackedForward, inputs: Inputs) -> None:
    """Pass the documents as the attention_mask."""
    inputs["attention_mask"] = packed
