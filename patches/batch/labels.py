"""Mask labels at document boundaries.

Shapes: B rows of S tokens, T = B·S.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.parallel import shard_tokens

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

IGNORE_INDEX = -100  # the label that transformers' losses leave out
_LABELS = ("shift_labels", "labels")  # in order of priority

_counted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose `num_items_in_batch` was already checked."""


def mask_labels(
    model: nn.Module,
    inputs: dict[str, Any],
    layout: PackedLayout,
    group: ProcessGroup | None,
) -> None:
    """Set labels to -100 where a document's last token would predict the next document.

    Replaces them in the forward's keyword arguments; the caller's tensors are not modified. With a
    group the labels are those of this rank's tokens.
    """
    given = {name: inputs[name] for name in _LABELS if inputs.get(name) is not None}
    for name, labels in given.items():
        inputs[name] = _masked(labels, layout, group, shifted=name == "shift_labels")
    if given and inputs.get("num_items_in_batch") is not None and not torch.compiler.is_compiling():
        name = next(iter(given))
        _warn_if_counted(model, given[name], inputs[name], layout, shifted=name == "shift_labels")


def _masked(
    labels: Tensor, layout: PackedLayout, group: ProcessGroup | None, *, shifted: bool
) -> Tensor:
    first = first_tokens(layout)
    if shifted:  # shift_labels[t] is token t + 1
        first = torch.nn.functional.pad(first[1:], (0, 1), value=False)
    if group is not None:
        first = shard_tokens(first, group)
    return labels.masked_fill(first.view(labels.shape).to(labels.device), IGNORE_INDEX)


def _warn_if_counted(
    model: nn.Module, labels: Tensor, masked: Tensor, layout: PackedLayout, *, shifted: bool
) -> None:
    """Warn if `num_items_in_batch` counts labels that were just masked. One read per model.

    Only the caller knows what it counted, over all the batches of a step.
    """
    has_boundaries = layout.num_docs != labels.shape[0] or bool(layout.has_padding)
    if model in _counted or not has_boundaries:
        return
    _counted.add(model)
    if not shifted:  # the loss ignores the first label of a row, so it is not counted
        labels, masked = labels[..., 1:], masked[..., 1:]
    if bool((labels != masked).any()):
        warnings.warn(
            "num_items_in_batch counts labels that the loss ignores: those at the first token of a "
            "document, or at padding, which a patched model masks. The loss is too small by their "
            "share; set these labels to -100 in the collator (DataCollatorWithFlattening does).",
            UserWarning,
            stacklevel=2,
        )


def first_tokens(layout: PackedLayout) -> Tensor:
    """bool `[T]`: True at each document's first token and at all padding.

    Labels at these tokens are masked.
    """
    flags = torch.zeros(layout.total_tokens + 1, dtype=torch.bool, device=layout.device)
    return flags.index_fill(0, layout.cu_seqlens.long(), True)[:-1] | ~layout.real_tokens()
