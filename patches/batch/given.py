"""`Given`: what one forward of a patched model was given.

Shapes: B rows of S tokens, T = B·S.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import Cache

from flexvarlen.layout.arguments import is_integer_tensor, require_tensor, whole_numbers
from flexvarlen.layout.labels import LABEL_COUNTS, SAMPLE_COUNTS
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.batch.find_layout import find_layout
from flexvarlen.patches.batch.given_documents import BOUNDARIES, GivenDocuments
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.batch.unpacked_rows import why_not_whole_rows
from flexvarlen.patches.models.layers import text_config_of
from flexvarlen.patches.parts import ModelParts
from flexvarlen.patches.state import Patch

Inputs = dict[str, Any]

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""A model's keyword for its cache: `cache` from transformers 5.24 on, which still takes the other
two; before, `past_key_values`, or `cache_params` in Mamba-2."""


def fills_cache(inputs: Inputs) -> bool:
    """Whether a forward decodes, or fills a cache, as generation does."""
    has_cache = any(inputs.get(name) is not None for name in CACHE_NAMES)
    return has_cache or bool(inputs.get("use_cache"))


_WITH_TEXT = 4  # rows of position_ids in vision-language models: text, time, height, width


class Given(NamedTuple):
    """The arguments of one forward, read once.

    Attributes:
        module, patch: the model that is called, with a head or without, and its patch.
        inputs: its other keyword arguments; integer position_ids and 2D masks as int64.
        tokens: `[B, S]` ids or `[B, S, hidden]` embeddings.
        boundaries: the arguments that only mark documents, None where not given.
        is_explicit: whether `packed_layout` or `cu_seq_lens_q` is given.
        positions: the position_ids whose restarts mark documents, or None.
        cache: the cache, or None.
        why_unpacked: why the forward is not packed (a cache, a 4D mask), or None.
        padded: the padded batch that the base model runs as this packed row, or None.
        layout: the documents, where a stage has found them.
    """

    module: nn.Module
    patch: Patch
    inputs: Inputs
    tokens: Tensor
    boundaries: Inputs
    is_explicit: bool
    positions: Tensor | None
    cache: Cache | None
    why_unpacked: str | None
    padded: PaddedBatch | None = None
    layout: PackedLayout | None = None

    @property
    def parts(self) -> ModelParts:
        return self.patch.parts

    @property
    def config(self) -> Any:
        """The config of the text tower."""
        return text_config_of(self.module.config)

    @property
    def reads_first_token(self) -> bool:
        """Whether an encoder's head reads a row's first token; ModernBERT's may take the mean."""
        pooling = getattr(self.module.config, "classifier_pooling", "cls")
        return not self.parts.causal and pooling == "cls"

    @property
    def shape(self) -> tuple[int, int]:
        """B and S."""
        return self.tokens.shape[0], self.tokens.shape[1]

    @property
    def mask(self) -> Any:
        """The attention_mask, or None."""
        return self.inputs.get("attention_mask")

    def documents(self) -> PackedLayout:
        """Find the documents, unless a stage has found them.

        Raises:
            ValueError: boundaries that are not valid, or contradict one another.
        """
        if self.layout is not None:
            return self.layout
        return find_layout(
            GivenDocuments(
                *self.shape,
                self.tokens.device,
                position_ids=self.positions,
                attention_mask=self.mask,
                capacity=self.patch.capacity,
                max_seqlen_bound=self.patch.max_seqlen_bound,
                **self.boundaries,
            )
        )


def read_arguments(
    module: nn.Module,
    patch: Patch,
    inputs: Inputs,
    tokens: Tensor,
    padded: PaddedBatch | None = None,
) -> Given:
    """Read the keyword arguments of a forward, once; `inputs` loses its boundaries.

    Raises:
        ValueError: a cache that is none of transformers', or positions of another shape.
    """
    for name in ("position_ids", "attention_mask"):  # int8 and uint8 overflow in sums
        x = inputs.get(name)
        if isinstance(x, Tensor) and x.ndim < 4 and is_integer_tensor(x):
            inputs[name] = x.long()
    for name in (SAMPLE_COUNTS, LABEL_COUNTS):  # no loss takes them
        if name in inputs and inputs[name] is None:
            del inputs[name]
    boundaries = {name: inputs.pop(name, None) for name in BOUNDARIES}
    cache = _cache_of(inputs)
    explicit = any(boundaries[name] is not None for name in ("packed_layout", "cu_seq_lens_q"))
    why_unpacked = why_not_whole_rows(cache, inputs.get("attention_mask"), tokens.shape[1])
    positions = _text_positions(
        inputs.get("position_ids"),
        has_axes=patch.parts.has_axes,
        documents_elsewhere=explicit
        or boundaries["seq_idx"] is not None
        or why_unpacked is not None,
    )
    return Given(
        module,
        patch,
        inputs,
        tokens,
        boundaries=boundaries,
        is_explicit=explicit,
        positions=positions,
        cache=cache,
        why_unpacked=why_unpacked,
        padded=padded,
    )


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


def _cache_of(inputs: Inputs) -> Cache | None:
    """The cache among the arguments, or None.

    Raises:
        ValueError: it is no `transformers.Cache`, such as that of continuous batching.
    """
    for name in CACHE_NAMES:
        cache = inputs.get(name)
        if cache is not None:
            if not isinstance(cache, Cache):
                raise ValueError(
                    f"{name} must be a transformers.Cache, got {type(cache).__name__}; pass a "
                    "DynamicCache, or remove it."
                )
            return cache
    return None


def _text_positions(
    position_ids: Tensor | None, *, has_axes: bool, documents_elsewhere: bool
) -> Tensor | None:
    """The positions `[B, S]` whose restarts mark documents, or None if there are none.

    Rotary positions of time, height and width repeat and jump on an image, so no boundary can be
    read from them. With 4 rows the first one is the text position.

    Args:
        position_ids: `[B, S]`; with `has_axes` also `[1, B, S]` or `[4, B, S]`, the text's first,
            or `[3, B, S]`: time, height and width.
        has_axes: whether the model's rotary positions have these rows.
        documents_elsewhere: positions are not needed, as documents are given explicitly or
            the forward is not packed.

    Raises:
        ValueError: no integers, another shape, or 3 rows without any other source of documents.
    """
    if position_ids is None:
        return None
    if not isinstance(position_ids, Tensor):
        raise ValueError(
            f"position_ids must be an integer tensor [B, S], got {type(position_ids).__name__}; "
            "pass torch.tensor(position_ids)."
        )
    if position_ids.ndim == 2:
        return whole_numbers("position_ids", position_ids)
    rows = position_ids.shape[0] if has_axes and position_ids.ndim == 3 else None
    if rows in (1, _WITH_TEXT):
        return whole_numbers("position_ids", position_ids[0])
    if rows != 3:
        raise ValueError(
            f"position_ids must have shape [B, S], got {tuple(position_ids.shape)}; pass the text "
            "row, or in a vision-language model the text row before time, height and width."
        )
    if documents_elsewhere:
        return None
    raise ValueError(
        "position_ids of only time, height and width need the documents too, as their "
        "boundaries cannot be read from them, got [3, B, S]; put the text positions first, "
        "[4, B, S], or also pass packed_layout= or cu_seq_lens_q=."
    )
