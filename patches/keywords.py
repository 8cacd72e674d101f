"""Arguments of a forward that would tell documents to nobody: by another name, or of another kind.

A keyword that no model knows is carried to the layers and lost there, and with it the documents.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_OURS_BY_OTHER_NAMES = {
    "document_ids": "attention_mask [B, S], of document numbers",
    "cu_seqlens": "cu_seq_lens_q",
    "cu_seqlens_q": "cu_seq_lens_q",
    "cu_seqlens_k": "cu_seq_lens_k",
    "packed_layouts": "packed_layout",
}


def refuse_other_names(inputs: dict[str, Any]) -> None:
    """Refuse boundaries under a name that nobody reads.

    Raises:
        ValueError: there is one, with the name it must have.
    """
    for name, ours in _OURS_BY_OTHER_NAMES.items():
        if inputs.get(name) is not None:
            raise ValueError(
                f"documents must be given by a name that is read, got {name}=, which is not: they "
                f"would see one another; pass {ours} instead."
            )


def refuse_mask_of_another_kind(attention_mask: Any) -> None:
    """Refuse a mask that is no tensor (a BlockMask), nor a dict of such by type of layer.

    Raises:
        ValueError: it is something else.
    """
    masks = attention_mask.values() if isinstance(attention_mask, dict) else (attention_mask,)
    for mask in masks:
        if mask is not None and not isinstance(mask, Tensor):
            raise ValueError(
                f"attention_mask must be a tensor, got {type(mask).__name__}; leave it out and "
                "pass the documents (packed_layout=, cu_seq_lens_q=, position_ids or document "
                "numbers [B, S] as attention_mask): each kernel makes its own mask of them."
            )
