"""Padded batches that a model runs as one packed row of their real tokens, and back.

Shapes: B rows of S tokens with padding; T tokens of the packed row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flexvarlen.layout.labels import unpredicted_tokens
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.token_map import Padding
from flexvarlen.packing.images import IMAGES
from flexvarlen.patches.batch.delivery import Delivery


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """A batch of B rows, and the packed row of T tokens that the model runs instead.

    Of a padded batch, in which each row holds one document, the packed row has the real tokens.

    Attributes:
        layout: the documents of the packed row; document i is row i, unless they are trees.
        tokens: how tokens move between the batch and the packed row.
        pads_left: whether any row begins with padding.
        delivery: shared with the head.
        has_empty_row: whether any row is padding alone.
        images: the columns of images of the packed row, if they are not those of the batch.
        several: whether a row of the batch may hold several documents.
    """

    layout: PackedLayout
    tokens: Padding
    pads_left: bool
    delivery: Delivery
    has_empty_row: bool = False
    images: Mapping[str, Tensor] = field(default_factory=dict)
    several: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """B and S."""
        return self.tokens.batch, self.tokens.row_tokens

    def unpredicted_tokens(self) -> Tensor:
        """bool `[B·S]`: True at the first real token of each row and at padding."""
        return self.tokens.leave(unpredicted_tokens(self.layout)[None], padding=True).flatten()

    def offsets_in_rows(self) -> Tensor:
        """int64 `[1, T]`: each token's offset in its row of the batch, padding counted."""
        return (self.tokens.offsets % self.tokens.row_tokens)[None]

    def inputs_of_row(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A base model's arguments for the packed row: each tensor `[B, S, ...]` packed."""
        row = {name: self.tokens.enter(x) for name, x in self.inputs_of_tokens(inputs).items()}
        positions: Tensor | None = inputs.get("position_ids")
        if positions is not None and positions.ndim == 3:  # [4, B, S]: text, time, height, width
            row["position_ids"] = self.tokens.enter(positions.movedim(0, -1)).movedim(-1, 0)
        others = {k: x for k, x in inputs.items() if k not in row and k != "attention_mask"}
        return {**others, **row, **self.images, "packed_layout": self.layout}

    def inputs_of_tokens(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The arguments that have a value for each token: `[B, S, ...]` or `[1, S, ...]`."""
        shapes = (self.shape, (1, self.shape[1]))
        return {
            name: value
            for name, value in inputs.items()
            if isinstance(value, Tensor)
            and value.shape[:2] in shapes
            and name != "attention_mask"
            and name not in IMAGES
        }

    def inputs_of_batch(self, inputs: dict[str, Any], pad_token_id: int | None) -> dict[str, Any]:
        """A head's arguments for the padded batch, from those for packed rows.

        Args:
            inputs: without boundaries; tensors of all tokens are padded, any other is kept, as
                the labels are.
            pad_token_id: of the head's config, by which it finds a row's last token.

        Raises:
            ValueError: no pad_token_id for several rows.
        """
        ids: Tensor | None = inputs.get("input_ids")
        tokens = inputs["inputs_embeds"] if ids is None else ids
        if pad_token_id is None and self.shape[0] > 1:
            raise ValueError(
                "config.pad_token_id must be set on a model that classifies packed documents, as "
                "its head finds each document's last token by it, got None; set it to the "
                "tokenizer's pad_token_id."
            )
        batch = {
            name: self.tokens.leave(
                value.expand(len(tokens), *value.shape[1:]).reshape(1, -1, *value.shape[2:]),
                padding=(pad_token_id or 0) if name == "input_ids" else 0,
            )
            if isinstance(value, Tensor)
            and value.shape[:2] in (tokens.shape[:2], (1, tokens.shape[1]))
            and name != "labels"  # of documents
            else value
            for name, value in inputs.items()
        }
        mask = self.tokens.leave(torch.ones_like(self.tokens.offsets)[None])
        positions = self.tokens.leave(self.layout.position_ids()[None])
        return {"position_ids": positions, **batch, "attention_mask": mask}


# Reads the device, which a graph cannot: a compiled model has a graph break here, once a forward.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def find_padding(
    attention_mask: Tensor,
    position_ids: Tensor | None,
    *,
    multiple_of: int,
    even_without: bool = False,
) -> PaddedBatch | None:
    """The padded batch that a 2D mask describes.

    A row may hold several documents if its mask numbers them, if there is padding between its real
    tokens, or if its positions restart.

    Args:
        attention_mask: `[B, S]`, 0 at padding and 1 elsewhere; other values number documents.
        position_ids: integer `[B, S]` or `[1, S]`; a restart inside a row begins a document.
        multiple_of: T is rounded up to a multiple of this.
        even_without: return a batch that has no padding too.

    Returns:
        None if there is no padding and not `even_without`, or if a row may hold several documents.

    Reads the device once.
    """
    batch, row_tokens = attention_mask.shape
    real = attention_mask != 0
    begins = real & torch.nn.functional.pad(~real[:, :-1], (1, 0), value=True)
    several = (real & (attention_mask != 1)).any() | (begins.sum(dim=1) > 1).any()
    if position_ids is not None:
        jumps = position_ids.diff(dim=1) != 1
        several = several | (jumps & real[:, 1:] & real[:, :-1]).any()
    first_is_padding = (~real[:, :1] & real.any(dim=1, keepdim=True)).any()
    read = torch.cat([real.sum(dim=1), torch.stack([first_is_padding, several])]).tolist()
    *lengths, pads_left, has_several = read
    real_tokens = sum(lengths)
    if has_several or (real_tokens == batch * row_tokens and not even_without):
        return None
    total = -(-max(real_tokens, 1) // multiple_of) * multiple_of
    flat = real.flatten()
    offsets = flat.nonzero_static(size=total, fill_value=len(flat))[:, 0]
    layout = PackedLayout.from_lengths(lengths, total_tokens=total, device=flat.device)
    tokens = Padding(offsets, batch, row_tokens)
    return PaddedBatch(layout, tokens, bool(pads_left), Delivery(), has_empty_row=0 in lengths)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def pad_documents(layout: PackedLayout, *, pads_left: bool) -> PaddedBatch:
    """A batch with one row for each document of a packed layout, as heads that pool take it.

    Padding and empty documents have no row. Reads the device once.

    Args:
        pads_left: whether padding is on the left. transformers' heads find a row's last token by
            its ids, padded on either side; without ids they read the row's last one.

    Raises:
        ValueError: no document has tokens.
    """
    real, first = layout.real_documents(), layout.first_tokens()
    lengths = torch.where(real, layout.last_tokens() + 1 - first, 0)
    batch, row_tokens = torch.stack([real.sum(), lengths.max()]).tolist()
    if not batch:
        raise ValueError(
            "a packed row must hold a document, got padding alone; drop such a batch before the "
            "model is called."
        )
    before = row_tokens - lengths if pads_left else torch.zeros_like(lengths)
    first_offset = (real.cumsum(0) - 1) * row_tokens + before  # of each document
    slots = layout.document_ids().clamp(max=len(real) - 1).long()
    offsets = first_offset[slots] + layout.position_ids()
    offsets = torch.where(layout.real_tokens(), offsets, batch * row_tokens)
    return PaddedBatch(layout, Padding(offsets, batch, row_tokens), pads_left, Delivery())
