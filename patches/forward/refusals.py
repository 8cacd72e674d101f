"""What a patched model's forward refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.attention.backends.registry import IMPLEMENTATIONS
from flexvarlen.layout.labels import LABEL_COUNTS, why_not_ignore_index
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.attention.refuse_context_parallel import refuse_context_parallel
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.batch.unsupported_keywords import refuse_unread
from flexvarlen.patches.forward.heads import HEAD, HeadReference
from flexvarlen.patches.forward.inputs import ForwardInputs
from flexvarlen.patches.forward.wrapper import arguments_of_running_call
from flexvarlen.patches.models.heads import CAUSAL
from flexvarlen.patches.state import CONTEXT, LostDocuments
from flexvarlen.patches.why_not import why_no_trees
from flexvarlen.upstream import required

HEAD_DROPPED_DOCUMENTS = (
    "a patched head's forward must pass its **kwargs on to its base model, as they carry the "
    "documents to the layers, got one that did not: its outputs may mix documents; call the base "
    "model with **kwargs, and patch_model again if another forward was set on it since."
)
"""Raised where a head passes its documents to nobody."""

_TEXT_ALONE = ("gemma3", "gemma4", "mistral3")
_IMAGES = (
    "token_type_ids",
    "mm_token_type_ids",
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "mm_encoder_outputs",  # `generate` passes {}
)


def refuse_inputs(forward: ForwardInputs) -> None:
    """Refuse inputs that would be ignored or misread.

    The values of labels are not read: torch raises where one is neither a class nor -100.
    """
    module, inputs = forward.module, forward.inputs
    mask, row_tokens = inputs.get("attention_mask"), forward.tokens.shape[1]
    refuse_context_parallel()
    refuse_unread(inputs, mask, type(module))
    if "ignore_index" in inputs and (why := why_not_ignore_index(inputs["ignore_index"])):
        raise ValueError(why)
    refuse_images(module.config, inputs)
    refuse_next_token_after_padding(mask, row_tokens, inputs.get("logits_to_keep"))
    implementation: Any = forward.config._attn_implementation
    if IMPLEMENTATIONS.get(implementation) not in forward.patch.backends:
        raise ValueError(
            "a patched model's attn_implementation must stay its own, got "
            f"{implementation!r}, set since; call unpatch_model before setting another, or "
            "patch_model again."
        )


def refuse_images(config: Any, inputs: dict[str, Any]) -> None:
    """Refuse a forward with images, in a model whose text alone is packed.

    Gemma's attention is bidirectional inside an image. That mask does not follow from documents and
    causality alone: the placeholder that a patched model passes would silently drop it. Mistral 3's
    images are not verified.

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


def refuse_next_token_after_padding(mask: object, row_tokens: int, logits_to_keep: object) -> None:
    """Refuse rows padded on the right where only the last logits are kept, as `generate` does.

    They would be those of padding, whose hidden states are zero: token 0 in each such row.

    Raises:
        ValueError: a row ends in padding. Reads the device; not checked in a compiled graph.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2 or torch.compiler.is_compiling():
        return
    keeps_last = isinstance(logits_to_keep, int) and logits_to_keep == 1
    if not keeps_last or mask.shape[1] != row_tokens:  # of decoding
        return
    real = mask != 0
    if bool((real.any(dim=1) & ~real[:, -1]).any()):  # a chunk of a prompt may be padding alone
        raise ValueError(
            "attention_mask must end in a real token in each row where only the last logits are "
            "kept (generate, logits_to_keep=1), got padding on the right; set "
            "tokenizer.padding_side='left'."
        )


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
        raise LostDocuments(HEAD_DROPPED_DOCUMENTS)


def refuse_beside_tree(forward: ForwardInputs) -> None:
    """Refuse what has no meaning for tokens that stand for several samples.

    Raises:
        ValueError: labels, shift_labels alone, position_ids, a cache, or outputs of another form.
            (`find_layout` refuses an attention_mask.)
        NotImplementedError: a model, a head or a setting that trees do not go with.
    """
    inputs = forward.inputs
    if inputs.get("labels") is not None:
        raise ValueError(
            "labels must be left out with a packed_layout of trees, as the token after a segment "
            "need not be the next on its path, got labels; pass the shift_labels and label_counts "
            "of fv.share_prefixes."
        )
    if inputs.get("shift_labels") is not None and inputs.get(LABEL_COUNTS) is None:
        raise ValueError(
            "shift_labels must come with label_counts with a packed_layout of trees, got them "
            "alone; take both from fv.share_prefixes."
        )
    for name, wanted in (("return_dict", True), ("logits_to_keep", 0)):
        if inputs.get(name) not in (None, wanted):
            raise ValueError(
                f"{name} must be {wanted} with a packed_layout of trees, got {inputs[name]!r}; "
                f"remove {name}."
            )
    if inputs.get("position_ids") is not None:
        raise ValueError(
            "position_ids cannot be combined with a packed_layout of trees, which defines them; "
            "remove position_ids."
        )
    if inputs.get("use_cache") or forward.cache is not None:
        raise ValueError(
            "a packed_layout of trees cannot fill a cache; pass use_cache=False and no cache."
        )
    beside = {
        "images": forward.has_images,
        "a head that pools documents": forward.parts.head not in ("", *CAUSAL),
    }
    why = why_no_trees(forward.parts, batch_invariant=forward.patch.batch_invariant)
    why = why or next((x for x, given in beside.items() if given), None)
    if why is not None:
        raise NotImplementedError(
            f"a packed_layout of trees is not supported with {why}; pack each path as a document."
        )
