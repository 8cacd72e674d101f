"""`ForwardInputs`: what a forward of a patched model was given, before its documents are found.

Shapes: B rows of S tokens, T = B·S.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.batch.cache import cache_of
from flexvarlen.patches.batch.find_layout import BOUNDARIES, GivenDocuments, find_layout
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.batch.positions import text_positions
from flexvarlen.patches.batch.unpacked_rows import why_not_whole_rows
from flexvarlen.patches.models.layers import base_of, text_config_of
from flexvarlen.patches.models.qwen_vl import has_axes
from flexvarlen.patches.state import Patch


class ForwardInputs:
    """The inputs of one forward of a patched model, before the documents are found.

    Attributes:
        module, base: the model that is called, and the one that holds the layers.
        patch: of the model.
        inputs: its keyword arguments, without the boundaries; the steps change them.
        tokens: `[B, S]` ids or `[B, S, hidden]` embeddings.
        padded: the padded batch from which this packed row was made, or None.
        boundaries: the arguments that only mark documents, None where not given.
        config: of the text tower.
        causal: whether attention is causal.
        cache: under any of `CACHE_NAMES`, or None.
        why_unpacked: why the forward is not packed (a cache, a 4D mask), or None.
        positions: the position_ids whose restarts mark documents, or None.
        packs: whether a row may hold several documents, or padding.
    """

    def __init__(
        self,
        module: nn.Module,
        patch: Patch,
        inputs: dict[str, Any],
        tokens: Tensor,
        padded: PaddedBatch | None,
    ) -> None:
        self.module, self.patch, self.inputs, self.tokens = module, patch, inputs, tokens
        self.padded = padded
        self.base: Any = base_of(module)  # type: ignore[arg-type]
        self.config: Any = text_config_of(module.config)
        self.group = patch.sequence_parallel_group
        self.batch, self.row_tokens = tokens.shape[:2]
        self.causal = patch.causal
        self.boundaries = {name: inputs.pop(name, None) for name in BOUNDARIES}
        self.mask, self.cache = inputs.get("attention_mask"), cache_of(inputs)
        self.why_unpacked = why_not_whole_rows(self.cache, self.mask, self.row_tokens)
        self.positions = text_positions(
            inputs.get("position_ids"),
            has_axes=has_axes(self.config),
            documents_elsewhere=self.is_explicit
            or self.boundaries["seq_idx"] is not None
            or self.why_unpacked is not None,
        )
        self.packs = True

    @property
    def is_explicit(self) -> bool:
        """Whether the documents are given explicitly."""
        return any(self.boundaries[name] is not None for name in ("packed_layout", "cu_seq_lens_q"))

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


def _is_captured(tokens: Tensor) -> bool:
    """Whether a CUDA graph is captured, which may be replayed on other documents."""
    return tokens.is_cuda and torch.cuda.is_current_stream_capturing()
