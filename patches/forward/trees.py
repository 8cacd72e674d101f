"""Rows of trees, whose tokens stand for several samples: what they do not go with."""

from __future__ import annotations

from flexvarlen.layout.labels import LABEL_COUNTS
from flexvarlen.patches.batch.given import Given
from flexvarlen.patches.batch.positions import has_images
from flexvarlen.patches.why_not import why_no_trees


def check_tree_inputs(given: Given) -> None:
    """Refuse what has no meaning for tokens that stand for several samples.

    Raises:
        ValueError: labels, shift_labels alone, position_ids, a cache, or outputs of another form.
            (`find_layout` refuses an attention_mask.)
        NotImplementedError: a model, a head or a setting that trees do not go with.
    """
    inputs = given.inputs
    if inputs.get("labels") is not None:
        raise ValueError(
            "labels must be left out with a packed_layout of trees, as the token after a segment "
            "need not be the next on its path, got labels; pass the shift_labels and label_counts "
            "of fv.share_prefixes."
        )
    if inputs.get("shift_labels") is not None and inputs.get(LABEL_COUNTS) is None:
        raise ValueError(
            "shift_labels must come with label_counts with a packed_layout of trees, got them "
            "alone; take both from fv.share_prefixes."
        )
    for name, wanted in (("return_dict", True), ("logits_to_keep", 0)):
        if inputs.get(name) not in (None, wanted):
            raise ValueError(
                f"{name} must be {wanted} with a packed_layout of trees, got {inputs[name]!r}; "
                f"remove {name}."
            )
    if inputs.get("position_ids") is not None:
        raise ValueError(
            "position_ids cannot be combined with a packed_layout of trees, which defines them; "
            "remove position_ids."
        )
    if inputs.get("use_cache") or given.cache is not None:
        raise ValueError(
            "a packed_layout of trees cannot fill a cache; pass use_cache=False and no cache."
        )
    beside = {
        "images": has_images(inputs),
        "a head that pools documents": given.parts.head.labels not in ("", "next token"),
    }
    why = why_no_trees(given.parts, batch_invariant=given.patch.batch_invariant)
    why = why or next((x for x, is_there in beside.items() if is_there), None)
    if why is not None:
        raise NotImplementedError(
            f"a packed_layout of trees is not supported with {why}; pack each path as a document."
        )
