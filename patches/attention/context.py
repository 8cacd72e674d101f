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

from flexvarlen.attention.api import resolve_backend
from flexvarlen.attention.backends.registry import get_backend
from flexvarlen.env import BATCH_INVARIANT, promised
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.mask.spec import MaskSpec
from flexvarlen.patches.attention.routing import BackendChoice, LayerKind, Route, chosen_for
from flexvarlen.patches.batch.checks import check as check

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
