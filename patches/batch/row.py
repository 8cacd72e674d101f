"""`PackedRow`: the packed row of one forward, as it follows from what was given."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.batch.labels import NO_TARGETS, Targets
from flexvarlen.patches.batch.padded_batch import PaddedBatch


class ImageRuns(NamedTuple):
    """Tokens of images that see one another both ways.

    Attributes:
        layer_types: the types of the layers in which they do.
        tokens: int32 `[2, T]`, start and end of each token's run, of `runs_of`.
    """

    layer_types: tuple[str, ...]
    tokens: Tensor


class PackedRow(NamedTuple):
    """The documents of one forward, and what follows from them.

    Attributes:
        layout: the documents.
        several: whether a row of the batch may hold several documents, or padding.
        padded: the padded batch that runs as this packed row, or None.
        padded_row_tokens: S of the caller's rows, if each may hold one document; else None.
        position_ids: for the model; None lets it count from 0 in each row.
        targets: what a head learns.
        fills_cache: whether the forward fills a cache, from rows of one document each.
        use_cache: replaces the argument, unless None.
        pooled_tokens: int64, offsets among all B·S tokens of those that a base model's pooler must
            read; None: the first of each row, which it reads by itself.
        image_runs: tokens of images that see one another both ways, or None.
        routes: int `[T, M, K]`, the experts that routers replay (-1: their own), or None.
    """

    layout: PackedLayout
    several: bool = True
    padded: PaddedBatch | None = None
    padded_row_tokens: int | None = None
    position_ids: Tensor | None = None
    targets: Targets = NO_TARGETS
    fills_cache: bool = False
    use_cache: bool | None = None
    pooled_tokens: Tensor | None = None
    image_runs: ImageRuns | None = None
    routes: Tensor | None = None

    def to(self, device: torch.device, *, non_blocking: bool) -> PackedRow:
        """The row with what layers read of it on another device."""
        runs, routes = self.image_runs, self.routes
        if runs is not None:
            runs = runs._replace(tokens=runs.tokens.to(device, non_blocking=non_blocking))
        if routes is not None:
            routes = routes.to(device, non_blocking=non_blocking)
        return self._replace(image_runs=runs, routes=routes)
