"""Multimodal rotary positions (time, height, width) of Qwen2-VL and similar.

Shapes: B rows of S tokens; N documents of at most L tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flexvarlen.layout.packed_layout import PackedLayout

GRIDS = ("image_grid_thw", "video_grid_thw")
"""The keywords that come with images and videos."""


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
    tokens_NL = _tokens_by_document(layout, layout.lengths).to(input_ids.device)
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


def _tokens_by_document(layout: PackedLayout, lengths: tuple[int, ...]) -> Tensor:
    """int64 `[N, L]` on the host: token indices of each document, without padding; else -1."""
    rest = layout.total_tokens - sum(lengths)
    real = layout.real_tokens().cpu()
    runs = torch.arange(layout.total_tokens, device="cpu").split([*lengths, rest])
    documents = [tokens for tokens in runs if len(tokens) and real[tokens[0]]]
    return pad_sequence(documents, batch_first=True, padding_value=-1)
