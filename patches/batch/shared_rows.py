"""Padded batches whose packed row holds each prefix that rows have in common once, as a tree.

Shapes: B rows of S tokens with padding; L real tokens of a row, with C integers each; T tokens of
the packed row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.prefix_tree import PrefixTree
from flexvarlen.layout.routed_experts import route_ids
from flexvarlen.layout.token_map import SharedPadding
from flexvarlen.packing.images import GRIDS, IMAGES, check_images
from flexvarlen.packing.tree_images import SAMPLE_COLUMNS, Image, SharedImages, images_in
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.state import ROUTES

MIN_SHARED_TOKENS = 32
"""A shorter prefix is not shared: it saves less than a deeper tree costs."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def share_prefixes_of_rows(
    padded: PaddedBatch, inputs: dict[str, Any], *, multiple_of: int
) -> PaddedBatch:
    """The same batch, with prefixes that its rows share once in its packed row.

    Rows share a token if it has the same offset in both, and all inputs of it and of every token
    before it are equal, images, positions and replayed experts included.

    Args:
        padded: without any that is shared yet.
        inputs: the base model's arguments. Nothing is shared if there are embeddings among them.
        multiple_of: T is rounded up to a multiple of this.

    Searched on the host: reads the device once.
    """
    batch, row_tokens = padded.shape
    of_tokens = padded.inputs_of_tokens(inputs)
    routes = of_tokens.pop(ROUTES, None)
    if any(x.ndim > 2 or x.is_floating_point() for x in of_tokens.values()):
        return padded
    real = padded.tokens.leave(torch.ones_like(padded.tokens.offsets, dtype=torch.bool)[None])
    compared = {name: x for name, x in of_tokens.items() if len(x) == batch}
    positions: Tensor | None = inputs.get("position_ids")
    if positions is not None and positions.ndim == 3:
        compared |= {f"position {i}": x for i, x in enumerate(positions)}
    if routes is not None:
        compared[ROUTES] = _numbered(routes)
    rows = _rows_of(list(compared.values()), real)
    lengths = [len(row) for row in rows]
    images = None
    given = [name for name in IMAGES if inputs.get(name) is not None]
    if given:
        if "mm_token_type_ids" not in compared or not any(name in GRIDS for name in given):
            raise NotImplementedError(
                "share_prefixes=True is not supported with images of models other than Qwen-VL, "
                "which come with image_grid_thw or video_grid_thw and mm_token_type_ids, got "
                f"{', '.join(given)}; leave share_prefixes=True out."
            )
        types = 2 + list(compared).index("mm_token_type_ids")
        images = _images_of([row[:, types] for row in rows], inputs)
        rows = images.with_image_ids(rows)
    tree = PrefixTree(rows, min_tokens=MIN_SHARED_TOKENS)
    tokens = sum(tree.lengths)
    if tokens == sum(lengths):
        return padded
    total = -(-tokens // multiple_of) * multiple_of
    slots = batch * row_tokens
    token_offsets = real.flatten().nonzero_static(size=sum(lengths))[:, 0]  # row by row
    offsets = tree.take(token_offsets.split(lengths))
    # Padding reads different tokens: a backward that adds all of it into one is slow.
    index = torch.arange(slots, device=offsets.device) % total
    paths = torch.cat(tree.paths()).to(offsets.device)
    layout = PackedLayout.from_tree(
        tree.lengths,
        tree.parents,
        total_tokens=total,
        device=offsets.device,
        max_depth=round_up_to_power_of_two(tree.depth),  # few graphs
    )
    shared = SharedPadding(
        torch.nn.functional.pad(offsets, (0, total - tokens), value=slots),
        batch,
        row_tokens,
        packed_index=index.index_copy(0, token_offsets, paths),
        real=real.flatten(),
    )
    columns = {} if images is None else images.of_tree(tree)
    return replace(padded, layout=layout, tokens=shared, images=columns)


def _numbered(routes: Tensor) -> Tensor:
    """int64 `[B, S]`, equal where tokens have equal routes, of `[B, S, M, K]`."""
    on_host = routes.cpu().numpy().reshape(-1, *routes.shape[2:])
    numbers = torch.from_numpy(route_ids([on_host])[0])
    return numbers.view(routes.shape[:2]).to(routes.device)


def _images_of(types: list[NDArray[np.int64]], inputs: dict[str, Any]) -> SharedImages:
    """The images of rows, by the types of their tokens `[L]`; joined in the order of the rows.

    Raises:
        ValueError: an image's tokens lie in two rows.
    """
    given = {name: inputs[name] for name in SAMPLE_COLUMNS if inputs.get(name) is not None}
    columns = {name: torch.as_tensor(x) for name, x in given.items()}
    on_host: dict[str, Any] = {
        name: x.cpu().numpy() if name in GRIDS else x for name, x in columns.items()
    }
    flat = np.concatenate(types)
    apart = np.concatenate([np.append(row, 0) for row in types])  # runs of two rows are two
    check_images(on_host | {"mm_token_type_ids": apart})
    found: list[list[Image]] = [[] for _ in types]
    ends = np.cumsum([len(row) for row in types])
    for image in images_in(flat, on_host):
        row = int(np.searchsorted(ends, image.tokens[0], "right"))
        if image.tokens[-1] >= ends[row]:
            raise ValueError(
                "pixel_values must be those of the rows' mm_token_type_ids, in the order of the "
                f"rows, got an image whose tokens go on after row {row}; pass what the processor "
                "returns."
            )
        found[row].append(image._replace(tokens=image.tokens - (ends[row] - len(types[row]))))
    return SharedImages(found, columns)


def _rows_of(inputs: list[Tensor], real: Tensor) -> list[NDArray[np.int64]]:
    """int64 `[L, C]` on the host, of each row: its tokens' offsets in the batch, and their inputs.

    Args:
        inputs: `[B, S]`.
        real: bool `[B, S]`, False at padding, which is before and after a row's tokens.
    """
    offsets = torch.arange(real.shape[1], device=real.device).expand_as(real)
    columns = torch.stack([real, offsets, *inputs], dim=2).long().cpu().numpy()
    is_real = columns[:, :, 0] > 0
    starts, lengths = is_real.argmax(1), is_real.sum(1)
    return [row[a : a + n] for row, a, n in zip(columns, starts, lengths, strict=True)]
