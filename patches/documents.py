"""The documents of a forward, found in the arguments that a transformers model is called with.

Order: an explicit `packed_layout`; else `cu_seq_lens_q`; else the union of restarts in
`position_ids` and changes of value in a 2D `attention_mask` and in `seq_idx`, so that a mask of
ones changes nothing; else one document a row.

Shapes: B rows of S tokens, packed one after another: T = B·S.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexvarlen.attention import resolve_backend
from flexvarlen.backends import get_backend
from flexvarlen.boundaries import default_capacity, document_starts
from flexvarlen.bounds import MaskSpec
from flexvarlen.layout import PackedLayout
from flexvarlen.mask import DocumentMask
from flexvarlen.patches.boundary_checks import (
    changes_of,
    check_cu_seq_lens,
    check_positions,
    check_row_starts,
    check_same_documents,
    layout_of,
    refuse_halves,
    require_layout,
)
from flexvarlen.patches.boundary_checks import check as check
from flexvarlen.patches.routing import BackendChoice, LayerKind, Route, chosen_for
from flexvarlen.switches import BATCH_INVARIANT, promised

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EXPLICIT = ("packed_layout", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The keywords of a forward that give its documents outright."""

BOUNDARIES = (*EXPLICIT, "seq_idx")
"""The keywords that only tell documents: no model needs them for anything else."""


CONTEXT = "flexvarlen"
"""The keyword under which the layers of a patched model get their `PackedForward`."""


class Reach:
    """Whether the base model got its head's `PackedForward`, a copy, or found the same documents.

    No dataclass, which FSDP would copy with its arguments.
    """

    def __init__(self, base: bool = False) -> None:
        self.base = base


@dataclass
class PackedForward:
    """What every layer of one forward shares.

    The documents, and by kind of layer the backend and what it derived from them.

    Attributes:
        backend: a backend's name, or one for each type of layers; "auto" is resolved by kind.
        deterministic, batch_invariant: as in `packed_attention`.
        chunk_size: tokens of a chunk, in the layers that have chunks.
        has_temperature: whether layers scale queries by their place in the row.
        routes: by kind; made before the first layer, or where a layer of another kind asks.
        several_a_row: documents, as the host knows, of a forward that may fill a cache.
        one_a_row: bool 0-dim, the same as a graph knows it.
        drops_pooled: whether a pooler's output, of whole rows, is left out.
        group: the ranks over which the row is cut; None: it is not.
        packs: whether a row may hold more than one document; known of a head's alone.
        reach: of this and its copies; None: nobody looks, as the base model itself made it.
        copies: the same on other devices, by name.
    """

    layout: PackedLayout
    backend: BackendChoice
    deterministic: bool | None = None
    batch_invariant: bool | None = None
    chunk_size: int | None = None
    has_temperature: bool = False
    routes: dict[LayerKind, Route] = field(default_factory=dict)
    several_a_row: bool = False
    one_a_row: Tensor | None = None
    drops_pooled: bool = False
    group: ProcessGroup | None = None
    packs: bool = False
    reach: Reach | None = None
    copies: dict[str, PackedForward] = field(default_factory=dict)

    def to(
        self, device: torch.device | str | int | None, *, non_blocking: bool = False
    ) -> PackedForward:
        """The same on a device, made once: accelerate asks before layers, and None is anywhere."""
        if device is None or torch.device(device) == self.layout.device:
            return self
        name = str(device)
        if name not in self.copies:
            moved = self.layout.to(torch.device(device), non_blocking=non_blocking)
            if moved is self.layout:  # "cuda", which is "cuda:0"
                return self
            self.copies[name] = replace(self, layout=moved, routes={}, copies={})
        return self.copies[name]

    @property
    def tokens_here(self) -> int:
        """T, or under a group the tokens of a shard."""
        size = 1 if self.group is None else dist.get_world_size(self.group)
        return self.layout.total_tokens // size

    def route(self, kind: LayerKind, dtype: torch.dtype, needs_grad: bool) -> Route:
        """Where the layers of a kind go; anew where "auto" was resolved for other calls.

        What is made inside a compiled graph is not kept: it lives in that graph.
        """
        found = self.routes.get(kind)
        if found is not None and found.serves(dtype, needs_grad):
            return found
        made = self.make_route(kind, dtype, needs_grad, tuple(self.routes.items()))
        if not torch.compiler.is_compiling():
            self.routes[kind] = made
        return made

    def make_route(
        self,
        kind: LayerKind,
        dtype: torch.dtype,
        needs_grad: bool,
        others: tuple[tuple[LayerKind, Route], ...] = (),
    ) -> Route:
        """The backend of a kind, "auto" resolved, and its plan: that of another kind, if equal.

        Raises:
            NotImplementedError: no candidate of "auto" can serve the kind.
        """
        backend = chosen_for(self.backend, kind.layer_type)
        asked: dict[str, Any] = {}
        if backend == "auto":
            asked = {"dtype": dtype, "needs_grad": needs_grad}
            try:
                backend = resolve_backend(
                    "auto",
                    DocumentMask(self.layout, kind.spec),
                    num_heads=kind.num_heads,
                    num_kv_heads=kind.num_kv_heads,
                    head_dim=kind.head_dim,
                    softcap=kind.softcap,
                    sinks=kind.sinks,
                    deterministic=self.deterministic,
                    batch_invariant=self.batch_invariant,
                    **asked,
                )
            except NotImplementedError as refusal:
                raise NotImplementedError(f"The {kind.layer_type} layers: {refusal}") from refusal
        for other, route in others:
            if route.backend == backend and other.spec == kind.spec:  # of the same mask
                return Route(backend, route.plan, **asked)
        plan = make_plan(backend, self.layout, kind.spec, batch_invariant=self.batch_invariant)
        return Route(backend, plan, **asked)


