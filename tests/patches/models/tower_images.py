"""Documents of text and images for models whose images replace tokens before the text model.

The images of a document are what the family's processor gives for them: pixels, padded to the
largest image of the batch, and sizes. Each family has its own; `PROCESSORS` is the list.

Shapes: I images of a batch; heights and widths are in patches of 4 pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

IMAGE, PATCH = 90, 4
BEFORE, AFTER = (7, 30, 11, 0, 1), (3, 0, 0, 5, 0)
"""Tokens of text around each document's images: the third ends in images, the fourth begins so."""
SIZES = ([(2, 4)], [], [(4, 2), (4, 4), (2, 4), (4, 4)], [(4, 2)], [])
"""Height and width of each document's images: one, none, four that touch, one, none."""


class Document(NamedTuple):
    """A text of L tokens, some of which stand for images.

    Attributes:
        ids, types: `[L]`; types are 1 at tokens of images.
        images: of each image, `[3, height, width]` in pixels.
    """

    ids: Tensor
    types: Tensor
    images: tuple[Tensor, ...]


class Processor(NamedTuple):
    """What a family's processor gives.

    Attributes:
        tokens: how many tokens stand for an image of this height and width.
        keywords: for these images, in the order of the tokens.
        types: the keyword of the tokens' types, also of text alone, or None.
        image: the id of a token of an image.
    """

    tokens: Callable[[int, int], int]
    keywords: Callable[[list[Tensor]], dict[str, Tensor]]
    types: str | None = None
    image: int = IMAGE


def _padded(images: list[Tensor]) -> Tensor:
    """`[I, 3, H, W]`, zero beyond an image."""
    height, width = (max(x.shape[axis] for x in images) for axis in (1, 2))
    return torch.stack([pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in images])


def _sizes(images: list[Tensor]) -> Tensor:
    return torch.tensor([x.shape[1:] for x in images])


def _whole(images: list[Tensor], side: int) -> Tensor:
    """`[I, 3, side, side]`, as resized images are."""
    return torch.stack([x.repeat(1, 4, 4)[:, :side, :side] for x in images])


def _patches(image: Tensor) -> Tensor:
    """`[height · width, 48]`: the patches of an image, row by row."""
    tiles = image.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)  # [3, h, w, 4, 4]
    return tiles.permute(1, 2, 3, 4, 0).reshape(-1, 3 * PATCH * PATCH)


def _padded_patches(images: list[Tensor], most: int, **how: Any) -> Tensor:
    """`[I, most, 48]`."""
    return torch.stack([pad(x, (0, 0, 0, most - len(x)), **how) for x in map(_patches, images)])


def _pixtral(images: list[Tensor]) -> dict[str, Tensor]:
    return {"pixel_values": _padded(images), "image_sizes": _sizes(images)}


def _anyres(images: list[Tensor]) -> dict[str, Tensor]:
    """The whole image, and its tiles of 8 pixels: `[I, tiles, 3, 8, 8]`."""
    made = []
    for image in images:
        tiles = image.unfold(1, 8, 8).unfold(2, 8, 8).permute(1, 2, 0, 3, 4).flatten(0, 1)
        made.append(torch.cat([image[None, :, :8, :8], tiles]))
    most = max(map(len, made))
    padded = [pad(x, (0, 0, 0, 0, 0, 0, 0, most - len(x))) for x in made]
    return {"pixel_values": torch.stack(padded), "image_sizes": _sizes(images)}


def _in_a_row_of_images(images: list[Tensor]) -> dict[str, Tensor]:
    """`[1, I, 3, 16, 16]`: Idefics and similar have an axis of rows."""
    mask = _padded([torch.ones_like(x) for x in [*images, torch.ones(3, 16, 16)]])[:-1, 0]
    pixels = _padded([*images, torch.zeros(3, 16, 16)])[:-1]
    return {"pixel_values": pixels[None], "pixel_attention_mask": mask[None].bool()}


def _naflex(images: list[Tensor]) -> dict[str, Tensor]:
    shapes = _sizes(images) // PATCH
    real = torch.arange(16) < shapes.prod(-1)[:, None]
    pixels = _padded_patches(images, 16)
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": real.long()}


def _patches_with_positions(images: list[Tensor]) -> dict[str, Tensor]:
    """Positions are (x, y) of each patch, -1 at padding."""
    positions = []
    for height, width in (_sizes(images) // PATCH).tolist():
        own = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)
        positions.append(pad(own, (0, 0, 0, 16 - len(own)), value=-1))
    return {
        "pixel_values": _padded_patches(images, 16),
        "image_position_ids": torch.stack(positions),
    }


PROCESSORS: dict[str, Processor] = {
    "mistral3": Processor(lambda h, w: h * w // 4, _pixtral),
    "llava_next": Processor(lambda h, w: 4 + h * (w + 1), _anyres),
    "internvl": Processor(lambda h, w: 4, lambda images: {"pixel_values": _whole(images, 16)}),
    "smolvlm": Processor(lambda h, w: 4, _in_a_row_of_images),
    "lfm2_vl": Processor(lambda h, w: h * w // 4, _naflex),
    "gemma3": Processor(
        lambda h, w: 4, lambda images: {"pixel_values": _whole(images, 8)}, "token_type_ids"
    ),
    "gemma4": Processor(
        lambda h, w: h * w // 4, _patches_with_positions, "mm_token_type_ids", image=2
    ),
}


@cache
def documents(family: str) -> tuple[Document, ...]:
    generator = torch.Generator().manual_seed(3)
    made = []
    of = PROCESSORS[family]
    for before, sizes, after in zip(BEFORE, SIZES, AFTER, strict=True):
        images, tokens = [], sum(of.tokens(*size) for size in sizes)
        for height, width in sizes:
            shape = (3, PATCH * height, PATCH * width)
            images.append(torch.randn(shape, generator=generator))
        ids = torch.randint(3, 80, (before + tokens + after,), generator=generator)
        ids[before : before + tokens] = of.image
        made.append(Document(ids, (ids == of.image).long(), tuple(images)))
    return tuple(made)


def inputs_of(family: str, some: Sequence[Document]) -> dict[str, Tensor]:
    """The processor's keywords for these documents in one row."""
    inputs = {"input_ids": torch.cat([x.ids for x in some])[None]}
    if PROCESSORS[family].types:
        inputs[PROCESSORS[family].types] = torch.cat([x.types for x in some])[None]
    images = [image for x in some for image in x.images]
    return {**inputs, **(PROCESSORS[family].keywords(images) if images else {})}


def lengths(family: str) -> list[int]:
    return [len(x.ids) for x in documents(family)]
