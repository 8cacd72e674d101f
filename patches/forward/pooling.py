"""Heads and poolers with one output per document or row.

A head with one output per document gets packed rows as a padded batch of a row for each.

Shapes: B rows of S tokens, T = B·S.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexvarlen.layout.boundaries import raise_or_assert
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.packing.images import has_images
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.batch.given import Given, Inputs
from flexvarlen.patches.batch.padded_batch import PaddedBatch, pad_documents
from flexvarlen.patches.batch.unpacked_rows import one_document_per_row
from flexvarlen.patches.forward.head_checks import check_document_labels
from flexvarlen.patches.forward.make_row import may_hold_several
from flexvarlen.patches.forward.padding import (
    HIDDEN_FIRST_TOKEN,
    head_inputs_for_padded_batch,
    refuse_rows_to_pool,
    require_dict,
)


def rows_of_documents(given: Given) -> Given | Inputs:
    """The arguments of a head with one output per document: a row for each.

    Given the layout alone if each row holds one document already.
    """
    if given.why_unpacked is not None:
        return given
    layout, padded = _layout_of_documents(given)
    if padded is None:
        return given._replace(layout=layout)
    inputs = padded.inputs_of_batch(given.inputs, given.config.pad_token_id)
    return head_inputs_for_padded_batch(given, inputs, padded)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _layout_of_documents(given: Given) -> tuple[PackedLayout, PaddedBatch | None]:
    """The layout of a head with one output per document, and a batch with a row for each.

    Padding is on the right, as in the batches that heads are trained with. A causal head without
    ids reads the last token of each row.

    Returns:
        No batch if a mask shows that each row holds one document already.

    Raises:
        NotImplementedError: rows of several documents with images.

    Reads the device, and breaks a compiled graph.
    """
    layout, parts = given.documents(), given.parts
    if not given.is_explicit and bool(one_document_per_row(layout, given.shape[0])):
        if given.reads_first_token and may_hold_several(given, layout):
            _refuse_hidden_first_token(layout, given.shape[0])
        return layout, None
    if has_images(given.inputs):
        raise NotImplementedError(
            "rows of several documents must hold text alone where a head gives one output per "
            f"document, got images for {type(given.module).__name__}; pass one document per row, "
            "or patch and call the base model."
        )
    without_ids = given.inputs.get("input_ids") is None
    return layout, pad_documents(layout, pads_left=parts.causal and without_ids)


def check_document_head(given: Given, layout: PackedLayout, several: bool) -> None:
    """Refuse labels that are not one for each row of a head with one output per document."""
    check_document_labels(given.inputs.get("labels"), given.shape[0])


def check_row_head(given: Given, layout: PackedLayout, several: bool) -> None:
    """Refuse rows of several documents under a head with one output per row."""
    batch = given.shape[0]
    raise_or_assert(
        one_document_per_row(layout, batch),
        f"{type(given.module).__name__} pools each row to one output, so a row must hold one "
        "document, got several; pass one document per row, or patch and call the base model, "
        "and pool its last_hidden_state by document.",
    )
    if several and given.parts.head.has_choices and given.reads_first_token:
        _refuse_hidden_first_token(layout, batch)


def _refuse_hidden_first_token(layout: PackedLayout, batch: int) -> None:
    """Refuse rows of padded documents that begin with padding. Reads the device."""
    real = layout.real_tokens().view(batch, -1)
    raise_or_assert((real[:, 0] | ~real.any(dim=1)).all(), HIDDEN_FIRST_TOKEN)


# ---- poolers of base models, which read the first token of a row ----


def pooled_tokens(given: Given, layout: PackedLayout, several: bool) -> Tensor | None:
    """int64: offsets among all B·S tokens of those that a pooler must read.

    Returns:
        None without a pooler, or where it reads the first token of each row by itself.

    Raises:
        ValueError: `return_dict=False`, or rows of a padded batch that runs packed begin with
            padding, or hold no token.
    """
    if given.module._modules.get("pooler") is None:
        return None
    padded, batch = given.padded, given.shape[0]
    if padded is not None:
        refuse_rows_to_pool(padded, reads_first=False)
        if padded.pads_left:  # transformers counts positions from the padding
            raise ValueError(
                "attention_mask must not hide the first token of a row, which the model's pooler "
                "reads, got padding on the left; pad on the right, or call "
                "patch_model without unpad=True."
            )
    if padded is not None or not several:
        return None
    require_dict(given.config, given.inputs)
    if torch.compiler.is_compiling():  # a graph keeps the slots without a document
        return layout.first_tokens()
    if bool(one_document_per_row(layout, batch)):
        rows = layout.real_tokens().view(batch, -1).to(torch.uint8)
        first = rows.argmax(dim=1)  # 0 in a row of padding alone
        return first + rows.shape[1] * torch.arange(batch, device=rows.device)
    return layout.first_tokens()[layout.real_documents()]


def pool_outputs(base: Any, packed: PackedForward, outputs: Any) -> None:
    """Pool the first token of each document, or of each row of a padded batch."""
    hidden_BSE, row = outputs["last_hidden_state"], packed.row
    if row.padded is not None and base._modules.get("pooler") is not None:
        outputs["pooler_output"] = base.pooler(hidden_BSE)
    elif row.pooled_tokens is not None:
        first = hidden_BSE.flatten(0, 1)[row.pooled_tokens]
        outputs["pooler_output"] = base.pooler(first[:, None])
