"""The position_ids of a forward: which ones mark documents, and how missing ones are built.

Shapes: B rows of S tokens, T = B·S; N documents of at most L tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flexvarlen.layout.arguments import whole_numbers
from flexvarlen.layout.boundaries import raise_or_assert
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.batch.unpacked_rows import one_document_per_row

GRIDS = ("image_grid_thw", "video_grid_thw")
"""The keywords that come with images and videos."""

_WITH_TEXT = 4  # rows of position_ids in vision-language models: text, time, height, width


def text_positions(
    position_ids: Tensor | None, *, has_axes: bool, documents_elsewhere: bool
) -> Tensor | None:
    """The positions `[B, S]` whose restarts mark documents, or None if there are none.

    Rotary positions of time, height and width repeat and jump on an image, so no boundary can be
    read from them. With 4 rows the first one is the text position.

    Args:
        position_ids: `[B, S]`; with `has_axes` also `[1, B, S]` or `[4, B, S]`, the text's first,
            or `[3, B, S]`: time, height and width.
        has_axes: whether the model's rotary positions have these rows.
        documents_elsewhere: positions are not needed, as documents are given explicitly or
            the forward is not packed.

    Raises:
        ValueError: no integers, another shape, or 3 rows without any other source of documents.
    """
    if position_ids is None:
        return None
    if not isinstance(position_ids, Tensor):
        raise ValueError(
            f"position_ids must be an integer tensor [B, S], got {type(position_ids).__name__}; "
            "pass torch.tensor(position_ids)."
        )
    if position_ids.ndim == 2:
        return whole_numbers("position_ids", position_ids)
    rows = position_ids.shape[0] if has_axes and position_ids.ndim == 3 else None
    if rows in (1, _WITH_TEXT):
        return whole_numbers("position_ids", position_ids[0])
    if rows != 3:
        raise ValueError(
            f"position_ids must have shape [B, S], got {tuple(position_ids.shape)}; pass the text "
            "row, or in a vision-language model the text row before time, height and width."
        )
    if documents_elsewhere:
        return None
    raise ValueError(
        "position_ids of only time, height and width need the documents too, as their "
        "boundaries cannot be read from them, got [3, B, S]; put the text positions first, "
        "[4, B, S], or also pass packed_layout= or cu_seq_lens_q=."
    )


def causal_positions(layout: PackedLayout, batch: int) -> Tensor:
    """int64 `[T]`: default positions of a causal model.

    If a row holds several documents, from 0 in each. If all rows hold one, from 0 in the row,
    left padding included, as in transformers, so that decoding continues. From 0 again in
    the padding after a document. No sync; traces.
    """
    in_document = layout.position_ids()
    if layout.padding is None:  # none before a document
        return in_document
    tokens = torch.arange(layout.total_tokens, device=layout.device)
    in_row = one_document_per_row(layout, batch) & layout.real_tokens()
    return torch.where(in_row, tokens % (layout.total_tokens // batch), in_document)


def positions_by_run(layout: PackedLayout, positions_BS: Tensor, row_tokens: int) -> Tensor:
    """Check for longrope that each run of consecutive positions is one document.

    Positions of padding are replaced, as they may continue those of a document.

    Raises:
        ValueError: the rotary tables would treat two documents as one. Inside a compiled graph the
            device asserts it.
    """
    real_BS, in_document_BS = (
        x.view(-1, row_tokens) for x in (layout.real_tokens(), layout.position_ids())
    )
    between_documents = real_BS[:, :-1] & real_BS[:, 1:] & (in_document_BS[:, 1:] == 0)
    goes_on = positions_BS.diff(dim=1) == 1
    raise_or_assert(
        ~(goes_on & between_documents).any(),
        "position_ids must not continue from one document to the next under rope_type 'longrope', "
        "whose frequencies depend on how long a document is; let each begin at 0, or leave "
        "position_ids out.",
    )
    return torch.where(real_BS, positions_BS, in_document_BS)


# ---- images of Qwen2-VL and similar ----


def image_positions(base: Any, layout: PackedLayout, inputs: dict[str, Any]) -> Tensor:
    """Rotary positions of a batch with images: as given, or `[3, B, S]` by document, 0 at padding.

    Computed by the model's own `get_rope_index` with one document per row; it uses the images
    in the order of the tokens.

    Raises:
        ValueError: the given positions cannot be correct, or the inputs needed to compute them
            are missing.
    """
    given: Tensor | None = inputs.get("position_ids")
    if given is not None and given.ndim == 2:
        raise ValueError(
            "position_ids must have 4 rows (text, time, height, width) where a batch has images, "
            f"got {tuple(given.shape)}; leave them out and pass packed_layout= or cu_seq_lens_q=, "
            "to have them made."
        )
    if given is not None:
        return given
    input_ids, types = inputs.get("input_ids"), inputs.get("mm_token_type_ids")
    if input_ids is None or types is None:
        raise ValueError(
            "input_ids and mm_token_type_ids (from the processor) must be given if a "
            "batch has images and no position_ids; pass them, or position_ids of 4 rows."
        )
    if torch.compiler.is_compiling() or layout.lengths is None:
        raise ValueError(
            "position_ids of 4 rows must be passed to a compiled model where a batch has images: "
            "get_rope_index does not trace; call it by document, before."
        )
    rest = layout.total_tokens - sum(layout.lengths)
    real = layout.real_tokens().cpu()
    runs = torch.arange(layout.total_tokens, device="cpu").split([*layout.lengths, rest])
    documents = [tokens for tokens in runs if len(tokens) and real[tokens[0]]]
    tokens_NL = pad_sequence(documents, batch_first=True, padding_value=-1).to(input_ids.device)
    is_token_NL = tokens_NL >= 0
    about = {name: inputs.get(name) for name in (*GRIDS, "second_per_grid_ts")}
    rope_3NL, deltas = base.get_rope_index(
        input_ids=input_ids.reshape(-1)[tokens_NL.clamp(min=0)],
        mm_token_type_ids=types.reshape(-1)[tokens_NL.clamp(min=0)],
        attention_mask=is_token_NL,
        **{name: x for name, x in about.items() if x is not None},
    )
    positions = rope_3NL.new_zeros(3, layout.total_tokens)
    positions[:, tokens_NL[is_token_NL]] = rope_3NL[:, is_token_NL]
    if len(tokens_NL) == len(input_ids):  # one document per row, so decoding may follow
        base.rope_deltas = deltas
    by_row: Tensor = positions.view(3, *input_ids.shape)
    return by_row
