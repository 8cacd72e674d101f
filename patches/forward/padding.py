"""`unpad`: the base model runs a padded batch as a packed row; its head sees the padded batch.

Shapes: B rows of S tokens, T = B·S.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flexvarlen.layout.arguments import to_int_or_none
from flexvarlen.packing.images import has_images
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.batch.given import Given, Inputs, fills_cache, read_arguments
from flexvarlen.patches.batch.labels import next_token_labels
from flexvarlen.patches.batch.padded_batch import PaddedBatch, find_padding
from flexvarlen.patches.batch.positions import padded_positions
from flexvarlen.patches.batch.shared_rows import share_prefixes_of_rows
from flexvarlen.patches.forward.head_checks import check_document_labels, wrap_loss
from flexvarlen.patches.models.layers import runs_compiled
from flexvarlen.patches.state import CONTEXT

COMPILED_MULTIPLE = 1024
"""Default `unpad_to_multiple_of` of compiled models; docs/benchmarks/preference.md compares it."""


def check_unpad(unpad: bool, multiple_of: int | None, share_prefixes: bool) -> None:
    """Check the arguments `unpad`, `unpad_to_multiple_of` and `share_prefixes` of `patch_model`.

    Raises:
        ValueError: a multiple that is no positive integer; or one, or `share_prefixes`, without
            `unpad`.
    """
    if share_prefixes and not unpad:
        raise ValueError(
            "share_prefixes=True finds what the rows of a padded batch share and needs unpad=True, "
            "got unpad=False; pass both, or make trees with fv.share_prefixes."
        )
    if multiple_of is not None and not (unpad and (to_int_or_none(multiple_of) or 0) > 0):
        raise ValueError(
            "unpad_to_multiple_of must be a positive number of tokens and needs unpad=True, got "
            f"{multiple_of!r} and unpad={unpad}; remove it, or pass both."
        )


def unpad_batch(given: Given) -> Given:
    """The packed row of a padded batch's real tokens."""
    padded = _find_padded_batch(given)
    return given if padded is None else run_packed(given, padded)


def unpad_below_head(given: Given) -> Given | Inputs:
    """The arguments of a head whose base model runs its padded batch as a packed row."""
    padded = _find_padded_batch(given)
    return given if padded is None else for_head(given, padded)


def run_packed(given: Given, padded: PaddedBatch) -> Given:
    """The arguments of a base model that runs a padded batch as a packed row.

    Raises:
        ValueError: `return_dict=False` asks for a tuple, whose outputs could not be replaced.
        NotImplementedError: images of other models than Qwen-VL where rows share prefixes.
    """
    require_dict(given.config, given.inputs)
    inputs = given.inputs
    if given.patch.share_prefixes and not padded.several:
        if given.parts.vision_name and has_images(inputs):
            inputs = inputs | {"position_ids": padded_positions(given, padded)}
        padded = share_prefixes_of_rows(padded, inputs, multiple_of=_multiple_of(given))
    row, tokens = padded.inputs_of_row(inputs), padded.tokens.enter(given.tokens)
    if given.patch.same_bits is not None and row.get("position_ids") is None:
        # Not offsets in the padded rows, with which a document's bits depend on its padding.
        row["position_ids"] = padded.layout.position_ids()[None]
    return read_arguments(given.module, given.patch, row, tokens, padded)


def require_dict(config: Any, inputs: Inputs) -> None:
    """Raise where the outputs of a base model are a tuple, in which none can be replaced."""
    return_dict = inputs.get("return_dict")
    if not (config.return_dict if return_dict is None else return_dict):
        raise ValueError(
            "return_dict must stay True for packed or unpadded batches, got False; remove it."
        )


