"""Labels: what they may be, which tokens of a packed row have none, and the loss of trees."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from flexvarlen.layout.arguments import (
    is_integer_tensor,
    require_tensor,
    to_int_or_none,
    whole_numbers,
)
from flexvarlen.layout.packed_layout import PackedLayout

IGNORE_INDEX = -100  # the label that transformers' losses leave out

LABELS = ("shift_labels", "labels")  # a batch's columns of labels; the loss takes the first given

# Columns of a tree: how many samples share each token, and in how many its label counts.
SAMPLE_COUNTS, LABEL_COUNTS = "sample_counts", "label_counts"


def why_not_ignore_index(given: Any) -> str | None:
    """Why a batch cannot have this `ignore_index`, or None. No sync unless it is on a device.

    Labels that a boundary, padding or a mask takes out of the loss are set to -100.
    """
    if given is None or to_int_or_none(given) == IGNORE_INDEX:
        return None
    return (
        f"ignore_index must be -100, which packed rows use for ignored labels, got "
        f"{given!r}; set the labels that the loss ignores to -100, and remove ignore_index."
    )


def why_not_labels(name: str, labels: Tensor | NDArray[Any]) -> str | None:
    """Why these are no labels, or None. Syncs if they are on a device, so no forward asks."""
    labels = int64_labels(labels) if isinstance(labels, Tensor) else labels
    wrong = labels[(labels < 0) & (labels != IGNORE_INDEX)]
    if not len(wrong):
        return None
    return (
        f"{name} must be at least 0, or -100 where the loss ignores them, got {wrong[0].item()}; "
        "set the labels that it ignores to -100."
    )


def int64_labels(labels: Tensor) -> Tensor:
    """Labels of integers as int64, as -100 fits in no unsigned dtype; others as they are."""
    return labels.to(torch.int64) if is_integer_tensor(labels) else labels


def unpredicted_tokens(layout: PackedLayout) -> Tensor:
    """bool `[T]`: True at each document's first token and at all padding. No sync; traces.

    No token of their document predicts these, so their labels do not count.
    """
    flags = torch.zeros(layout.total_tokens + 1, dtype=torch.bool, device=layout.device)
    return flags.index_fill(0, layout.cu_seqlens.long(), True)[:-1] | ~layout.real_tokens()


def tree_loss(
    logits: Tensor,
    shift_labels: Tensor,
    label_counts: Tensor,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """The cross entropy that the samples would have had if each was computed by itself.

    A label of a row of trees counts once for each sample in which it is not -100.

    Args:
        logits: `[T, V]` or `[1, T, V]`, computed in at least fp32.
        shift_labels: integer `[T]` or `[1, T]`, the next token of each token, -100 where there is
            none.
        label_counts: integer `[T]` or `[1, T]`, in how many samples each label counts.
        num_items_in_batch: labels of all samples together, by which the sum is divided; None:
            those of this row.

    Returns:
        0-d, fp32 or wider; NaN if no token has a label, as cross_entropy gives.

    Raises:
        ValueError: other numbers of tokens, or labels or counts that are not integers.

    Differentiable. No sync; traces under `fullgraph=True`.

    >>> logits = torch.zeros(3, 4)
    >>> tree_loss(logits, torch.tensor([1, 2, -100]), torch.tensor([2, 1, 1])).item()
    1.3862943649291992
    """
    for name, x in (("shift_labels", shift_labels), ("label_counts", label_counts)):
        require_tensor(name, x)
    if not isinstance(logits, Tensor) or logits.ndim < 2:
        raise ValueError(
            f"logits must be a tensor [T, V] or [1, T, V], got {getattr(logits, 'shape', logits)}; "
            "pass the model's."
        )
    labels_T = whole_numbers("shift_labels", shift_labels).reshape(-1)
    counts_T = whole_numbers("label_counts", label_counts).reshape(-1)
    logits_TV = logits.flatten(0, -2)
    if not len(logits_TV) == len(labels_T) == len(counts_T):
        raise ValueError(
            "logits, shift_labels and label_counts must have the same tokens, got "
            f"{len(logits_TV)}, {len(labels_T)} and {len(counts_T)}; take the latter two from "
            "fv.share_prefixes."
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses_T = cross_entropy(
        logits_TV.to(wide), labels_T, ignore_index=IGNORE_INDEX, reduction="none"
    )
    if num_items_in_batch is None:
        num_items_in_batch = torch.where(labels_T == IGNORE_INDEX, 0, counts_T).sum()
    return (losses_T * counts_T).sum() / num_items_in_batch