@dataclass(frozen=True)
class PackedVision:
    """What the layers of a vision tower share in one forward.

    Attributes:
        frames: documents are frames of images and videos.
        windows: documents are windows of frames, if the tower has layers for these.
    """

    frames: PackedForward
    windows: PackedForward | None = None

    def packed(self, cu_seqlens: Tensor | None) -> PackedForward:
        """The documents of the layer that got these very boundaries.

        Raises:
            ValueError: they are others.
        """
        for packed in (self.frames, self.windows):
            if packed is not None and cu_seqlens is packed.layout.cu_seqlens:
                return packed
        raise ValueError(
            "a patched vision tower's layers must get the boundaries that its forward made, got "
            "others; leave cu_seqlens out of the call."
        )


def make_plan(
    backend: str, layout: PackedLayout, spec: MaskSpec, *, batch_invariant: bool | None = None
) -> Any:
    """The backend's plan for self-attention inside these documents. No sync; traces."""
    mask = DocumentMask(layout, spec)
    if promised(BATCH_INVARIANT, batch_invariant):
        return get_backend(backend).plan(mask, batch_invariant=True)
    return get_backend(backend).plan(mask)


class Unpacked(Enum):
    """What a patched model hands its layers in place of a `PackedForward` where it packs nothing.

    Its rows were found to hold one document each, also by what no layer sees.
    """

    CHECKED = "checked"


