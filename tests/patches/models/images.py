"""Documents of text and images: what a processor gives for them, and their positions alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import flexvarlen as fv
from tests import forms
from tests.tiny_models import new_model

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
IMAGE, _, BEGIN, END = (90, 91, 92, 93)
# Images of each document, as frames, height and width: none, one, two, one of two frames.
GRIDS = ([(1, 8, 4)], [], [(1, 4, 4), (1, 12, 6)], [(2, 6, 4)], [])
TEXT = (7, 30, 11, 5, 1)


@dataclass(frozen=True)
class Document:
    """A text of L tokens, some of which stand for images.

    Attributes:
        ids, types: `[L]`; types are 1 at tokens of images.
        grid: `[images, 3]`.
        patches: `[patches, 96]`, fp32.
    """

    ids: Tensor
    types: Tensor
    grid: Tensor
    patches: Tensor


@cache
def documents() -> tuple[Document, ...]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for tokens, images in zip(TEXT, GRIDS, strict=True):
        ids = torch.randint(3, 80, (tokens,), generator=generator).tolist()
        types = [0] * tokens
        for frames, height, width in images:
            own = frames * height * width // 4
            ids += [BEGIN, *[IMAGE] * own, END, 5, 6]
            types += [0, *[1] * own, 0, 0, 0]
        grid = torch.tensor(images, dtype=torch.long).view(-1, 3)
        patches = torch.randn(int(grid.prod(-1).sum()), 96, generator=generator)
        made.append(Document(torch.tensor(ids), torch.tensor(types), grid, patches))
    return tuple(made)


LENGTHS = [len(x.ids) for x in documents()]
ROW = forms.row_of(LENGTHS)
PATCHES = torch.cat([x.patches for x in documents()])
GRID = torch.cat([x.grid for x in documents()])


def layout() -> fv.PackedLayout:
    return fv.PackedLayout.from_lengths(LENGTHS)


def inputs_of(some: Sequence[Document]) -> dict[str, Tensor]:
    """The processor's keywords for these documents in one row."""
    inputs = {
        "input_ids": torch.cat([x.ids for x in some])[None],
        "mm_token_type_ids": torch.cat([x.types for x in some])[None],
    }
    grid = torch.cat([x.grid for x in some])
    if len(grid):
        inputs |= {"pixel_values": torch.cat([x.patches for x in some]), "image_grid_thw": grid}
    return inputs


@cache
def positions(family: str) -> Tensor:
    """`[3, T]`: in time, height and width, of each document alone."""
    model, found = new_model(family).model, []
    for document in documents():
        own = torch.arange(len(document.ids)).expand(3, -1)
        if len(document.grid):
            ids, types = document.ids[None], document.types[None]
            own = model.get_rope_index(ids, types, image_grid_thw=document.grid)[0][:, 0]
        found.append(own)
    return torch.cat(found, dim=1)


def four_rows(family: str) -> Tensor:
    """`[4, 1, T]`: the text's own, by which documents are found, then those of `positions`."""
    return torch.cat([ROW.position_ids, positions(family)])[:, None]


FORMS: dict[str, Any] = {
    "four_rows": lambda family: {"position_ids": four_rows(family)},
    "packed_layout": lambda family: forms.given("packed_layout", ROW),
    "cu_seq_lens": lambda family: forms.given("cu_seq_lens", ROW, "cu_seq_lens_k"),
    "three_rows_and_layout": lambda family: {
        **forms.given("packed_layout", ROW),
        "position_ids": positions(family)[:, None],
    },
    "document_id_mask": lambda family: forms.given("document_ids", ROW),
}
"""The keywords beside `inputs_of`, by the family whose positions they may hold."""
