"""Labels: what they may be, and which tokens of a packed row have none."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from flexvarlen.layout.arguments import is_integer_tensor, to_int_or_none
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
