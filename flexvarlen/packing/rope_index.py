"""Positions in time, height and width of tokens and images, by a model's `get_rope_index`.

Shapes: T tokens of N documents of at most L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.packing.images import GRIDS, check_images


@dataclass(frozen=True)
class RopeIndex:
    """The `get_rope_index` of a model, without its weights.

    Attributes:
        kind: the model's class that has it.
        config: of the model.
    """

    kind: type[nn.Module]
    config: Any

    @classmethod
    def of(cls, model: Any) -> RopeIndex | None:
        """The rope index of a model, or None for a model without positions in three dimensions.

        Raises:
            ValueError: it is not a model.
        """
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"model must be a transformers model, got {type(model).__name__}; pass the model "
                "that is trained."
            )
        having = (x for x in model.modules() if hasattr(type(x), "get_rope_index"))
        found: Any = next(having, None)
        return None if found is None else cls(type(found), found.config)

    def __call__(self, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Positions `[3, N, L]` and what decoding adds to them `[N, 1]`; see transformers."""
        model: Any = self.kind.__new__(self.kind)
        nn.Module.__init__(model)
        model.config = self.config
        found: tuple[Tensor, Tensor] = model.get_rope_index(**inputs)
        return found


def rope_positions(
    get_rope_index: Callable[..., tuple[Tensor, Tensor]],
    layout: PackedLayout,
    input_ids: Tensor,
    types: Tensor,
    images: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """Positions in the text, and in time, height and width, of each document alone.

    Args:
        get_rope_index: the model's; called for the documents with images.
        layout: the documents, no trees, with lengths that are known. Reads it.
        input_ids, types: `[T]`, on the CPU.
        images: the columns of images of all documents, on the CPU.

    Raises:
        ValueError: the images do not fit the tokens; `get_rope_index` would stop a loop silently.

    Returns:
        int64 `[4, T]` on the CPU, the last three 0 at padding; and what decoding adds to positions,
        `[N, 1]`, of documents with tokens.
    """
    real, lengths = layout.real_tokens().tolist(), list(layout.lengths or ())
    runs = torch.arange(sum(lengths)).split(lengths)
    documents = [tokens for tokens in runs if len(tokens) and real[tokens[0]]]
    positions = torch.zeros(4, len(input_ids), dtype=torch.long)
    positions[0] = layout.position_ids()
    deltas = torch.zeros(len(documents), 1, dtype=torch.long)
    with_images = [i for i, tokens in enumerate(documents) if types[tokens].any()]
    for i in set(range(len(documents))).difference(with_images):
        positions[1:, documents[i]] = torch.arange(len(documents[i]))
    if with_images:
        ends = torch.zeros(1, dtype=types.dtype)  # runs of two documents are two
        apart = torch.cat([x for i in with_images for x in (types[documents[i]], ends)])
        check_images({**images, "mm_token_type_ids": apart})
        chosen = [documents[i] for i in with_images]
        tokens_NL = pad_sequence(chosen, batch_first=True, padding_value=-1)
        is_token_NL = tokens_NL >= 0
        about = {name: images[name] for name in (*GRIDS, "second_per_grid_ts") if name in images}
        rope_3NL, deltas[with_images] = get_rope_index(
            input_ids=input_ids[tokens_NL.clamp(min=0)],
            mm_token_type_ids=types[tokens_NL.clamp(min=0)],
            attention_mask=is_token_NL,
            **about,
        )
        positions[1:, tokens_NL[is_token_NL]] = rope_3NL[:, is_token_NL]
    return positions, deltas
