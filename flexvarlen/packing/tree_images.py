"""Images of samples that share prefixes: which tokens are whose, and those of a row of trees.

Shapes: L tokens of a sample; T of the trees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.prefix_tree import PrefixTree
from flexvarlen.packing.images import GRIDS, PIXELS, RopeIndex, joined_images, rope_positions

TYPES = "mm_token_type_ids"
_KINDS = (
    (1, "image_grid_thw", "pixel_values", ()),
    (2, "video_grid_thw", "pixel_values_videos", ("second_per_grid_ts",)),
)
"""Type of the tokens, the columns of their images, and others with a row for each."""

SAMPLE_COLUMNS = (TYPES, *GRIDS, *PIXELS, "second_per_grid_ts")


@dataclass(frozen=True)
class Image:
    """An image or a video of a sample.

    Attributes:
        tokens: int64, where its tokens are in the sample.
        columns: its rows of each column.
    """

    tokens: NDArray[np.int64]
    columns: dict[str, NDArray[Any]]

    def digest(self) -> bytes:
        """Equal for equal images."""
        made = hashlib.blake2b(digest_size=16)
        for name, values in self.columns.items():
            made.update(f"{name} {values.dtype} {values.shape}".encode())
            made.update(values.tobytes())
        return made.digest()


def any_images(samples: Sequence[Any]) -> bool:
    """Whether a sample has columns of images."""
    names = (*PIXELS, *GRIDS)
    mappings = (x for x in samples if isinstance(x, Mapping))
    return any(sample.get(name) is not None for sample in mappings for name in names)


class TreeImages:
    """The images of samples.

    Args:
        samples: token ids, or mappings with columns of images.
        ids: int64 `[L]` for each.

    Raises:
        ValueError: a sample's columns contradict one another, or are not those of Qwen-VL models.
    """

    def __init__(self, samples: Sequence[Any], ids: Sequence[NDArray[np.int64]]) -> None:
        self.ids, self.types, self.images = ids, [], []
        self.columns: list[dict[str, NDArray[Any]]] = []
        for index, (sample, tokens) in enumerate(zip(samples, ids, strict=True)):
            given = sample if isinstance(sample, Mapping) else {}
            columns = {x: np.asarray(given[x]) for x in SAMPLE_COLUMNS if given.get(x) is not None}
            types = columns.pop(TYPES, np.zeros_like(tokens)).astype(np.int64)
            if types.shape != tokens.shape:
                raise ValueError(
                    f"{TYPES} of sample {index} must have a value for each of {len(tokens)} tokens,"
                    f" got shape {list(types.shape)}; pass what the processor returns."
                )
            self.types.append(types)
            self.columns.append(columns)
            self.images.append(_images_of(index, columns, types))

    def compared_with(self, rows: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
        """The rows `[L, C]` with a number more: of the image that a token belongs to, 0 at text."""
        known: dict[bytes, int] = {}
        found = []
        for row, images in zip(rows, self.images, strict=True):
            keys = np.zeros(len(row), np.int64)
            for image in images:
                keys[image.tokens] = known.setdefault(image.digest(), len(known) + 1)
            found.append(np.column_stack([row, keys]))
        return found

    def row(self, tree: PrefixTree, layout: PackedLayout, model: Any) -> dict[str, Tensor]:
        """What the model gets of images; see `SharedPrefixes`.

        Raises:
            ValueError: an image lies in two segments, or the model is not given.
        """
        if model is None:
            raise ValueError(
                "model must be given where samples have images, whose tokens it gives positions, "
                "got None; pass model=model."
            )
        rope = model if isinstance(model, RopeIndex) else RopeIndex.of(model)
        lengths = [len(x) for x in self.ids]
        ids, types = (torch.from_numpy(np.concatenate(x)) for x in (self.ids, self.types))
        documents = torch.arange(sum(lengths)).split(lengths)
        positions, _ = rope_positions(rope, ids, types, documents, joined_images(self.columns))
        of_samples = torch.cat([positions, types[None]]).T.split(lengths)
        row_4T = torch.zeros(4, layout.total_tokens, dtype=torch.long)
        row_4T[:, : sum(tree.lengths)] = tree.take(of_samples).T
        in_path_1T = layout.position_ids().cpu()[None]
        images = [x.columns for piece in tree.pieces for x in self._whole_in(*piece)]
        return {
            **joined_images(images),
            "position_ids": torch.cat([in_path_1T, row_4T[:3]])[:, None],
            TYPES: row_4T[3:],
        }

    def _whole_in(self, sample: int, start: int, stop: int) -> list[Image]:
        found = [x for x in self.images[sample] if start <= x.tokens[0] < stop]
        if any(x.tokens[-1] >= stop for x in found):
            raise ValueError(
                f"samples must not part inside an image, got one in sample {sample} whose last "
                "token is followed by tokens with different labels; let a token of text follow it."
            )
        return found


def _images_of(
    index: int, columns: Mapping[str, NDArray[Any]], types: NDArray[np.int64]
) -> list[Image]:
    """A sample's images and videos, in the order of their first tokens."""
    found = []
    for kind, grid_name, pixels_name, others in _KINDS:
        tokens = np.flatnonzero(types == kind)
        grid, pixels = (columns.get(name, types[:0]) for name in (grid_name, pixels_name))
        patches = grid.prod(-1) if len(grid) else np.zeros(0, np.int64)
        per_token = len(pixels) // max(len(tokens), 1)
        if patches.sum() != len(pixels) or per_token * len(tokens) != len(pixels):
            raise ValueError(
                f"{pixels_name} of sample {index} must have the patches of {grid_name}, and as "
                f"many for each of {len(tokens)} tokens of {TYPES}, got {len(pixels)}; pass what "
                "the processor of a Qwen-VL model returns."
            )
        last_patches = np.cumsum([0, *patches])
        for number, (a, b) in enumerate(pairwise(last_patches.tolist())):
            rows = {pixels_name: pixels[a:b], grid_name: grid[number : number + 1]}
            rows |= {name: columns[name][number : number + 1] for name in others if name in columns}
            found.append(Image(tokens[a // per_token : b // per_token], rows))
    return sorted(found, key=lambda image: int(image.tokens[0]))
