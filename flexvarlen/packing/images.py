"""The columns that processors return for images and videos: read, checked and joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    "num_frames_per_video",
)
"""Columns with one row for each image, tile, patch or video, in the order of the tokens."""

SIZES = ("image_sizes", "spatial_shapes", "image_position_ids", "video_position_ids")
"""Columns of models whose images take different numbers of tokens."""

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Columns that say of each token whether it is text, 0, or what else it is."""

KINDS = {1: ("image_grid_thw", "pixel_values"), 2: ("video_grid_thw", "pixel_values_videos")}
"""The type of their tokens, and the columns, of images and videos in Qwen-VL models."""

Columns = Mapping[str, NDArray[Any]]


def read_images(columns: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The columns of images of a document, with a row for each image, tile or patch."""
    found = {}
    for name in IMAGES:
        value = columns.get(name)
        if value is None:
            continue
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            value = torch.stack(list(value))
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            value = value.float() if value.dtype == torch.bfloat16 else value
        shape = {"image_grid_thw": (-1, 3), "video_grid_thw": (-1, 3), "second_per_grid_ts": (-1,)}
        array = np.asarray(value)
        array = array.reshape(shape[name]) if name in shape else array
        if len(array):
            found[name] = array
    pixels = found.get("pixel_values")
    if pixels is not None and pixels.ndim == 5 and "image_sizes" not in found:  # see joined_images
        for name in ("pixel_values", "pixel_attention_mask"):
            if name in found:
                found[name] = found[name].reshape(-1, *found[name].shape[2:])
    return found


def check_images(columns: Mapping[str, Any]) -> None:
    """Check that images and the types of tokens fit together, in a document or in a whole row.

    Args:
        columns: `mm_token_type_ids` `[L]` of the tokens that are kept, grids, and pixels if known.

    Raises:
        ValueError: they do not; another document would get them.
    """
    types = columns.get("mm_token_type_ids")
    types = None if types is None else np.asarray(types)
    highest = 0 if types is None else int(types.max(initial=0))
    for kind, (grid_name, pixels_name) in KINDS.items():
        grid, pixels = columns.get(grid_name), columns.get(pixels_name)
        if grid is None and kind > highest:
            continue
        if types is None and grid is not None:
            raise ValueError(
                "a document with images must have mm_token_type_ids, got none; call the processor "
                "with return_mm_token_type_ids=True."
            )
        if types is None or (grid is None and pixels is not None):  # a model without grids
            continue
        is_image = types == kind
        runs = np.count_nonzero(is_image[1:] & ~is_image[:-1]) + int(is_image[:1].sum())
        grid = np.zeros((0, 3), np.int64) if grid is None else np.asarray(grid)
        patches, tokens = grid.prod(-1), int(np.count_nonzero(is_image))
        frames = int(grid[:, 0].sum())  # of which Qwen3-VL makes a run each
        fits = runs == len(grid) or (kind == 2 and runs == frames)
        if pixels is not None:
            per_token, rest = divmod(len(pixels), max(tokens, 1))
            fits &= int(patches.sum()) == len(pixels) and rest == 0
            fits &= not (patches % max(per_token, 1)).any()
        if not fits:
            raise ValueError(
                f"{grid_name} must have a row for each run of tokens whose mm_token_type_ids are "
                f"{kind}, and as many patches as {pixels_name}, got {len(grid)} rows of "
                f"{int(patches.sum())} patches for {runs} runs of {tokens} tokens and "
                f"{'unknown' if pixels is None else len(pixels)} patches; pass what the processor "
                "returns, uncut."
            )


def joined_images(rows: Sequence[Columns]) -> dict[str, Tensor]:
    """The columns of images of all rows, one after the other.

    All dimensions but the first are padded at their ends, as processors pad images of several
    sizes: with zeros, positions with -1. Floats are float32; models convert them.
    """
    found = {}
    for name in IMAGES:
        given = [row[name] for row in rows if name in row]
        if given:
            joined = torch.from_numpy(_joined(name, given))
            found[name] = joined.float() if joined.is_floating_point() else joined
    seconds, videos = found.get("second_per_grid_ts"), found.get("video_grid_thw", ())
    if seconds is not None and len(seconds) != len(videos):
        raise ValueError(
            f"second_per_grid_ts must be given for all {len(videos)} videos or for none, got "
            f"{len(seconds)}; make all documents with one processor."
        )
    mask = found.get("pixel_attention_mask")
    if mask is not None and mask.ndim == 3:  # of Idefics and SmolVLM, whose images are rows of one
        found |= {x: found[x][None] for x in ("pixel_values", "pixel_attention_mask")}
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
    shape = sum(map(len, given)), *np.max(list(shapes), axis=0)
    whole = np.full(shape, fill, np.result_type(*given))
    first = 0
    for x in given:
        whole[(slice(first, first + len(x)), *map(slice, x.shape[1:]))] = x
        first += len(x)
    return whole


def num_patches(columns: Columns) -> int:
    """Patches of a document in Qwen's models; images, or their tiles, in others."""
    pixels = [columns[name] for name in PIXELS if name in columns]
    return sum(len(x) * (x.shape[1] if x.ndim == 5 else 1) for x in pixels)  # images of tiles


def rows_of_pixels(
    columns: Mapping[str, Any], types: Tensor, documents: Sequence[slice]
) -> dict[str, Tensor]:
    """Which rows of the pixels belong to some documents of a row.

    Each token of images must stand for equally many rows of the pixels, as in Qwen-VL models, or
    each row for equally many tokens. Pixels of which this is not so are left out.

    Args:
        columns: of the images of all documents.
        types: int `[T]`, the type of each token: 1 of images, 2 of videos.
        documents: the tokens of each.

    Returns:
        bool `[rows]` by the name of the pixels.
    """
    found: dict[str, Tensor] = {}
    is_theirs_T = torch.zeros_like(types, dtype=torch.bool)
    for tokens in documents:
        is_theirs_T[tokens] = True
    for kind, (_, name) in KINDS.items():
        pixels = columns.get(name)
        if not isinstance(pixels, Tensor) or not len(pixels):
            continue
        if pixels.ndim == 5 or any(columns.get(x) is not None for x in SIZES):
            continue
        is_theirs = is_theirs_T[types == kind]
        per_token, rest = divmod(len(pixels), max(len(is_theirs), 1))
        per_row, other_rest = divmod(len(is_theirs), len(pixels))
        if rest == 0 and len(is_theirs):
            found[name] = is_theirs.repeat_interleave(per_token)
        elif other_rest == 0 and len(is_theirs):
            found[name] = is_theirs[::per_row]
    return found


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
