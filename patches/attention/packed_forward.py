"""`PackedForward`: what every attention layer of one forward shares."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flexvarlen.attention.api import needs_gradients, refuse_forward_mode
from flexvarlen.attention.auto.candidate_call import in_own_thread
from flexvarlen.attention.backends.registry import get_backend
from flexvarlen.attention.call import AttentionCall, Backend, is_past_int32
from flexvarlen.attention.choose import choose
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.row_split import RowKeys
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.patches.attention.backend_choice import chosen_for, refusal_of_layers
from flexvarlen.patches.batch.delivery import Delivery
from flexvarlen.patches.batch.row import PackedRow
from flexvarlen.patches.models.layers import LayerKind
from flexvarlen.patches.state import BackendChoice
from flexvarlen.recurrent.documents import RecurrentDocuments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Unpacked(NamedTuple):
    """Passed to the layers of a patched model instead of a `PackedForward` if nothing is packed.

    The model has checked that each row holds one document, using inputs that layers do not see. A
    layer whose keys nevertheless are its own tokens (a sliding layer of a static cache) attends
    with the arguments of `patch_model`.

    Attributes:
        backend: the name of a backend, or a mapping from layer types to names.
        deterministic, batch_invariant: as in `packed_attention`.
    """

    backend: BackendChoice
    deterministic: bool
    batch_invariant: bool


class Route(NamedTuple):
    """The backend, call, mask and plan of the layers of one kind.

    Attributes:
        backend: the kernel.
        call: the static arguments of the layers' calls.
        mask: the mask of this forward's documents.
        plan: the backend's plan for this mask.
        keys: the keys that queries attend to: of this rank alone, or also of others.
    """

    backend: Backend
    call: AttentionCall
    mask: DocumentMask
    plan: Any
    keys: RowKeys[PackedLayout]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Call the kernel; the output `[T, H, D]`."""
        out, _ = self.backend.attend(q, k, v, sinks, self.call, self.mask, self.plan)
        return out


SHARD_WITHOUT_GROUP = (
    "packed_layout must describe whole documents, got one rank's shard of a row; pass "
    "sequence_parallel_group= to patch_model."
)


