"""The loss of a forward over trees, and the arguments and models that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from flexvarlen.layout.tree_loss import tree_loss
from flexvarlen.patches.forward.heads import user_loss
from flexvarlen.patches.models.heads import CAUSAL
from flexvarlen.patches.models.qwen_vl import has_images
from flexvarlen.patches.why_not import why_no_trees

if TYPE_CHECKING:
    from flexvarlen.patches.forward.inputs import ForwardInputs

SAMPLE_COUNTS = "sample_counts"


def take_loss(module: nn.Module, inputs: dict[str, Any]) -> Callable[[Tensor], Tensor] | None:
    """Pop sample_counts and their labels, as the model's loss would count a shared token once.

    Returns:
        logits -> the loss over all samples; None without sample_counts.

    Raises:
        ValueError: sample_counts without shift_labels, or beside labels.
        NotImplementedError: a loss function that the user set.
    """
    counts, labels = inputs.pop(SAMPLE_COUNTS, None), inputs.get("shift_labels")
    if counts is None:
        return None
    if labels is None or inputs.get("labels") is not None:
        raise ValueError(
            "sample_counts must come with shift_labels and without labels; take both from "
            "fv.share_prefixes."
        )
    if user_loss(module) is not None:
        raise NotImplementedError(
            "model.loss_function is not called with sample_counts, got one that was set; compute "
            "the loss from the logits, or of each sample by fv.SharedPrefixes.unfold."
        )
    items = inputs.pop("num_items_in_batch", None)
    return partial(
        tree_loss,
        shift_labels=inputs.pop("shift_labels"),
        sample_counts=counts,
        num_items_in_batch=items,
    )


def refuse_beside_tree(forward: ForwardInputs) -> None:
    """Refuse what has no meaning for tokens that stand for several samples.

    Raises:
        ValueError: labels, shift_labels alone, position_ids, a cache, or outputs of another form.
            (`find_layout` refuses an attention_mask.)
        NotImplementedError: a model, a head or a setting that trees do not go with.
    """
    inputs = forward.inputs
    if inputs.get("labels") is not None:
        raise ValueError(
            "labels must be left out with a packed_layout of trees, as the token after a segment "
            "need not be the next on its path, got labels; pass the shift_labels and sample_counts "
            "of fv.share_prefixes."
        )
    if inputs.get("shift_labels") is not None and inputs.get(SAMPLE_COUNTS) is None:
        raise ValueError(
            "shift_labels must come with sample_counts with a packed_layout of trees, got them "
            "alone; take both from fv.share_prefixes."
        )
    for name, wanted in (("return_dict", True), ("logits_to_keep", 0)):
        if inputs.get(name) not in (None, wanted):
            raise ValueError(
                f"{name} must be {wanted} with a packed_layout of trees, got {inputs[name]!r}; "
                "leave it out."
            )
    if inputs.get("position_ids") is not None:
        raise ValueError(
            "position_ids must be left out with a packed_layout of trees, whose positions count "
            "along each path, got some; leave them out."
        )
    if inputs.get("use_cache") or forward.cache is not None:
        raise ValueError(
            "a cache must not be filled by a packed_layout of trees, got one; pass use_cache=False "
            "and no cache."
        )
    why = why_no_trees(forward.parts) or _why_not(forward)
    if why is not None:
        raise NotImplementedError(
            f"a packed_layout of trees is not supported with {why}; pack each path as a document."
        )


def _why_not(forward: ForwardInputs) -> str | None:
    if forward.group is not None:
        return "sequence_parallel_group"
    if has_images(forward.inputs):
        return "images"
    if forward.returns_router_logits:
        return "output_router_logits=True, whose loss would count a shared token once"
    if forward.parts.head not in ("", *CAUSAL):
        return "a head that pools documents"
    return None