def _find_padded_batch(given: Given) -> PaddedBatch | None:
    """The padded batch that the base model runs as a packed row, or None if it runs as it is.

    Raises:
        NotImplementedError: the forward takes embeddings where the ids of a padded batch are
            needed.

    Reads the device once, if there is a 2D mask.
    """
    inputs, parts, mask = given.inputs, given.parts, given.mask
    has_boundaries = any(x is not None for x in given.boundaries.values())
    if (
        not isinstance(mask, Tensor)
        or mask.shape != given.shape
        or fills_cache(inputs)
        or has_boundaries
    ):
        return None
    found: PaddedBatch | None = find_padding(
        mask,
        given.positions,
        multiple_of=_multiple_of(given),
        even_without=given.patch.share_prefixes,
    )
    needs_ids = parts.head.labels == "document" or not parts.causal
    if found is not None and needs_ids and inputs.get("input_ids") is None:
        raise NotImplementedError(
            "a classifier or encoder needs input_ids for a padded batch, whose padding it knows by "
            "them, got inputs_embeds; pass input_ids, or call patch_model without unpad=True."
        )
    return found


def _multiple_of(given: Given) -> int:
    """What the tokens of a padded batch's packed row are rounded up to a multiple of."""
    if given.patch.same_bits is not None:  # `fill_row` refuses longer rows
        return given.patch.same_bits
    if given.patch.unpad_to_multiple_of is not None:
        return given.patch.unpad_to_multiple_of
    return COMPILED_MULTIPLE if runs_compiled(given.parts.text_tower(given.module)) else 1


def for_head(given: Given, padded: PaddedBatch) -> Inputs:
    """As `head_inputs_for_padded_batch`, with labels at padding masked and pooling checked."""
    head, inputs = given.parts.head, given.inputs
    if head.labels == "next token":
        inputs = inputs | next_token_labels(given, padded.unpredicted_tokens(), several=True)
    elif head.labels == "document" or head.has_choices:
        refuse_rows_to_pool(padded, reads_first=given.reads_first_token)
    return head_inputs_for_padded_batch(given, inputs, padded)


def head_inputs_for_padded_batch(given: Given, inputs: Inputs, padded: PaddedBatch) -> Inputs:
    """Check labels by document, and let the head pass the packed row on to its base model."""
    if given.parts.head.labels == "document":
        check_document_labels(inputs.get("labels"), padded.shape[0])
    if given.parts.drops_keywords:
        inputs["attention_mask"] = padded
    wrap_loss(given.module)
    return inputs | {CONTEXT: padded}


HIDDEN_FIRST_TOKEN = (
    "attention_mask must not hide the first token of a row, which the model's classifier reads, "
    "got padding on the left; pad on the right."
)
"""Raised where a model would read padding."""


def refuse_rows_to_pool(padded: PaddedBatch, *, reads_first: bool) -> None:
    """Refuse rows of which a pooler, or a head that pools, would read padding.

    Args:
        reads_first: whether it reads the first token of each row.

    Raises:
        ValueError: a row holds no token, or begins with padding where its first token is read.
    """
    if padded.has_empty_row:
        raise ValueError(
            "attention_mask must leave at least one token of each row where rows are pooled, got a "
            "row of padding alone; drop it from the batch."
        )
    if padded.pads_left and reads_first:
        raise ValueError(HIDDEN_FIRST_TOKEN)


def pad_outputs(base: nn.Module, packed: PackedForward, outputs: Any) -> None:
    """Give a base model's outputs the shape of its padded batch."""
    padded = packed.row.padded
    if padded is None:
        return
    tokens = padded.tokens
    outputs["last_hidden_state"] = tokens.leave(outputs["last_hidden_state"])
    if outputs.get("hidden_states") is not None:
        outputs["hidden_states"] = tuple(map(tokens.leave, outputs["hidden_states"]))
    if outputs.get("router_logits") is not None:  # [T, E] of each layer, as [B·S, E]
        of_rows = (tokens.leave(x[None]).flatten(0, 1) for x in outputs["router_logits"])
        outputs["router_logits"] = tuple(of_rows)
