"""Padded batches that run as packed rows, and heads and poolers that need a row per document.

With `unpad` the base model drops a batch's padding and puts it back into its outputs; the head sees
the padded batch. A head with one output per document gets packed rows as such a batch.

Shapes: B rows of S tokens, T = B·S.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexvarlen.layout.arguments import to_int_or_none
from flexvarlen.layout.boundaries import raise_or_assert
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.batch.find_layout import BOUNDARIES
from flexvarlen.patches.batch.padded_batch import (
    PaddedBatch,
    find_padding,
    pad_documents,
)
from flexvarlen.patches.batch.unpacked_rows import one_document_per_row
from flexvarlen.patches.models.heads import PER_DOCUMENT
from flexvarlen.patches.state import CONTEXT

if TYPE_CHECKING:
    from flexvarlen.patches.forward.inputs import ForwardInputs


def check_unpad(unpad: bool, multiple_of: int | None, share_prefixes: bool) -> None:
    """Check the arguments `unpad`, `unpad_to_multiple_of` and `share_prefixes` of `patch_model`.

    Raises:
        ValueError: a multiple that is no positive integer; or one, or `share_prefixes`, without
            `unpad`.
    """
    if share_prefixes and not unpad:
        raise ValueError(
            "share_prefixes=True finds what the rows of a padded batch share and needs unpad=True, "
            "got unpad=False; pass both, or make trees with fv.share_prefixes."
        )
    if multiple_of is not None and not (unpad and (to_int_or_none(multiple_of) or 0) > 0):
        raise ValueError(
            "unpad_to_multiple_of must be a positive number of tokens and needs unpad=True, got "
            f"{multiple_of!r} and unpad={unpad}; leave it out, or pass both."
        )


def find_padded_batch(forward: ForwardInputs) -> PaddedBatch | None:
    """The padded batch that the base model runs as a packed row, or None if it runs as it is.

    Takes it from the arguments if the head has found it.

    Raises:
        NotImplementedError: the forward takes embeddings where the ids of a padded batch are
            needed.

    Reads the device once, if there is a 2D mask and `unpad`.
    """
    patch, parts, inputs = forward.patch, forward.parts, forward.inputs
    shape = forward.tokens.shape[:2]
    given: PaddedBatch | None = inputs.pop(CONTEXT, None)
    if given is not None and (given.batch, given.row_tokens) == shape:
        forward.padded_by_head = True  # not where a head calls another batch
        return given
    mask = inputs.get("attention_mask")
    if not patch.unpad or not isinstance(mask, Tensor) or mask.shape != shape:
        return None
    fills_cache = forward.cache is not None or inputs.get("use_cache")
    if fills_cache or any(inputs.get(name) is not None for name in BOUNDARIES):
        return None
    found: PaddedBatch | None = find_padding(
        mask,
        inputs.get("position_ids"),
        multiple_of=forward.unpad_to_multiple_of,
        even_without=patch.share_prefixes,
    )
    if found is None:
        return None
    needs_ids = parts.head in PER_DOCUMENT or not parts.causal
    if needs_ids and inputs.get("input_ids") is None:
        raise NotImplementedError(
            "a classifier or encoder needs input_ids for a padded batch, whose padding it knows by "
            "them, got inputs_embeds; pass input_ids, or call patch_model without unpad=True."
        )
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def layout_of_pooling_head(forward: ForwardInputs) -> tuple[PackedLayout, PaddedBatch | None]:
    """The layout of a head with one output per document, and a batch with a row for each.

    Padding is on the right, as in the batches that heads are trained with. A causal head without
    ids reads the last token of each row.

    Returns:
        No batch if a mask shows that each row holds one document already.

    Raises:
        NotImplementedError: rows of several documents with images.

    Reads the device, and breaks a compiled graph.
    """
    layout = forward.find_layout()
    if not forward.is_explicit and bool(one_document_per_row(layout, forward.batch)):
        if forward.packs and forward.reads_first_token:
            refuse_hidden_first_token(layout, forward.batch)
        return layout, None
    if forward.parts.vision_name and forward.has_images:
        raise NotImplementedError(
            "rows of several documents must hold text alone where a head gives one output per "
            f"document, got images for {type(forward.module).__name__}; pass one document per row, "
            "or patch and call the base model."
        )
    without_ids = forward.inputs.get("input_ids") is None
    return layout, pad_documents(layout, pads_left=forward.parts.causal and without_ids)


def note_pooler(forward: ForwardInputs, packed: PackedForward) -> None:
    """Note whether a base model's pooler reads the first token of a row, or of each document.

    Raises:
        ValueError: `return_dict=False` asks for a tuple, whose outputs could not be replaced; or
            rows of a padded batch that runs packed begin with padding, or hold no token.
    """
    padded, layout, batch = packed.padded, packed.layout, forward.batch
    has_pooler = forward.module._modules.get("pooler") is not None
    if has_pooler and padded is not None:
        refuse_rows_to_pool(padded, reads_first=False)
        if padded.pads_left:  # transformers counts positions from the padding
            raise ValueError(
                "attention_mask must not hide the first token of a row, which the model's pooler "
                "reads, got padding on the left; pad on the right, or call "
                "patch_model without unpad=True."
            )
    elif has_pooler and packed.packs:
        if torch.compiler.is_compiling():  # a graph keeps the slots without a document
            packed.pooled_tokens = layout.first_tokens()
        elif bool(one_document_per_row(layout, batch)):
            rows = layout.real_tokens().view(batch, -1).to(torch.uint8)
            first = rows.argmax(dim=1)  # 0 in a row of padding alone
            packed.pooled_tokens = first + rows.shape[1] * torch.arange(batch, device=rows.device)
        else:
            packed.pooled_tokens = layout.first_tokens()[layout.real_documents()]
    return_dict = forward.inputs.get("return_dict")
    wants_dict = forward.config.return_dict if return_dict is None else return_dict
    if (packed.pooled_tokens is not None or padded is not None) and not wants_dict:
        raise ValueError(
            "return_dict must stay True for packed or unpadded batches, got False; leave it out."
        )


HIDDEN_FIRST_TOKEN = (
    "attention_mask must not hide the first token of a row, which the model's classifier reads, "
    "got padding on the left; pad on the right."
)
"""Raised where a model would read padding."""


def refuse_hidden_first_token(layout: PackedLayout, batch: int) -> None:
    """Refuse rows of padded documents that begin with padding. Reads the device."""
    real = layout.real_tokens().view(batch, -1)
    raise_or_assert((real[:, 0] | ~real.any(dim=1)).all(), HIDDEN_FIRST_TOKEN)


def refuse_rows_to_pool(padded: PaddedBatch, *, reads_first: bool) -> None:
    """Refuse rows of which a pooler, or a head that pools, would read padding.

    Args:
        reads_first: whether it reads the first token of each row.

    Raises:
        ValueError: a row holds no token, or begins with padding where its first token is read.
    """
    if padded.has_empty_row:
        raise ValueError(
            "attention_mask must leave at least one token of each row where rows are pooled, got a "
            "row of padding alone; drop it from the batch."
        )
    if padded.pads_left and reads_first:
        raise ValueError(HIDDEN_FIRST_TOKEN)


def pad_and_pool(base: Any, packed: PackedForward, outputs: Any) -> None:
    """Give a base model's outputs the shape of its padded batch, and pool them by document."""
    padded = packed.padded
    if padded is not None:
        outputs["last_hidden_state"] = padded.to_batch(outputs["last_hidden_state"])
        if outputs.get("hidden_states") is not None:
            outputs["hidden_states"] = tuple(map(padded.to_batch, outputs["hidden_states"]))
        if outputs.get("router_logits") is not None:  # [T, E] of each layer, as [B·S, E]
            of_rows = (padded.to_batch(x[None]).flatten(0, 1) for x in outputs["router_logits"])
            outputs["router_logits"] = tuple(of_rows)
    pooler = base._modules.get("pooler")
    if pooler is not None and padded is not None:
        outputs["pooler_output"] = pooler(outputs["last_hidden_state"])
    elif packed.pooled_tokens is not None:
        hidden = outputs["last_hidden_state"].flatten(0, 1)
        outputs["pooler_output"] = base.pooler(hidden[packed.pooled_tokens][:, None])