def find_layout(
    batch: int,
    row_tokens: int,
    device: torch.device,
    *,
    packed_layout: PackedLayout | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    seq_idx: Tensor | None = None,
    capacity: int | None = None,
    max_seqlen_bound: int | None = None,
) -> PackedLayout:
    """The layout of a forward's T = B·S tokens.

    Args:
        batch, row_tokens, device: B, S and where the tokens are.
        packed_layout: the documents of all T tokens.
        cu_seq_lens_q, cu_seq_lens_k: int32 `[num_docs + 1]`, cumulative over all T tokens; equal.
        max_length_q, max_length_k: tokens of the longest document, if the caller gave it; checked
            eagerly.
        position_ids: integer `[B, S]` or `[1, S]`.
        attention_mask: `[B, S]`, 0 at padding; other values may number documents.
        seq_idx: integer `[B, S]` or `[1, S]`, the number of each token's document; beside
            `packed_layout` or `cu_seq_lens_q` it must say the same.
        capacity, max_seqlen_bound: as in `PackedLayout.from_lengths`; default: those of
            `packed_layout`, more slots if a mask beside it makes more documents.

    Raises:
        ValueError: boundaries that break the contract, or contradict one another.

    Eagerly at most one read of the device, one more if `seq_idx` comes beside `cu_seq_lens_q`;
    inside a compiled graph none, and the boundaries are asserted on the device.
    """
    total = batch * row_tokens
    sizes: dict[str, Any] = {"capacity": capacity, "max_seqlen_bound": max_seqlen_bound}
    if attention_mask is not None and attention_mask.shape != (batch, row_tokens):
        raise ValueError(
            f"attention_mask must have shape {(batch, row_tokens)}, as the tokens, got "
            f"{tuple(attention_mask.shape)}; give one value a token."
        )
    if position_ids is not None:
        check_positions(position_ids, batch, row_tokens)
    if packed_layout is None and cu_seq_lens_q is None:
        refuse_halves(cu_seq_lens_k, max_length_q, max_length_k)
    changes = None if seq_idx is None else changes_of(seq_idx, batch, row_tokens, device)
    if packed_layout is not None:
        require_layout(packed_layout)
        if not torch.compiler.is_compiling():  # DDP and FSDP move a batch's tensors alone
            packed_layout = packed_layout.to(device)
        if packed_layout.total_tokens != total or packed_layout.device != device:
            raise ValueError(
                f"packed_layout must cover the batch's {total} tokens on {device}, got "
                f"{packed_layout.total_tokens} on {packed_layout.device}; pass total_tokens= and "
                "device= when you make it."
            )
        explicit = packed_layout
    elif cu_seq_lens_q is not None:
        check_cu_seq_lens(cu_seq_lens_q, cu_seq_lens_k, device)
        explicit = layout_of(cu_seq_lens_q, total, **sizes)
        for longest in (max_length_q, max_length_k):
            # A graph knows no max_seqlen: there `longest`, which would be guarded on, stays unread.
            if (
                explicit.max_seqlen is not None
                and longest is not None
                and longest < explicit.max_seqlen
            ):
                raise ValueError(
                    "max_length_q and max_length_k must be at least the longest document, "
                    f"{explicit.max_seqlen} tokens, got {longest}; pass the largest difference of "
                    "cu_seq_lens_q."
                )
    elif position_ids is None and attention_mask is None and changes is None:
        return PackedLayout.from_rows(batch, row_tokens, device=device, **sizes)
    else:
        starts = document_starts(
            batch,
            row_tokens,
            device,
            position_ids_BT=position_ids,
            attention_mask_BT=attention_mask,
        )
        padding = None if attention_mask is None else (attention_mask == 0).reshape(-1)
        if changes is not None:  # but no run of padding is cut
            starts = starts | (changes if padding is None else changes & ~padding)
        if padding is not None:
            starts = _cut_padding(starts, padding, max_seqlen_bound)
        return PackedLayout.from_starts(starts, padding_T=padding, **sizes)
    if batch > 1:
        check_row_starts(explicit, batch, row_tokens)
    if changes is not None:
        check_same_documents(
            changes, explicit, attention_mask, row_tokens, reads=packed_layout is None
        )
    if attention_mask is None:
        return explicit
    starts = document_starts(
        batch, row_tokens, device, cu_seqlens=explicit.cu_seqlens, attention_mask_BT=attention_mask
    )
    padding = (attention_mask == 0).reshape(-1) | ~explicit.real_tokens()
    bound = explicit.max_seqlen_bound if max_seqlen_bound is None else max_seqlen_bound
    starts = _cut_padding(starts, padding, bound)
    slots = capacity
    if capacity is None and torch.compiler.is_compiling():  # room for the runs of padding
        slots = max(explicit.capacity + -(-total // bound), default_capacity(total))
    layout = PackedLayout.from_starts(
        starts, padding_T=padding, capacity=slots, max_seqlen_bound=bound
    )
    if slots is not None or layout.lengths is None or len(layout.lengths) > explicit.capacity:
        return layout
    sized = PackedLayout.from_lengths(
        layout.lengths, device=device, capacity=explicit.capacity, max_seqlen_bound=bound
    )
    sized.padding, sized.has_padding = layout.padding, layout.has_padding
    return sized


def _cut_padding(starts: Tensor, padding: Tensor, bound: int | None) -> Tensor:
    """Starts at which no run of padding is longer than documents may be: it takes slots too."""
    if bound is None:
        return starts
    return starts | (padding & (torch.arange(len(starts), device=starts.device) % bound == 0))


def first_tokens(layout: PackedLayout) -> Tensor:
    """bool `[T]`: True at each document's first token and at all padding.

    Labels there must not be learned.
    """
    flags = torch.zeros(layout.total_tokens + 1, dtype=torch.bool, device=layout.device)
    return flags.index_fill(0, layout.cu_seqlens.long(), True)[:-1] | ~layout.real_tokens()
