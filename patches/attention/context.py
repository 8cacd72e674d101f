"""`PackedForward`: what every attention layer of one forward shares."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flexvarlen.attention.backends.registry import get_backend
from flexvarlen.attention.call import AttentionCall, Backend, is_past_int32
from flexvarlen.attention.choose import choose
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.patches.attention.routing import chosen_for, refusal_of_layers
from flexvarlen.patches.models.layers import LayerKind
from flexvarlen.patches.state import BackendChoice

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Unpacked(Enum):
    """What a patched model hands its layers in place of a `PackedForward` where it packs nothing.

    Its rows were found to hold one document each, also by what no layer sees.
    """

    CHECKED = "checked"


class Route(NamedTuple):
    """Where the layers of one kind go.

    Attributes:
        backend: the kernel.
        call: what they ask of it.
        mask: of this forward's documents.
        plan: the backend's, made of this mask.
    """

    backend: Backend
    call: AttentionCall
    mask: DocumentMask
    plan: Any


class PackedForward:
    """The documents of one forward, and where the layers of each kind go.

    No dataclass, of which FSDP would hand each layer a copy.

    Attributes:
        layout: the documents.
        backend: a backend's name, or one for each type of layers; "auto" is resolved by kind.
        deterministic, batch_invariant: as in `packed_attention`.
        training: "auto" chooses for a backward, also where there are no gradients: a reentrant
            checkpoint runs a training forward without them first.
        kinds: of the model's layers, as far as they are known.
        group: the ranks over which the row is cut; None: it is not.
        has_temperature: whether layers scale queries by their position in the row.
        chunk_size: tokens of a chunk, in the layers that have chunks.
        routes: by kind; made before the first layer, or where a layer of another kind asks.
        one_a_row: whether no row holds several documents, of a forward that may fill a cache; in a
            compiled graph a bool tensor. None: it fills none.
        drops_pooled: whether a pooler's output, of whole rows, is left out.
        packs: whether a row may hold several documents, or padding.
        in_base: whether the base model got this very object from its head.
    """

    def __init__(
        self,
        layout: PackedLayout,
        backend: BackendChoice,
        *,
        deterministic: bool,
        batch_invariant: bool,
        training: bool = False,
        kinds: tuple[LayerKind, ...] = (),
        group: ProcessGroup | None = None,
        chunk_size: int | None = None,
        has_temperature: bool = False,
    ) -> None:
        self.layout, self.backend, self.group = layout, backend, group
        self.deterministic, self.batch_invariant = deterministic, batch_invariant
        self.training, self.kinds = training, kinds
        self.chunk_size, self.has_temperature = chunk_size, has_temperature
        self.routes: dict[LayerKind, Route] = {}
        self.one_a_row: Tensor | bool | None = None
        self.drops_pooled = False
        self.packs, self.in_base = True, False
        self._copies: dict[str, PackedForward] = {}

    @property
    def tokens_here(self) -> int:
        """T, or under a group the tokens of a shard."""
        size = 1 if self.group is None else dist.get_world_size(self.group)
        return self.layout.total_tokens // size

    def to(
        self, device: torch.device | str | int | None, *, non_blocking: bool = False
    ) -> PackedForward:
        """The same on a device, made once: accelerate asks before layers, and None is anywhere."""
        if device is None or torch.device(device) == self.layout.device:
            return self
        name = str(device)
        if name not in self._copies:
            moved = self.layout.to(torch.device(device), non_blocking=non_blocking)
            if moved is self.layout:  # "cuda", which is "cuda:0"
                return self
            copy = PackedForward.__new__(PackedForward)
            vars(copy).update(vars(self), layout=moved, routes={}, _copies={})
            self._copies[name] = copy
        return self._copies[name]

    @property
    def reached_base(self) -> bool:
        """Whether the base model got this, or a copy on another device, from its head."""
        return self.in_base or any(copy.reached_base for copy in self._copies.values())

    def prepare(self, dtype: torch.dtype, *, needs_grad: bool) -> None:
        """Make the routes of all kinds, before the first layer: no layer's graph builds a plan."""
        for kind in self.kinds:
            self.routes[kind] = self._make_route(kind, dtype, needs_grad)

    def route(self, kind: LayerKind, dtype: torch.dtype, needs_grad: bool) -> Route:
        """Where the layers of a kind go; its plan is that of another kind with an equal mask.

        What is made inside a compiled graph is not kept: it lives in that graph.

        Raises:
            NotImplementedError: the backend cannot serve the kind.
        """
        found = self.routes.get(kind)
        if found is not None:
            call = found.call
            if call.dtype == dtype and call.needs_grad == needs_grad:
                return found
        made = self._make_route(kind, dtype, needs_grad)
        if not torch.compiler.is_compiling():
            self.routes[kind] = made
        return made

    def _make_route(self, kind: LayerKind, dtype: torch.dtype, needs_grad: bool) -> Route:
        layout, spec = self.layout, kind.spec
        mask = DocumentMask(layout, spec)
        call = kind.call(
            layout.device,
            dtype,
            needs_grad=needs_grad,
            deterministic=self.deterministic,
            batch_invariant=self.batch_invariant,
            past_int32=is_past_int32(layout, layout, kind.num_heads, kind.head_dim),
        )
        backend = self._backend_for(kind, call, mask)
        for other in tuple(self.routes.values()):
            if other.backend is backend and other.mask.spec == spec:
                return Route(backend, call, other.mask, other.plan)
        plan = backend.plan(mask, batch_invariant=self.batch_invariant)
        return Route(backend, call, mask, plan)

    def _backend_for(self, kind: LayerKind, call: AttentionCall, mask: DocumentMask) -> Backend:
        asked = chosen_for(self.backend, kind.layer_type)
        if asked == "auto" and self.training:
            call = call._replace(needs_grad=True)
        try:
            name = choose(asked, call, mask)
        except NotImplementedError as refusal:
            if asked == "auto":
                sentence = f"The {kind.layer_type} layers: {refusal}"
            elif len(self.kinds) > 1:
                sentence = refusal_of_layers(str(refusal), asked, kind, call)
            else:
                raise
            raise NotImplementedError(sentence) from refusal
        # Kernels fail on a row of no tokens.
        return get_backend(name if self.layout.total_tokens else "reference")


class PackedVision(NamedTuple):
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
