"""`ForwardInputs`: what a forward of a patched model was given, and what its steps found in it.

Shapes: B rows of S tokens, T = B·S.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.layout.arguments import require_tensor
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.batch.cache import cache_of
from flexvarlen.patches.batch.find_layout import BOUNDARIES, GivenDocuments, find_layout
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.batch.positions import text_positions
from flexvarlen.patches.batch.unpacked_rows import why_not_whole_rows
from flexvarlen.patches.models.layers import text_config_of
from flexvarlen.patches.state import Patch


class ForwardInputs:
    """The inputs of one forward of a patched model.

    Attributes:
        module, patch, parts: the model that is called, with a head or without, and its own.
        inputs: its keyword arguments; the steps change them.
        tokens: `[B, S]` ids or `[B, S, hidden]` embeddings.
        tower, config: of text.
        group: the ranks over which a row is sharded, or None.
        padded: the padded batch that the base model runs as this packed row, or None.
        padded_by_head: whether the head found it.
        packs: whether a row may hold several documents, or padding.

    From `take_boundaries` on:
        batch, row_tokens: B and S.
        boundaries: the arguments that only mark documents, None where not given; taken out of
            `inputs`.
        mask, cache: the attention_mask, and the cache under any of `CACHE_NAMES`, or None.
        why_unpacked: why the forward is not packed (a cache, a 4D mask), or None.
        positions: the position_ids whose restarts mark documents, or None.
    """

    def __init__(
        self, module: nn.Module, patch: Patch, inputs: dict[str, Any], tokens: Tensor
    ) -> None:
        self.module, self.patch, self.parts = module, patch, patch.parts
        self.inputs, self.tokens = inputs, tokens
        self.tower: Any = patch.parts.text_tower(module)
        self.config: Any = text_config_of(module.config)
        self.group = patch.sequence_parallel_group
        self.padded: PaddedBatch | None = None
        self.padded_by_head = False
        self.packs = True

    def take_boundaries(self) -> None:
        """Take the boundaries out of the arguments, and see whether the forward is packed."""
        inputs = self.inputs
        self.batch, self.row_tokens = self.tokens.shape[:2]
        self.boundaries = {name: inputs.pop(name, None) for name in BOUNDARIES}
        self.mask, self.cache = inputs.get("attention_mask"), cache_of(inputs)
        self.why_unpacked = why_not_whole_rows(self.cache, self.mask, self.row_tokens)
        self.positions = text_positions(
            inputs.get("position_ids"),
            has_axes=self.parts.has_axes,
            documents_elsewhere=self.is_explicit
            or self.boundaries["seq_idx"] is not None
            or self.why_unpacked is not None,
        )

    @property
    def is_explicit(self) -> bool:
        """Whether the documents are given explicitly."""
        return any(self.boundaries[name] is not None for name in ("packed_layout", "cu_seq_lens_q"))

    @property
    def returns_router_logits(self) -> bool:
        """Whether the forward returns the logits of its experts' routers."""
        asked = self.inputs.get("output_router_logits")
        return bool(getattr(self.config, "output_router_logits", False) if asked is None else asked)

    @property
    def padded_row_tokens(self) -> int | None:
        """S as the caller sees it, if each row may hold one document; else None."""
        if self.padded is not None and self.patch.unpad:
            return self.padded.row_tokens
        return None if self.is_explicit else self.row_tokens

    def find_layout(self) -> PackedLayout:
        """Find the documents; with a group, those of the whole row."""
        layout: PackedLayout | None = self.boundaries["packed_layout"]
        if self.group is None or layout is None:
            layout = find_layout(
                GivenDocuments(
                    self.batch,
                    self.row_tokens,
                    self.tokens.device,
                    position_ids=self.positions,
                    attention_mask=self.mask,
                    capacity=self.patch.capacity,
                    max_seqlen_bound=self.patch.max_seqlen_bound,
                    **self.boundaries,
                )
            )
        if not (torch.compiler.is_compiling() or _is_captured(self.tokens)):
            several = layout.num_docs != self.batch or layout.segments is not None
            self.packs = several or bool(layout.has_padding)
        return layout


def tokens_of(inputs: dict[str, Any]) -> Tensor | None:
    """The `[B, S]` ids or `[B, S, hidden]` embeddings among a forward's arguments.

    Raises:
        ValueError: they are no tensor of this shape.
    """
    name = "inputs_embeds" if inputs.get("input_ids") is None else "input_ids"
    tokens: Tensor | None = inputs.get(name)
    if tokens is not None:
        require_tensor(name, tokens)
        if tokens.ndim < 2:
            raise ValueError(
                f"{name} must have shape [B, S], or [B, S, hidden] of embeddings, got "
                f"{tuple(tokens.shape)}; pass {name}[None] for one row."
            )
    return tokens


def _is_captured(tokens: Tensor) -> bool:
    """Whether a CUDA graph is captured, which may be replayed on other documents."""
    return tokens.is_cuda and torch.cuda.is_current_stream_capturing()
