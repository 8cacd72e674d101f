"""What processors return for images and videos: columns of images, and positions of their tokens.

Shapes: T tokens of all documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from flexvarlen.layout.labels import IGNORE_INDEX

GRIDS = ("image_grid_thw", "video_grid_thw")
"""The columns that come with images and videos in models with positions in three dimensions."""

PIXELS = ("pixel_values", "pixel_values_videos")
IMAGES = (
    *PIXELS,
    *GRIDS,
    "second_per_grid_ts",
    "image_sizes",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_position_ids",
    "video_position_ids",
)
"""Columns with one row for each image, tile, patch or video, in the order of the tokens."""

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Columns that say of each token whether it is text, 0, or what else it is."""

Columns = Mapping[str, NDArray[Any]]


def joined_images(rows: Sequence[Columns]) -> dict[str, Tensor]:
    """The columns of images of all rows, one after the other.

    All dimensions but the first are padded at their ends, as processors pad images of several
    sizes: with zeros, positions with -1. Floats are float32; models convert them.
    """
    found = {}
    for name in IMAGES:
        given = [row[name] for row in rows if name in row and len(row[name])]
        if given:
            joined = torch.from_numpy(_joined(name, given))
            found[name] = joined.float() if joined.is_floating_point() else joined
    return found


def _joined(name: str, given: list[NDArray[Any]]) -> NDArray[Any]:
    shapes = {x.shape[1:] for x in given}
    if len(shapes) == 1:
        return np.concatenate(given)
    if len({len(shape) for shape in shapes}) > 1:
        raise ValueError(
            f"{name} must have the same number of dimensions in all documents, got shapes "
            f"{sorted(shapes)}; make all documents with one processor."
        )
    fill = -1 if name.endswith("position_ids") else 0  # Gemma 4 marks padding by -1
    whole = np.full((sum(map(len, given)), *np.max(list(shapes), axis=0)), fill, given[0].dtype)
    first = 0
    for x in given:
        whole[(slice(first, first + len(x)), *map(slice, x.shape[1:]))] = x
        first += len(x)
    return whole


def num_patches(columns: Columns) -> int:
    """Patches of a document in Qwen's models; images, or their tiles, in others."""
    pixels = [columns[name] for name in PIXELS if name in columns]
    return sum(len(x) * (x.shape[1] if x.ndim == 5 else 1) for x in pixels)  # images of tiles


def has_images(columns: Mapping[str, Any]) -> bool:
    """Whether a document, or a batch, has images or videos."""
    given = (columns.get(name) for name in (*PIXELS, *GRIDS))
    return any(x is not None and len(x) > 0 for x in given)


def text_alone(columns: Columns) -> NDArray[Any]:
    """The input_ids as labels: -100 at tokens of images.

    Raises:
        ValueError: nothing says which these are.
    """
    tokens, types = columns["input_ids"], columns.get("mm_token_type_ids")
    if types is None and has_images(columns):
        types = columns.get("token_type_ids")  # Gemma 3; elsewhere two sentences
        if types is None:
            raise ValueError(
                "features with images must have labels, or token types by which tokens of images "
                "get none; call the processor with return_mm_token_type_ids=True."
            )
    return tokens if types is None else np.where(types == 0, tokens, IGNORE_INDEX)


# ---- positions in time, height and width ----


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
        """That of a model, or None for a model without positions in three dimensions.

        Raises:
            ValueError: it is not a model.
        """
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"model must be a transformers model, got {type(model).__name__}; pass the model "
                "that is trained."
            )
        having = (x for x in model.modules() if hasattr(x, "get_rope_index"))
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
    input_ids: Tensor,
    types: Tensor,
    documents: Sequence[Tensor],
    images: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """Positions in time, height and width, of each document alone.

    Args:
        get_rope_index: the model's; called for the documents with images.
        input_ids, types: `[T]`, on the CPU.
        documents: the indices of each document's tokens.
        images: the columns of images of all documents, on the CPU.

    Returns:
        int64 `[3, T]`, 0 at tokens of no document, and what decoding adds to positions, `[N, 1]`.
    """
    positions = torch.zeros(3, len(input_ids), dtype=torch.long)
    deltas = torch.zeros(len(documents), 1, dtype=torch.long)
    with_images = [i for i, tokens in enumerate(documents) if types[tokens].any()]
    for i in set(range(len(documents))).difference(with_images):
        positions[:, documents[i]] = torch.arange(len(documents[i]))
    if with_images:
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
        positions[:, tokens_NL[is_token_NL]] = rope_3NL[:, is_token_NL]
    return positions, deltas
