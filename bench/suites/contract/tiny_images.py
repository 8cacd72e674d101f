"""Documents of the forms with images, for tiny models that take them.

A form says where each document stands; here some of its tokens become tokens of an image, whose
pixels follow from the document's tokens: what changes those changes the image.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from flexvarlen.bench.suites.contract.batch_forms import Batch

IMAGE = 90
AT = {1: 2, 3: 3, 4: 1}
"""The first of an image's 4 tokens, by document; as in a processor's, text is around them."""


class Images(NamedTuple):
    """What a family's processor gives for N images of 4 tokens each.

    Attributes:
        pixels: shape of `pixel_values` without the first axis, N or patches of N images.
        grid: an image's time, height and width in patches, the keyword `image_grid_thw`.
        types: the keyword that is 1 at an image's tokens.
    """

    pixels: tuple[int, ...]
    grid: tuple[int, int, int] | None = None
    types: str | None = None


IMAGES = {
    "gemma3": Images((1, 3, 8, 8), types="token_type_ids"),
    "internvl": Images((1, 3, 16, 16)),
    "qwen3_vl": Images((16, 96), (1, 4, 4), "mm_token_type_ids"),
}
"""By model type."""


def with_images(images: Images | None, batch: Batch, first: int = 0) -> Batch:
    """The batch with images of this kind, if any; its documents are numbered from `first`."""
    if images is None:
        return batch
    inputs = dict(batch.inputs)
    ids = inputs["input_ids"] = 3 + (inputs["input_ids"] - 3).clamp(0) % 77
    pixels = []
    for number, (row, tokens) in enumerate(batch.slices, first):
        if number in AT:
            generator = torch.Generator().manual_seed(int(ids[row, tokens].sum()))
            pixels.append(torch.randn(images.pixels, generator=generator))
            begin = tokens.start + AT[number]
            ids[row, begin : begin + 4] = IMAGE
    if images.types:
        inputs[images.types] = (ids == IMAGE).long()
    if images.grid and "position_ids" in inputs:  # one row for each of text, time, height, width
        inputs["position_ids"] = inputs["position_ids"].expand(4, *ids.shape)
    if pixels:
        inputs["pixel_values"] = torch.cat(pixels).to(ids.device)
        if images.grid:
            inputs["image_grid_thw"] = torch.tensor([images.grid] * len(pixels), device=ids.device)
    return replace(batch, inputs=inputs)
