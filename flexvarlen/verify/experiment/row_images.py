"""`RowImages`: the images of a row of documents, and those of each document alone.

Shapes: T tokens of the row; a row of pixels is a patch in Qwen-VL models, elsewhere an image or a
tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.packing.images import (
    GRIDS,
    IMAGES,
    KINDS,
    PIXELS,
    TOKEN_TYPES,
    check_images,
    rows_of_pixels,
)
from flexvarlen.packing.rope_index import RopeIndex, rope_positions

SECONDS = "second_per_grid_ts"


@dataclass(frozen=True)
class RowImages:
    """The images of a row; without arguments, none.

    Attributes:
        columns: pixels, and their grids, in the order of the tokens.
        types: int64 `[1, T]`, 1 at tokens of images and 2 at those of videos.
        types_name: the keyword by which the model gets `types`; None: it gets none.
        positions: int64 `[3, 1, T]`, in time, height and width, of each document alone; None of
            models whose positions have one dimension.
        special: tokens that are not replaced, as the model gives them a meaning.
    """

    columns: Mapping[str, Tensor] = field(default_factory=dict)
    types: Tensor = field(default_factory=lambda: torch.zeros(1, 0, dtype=torch.long))
    types_name: str | None = None
    positions: Tensor | None = None
    special: frozenset[int] = frozenset()

    @classmethod
    def read(
        cls,
        batch: Mapping[str, Any],
        real: Tensor,
        documents: Sequence[slice],
        model: Any,
        special: frozenset[int],
    ) -> RowImages:
        """The images of a batch.

        Args:
            batch: a forward's keyword arguments.
            real: bool `[B, S]`, where the T tokens of documents are.
            documents: the indices of each document's tokens in T.
            model: whose `get_rope_index` makes the positions, if it has one.
            special: see the class.

        Raises:
            ValueError: images do not fit the tokens, or nothing says which tokens are theirs.
            NotImplementedError: sizes of images that their model's processor alone can relate to
                tokens.
        """
        ids = batch["input_ids"]
        given = {name: batch[name] for name in IMAGES if batch.get(name) is not None}
        columns = {name: torch.as_tensor(x, device=ids.device) for name, x in given.items()}
        supported = (*PIXELS, *GRIDS, SECONDS)
        for name, x in columns.items():
            if name not in supported or (name in PIXELS and x.ndim == 5):
                raise NotImplementedError(
                    "a comparison needs images of a grid or of a fixed number of tokens, got "
                    f"{name} of shape {list(x.shape)}; check these with fv.verify_isolation."
                )
        types_name = next((name for name in TOKEN_TYPES if batch.get(name) is not None), None)
        if types_name is None:
            check_images(columns)
            image_token = getattr(model.config, "image_token_id", None)
            types = (ids == (-1 if image_token is None else image_token)).long()
        else:
            types = batch[types_name]
        images = cls(columns, types[real][None], types_name, None, special)
        for document in documents:
            images.alone(document)  # raises where it does not have its own
        rope = RopeIndex.of(model)
        if rope is None:
            return images
        on_host = {name: x if name in PIXELS else x.cpu() for name, x in columns.items()}
        row = PackedLayout.from_lengths([each.stop - each.start for each in documents])
        found, _ = rope_positions(rope, row, ids[real].cpu(), types[real].cpu(), on_host)
        return replace(images, positions=found[1:, None].to(ids.device))

    def alone(self, document: slice) -> dict[str, Tensor]:
        """The keyword arguments of a document alone.

        Args:
            document: the indices of its tokens.

        Raises:
            ValueError: some pixels are not known to be its own, or another's.
        """
        found = self._of_tokens(self.types[:, document])
        rows_of = rows_of_pixels(self.columns, self.types[0], [document])
        for kind, (grid_name, name) in KINDS.items():
            pixels, grid = self.columns.get(name), self.columns.get(grid_name)
            if pixels is None and grid is None:
                continue
            are_images = self.types[0] == kind
            own, tokens = int(are_images[document].sum()), int(are_images.sum())
            rows = rows_of.get(name)
            if pixels is None or rows is None or int(rows.sum()) * tokens != own * len(pixels):
                raise ValueError(
                    f"{name} must have equally many rows for each token of images, in each "
                    f"document, got {0 if pixels is None else len(pixels)} rows for {tokens} "
                    "tokens; pass what the processor returns, uncut."
                )
            if own == 0:
                continue
            found[name] = pixels[rows]
            if grid is None:
                continue
            patches = grid.prod(-1)
            is_theirs = rows[patches.cumsum(0) - patches]
            found[grid_name] = grid[is_theirs]
            if name == "pixel_values_videos" and SECONDS in self.columns:
                found[SECONDS] = self.columns[SECONDS][is_theirs]
        return found

    def packed(self, marks: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of the packed row.

        Args:
            marks: those that mark its documents; the positions of images are put under theirs.
        """
        found = {**marks, **self.columns, **self._of_tokens(self.types)}
        if self.positions is not None:
            rows = [marks["position_ids"][None]] if "position_ids" in marks else []
            found["position_ids"] = torch.cat([*rows, self.positions])
        return found

    @property
    def with_types(self) -> dict[str, Tensor]:
        """Pixels and `types`, for `with_other_images`."""
        return {**self.columns, "mm_token_type_ids": self.types}

    def with_pixels(self, pixels: Mapping[str, Tensor]) -> RowImages:
        """The same with other pixels."""
        return replace(self, columns={**self.columns, **pixels})

    def _of_tokens(self, types: Tensor) -> dict[str, Tensor]:
        return {} if self.types_name is None else {self.types_name: types}


NO_IMAGES = RowImages()
