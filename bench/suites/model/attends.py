"""What attends to a row: of "auto", what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.attention.auto.cache_keys import sizes
from flexvarlen.attention.choose import decision_for
from flexvarlen.patches.parts import ModelParts
from flexvarlen.verify.experiment.tree_batch import Row
from flexvarlen.verify.experiment.variant import Variant


def attends(
    variant: Variant,
    row: Row,
    *,
    packed: bool = True,
    compiled: bool = False,
    needs_grad: bool = True,
) -> str | None:
    """The backend that attends to a row; "auto" is resolved, and its kernel checked if it was not.

    Call it before anything is compiled: inside a graph flex's kernels are not checked. None for
    transformers' own, for "auto" from position_ids, whose sizes are known in the graph only, and
    for "auto" where the documents are not packed.
    """
    if variant.theirs:
        return None
    if variant.attention != "auto":
        return variant.attention
    if variant.form != "packed_layout" or not packed:
        return None
    layout = variant.layout(row)
    return taken_by_auto(variant.model, layout, compiled=compiled, needs_grad=needs_grad)


def taken_by_auto(
    model: PreTrainedModel,
    layout: fv.PackedLayout,
    dtype: torch.dtype | None = None,
    *,
    needs_grad: bool = True,
    compiled: bool = False,
) -> str:
    """What "auto" takes for a model's layers, once each."""
    found = {}
    for kind in ModelParts.of(model).kinds:
        mask = fv.DocumentMask.of(layout, causal=kind.causal, window=kind.window, chunk=kind.chunk)
        call = kind.call(layout.device, dtype or model.dtype, needs_grad=needs_grad)
        call = call._replace(spec=mask.spec)
        decision = decision_for(call.in_graph() if compiled else call, sizes(mask), mask)
        found[kind.layer_type] = decision.backend
    return ", ".join(dict.fromkeys(found.values()))


def taken_for(model: PreTrainedModel, batch: Mapping[str, Any], dtype: torch.dtype) -> str:
    """The kernel that "auto" takes for a packed batch."""
    return taken_by_auto(model, batch["packed_layout"].to(model.device), dtype)
