"""`ForwardInputs`: what a forward of a patched model was given, and what its steps found in it.

Shapes: B rows of S tokens, T = B·S.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from flexvarlen.layout.arguments import is_integer_tensor, require_tensor
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.batch.find_layout import BOUNDARIES, GivenDocuments, find_layout
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.batch.positions import GRIDS, text_positions
from flexvarlen.patches.batch.unpacked_rows import why_not_whole_rows
from flexvarlen.patches.models.heads import CHOICES
from flexvarlen.patches.models.layers import is_compiled_by_layer, text_config_of
from flexvarlen.patches.state import Patch

Inputs = dict[str, Any]

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""A model's keyword for its cache: `cache` from transformers 5.24 on, which still takes the other
two; before, `past_key_values`, or `cache_params` in Mamba-2."""

COMPILED_MULTIPLE = 1024
"""Default `unpad_to_multiple_of` of compiled models; docs/benchmarks/preference.md compares it."""


class ForwardInputs:
    """The inputs of one forward of a patched model.

    Attributes:
        module, patch, parts: the model that is called, with a head or without, and its own.
        inputs: its keyword arguments, positions and a 2D mask of integers as int64; the steps
            change them.
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
        mask: the attention_mask, or None.
        why_unpacked: why the forward is not packed (a cache, a 4D mask), or None.
        positions: the position_ids whose restarts mark documents, or None.
    """

    def __init__(self, module: nn.Module, patch: Patch, inputs: Inputs, tokens: Tensor) -> None:
        self.module, self.patch, self.parts = module, patch, patch.parts
        self.inputs, self.tokens = inputs, tokens
        for name in ("position_ids", "attention_mask"):  # sums and differences of few bits wrap
            given = inputs.get(name)
            if isinstance(given, Tensor) and given.ndim < 4 and is_integer_tensor(given):
                inputs[name] = given.to(torch.int64)
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
        self.mask = inputs.get("attention_mask")
        self.why_unpacked = why_not_whole_rows(self.cache, self.mask, self.row_tokens)
        self.positions = text_positions(
            inputs.get("position_ids"),
            has_axes=self.parts.has_axes,
            documents_elsewhere=self.is_explicit
            or self.boundaries["seq_idx"] is not None
            or self.why_unpacked is not None,
        )

    @property
    def cache(self) -> Cache | None:
        """The cache among the arguments, or None.

        Raises:
            ValueError: it is no `transformers.Cache`, such as that of continuous batching.
        """
        given = ((name, self.inputs.get(name)) for name in CACHE_NAMES)
        name, cache = next(((name, x) for name, x in given if x is not None), ("", None))
        if cache is not None and not isinstance(cache, Cache):
            raise ValueError(
                f"{name} must be a transformers.Cache, got {type(cache).__name__}; pass a "
                "DynamicCache, or leave it out."
            )
        return cache

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
    def has_images(self) -> bool:
        """Whether the arguments include images or videos."""
        return any(self.inputs.get(name) is not None for name in GRIDS)

    @property
    def reads_first_token(self) -> bool:
        """Whether an encoder's head reads a row's first token; ModernBERT's may take the mean."""
        of_head = getattr(self.module.config, "classifier_pooling", "cls")
        return not self.parts.causal and of_head == "cls"

    @property
    def is_compiled(self) -> bool:
        """Whether the model is compiled, as a whole or layer by layer."""
        return torch.compiler.is_compiling() or is_compiled_by_layer(self.tower)

    @property
    def unpad_to_multiple_of(self) -> int:
        """What the tokens of a padded batch's packed row are rounded up to a multiple of."""
        if self.patch.unpad_to_multiple_of is not None:
            return self.patch.unpad_to_multiple_of
        return COMPILED_MULTIPLE if self.is_compiled else 1

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


def tokens_of(inputs: Inputs) -> Tensor | None:
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


def flatten_choices(patch: Patch, inputs: Inputs) -> tuple[Inputs, Callable[[Inputs], Inputs]]:
    """Arguments with tokens `[B · choices, S]`, and a function that restores their shapes.

    A multiple-choice head has rows `[B, choices, S]`: each choice is a row like any other.

    Returns:
        Of any other model the arguments themselves, and a function that returns what it is given.
    """
    tokens = tokens_of(inputs) if patch.parts.head == CHOICES else None
    if tokens is None:
        return inputs, lambda prepared: prepared
    rows = tokens.shape[:2]
    of_tokens = [
        name
        for name, x in inputs.items()
        if isinstance(x, Tensor) and x.ndim > 2 and x.shape[:2] == rows
    ]

    def restore(prepared: Inputs) -> Inputs:
        for name in {*of_tokens, "position_ids", "attention_mask"}:  # some are made from documents
            x = prepared.get(name)
            if isinstance(x, Tensor) and len(x) == rows.numel():
                prepared[name] = x.unflatten(0, rows)
        return prepared

    return inputs | {name: inputs[name].flatten(0, 1) for name in of_tokens}, restore


def _is_captured(tokens: Tensor) -> bool:
    """Whether a CUDA graph is captured, which may be replayed on other documents."""
    return tokens.is_cuda and torch.cuda.is_current_stream_capturing()
