"""Mask labels at document boundaries.

Shapes: B rows of S tokens, T = B·S.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.layout.arguments import require_tensor
from flexvarlen.layout.labels import IGNORE_INDEX, LABELS, int64_labels

_counted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose `num_items_in_batch` was already checked."""


def mask_labels(
    model: nn.Module, inputs: dict[str, Any], first: Tensor, *, packs: bool = True
) -> None:
    """Set labels to -100 where a document's last token, or padding, would predict a token.

    Replaces them in the forward's keyword arguments; the caller's tensors are not modified.

    Args:
        first: bool `[T]`, as `unpredicted_tokens` returns it.
        packs: whether a row may hold several documents, or padding.
    """
    given = {name: inputs[name] for name in LABELS if inputs.get(name) is not None}
    for name, labels in given.items():
        require_tensor(name, labels)
        if labels.numel() != len(first):
            raise ValueError(
                f"{name} must have one label for each of {len(first)} tokens, got shape "
                f"{tuple(labels.shape)}; pass labels shaped like input_ids, -100 at "
                "tokens that the loss ignores."
            )
        masked_T = first
        if name == "shift_labels":  # shift_labels[t] is token t + 1
            masked_T = torch.nn.functional.pad(first[1:], (0, 1), value=False)
        is_masked = masked_T.view(labels.shape).to(labels.device)
        if labels.dtype != torch.int64:
            labels = int64_labels(labels)
        inputs[name] = labels.masked_fill(is_masked, IGNORE_INDEX)
    counted = packs and inputs.get("num_items_in_batch") is not None
    if given and counted and not torch.compiler.is_compiling():
        name = next(iter(given))
        _warn_if_counted(model, given[name], inputs[name], shifted=name == "shift_labels")


def _warn_if_counted(model: nn.Module, labels: Tensor, masked: Tensor, *, shifted: bool) -> None:
    """Warn if `num_items_in_batch` counts labels that were just masked. One read per model.

    Only the caller knows what it counted, over all the batches of a step.
    """
    if model in _counted:
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
