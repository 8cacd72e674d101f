"""Find the documents of a batch, and the segments of its trees, before the model runs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.segments import Segments
from flexvarlen.patches.batch.find_layout import find_layout
from flexvarlen.patches.batch.given_documents import BOUNDARIES, GivenDocuments
from flexvarlen.patches.isolation.tokens import Unit
from flexvarlen.patches.state import ATTRIBUTE


def why_not_whole(model: nn.Module, batch: object, layout: PackedLayout | None) -> str | None:
    """Why a row that ranks share is not verified, or None.

    All ranks get the same answer, so none waits for a rank that raises because of its documents.
    """
    given = layout or (batch.get("packed_layout") if isinstance(batch, Mapping) else None)
    if shares_rows(model):
        what = "a model with sequence_parallel_group"
    elif isinstance(given, PackedLayout) and not given.shard.is_whole:
        what = "a shard of fv.shard_row"
    else:
        return None
    return (
        f"verify_isolation needs whole rows on each rank, got {what}, whose documents may be "
        "split over ranks; pass the whole row inside `with fv.patched(model):`."
    )


def shares_rows(model: nn.Module) -> bool:
    """Whether a patched model has a `sequence_parallel_group`."""
    patches = (vars(module).get(ATTRIBUTE) for module in model.modules())
    groups = [patch.sequence_parallel_group for patch in patches if patch is not None]
    return any(group is not None and group.size() > 1 for group in groups)


def documents_of(inputs: Mapping[str, Any], layout: PackedLayout | None) -> PackedLayout:
    """The documents of a batch, as `layout_of` finds them, or the layout if one is given.

    A mask that is not 2D is ignored.

    Raises:
        ValueError: no `input_ids` `[B, S]`, or boundaries that break the contract.
    """
    known = dict(inputs)
    mask = known.get("attention_mask")
    if not (isinstance(mask, Tensor) and mask.ndim == 2):
        known["attention_mask"] = None
    found = layout_of(known) if layout is None else layout
    ids = known.get("input_ids")
    if not isinstance(ids, Tensor) or ids.numel() != found.total_tokens:
        raise ValueError(
            f"layout must cover the batch's input_ids, got {found.total_tokens} tokens; set "
            "total_tokens= when you make it."
        )
    return found


def layout_of(batch: Mapping[str, Any]) -> PackedLayout:
    """The documents of a forward's keyword arguments, by the contract of `patch_model`.

    Of `position_ids` `[4, B, S]` the first row counts.

    Raises:
        ValueError: no input_ids `[B, S]`, or boundaries that break the contract.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise ValueError(
            "batch must hold input_ids of shape [B, S], got "
            f"{tuple(ids.shape) if isinstance(ids, Tensor) else ids!r}; pass the arguments of the "
            "model's forward."
        )
    known: Any = {name: batch.get(name) for name in (*BOUNDARIES, "position_ids", "attention_mask")}
    positions = known["position_ids"]
    if isinstance(positions, Tensor) and positions.ndim == 3 and positions.shape[0] == 4:
        known["position_ids"] = positions[0]
    return find_layout(GivenDocuments(ids.shape[0], ids.shape[1], ids.device, **known))


def units_of(layout: PackedLayout) -> list[Unit]:
    """The non-empty documents without padding; in trees, the segments that have tokens."""
    if layout.segments is not None:
        return _segments(layout.segments)
    real = layout.real_tokens().tolist()
    spans = pairwise(accumulate(layout.lengths or (), initial=0))
    return [Unit(start, end, end) for start, end in spans if end > start and real[start]]


def _segments(segments: Segments) -> list[Unit]:
    starts, ends, _, depths = segments.table.tolist()
    units, tree = [], -1
    for length, start, end, depth in zip(segments.lengths, starts, ends, depths, strict=False):
        tree += depth == 0
        if length > 0:
            units.append(Unit(start, start + length, end, depth, tree))
    return units
