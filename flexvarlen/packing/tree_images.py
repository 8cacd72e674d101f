"""Images of samples that share prefixes: which tokens are whose, and those of a row of trees.

Of models whose processor returns `image_grid_thw` and `video_grid_thw` (Qwen2-VL and similar).
Shapes: L tokens of a sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.prefix_tree import PrefixTree
from flexvarlen.packing.images import (
    GRIDS,
    KINDS,
    PIXELS,
    check_images,
    has_images,
    joined_images,
    read_images,
)
from flexvarlen.packing.rope_index import RopeIndex, rope_positions

SAMPLE_COLUMNS = ("mm_token_type_ids", *GRIDS, *PIXELS, "second_per_grid_ts")


class Image(NamedTuple):
    """An image or a video of a sample.

    Attributes:
        kind: the type of its tokens.
        number: its index among those of its kind, of all samples.
        tokens: int64, where its tokens are in the sample.
    """

    kind: int
    number: int
    tokens: NDArray[np.int64]


def any_images(samples: Sequence[Any]) -> bool:
    """Whether a sample has columns of images."""
    return any(isinstance(x, Mapping) and has_images(x) for x in samples)


def rope_index_of(model: Any) -> RopeIndex:
    """The rope index of a model whose samples share images.

    Raises:
        ValueError: the model has no positions in three dimensions.
    """
    found = model if isinstance(model, RopeIndex) else RopeIndex.of(model)
    if found is None:
        raise ValueError(
            "model must have positions in three dimensions, as Qwen-VL models do, where samples "
            f"have images, got {type(model).__name__}; leave model out for samples of text."
        )
    return found


def images_in(types: NDArray[np.int64], columns: Mapping[str, Any]) -> list[Image]:
    """Images and videos, in the order of their first tokens.

    Args:
        types: int64 `[L]`.
        columns: of images, checked by `check_images`; grids on the host.
    """
    found = []
    for kind, (grid_name, pixels_name) in KINDS.items():
        if columns.get(grid_name) is not None:
            tokens, patches = np.flatnonzero(types == kind), np.asarray(columns[grid_name]).prod(-1)
            ends = np.cumsum([0, *patches]) // (len(columns[pixels_name]) // len(tokens))
            for number, (a, b) in enumerate(pairwise(ends.tolist())):
                found.append(Image(kind, number, tokens[a:b]))
    return sorted(found, key=lambda image: int(image.tokens[0]))


class SharedImages:
    """The images of samples, of which equal ones may be shared.

    Args:
        images: of each sample.
        columns: the columns of images of all samples, joined; on any device. Reads it.
    """

    def __init__(self, images: Sequence[Sequence[Image]], columns: Mapping[str, Tensor]) -> None:
        self.images, self.columns = images, columns
        self._keys: dict[tuple[int, int], int] = {}
        known: dict[Any, int] = {}
        for kind, (grid_name, pixels_name) in KINDS.items():
            if grid_name not in columns:
                continue
            grid = columns[grid_name].tolist()
            others = columns.get("second_per_grid_ts") if kind == 2 else None
            seconds = [0.0] * len(grid) if others is None else others.tolist()
            hashes = _hashes(columns[pixels_name], columns[grid_name].prod(-1))
            for index, what in enumerate(zip(map(tuple, grid), seconds, hashes, strict=True)):
                self._keys[kind, index] = known.setdefault((kind, what), len(known) + 1)

    def with_image_ids(self, rows: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
        """The rows `[L, C]` with a number more: of the image that a token belongs to, 0 at text."""
        found = []
        for row, images in zip(rows, self.images, strict=True):
            keys = np.zeros(len(row), np.int64)
            for image in images:
                keys[image.tokens] = self._keys[image.kind, image.number]
            found.append(np.column_stack([row, keys]))
        return found

    def of_tree(self, tree: PrefixTree) -> dict[str, Tensor]:
        """The columns of images for a row of trees: of each segment its own.

        Raises:
            ValueError: an image lies in two segments.
        """
        taken: dict[int, list[int]] = {kind: [] for kind in KINDS}
        for sample, start, stop in tree.pieces:
            for kind, number, tokens in self.images[sample]:
                if start <= tokens[0] < stop:
                    taken[kind].append(number)
                    if tokens[-1] >= stop:
                        raise ValueError(
                            f"samples must not branch inside an image, got one in sample {sample}; "
                            "let a token of text follow it, before labels differ."
                        )
        found = {}
        for kind, (grid_name, pixels_name) in KINDS.items():
            if not taken[kind]:
                continue
            grid, pixels = self.columns[grid_name], self.columns[pixels_name]
            ends = np.cumsum([0, *grid.prod(-1).tolist()])
            patches = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in taken[kind]])
            found[grid_name] = grid[torch.tensor(taken[kind], device=grid.device)]
            found[pixels_name] = pixels[torch.from_numpy(patches).to(pixels.device)]
            if kind == 2 and (seconds := self.columns.get("second_per_grid_ts")) is not None:
                found["second_per_grid_ts"] = seconds[torch.tensor(taken[kind])]
        return found


class ImagesOfSamples:
    """The images of samples, and their tokens.

    Args:
        samples: token ids, or mappings with columns of images.
        ids: int64 `[L]` of each.
    """

    def __init__(self, samples: Sequence[Any], ids: Sequence[NDArray[np.int64]]) -> None:
        found, self.types, columns = [], [], []
        seen = Counter[int]()
        for index, (sample, tokens) in enumerate(zip(samples, ids, strict=True)):
            given = sample if isinstance(sample, Mapping) else {}
            own = read_images(given)
            types = np.zeros_like(tokens)
            if given.get("mm_token_type_ids") is not None:
                types = np.asarray(given["mm_token_type_ids"]).astype(np.int64)
            if types.shape != tokens.shape:
                raise ValueError(
                    f"mm_token_type_ids of sample {index} must have a value for each of "
                    f"{len(tokens)} tokens, got shape {list(types.shape)}; pass what the processor "
                    "returns."
                )
            check_images(own | {"mm_token_type_ids": types})
            images = images_in(types, own)
            found.append([x._replace(number=seen[x.kind] + x.number) for x in images])
            seen.update(x.kind for x in images)
            self.types.append(types)
            columns.append(own)
        self.ids, self.columns = ids, joined_images(columns)
        self.shared = SharedImages(found, self.columns)

    def row(self, tree: PrefixTree, layout: PackedLayout, model: Any) -> dict[str, Tensor]:
        """What the model gets of images; see `SharedPrefixes`."""
        if model is None:
            raise ValueError(
                "model must be given where samples have images, to compute their position_ids, got "
                "None; pass model=model."
            )
        rope = rope_index_of(model)
        lengths = [len(x) for x in self.ids]
        ids, types = (torch.from_numpy(np.concatenate(x)) for x in (self.ids, self.types))
        samples = PackedLayout.from_lengths(lengths)
        positions_4T, _ = rope_positions(rope, samples, ids, types, self.columns)
        of_samples = torch.cat([positions_4T, types[None]]).T.split(lengths)
        row_5T = torch.zeros(5, layout.total_tokens, dtype=torch.long)
        row_5T[:, : sum(tree.lengths)] = tree.take(of_samples).T
        return {
            **self.shared.of_tree(tree),
            "position_ids": row_5T[:4, None],
            "mm_token_type_ids": row_5T[4:],
        }


def _hashes(pixels: Tensor, patches: Tensor) -> list[int]:
    """A 64-bit number for each image: equal for equal images.

    Of random weights, so that two images that differ get equal ones with a probability below
    2**-40. Bits are not compared: pixels would have to be copied to the host.
    """
    of_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = pixels.contiguous().view(of_bits[pixels.element_size()]).flatten(1)
    image = torch.arange(len(patches), device=pixels.device).repeat_interleave(
        patches.to(pixels.device), output_size=len(pixels)
    )
    first = (patches.cumsum(0) - patches).to(pixels.device)[image]
    number = torch.arange(len(pixels), device=pixels.device) - first
    weights = [
        torch.randint(-(2**63), 2**63 - 1, (n,), generator=torch.Generator().manual_seed(n))
        for n in (bits.shape[1], int(patches.max()))
    ]
    columns, rows = (x.to(pixels.device) for x in weights)
    of_rows = torch.cat([(x.long() * columns).sum(-1) for x in bits.split(4096)])
    made = torch.zeros(len(patches), dtype=torch.int64, device=pixels.device)
    found: list[int] = made.index_add_(
        0, image, (of_rows ^ (of_rows >> 29)) * rows[number]
    ).tolist()
    return found
