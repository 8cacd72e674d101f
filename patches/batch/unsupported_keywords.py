"""Refuse arguments that describe documents in a name or type that no model reads.

An unknown keyword would be passed to the layers and ignored there, and documents would leak.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from flexvarlen.layout.routed_experts import ROUTED_EXPERTS

COLUMNS = (
    "seq_lengths",
    "seq_idx",
    "completion_mask",
    "assistant_masks",
    "packed_layout",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    ROUTED_EXPERTS,
)
"""Dataset columns that `PackedCollator` reads in addition to the parameters of models.

Trainer removes columns for which the model's `forward` has no parameter before it calls the
collator, so the patched `forward` lists them.
"""

_NUMBERS = "attention_mask [B, S], of document numbers"
_LENGTHS = "packed_layout=PackedLayout.from_lengths(...)"
_OURS = {
    "packed_layout": "layout layouts packed_layouts packed_seq_params",
    "cu_seq_lens_q": (
        "cu_seqlens cu_seqlen cu_seqlens_q cu_seqlen_q cu_seq_lens cu_seq_len cu_seq_len_q "
        "cu_seq_lengths cu_lens cu_doc_lens cu_document_lens seqstart boundaries doc_boundaries "
        "document_boundaries"
    ),
    "cu_seq_lens_k": "cu_seqlens_k cu_seqlen_k cu_seq_len_k cu_seqlens_kv cu_seq_lens_kv",
    _LENGTHS: (
        "lengths seq_lengths seq_lens seqlens seqlen sequence_lengths sequence_lens doc_lengths "
        "doc_lens document_lengths document_lens packed_lengths packed_seq_lens sample_lengths "
        "sample_lens example_lengths seqlens_in_batch"
    ),
    _NUMBERS: (
        "document_ids document_id document_idx doc_ids doc_id doc_idx segment_ids segment_id "
        "segment_idx sequence_ids sequence_id sequence_idx seq_ids seq_id decoder_segment_ids "
        "packing_ids document_mask doc_mask segment_mask block_mask attn_mask attn_bias"
    ),
    "position_ids": "position_id positions pos_ids input_pos segment_positions",
    "packed_layout=PackedLayout.from_tree(...)": (  # the trees of TRL's AsyncGRPOTrainer
        "tree_kv_index tree_cu_seqlens_q tree_cu_seqlens_k"
    ),
}
_OURS_BY_OTHER_NAMES = {other: ours for ours, others in _OURS.items() for other in others.split()}
_LOSS_MASKS = ("completion_mask", "assistant_masks")
_REFUSED = frozenset((*_OURS_BY_OTHER_NAMES, *_LOSS_MASKS, ROUTED_EXPERTS))


def refuse_unread(
    inputs: dict[str, Any], attention_mask: Any, model_class: type | None = None
) -> None:
    """Refuse boundaries, and loss masks, in a name or type that no model reads.

    Args:
        inputs: a forward's keyword arguments.
        attention_mask: of the forward.
        model_class: whose `forward` is called; it may have parameters of such names for itself.

    Raises:
        ValueError: there is one (the message gives the correct name), or a mask that is neither a
            tensor nor a dict of tensors by layer type.
    """
    for name in inputs:
        if name not in _REFUSED or inputs[name] is None or _is_parameter(name, model_class):
            continue
        if name == ROUTED_EXPERTS:  # where there are routers, the forward has taken it
            raise ValueError(
                f"{ROUTED_EXPERTS} must be given to a model with experts, got it for "
                f"{getattr(model_class, '__name__', 'a model')}, which has none; remove it."
            )
        if name in _LOSS_MASKS:
            raise ValueError(
                f"{name} must be applied to the labels before a model is called, got it as an "
                "argument, which no model reads: what it masks would be trained on; let "
                "PackedCollator make the batch, or set the labels to -100 where it is 0 and drop "
                "the column."
            )
        raise ValueError(
            "documents must be passed as a supported keyword (packed_layout, cu_seq_lens_q, "
            f"position_ids, attention_mask, seq_idx), got {name}=, which is not: they would see "
            f"one another; pass {_OURS_BY_OTHER_NAMES[name]} instead."
        )
    masks = attention_mask.values() if isinstance(attention_mask, dict) else (attention_mask,)
    for mask in masks:
        if mask is not None and not isinstance(mask, Tensor):
            raise ValueError(
                f"attention_mask must be a tensor, got {type(mask).__name__}; remove it and "
                "pass the documents (packed_layout=, cu_seq_lens_q=, position_ids or document "
                "numbers [B, S] as attention_mask): each kernel makes its own mask of them."
            )


# In a compiled graph this is evaluated while tracing.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_parameter(name: str, model_class: Any) -> bool:
    """Whether a model's class takes an argument of this name for itself."""
    return model_class is not None and name in inspect.signature(model_class.forward).parameters
