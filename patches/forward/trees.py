"""Rows of trees, whose tokens stand for several samples: what cannot be combined with them."""

from __future__ import annotations

from flexvarlen.layout.labels import LABEL_COUNTS
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.packing.images import has_images
from flexvarlen.patches.batch.given import Given
from flexvarlen.patches.forward.router import returns_router_logits
from flexvarlen.patches.models.layers import is_compiled_by_layer
from flexvarlen.patches.refusal import Refusal
from flexvarlen.patches.why_not import why_no_trees


def _other_than(name: str, wanted: bool | int) -> Refusal:
    def when(given: Given) -> str | None:
        x = given.inputs.get(name)
        return None if x in (None, wanted) else repr(x)

    return Refusal(
        when, f"{name} must be {wanted} with a packed_layout of trees, got {{got}}; remove {name}."
    )


def _unsupported(given: Given) -> str | None:
    if why := why_no_trees(given.parts, batch_invariant=given.patch.batch_invariant):
        return why
    if has_images(given.inputs) and not given.parts.vision_name:
        return "images of models other than Qwen-VL"
    learns = given.parts.head.labels
    return None if learns in ("", "next token") else "a head that pools documents"


def _why_no_parts(given: Given) -> str | None:
    layout: PackedLayout | None = given.boundaries["packed_layout"]
    if layout is None or not layout.shard.is_part_of_tree:
        return None
    if given.patch.sequence_parallel_group is not None:
        return "a sequence_parallel_group"
    if is_compiled_by_layer(
        given.parts.text_tower(given.module)
    ):  # a graph for each index of a layer
        return "layers compiled one by one"
    return "output_router_logits" if returns_router_logits(given) else None


# `find_layout` refuses an attention_mask.
TREES = (
    Refusal(
        lambda given: given.inputs.get("labels") is not None,
        "labels cannot be combined with a packed_layout of trees, as the token after a segment "
        "need not be the next on its path; pass the shift_labels and label_counts of "
        "fv.share_prefixes.",
    ),
    Refusal(
        lambda given: (
            given.inputs.get("shift_labels") is not None and given.inputs.get(LABEL_COUNTS) is None
        ),
        "shift_labels must come with label_counts with a packed_layout of trees; take both from "
        "fv.share_prefixes.",
    ),
    _other_than("return_dict", True),
    Refusal(
        lambda given: (
            repr(given.inputs["logits_to_keep"])
            if given.inputs.get("shift_labels") is not None
            and given.inputs.get("logits_to_keep") not in (None, 0)
            else None
        ),
        "logits_to_keep must be 0 with the shift_labels of a packed_layout of trees, got {got}; "
        "remove logits_to_keep.",
    ),
    Refusal(
        lambda given: (
            bool(given.parts.vision_name)
            and has_images(given.inputs)
            and given.inputs.get("position_ids") is None
        ),
        "position_ids of 4 rows must be given with a packed_layout of trees where a batch has "
        "images; pass the batch of fv.share_prefixes(samples, model=model).",
    ),
    Refusal(
        lambda given: given.inputs.get("position_ids") is not None and not has_images(given.inputs),
        "position_ids cannot be combined with a packed_layout of trees, which defines them; remove "
        "position_ids.",
    ),
    Refusal(
        lambda given: bool(given.inputs.get("use_cache")) or given.cache is not None,
        "a packed_layout of trees cannot fill a cache; pass use_cache=False and no cache.",
    ),
    Refusal(
        _unsupported,
        "a packed_layout of trees is not supported with {got}; pack each path as a document.",
        NotImplementedError,
    ),
    Refusal(
        _why_no_parts,
        "a tree cannot run in parts with {got}; run the whole tree: shared.batch().",
        NotImplementedError,
    ),
)
"""What has no meaning for tokens that stand for several samples."""
