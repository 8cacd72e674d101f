"""The position_ids of a forward: which row of them tells documents, and how missing ones are made.

The text towers of Qwen-VL take rotary positions of 3 rows (time, height, width). These repeat and
jump on an image, so no border can be read from them. The form of 4 rows has the text's own first.

Shapes: B rows of S tokens; N documents of at most L tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.batch.one_document import causal_positions
from flexvarlen.patches.models.towers import vision_tower

_WITH_TEXT = 4  # rows of positions, of which the first is the text's
_GRIDS = ("image_grid_thw", "video_grid_thw")


def has_axes(text_config: Any) -> bool:
    """Whether rotary positions have rows for time, height and width."""
    parameters: dict[str, Any] = text_config.__dict__.get("rope_parameters") or {}
    return "mrope_section" in parameters


def text_positions(
    position_ids: Tensor | None, *, axes: bool, borders_elsewhere: bool
) -> Tensor | None:
    """The positions `[B, S]` whose restarts begin documents, or None if nothing tells.

    Args:
        position_ids: `[B, S]`; with `axes` also `[1, B, S]` or `[4, B, S]`, the text's first, or
            `[3, B, S]`: time, height and width.
        axes: as `has_axes` says.
        borders_elsewhere: nobody needs positions to tell documents: these are given outright, or
            the forward is not packed.

    Raises:
        ValueError: another shape, or 3 rows with nothing else to tell documents.
    """
    if position_ids is None:
        return None
    if not isinstance(position_ids, Tensor):
        raise ValueError(
            f"position_ids must be an integer tensor [B, S], got {type(position_ids).__name__}; "
            "pass torch.tensor(position_ids)."
        )
    if position_ids.ndim == 2:
        return position_ids
    rows = position_ids.shape[0] if axes and position_ids.ndim == 3 else None
    if rows in (1, _WITH_TEXT):
        return position_ids[0]
    if rows != 3:
        raise ValueError(
            f"position_ids must have shape [B, S], got {tuple(position_ids.shape)}; pass the text "
            "row, or in a model of images the text row in front of time, height and width."
        )
    if borders_elsewhere:
        return None
    raise ValueError(
        "position_ids of time, height and width alone must come with the documents, whose borders "
        "they do not tell, got [3, B, S]; put the text's own positions in front, [4, B, S], or "
        "pass packed_layout= or cu_seq_lens_q= beside them."
    )


def positions_for(
    base: nn.Module, layout: PackedLayout, inputs: dict[str, Any], *, packs: bool, causal: bool
) -> Tensor | None:
    """The position_ids for a forward: as given, or made; None lets the model make them.

    Made by document, but for a causal model whose rows hold one document each: those count padding
    too, as the model's own do, so that decoding goes on from them.

    Args:
        inputs: the forward's keyword arguments.
        packs: whether a row may hold several documents, or padding.
        causal: whether attention is.

    Raises:
        ValueError: the batch has images, and no positions that could be right there, nor anything
            to make them of.
    """
    given: Tensor | None = inputs.get("position_ids")
    has_vision = vision_tower(base) is not None
    if has_vision and any(inputs.get(name) is not None for name in _GRIDS):
        return _positions_on_images(base, layout, inputs) if given is None else _of_images(given)
    if given is not None:
        return _from_its_first(given, _first_position(base))
    # Such a model would make them from the mask, which is our placeholder.
    if not (packs or has_vision):
        return None
    tokens: Tensor | None = inputs.get("input_ids")
    tokens = inputs["inputs_embeds"] if tokens is None else tokens
    shape = tokens.shape[:2]
    if causal:
        return causal_positions(layout, shape[0]).view(shape)
    return (layout.position_ids() + _first_position(base)).view(shape)


def _first_position(base: nn.Module) -> int:
    """The position of a document's first token: RoBERTa counts from padding_idx + 1."""
    embeddings = base._modules.get("embeddings")
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(embeddings.padding_idx) + 1  # type: ignore[union-attr, arg-type]
    return 0


def _from_its_first(given: Tensor, first: int) -> Tensor:
    """Positions as the model counts them, where a row's are given from 0 on, as collators do.

    A model that counts from another position has none that is 0 at a row's first token.
    """
    if first == 0 or given.ndim != 2:
        return given
    return given + first * (given[:, :1] == 0)


def _of_images(given: Tensor) -> Tensor:
    if given.ndim == 2:
        raise ValueError(
            "position_ids must have 4 rows (text, time, height, width) where a batch has images, "
            f"got {tuple(given.shape)}; leave them out and pass packed_layout= or cu_seq_lens_q=, "
            "to have them made."
        )
    return given


def _positions_on_images(base: Any, layout: PackedLayout, inputs: dict[str, Any]) -> Tensor:
    """Rotary positions `[3, B, S]` by document, 0 at padding.

    Made with the model's own `get_rope_index`, of which each document is a row: it takes the images
    in the order of the tokens.
    """
    input_ids, types = inputs.get("input_ids"), inputs.get("mm_token_type_ids")
    if input_ids is None or types is None:
        raise ValueError(
            "input_ids and mm_token_type_ids (the processor returns it) must be there where a "
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
    about = {name: inputs.get(name) for name in (*_GRIDS, "second_per_grid_ts")}
    rope_3NL, deltas = base.get_rope_index(
        input_ids=input_ids.reshape(-1)[tokens_NL.clamp(min=0)],
        mm_token_type_ids=types.reshape(-1)[tokens_NL.clamp(min=0)],
        attention_mask=is_token_NL,
        **{name: x for name, x in about.items() if x is not None},
    )
    positions = rope_3NL.new_zeros(3, layout.total_tokens)
    positions[:, tokens_NL[is_token_NL]] = rope_3NL[:, is_token_NL]
    if len(documents) == len(input_ids):  # decoding goes on from one document a row
        base.rope_deltas = deltas
    by_row: Tensor = positions.view(3, *input_ids.shape)
    return by_row