class PackedForward:
    """The documents of one forward, and the route of each kind of layer.

    Not a dataclass, as FSDP would pass each layer its own copy.

    Attributes:
        layout: the documents.
        backend: a backend's name, or a mapping from layer types to names; "auto" is resolved for
            each kind of layer.
        deterministic, batch_invariant: as in `packed_attention`.
        training: let "auto" assume a backward even if gradients are disabled: in the first forward
            of a reentrant checkpoint, and in a reference model, which should round as the policy.
        kinds: the kinds of the model's layers, as far as they are known.
        has_all_kinds: whether every layer must be of one of `kinds`.
        group: the ranks over which the row is sharded, of which the layout is a shard; or None.
        has_temperature: whether layers scale queries by their position in the row.
        chunk_size: tokens of a chunk, in layers that have chunks.
        routes: the routes by kind; built before the first layer, or when a layer of another kind
            needs one.
        recurrent: the documents for recurrent layers; None if the model has none.
        row: the row of the whole forward; for layers outside a patched model, only its layout.
        delivery: state shared by a head and its base model, and by copies of this object.
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
        has_all_kinds: bool = False,
        group: ProcessGroup | None = None,
        chunk_size: int | None = None,
        has_temperature: bool = False,
        recurrent: RecurrentDocuments | None = None,
        row: PackedRow | None = None,
    ) -> None:
        self.layout, self.backend, self.group = layout, backend, group
        self.deterministic, self.batch_invariant = deterministic, batch_invariant
        self.training, self.kinds = training, kinds
        self.has_all_kinds = has_all_kinds
        if group is None and layout.shard.needs_group:
            raise ValueError(SHARD_WITHOUT_GROUP)
        self.chunk_size, self.has_temperature = chunk_size, has_temperature
        self.routes: dict[LayerKind, Route] = {}
        self.recurrent = recurrent
        self.row = PackedRow(layout) if row is None else row
        padded = self.row.padded
        self.delivery = Delivery() if padded is None else padded.delivery
        self._copies: dict[str, PackedForward] = {}
        self._postponed: Callable[[], None] | None = None

    def to(
        self, device: torch.device | str | int | None, *, non_blocking: bool = False
    ) -> PackedForward:
        """Return a cached copy on `device`; accelerate calls this before layers. None: no move."""
        if device is None or torch.device(device) == self.layout.device:
            return self
        name = str(device)
        if name not in self._copies:
            moved = self.layout.to(torch.device(device), non_blocking=non_blocking)
            if moved is self.layout:  # "cuda", which is "cuda:0"
                return self
            copy = PackedForward.__new__(PackedForward)
            vars(copy).update(vars(self), layout=moved, routes={}, _copies={}, _postponed=None)
            copy.row = self.row.to(moved.device, non_blocking=non_blocking)
            if self.recurrent is not None:
                copy.recurrent = self.recurrent.of_layout(moved)
            self._copies[name] = copy
        return self._copies[name]

    def mask_of_rows(self, batch: int) -> Tensor | None:
        """1 at tokens of documents, 0 at padding, int64 `[batch, S]`; None if there is no padding.

        In a compiled graph there is always a mask, as padding depends on the documents.
        """
        if not torch.compiler.is_compiling() and self.layout.has_padding is False:
            return None
        return self.layout.real_tokens().view(batch, -1).long()

    def prepare(self, dtype: torch.dtype, *, needs_grad: bool) -> None:
        """Build the routes of all kinds before the first layer, so that no layer builds a plan.

        A kind that its backend refuses is skipped: `dtype` is a guess (FSDP2 casts parameters
        later), and `route` raises for the layer's actual dtype.
        """
        for kind in self.kinds:
            with suppress(NotImplementedError):
                self.routes[kind] = self._make_route(kind, dtype, needs_grad)

    def postpone(self, recurrent: RecurrentDocuments, dtype: torch.dtype, needs_grad: bool) -> None:
        """Let the first layer call `prepare`; a recurrent layer does so while its kernels compile.

        It runs in another thread, as the layer may be under selective checkpointing, whose dispatch
        mode must not see it.
        """

        def prepare_once() -> None:
            if self._postponed is not None:
                self._postponed = recurrent.meanwhile = None
                prepare = partial(self.prepare, dtype, needs_grad=needs_grad)
                in_own_thread(self.layout.device, prepare, needs_grad=needs_grad)

        self._postponed = recurrent.meanwhile = prepare_once

    def attend(
        self,
        kind: LayerKind,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layer: int | None = None,
    ) -> Tensor:
        """The output of a layer, `[T, H, D]`; `layer` is its index in the model.

        Raises:
            NotImplementedError: the backend cannot serve the kind, or the tensors have tangents.
        """
        route = self.route(kind, q.dtype, needs_gradients(q, k, v, sinks))
        if forward_ad._current_level >= 0:
            refuse_forward_mode(route.backend.name, q, k, v, sinks)
        out: Tensor = route.keys.attend(route.attend, q, k, v, sinks, layer)
        return out

    def route(self, kind: LayerKind, dtype: torch.dtype, needs_grad: bool) -> Route:
        """The route of a kind of layer; kinds with equal masks share a plan.

        A route built inside a compiled graph is not stored: its tensors belong to that graph.

        Raises:
            NotImplementedError: the backend cannot serve the kind.
        """
        found = self.routes.get(kind)
        if found is None and self._postponed is not None:
            self._postponed()
            found = self.routes.get(kind)
        if found is not None:
            call = found.call
            if call.dtype == dtype and call.needs_grad == needs_grad:
                return found
        elif self.has_all_kinds:
            self._check_known(kind)
        made = self._make_route(kind, dtype, needs_grad)
        if not torch.compiler.is_compiling():
            self.routes[kind] = made
        return made

    def _check_known(self, kind: LayerKind) -> None:
        """Refuse a layer whose numbers differ from those it had when the model was patched.

        Its attributes and its call must agree: if a release of transformers renames a keyword or
        an attribute, they do not.
        """
        known = [each.numbers for each in self.kinds]
        if kind.numbers not in known:
            raise NotImplementedError(
                "an attention layer must compute what its config and its attributes said when the "
                f"model was patched, {' or '.join(map(str, known)) or 'no attention'}, got "
                f"{kind.numbers}; call patch_model after the last change, and use a release of "
                "transformers that flexvarlen allows."
            )

    def _make_route(self, kind: LayerKind, dtype: torch.dtype, needs_grad: bool) -> Route:
        keys = self.layout.shard.keys(kind.window, kind.chunk, self.group)
        layout, layout_k = keys.layouts(self.layout)
        images, runs = self.row.image_runs, None
        if images is not None and kind.layer_type in images.layer_types:
            runs = images.tokens
        call = kind.call(
            layout.device,
            dtype,
            needs_grad=needs_grad,
            trees=(layout_k or layout).segments is not None,
            cross=layout_k is not None,
            runs=runs is not None,
            deterministic=self.deterministic,
            batch_invariant=self.batch_invariant,
            past_int32=is_past_int32(layout, layout_k or layout, kind.num_heads, kind.head_dim),
        )
        mask = DocumentMask(layout, call.spec, layout_k=layout_k, runs=runs)
        backend = self._backend_for(kind, call, mask)
        for other in tuple(self.routes.values()):
            if other.backend is backend and other.mask.spec == call.spec:
                return Route(backend, call, other.mask, other.plan, keys)
        plan = backend.plan(mask, batch_invariant=self.batch_invariant)
        return Route(backend, call, mask, plan, keys)

    def _backend_for(self, kind: LayerKind, call: AttentionCall, mask: DocumentMask) -> Backend:
        requested = chosen_for(self.backend, kind.layer_type)
        try:
            name = choose(requested, call, mask, training=self.training)
        except NotImplementedError as refusal:
            if requested == "auto":
                sentence = f"The {kind.layer_type} layers: {refusal}"
            elif len(self.kinds) > 1:
                sentence = refusal_of_layers(str(refusal), requested, kind, call)
            else:
                raise
            raise NotImplementedError(sentence) from refusal
        # Kernels fail on an empty row.
        return get_backend(name if self.layout.total_tokens else "reference")


class PackedVision(NamedTuple):
    """The documents of one forward of a vision tower, shared by its layers.

    Attributes:
        frames: documents are frames of images and videos.
        windows: documents are windows of frames, if the tower has layers for these.
    """

    frames: PackedForward
    windows: PackedForward | None = None

    def packed(self, cu_seqlens: Tensor | None) -> PackedForward:
        """The `PackedForward` whose `cu_seqlens` is this tensor.

        Raises:
            ValueError: `cu_seqlens` is another tensor.
        """
        for packed in (self.frames, self.windows):
            if packed is not None and cu_seqlens is packed.layout.cu_seqlens:
                return packed
        raise ValueError(
            "cu_seqlens of a vision tower's layers must be those that the patched forward made; "
            "remove cu_seqlens from the call."
        )
