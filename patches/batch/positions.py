"""The position_ids that a packed row gets: as given, or counted in its documents.

`position_maker` chooses a function for a model: (what was given, the documents, whether a row may
hold several) -> position_ids, or None to let the model count from 0 in each row.

Shapes: B rows of S tokens, T = B·S; N documents of at most L tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexvarlen.layout.boundaries import raise_or_assert
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.packing.images import GRIDS, has_images
from flexvarlen.packing.rope_index import rope_positions
from flexvarlen.patches.batch.given import Given
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.batch.unpacked_rows import one_document_per_row
from flexvarlen.patches.parts import ModelParts

PositionMaker = Callable[[Given, PackedLayout, bool], Tensor | None]


def position_maker(parts: ModelParts) -> PositionMaker:
    """The function that makes the position_ids of a model."""
    if parts.vision_name:
        return _with_images
    if parts.has_longrope:
        return _by_run
    return _causal if parts.causal else _bidirectional


def _causal(given: Given, layout: PackedLayout, several: bool) -> Tensor | None:
    positions: Tensor | None = given.inputs.get("position_ids")
    if positions is None and given.padded is not None:  # padding is counted, as unpatched
        return given.padded.offsets_in_rows()
    if positions is None and (several or not layout.shard.is_whole):
        return default_positions(layout, given.shape)
    return positions


def default_positions(layout: PackedLayout, shape: tuple[int, int]) -> Tensor:
    """int64 `[B, S]`: default positions of a causal model.

    If a row holds several documents, from 0 in each. If all rows hold one, from 0 in the row,
    left padding included, as in transformers, so that decoding continues. From 0 again in
    the padding after a document. No sync; traces.
    """
    in_document = layout.position_ids()
    if layout.padding is not None:
        tokens = torch.arange(layout.total_tokens, device=layout.device)
        in_row = one_document_per_row(layout, shape[0]) & layout.real_tokens()
        in_document = torch.where(in_row, tokens % (layout.total_tokens // shape[0]), in_document)
    return in_document.view(shape)


def _bidirectional(given: Given, layout: PackedLayout, several: bool) -> Tensor | None:
    """Positions for an encoder, whose table may begin at another one than 0 (RoBERTa)."""
    first: int = given.parts.first_position
    positions: Tensor | None = given.inputs.get("position_ids")
    if positions is not None and (not first or positions.ndim != 2):
        return positions
    if positions is None and given.padded is not None and not first:
        return given.padded.offsets_in_rows()
    if positions is None and not several and layout.shard.is_whole:
        return None
    real, in_document = (x.view(given.shape) for x in (layout.real_tokens(), layout.position_ids()))
    if positions is None:  # padding gets the first, which every table has
        return in_document * real + first
    in_row = torch.arange(positions.shape[1], device=positions.device)
    counts_row = (positions == in_row) & (positions[:, :1] == 0)  # padding on the left too
    from_0 = (real & ((positions == in_document) | counts_row)).any(dim=1, keepdim=True)
    return positions + first * from_0


def _with_images(given: Given, layout: PackedLayout, several: bool) -> Tensor:
    """Positions for a vision-language model, which would make them from our placeholder mask."""
    if has_images(given.inputs):
        return image_positions(given.parts.base(given.module), layout, given.inputs)
    positions: Tensor | None = given.inputs.get("position_ids")
    return default_positions(layout, given.shape) if positions is None else positions


def _by_run(given: Given, layout: PackedLayout, several: bool) -> Tensor | None:
    """Positions for longrope, whose tables depend on the length of a run of positions."""
    positions = given.positions
    if positions is None and given.padded is not None:
        positions = given.padded.offsets_in_rows()
    if positions is None:
        return default_positions(layout, given.shape) if several else None
    return positions_by_run(layout, positions, given.shape[1])


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
    """Rotary positions of a batch with images: as given, or `[4, B, S]` by document.

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
            f"got {tuple(given.shape)}; remove them and pass packed_layout= or cu_seq_lens_q=, "
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
    about = (*GRIDS, "second_per_grid_ts")
    given_images = {name: inputs[name] for name in about if inputs.get(name) is not None}
    images = {name: torch.as_tensor(x).cpu() for name, x in given_images.items()}
    positions, deltas = rope_positions(
        base.get_rope_index, layout, input_ids.flatten().cpu(), types.flatten().cpu(), images
    )
    if len(deltas) == len(input_ids):  # one document per row, so decoding may follow
        base.rope_deltas = deltas.to(input_ids.device)
    return positions.to(input_ids.device).view(4, *input_ids.shape)


def padded_positions(given: Given, padded: PaddedBatch) -> Tensor:
    """Positions of a padded batch with images, `[n, B, S]`: as given, or `[4, B, S]` by row."""
    positions: Tensor | None = given.inputs.get("position_ids")
    if positions is not None:
        return positions
    row = padded.inputs_of_row(given.inputs)
    positions_41T = image_positions(given.parts.base(given.module), padded.layout, row)
    return padded.tokens.leave(positions_41T.movedim(0, -1)).movedim(-1, 0)
