"""`PackedLayout`, the only object that carries the document boundaries of a packed row.

Shapes: T = total_tokens (padding included), N = number of document slots (`capacity`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexvarlen.layout.arguments import (
    INT32_MAX,
    checked_sizes,
    holds_integers,
    integers,
    require_device,
    require_tensor,
)
from flexvarlen.layout.boundaries import (
    Condition,
    check_boundaries,
    check_fit,
    default_capacity,
    document_starts,
    host_int32,
    is_traced,
    round_up_to_power_of_two,
    safe_boundaries,
    slots_of,
    traced_boundaries,
)
from flexvarlen.layout.describe import described
from flexvarlen.layout.launch_sizes import LaunchSizes
from flexvarlen.layout.per_document import (
    document_boundaries,
    one_row,
    real_documents,
    split_documents,
)
from flexvarlen.layout.position_ids import compute_position_ids, traced_position_ids
from flexvarlen.layout.segments import Segments, token_bounds

if TYPE_CHECKING:
    from flexvarlen.parallel.sharded_layout import RowShard


class PackedLayout:
    """The documents of one packed row of T tokens; `cu_seqlens[i]:cu_seqlens[i + 1]` is document i.

    Make one with `from_lengths`, `from_cu_seqlens` or `from_position_ids`, or with `from_tree` if
    documents share their beginnings: they validate. Kernels, table widths and compiled graphs
    depend only on `total_tokens`, `capacity` and `max_seqlen_bound` (and a tree's `max_depth`):
    other documents with the same sizes cause no recompilation.

    Attributes:
        cu_seqlens: int32 `[capacity + 1]`, on the device of the tokens; starts at 0, never
            decreases, and repeats its last value in the spare slots. Tokens from the last value on
            are padding.
        cu_seqlens_host: the same values on the CPU, or None when only the device knows them.
        total_tokens: T, padding included.
        max_seqlen_bound: upper bound on document length that kernels and tables are sized for.
        num_docs: number of documents (empty ones count), or None when only the device knows.
        max_seqlen: tokens of the longest document, or None when only the device knows.
        padding: bool `[T]`, True at tokens of padding runs inside the row, or None when there are
            none. Each run is a slot of its own in `cu_seqlens`; its tokens attend to nothing, and
            their outputs are zero.
        launch: the sizes that cu_seqlens kernels are launched with.
        segments: of documents that are trees, or None.
        shard: if these are one rank's pieces of the documents of a longer row, how they go on at
            the other ranks; else None. Made by `shard_row`.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        *,
        cu_seqlens_host: Tensor | None,
        total_tokens: int,
        max_seqlen_bound: int,
        num_docs: int | None,
        max_seqlen: int | None,
        padding: Tensor | None = None,
        has_padding: bool | None = None,
        segments: Segments | None = None,
        shard: RowShard | None = None,
    ) -> None:
        if cu_seqlens.dtype != torch.int32 or (padding is not None and padding.dtype != torch.bool):
            raise ValueError(
                "a PackedLayout takes int32 boundaries and bool padding, got "
                f"{cu_seqlens.dtype} and {None if padding is None else padding.dtype}; make it "
                "with from_lengths() or from_cu_seqlens()."
            )
        self.cu_seqlens = cu_seqlens.contiguous()  # kernels know no strides
        self.cu_seqlens_host = cu_seqlens_host
        self.total_tokens = total_tokens
        self.max_seqlen_bound = max_seqlen_bound
        self.num_docs = num_docs
        self.max_seqlen = max_seqlen
        self.padding = None if padding is None else padding.contiguous()
        self.has_padding = has_padding
        self.segments = segments
        self.shard = shard
        self._note_launch_sizes()

    # ---- making one ----

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | Tensor,
        *,
        total_tokens: int | None = None,
        device: torch.device | str = "cpu",
        capacity: int | None = None,
        max_seqlen_bound: int | None = None,
    ) -> PackedLayout:
        """Build a layout of consecutive documents, starting at token 0.

        Args:
            lengths: tokens of each document, each at least 0.
            total_tokens: T; default: the sum. Tokens past the last document are padding.
            device: where `cu_seqlens` goes.
            capacity: number of document slots to allocate; default: the number of documents,
                rounded up to a power of two.
            max_seqlen_bound: upper bound on document length; default: the longest document,
                rounded up to a power of two, at most T.

        Raises:
            ValueError: a negative or non-integer length, more tokens than `total_tokens`, more
                documents than `capacity`, or a document longer than `max_seqlen_bound`.

        Syncs only if `lengths` is a tensor on a device.

        >>> PackedLayout.from_lengths([3, 0, 2]).cu_seqlens
        tensor([0, 3, 3, 5, 5], dtype=torch.int32)
        """
        values = integers("lengths", lengths)
        for i, length in enumerate(values):
            if length < 0:
                raise ValueError(
                    f"lengths must be at least 0, got {length} at index {i}; drop or fix that "
                    "document."
                )
        boundaries = [0]
        for length in values:
            boundaries.append(boundaries[-1] + length)
        return cls._from_host(
            boundaries, total_tokens, require_device(device), capacity, max_seqlen_bound
        )

    @classmethod
    def from_tree(
        cls,
        lengths: Sequence[int] | Tensor,
        parents: Sequence[int] | Tensor,
        *,
        total_tokens: int | None = None,
        device: torch.device | str = "cpu",
        capacity: int | None = None,
        max_seqlen_bound: int | None = None,
        max_depth: int | None = None,
    ) -> PackedLayout:
        """Build a layout of trees: segments that continue others, and share them with siblings.

        A token sees its own segment up to itself, and the segments above it, never a sibling's.
        Each tree is one document of the layout.

        Args:
            lengths: tokens of each segment, in the order of the row: depth first.
            parents: for each segment the index of the one that it continues, -1 at a root.
            total_tokens, device: as in `from_lengths`.
            capacity: number of segment slots; default: the segments, rounded up to a power of two.
            max_seqlen_bound: upper bound on the tokens of a whole tree; default as in
                `from_lengths`.
            max_depth: upper bound on the segments of a path; default: those of the longest.

        Raises:
            ValueError: as `from_lengths`, and for parents that are no trees laid out depth first.

        Where all segments are roots it is the layout that `from_lengths` makes, unless a larger
        `max_depth` asks for the same compiled graph as trees have.

        >>> tree = PackedLayout.from_tree([3, 2, 1], parents=[-1, 0, 0])
        >>> tree.position_ids()
        tensor([0, 1, 2, 3, 4, 3])
        """
        on = require_device(device)
        sizes = integers("lengths", lengths)
        total_tokens, capacity, max_seqlen_bound = checked_sizes(
            total_tokens, capacity, max_seqlen_bound
        )
        slots = round_up_to_power_of_two(len(sizes)) if capacity is None else capacity
        if slots < max(len(sizes), 1):
            raise ValueError(
                f"capacity must be at least the {len(sizes)} segments given, got {slots}; raise "
                "capacity."
            )
        segments = Segments.of(sizes, parents, slots, max_depth, on)
        trees = segments.tree_lengths()
        for name, given, least, what in (
            ("total_tokens", total_tokens, sum(trees), "the tokens of all segments"),
            ("max_seqlen_bound", max_seqlen_bound, max(trees, default=0), "those of any tree"),
        ):
            if given is not None and given < least:
                raise ValueError(
                    f"{name} must be at least {what}, {least}, got {given}; raise {name}."
                )
        layout = cls.from_lengths(
            trees,
            total_tokens=total_tokens,
            device=on,
            capacity=slots,
            max_seqlen_bound=max_seqlen_bound,
        )
        if segments.max_depth > 1:
            layout.segments = segments
            layout._note_launch_sizes()
        return layout

    @classmethod
    def from_rows(
        cls,
        batch: int,
        row_tokens: int,
        *,
        device: torch.device,
        capacity: int | None = None,
        max_seqlen_bound: int | None = None,
    ) -> PackedLayout:
        """Build a layout of `batch` rows of `row_tokens` tokens (T = B·S), one document per row.

        Args:
            batch, row_tokens: B and S.
            device, capacity, max_seqlen_bound: as in `from_lengths`; inside a compiled graph the
                defaults are B and S.

        Raises:
            ValueError: more rows than `capacity`, or longer ones than `max_seqlen_bound`.

        Does not sync; traces under `fullgraph=True`, also with dynamic B and S.
        """
        if not torch.compiler.is_compiling():
            lengths = integers("row_tokens", [row_tokens]) * integers("batch", [batch])[0]
            return cls.from_lengths(
                lengths, device=device, capacity=capacity, max_seqlen_bound=max_seqlen_bound
            )
        total = batch * row_tokens
        slots = max(batch, 1) if capacity is None else capacity
        bound = max(row_tokens, 1) if max_seqlen_bound is None else max_seqlen_bound
        checked = check_fit(batch, row_tokens, total, slots, bound)

        def boundaries(device: torch.device) -> Tensor:
            ends = torch.arange(slots + 1, dtype=torch.int32, device=device)
            return ends.clamp(max=batch) * row_tokens

        host = boundaries(torch.device("cpu"))
        return cls(
            host if device.type == "cpu" else boundaries(device),
            cu_seqlens_host=host,
            total_tokens=checked.total_tokens,
            max_seqlen_bound=checked.max_seqlen_bound,
            num_docs=checked.num_docs,
            max_seqlen=checked.max_seqlen,
            has_padding=False,
        )

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor | Sequence[int],
        *,
        total_tokens: int | None = None,
        capacity: int | None = None,
        max_seqlen_bound: int | None = None,
    ) -> PackedLayout:
        """Build a layout from cumulative lengths, as used by FlashAttention and transformers.

        Args:
            cu_seqlens: int32 or int64 `[num_docs + 1]`, on the device of the tokens, or a list;
                starts at 0, never decreases.
            total_tokens: T; default: the last boundary. Required inside a compiled graph.
            capacity, max_seqlen_bound: as in `from_lengths`. Inside a compiled graph the
                defaults are the slots of `cu_seqlens` and T; pass a bound, as tables grow with it.

        Raises:
            ValueError: the boundaries are not valid. A compiled graph asserts it on the device.

        One sync if the boundaries are on a device; none inside a compiled graph.

        >>> PackedLayout.from_cu_seqlens([0, 3, 5]).lengths
        (3, 2)
        """
        if not isinstance(cu_seqlens, Tensor):
            cu_seqlens = torch.tensor(integers("cu_seqlens", cu_seqlens), device="cpu")
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}; call .to(torch.int32) "
                "on it."
            )
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
            raise ValueError(
                f"cu_seqlens must have shape [num_docs + 1] with at least one document, got "
                f"{tuple(cu_seqlens.shape)}; "
                "flatten it, and start it with 0."
            )
        if torch.compiler.is_compiling():
            if total_tokens is None:
                raise ValueError(
                    "total_tokens must be given inside a compiled graph, got None; pass the number "
                    "of tokens in the row."
                )
            if cu_seqlens.dtype == torch.int64:  # not wrapped around, to a boundary in the row
                cu_seqlens = cu_seqlens.clamp(-1, INT32_MAX).to(torch.int32)
            return cls._from_device(cu_seqlens, total_tokens, capacity, max_seqlen_bound)
        return cls._from_host(
            cu_seqlens.tolist(), total_tokens, cu_seqlens.device, capacity, max_seqlen_bound
        )

    @classmethod
    def from_position_ids(
        cls,
        position_ids_BT: Tensor,
        *,
        capacity: int | None = None,
        max_seqlen_bound: int | None = None,
    ) -> PackedLayout:
        """A layout from positions that restart at each document; rows follow one another, T = B·S.

        A document begins at each row's start and wherever a position is not the previous one + 1. A
        document whose positions continue the previous document's cannot be detected: pass lengths
        or cu_seqlens for such data.

        Args:
            position_ids_BT: `[B, S]` (or `[S]`), of any integer dtype.
            capacity, max_seqlen_bound: as in `from_lengths`.

        Raises:
            ValueError: wrong shape or dtype, or documents that exceed the capacity or the bound.

        A device tensor is read back once (one sync).

        >>> PackedLayout.from_position_ids(torch.tensor([[0, 1, 2, 0, 1]])).lengths
        (3, 2)
        """
        require_tensor("position_ids", position_ids_BT)
        positions = position_ids_BT[None] if position_ids_BT.ndim == 1 else position_ids_BT
        if positions.ndim != 2 or not holds_integers(positions):
            raise ValueError(
                f"position_ids must be an integer tensor [B, S], got {positions.dtype} "
                f"{tuple(position_ids_BT.shape)}; "
                "for 3-row multimodal positions pass the text row."
            )
        starts = document_starts(
            positions.shape[0],
            positions.shape[1],
            positions.device,
            position_ids_BT=positions.to(torch.int64),
        )
        return cls.from_starts(starts, capacity=capacity, max_seqlen_bound=max_seqlen_bound)

    @classmethod
    def from_starts(
        cls,
        starts_T: Tensor,
        *,
        padding_T: Tensor | None = None,
        capacity: int | None = None,
        max_seqlen_bound: int | None = None,
        conditions: Sequence[Condition] = (),
    ) -> PackedLayout:
        """A layout from flags: a document (or a padding run) begins at each True.

        Args:
            starts_T: bool `[T]`; the first is taken as True.
            padding_T: bool `[T]`, True at padding tokens; a run of them is a slot of its own.
            capacity, max_seqlen_bound: as in `from_lengths`; inside a compiled graph the defaults
                are `default_capacity(T)` and T.
            conditions: read together with the flags. A compiled graph asserts them on the device.

        Raises:
            ValueError: flags that are not bool, a condition that does not hold, or documents that
                exceed the capacity or the bound.

        One sync if the flags are on a device; none inside a compiled graph.
        """
        for name, x in (("starts_T", starts_T), ("padding_T", padding_T)):
            if x is not None or name == "starts_T":
                require_tensor(name, x)
        total = starts_T.shape[0]
        for each in (starts_T, padding_T):
            if each is not None and (each.dtype != torch.bool or each.shape != (total,)):
                raise ValueError(
                    "starts_T and padding_T must be bool [T], got "
                    f"{each.dtype} {tuple(each.shape)}; pass True where a document begins, or at "
                    "padding."
                )
        if padding_T is not None:
            starts_T = starts_T | pad(padding_T[1:] != padding_T[:-1], (1, 0))
        if torch.compiler.is_compiling():
            for holds, sentence in conditions:
                torch._assert_async(holds, f"flexvarlen: {sentence}")
            slots = min(capacity or default_capacity(total), total)
            cu_seqlens = traced_boundaries(starts_T, slots)
            return cls._from_device(cu_seqlens, total, slots, max_seqlen_bound, padding_T)
        flags = [starts_T] if padding_T is None else [starts_T, padding_T]
        read = torch.cat([*flags, *(holds[None] for holds, _ in conditions)]).cpu()
        held = read[total * len(flags) :].tolist()
        for (_, sentence), holds in zip(conditions, held, strict=True):
            if not holds:
                raise ValueError(sentence)
        starts = read[:total].nonzero()[:, 0].tolist()
        if padding_T is not None and not read[total : 2 * total].any():
            padding_T = None
        boundaries = [*starts, total] if starts and starts[0] == 0 else [0, *starts, total]
        return cls._from_host(
            boundaries, total, starts_T.device, capacity, max_seqlen_bound, padding_T
        )

    @classmethod
    def _from_host(
        cls,
        boundaries: list[int],
        total_tokens: int | None,
        device: torch.device,
        capacity: int | None,
        max_seqlen_bound: int | None,
        padding: Tensor | None = None,
    ) -> PackedLayout:
        checked = check_boundaries(boundaries, total_tokens, capacity, max_seqlen_bound)
        spare = checked.capacity - checked.num_docs
        host = host_int32(boundaries + [boundaries[-1]] * spare, device)
        return cls(
            host.to(device, non_blocking=True),
            cu_seqlens_host=host,
            total_tokens=checked.total_tokens,
            max_seqlen_bound=checked.max_seqlen_bound,
            num_docs=checked.num_docs,
            max_seqlen=checked.max_seqlen,
            padding=padding,
            has_padding=padding is not None or boundaries[-1] < checked.total_tokens,
        )

    @classmethod
    def _from_device(
        cls,
        cu_seqlens: Tensor,
        total: int,
        capacity: int | None,
        max_seqlen_bound: int | None,
        padding: Tensor | None = None,
    ) -> PackedLayout:
        """Nothing is read back: see `safe_boundaries`."""
        _, capacity, max_seqlen_bound = checked_sizes(total, capacity, max_seqlen_bound)
        bound = total if max_seqlen_bound is None else min(max_seqlen_bound, total)
        return cls(
            safe_boundaries(cu_seqlens, total, capacity, bound),
            cu_seqlens_host=None,
            total_tokens=total,
            max_seqlen_bound=bound,
            num_docs=None,
            max_seqlen=None,
            padding=padding,
        )

    # ---- reading it ----

    @property
    def capacity(self) -> int:
        """Number of document slots; spare slots are empty documents."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def device(self) -> torch.device:
        """The device of `cu_seqlens`, where the tokens must be."""
        return self.cu_seqlens.device

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Tokens of each document (padding runs included), or None when only the device knows."""
        if self.cu_seqlens_host is None:
            return None
        return tuple(self.cu_seqlens_host.diff()[: self.num_docs].tolist())

    def document_ids(self) -> Tensor:
        """int32 `[T]`: the slot of each token; `capacity` at padding after the last document.

        No sync; traces.
        """
        tokens = torch.arange(self.total_tokens, device=self.device, dtype=torch.int32)
        return slots_of(self.cu_seqlens, tokens)

    def position_ids(self) -> Tensor:
        """int64 `[T]`: each token's position in its document, from 0; in a tree along its path.

        In a shard of a row a document goes on where the rank before left off. No sync; traces.
        """
        if self.segments is not None:
            return token_bounds(self.segments.table, self.total_tokens)[1].long()
        compute = traced_position_ids if is_traced() else compute_position_ids
        positions = compute(self.cu_seqlens, self.total_tokens)
        return (
            positions if self.shard is None else positions + self.shard.starts[self.document_ids()]
        )

    def real_tokens(self) -> Tensor:
        """bool `[T]`: True where the token belongs to a document, False at padding.

        No sync; traces.
        """
        real = (
            torch.arange(self.total_tokens, device=self.device, dtype=torch.int32)
            < self.cu_seqlens[-1]
        )
        return real if self.padding is None else real & ~self.padding

    # ---- per document; see also `pool` and `document_logprobs` ----

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Views of x, one for each document; padding after the last document is left out.

        Args:
            x: any dtype, `[T, ...]` or `[1, T, ...]`, on any device.

        Returns:
            `num_docs` views `[length, ...]`; a padding run inside the row is one of them.

        Raises:
            ValueError: x has another shape, only the device knows the boundaries, or inside a
                compiled graph, whose shapes cannot depend on the documents.

        Differentiable. No sync; does not trace.

        >>> PackedLayout.from_lengths([2, 1], total_tokens=4).split(torch.arange(4))
        (tensor([0, 1]), tensor([2]))
        """
        return split_documents(x, self)

    def paths(self) -> tuple[Tensor, ...]:
        """The tokens of each path of the trees, from the root to a leaf; of plain documents, all.

        Returns:
            int64 index tensors `[L]` on the layout's device, in the order of the leaves.

        Raises:
            ValueError: as `split`.

        >>> PackedLayout.from_tree([2, 1, 1], parents=[-1, 0, 0]).paths()
        (tensor([0, 1, 2]), tensor([0, 1, 3]))
        """
        if self.segments is None or torch.compiler.is_compiling():
            return self.split(torch.arange(self.total_tokens, device=self.device))
        return tuple(path.to(self.device) for path in self.segments.paths())

    def unfold(self, x: Tensor) -> tuple[Tensor, ...]:
        """x along each path: what `split` gives had nothing been shared.

        Args:
            x: any dtype, `[T, ...]` or `[1, T, ...]`, on the layout's device.

        Returns:
            A tensor `[L, ...]` for each path.

        Raises:
            ValueError: as `split`.

        Differentiable: the gradients of a shared token add up.
        """
        if self.segments is None:
            return self.split(x)
        x_T = one_row(x, self.total_tokens)
        return tuple(x_T[path] for path in self.paths())

    def first_tokens(self) -> Tensor:
        """The index of each document's first token, int64 on the layout's device.

        Returns:
            `[num_docs]`. `[capacity]` inside a compiled graph, inside a CUDA graph capture, and
            where only the device knows the number of documents. The slot of a padding run gives the
            run's own first token. Slots without tokens (empty documents, spare slots) give an index
            inside the row, of a token that is not theirs: leave them out with `real_documents`.

        No sync; traces under `fullgraph=True`.

        >>> PackedLayout.from_lengths([2, 3]).first_tokens()
        tensor([0, 2])
        """
        return document_boundaries(self)[:-1].long().clamp(max=self.total_tokens - 1)

    def last_tokens(self) -> Tensor:
        """The index of each document's last token; otherwise as `first_tokens`.

        >>> PackedLayout.from_lengths([2, 3]).last_tokens()
        tensor([1, 4])
        """
        return (document_boundaries(self)[1:].long() - 1).clamp(min=0)

    def real_documents(self) -> Tensor:
        """True at documents with tokens; False at empty ones, padding runs and spare slots.

        Bool `[num_docs]` or `[capacity]`, as `first_tokens`. Its sum counts the documents inside a
        compiled graph. No sync; traces under `fullgraph=True`.

        >>> PackedLayout.from_lengths([2, 0, 3]).real_documents().sum()
        tensor(2)
        """
        return real_documents(self)

    def to(self, device: torch.device | str | None, *, non_blocking: bool = False) -> PackedLayout:
        """Return the layout with its tensors on `device`, or `self` if they are already there.

        As for `Tensor.to`, None is where they are (accelerate's hooks pass it), and with
        `non_blocking` copies from pinned memory do not block the host.
        """
        device = self.device if device is None else require_device(device)

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        return self if move(self.cu_seqlens) is self.cu_seqlens else self.moved(move)

    def pin_memory(self) -> PackedLayout:
        """The same layout with its tensors in page-locked memory; a `DataLoader` calls it."""
        return self.moved(Tensor.pin_memory)

    def moved(self, move: Callable[[Tensor], Tensor]) -> PackedLayout:
        """The same layout with `move` of its tensors; those on the host stay."""
        return self.replace(
            cu_seqlens=move(self.cu_seqlens),
            padding=None if self.padding is None else move(self.padding),
            segments=None if self.segments is None else self.segments.moved(move),
            shard=None if self.shard is None else self.shard.moved(move),
        )

    def replace(self, **fields: Any) -> PackedLayout:
        """The same layout with other values of these fields, named as in the constructor."""
        given = {
            "cu_seqlens": self.cu_seqlens,
            "cu_seqlens_host": self.cu_seqlens_host,
            "total_tokens": self.total_tokens,
            "max_seqlen_bound": self.max_seqlen_bound,
            "num_docs": self.num_docs,
            "max_seqlen": self.max_seqlen,
            "padding": self.padding,
            "has_padding": self.has_padding,
            "segments": self.segments,
            "shard": self.shard,
        }
        return PackedLayout(**(given | fields))

    # ---- what kernels are launched for ----

    def _note_launch_sizes(self) -> None:
        documents = self.num_docs
        longest: tuple[int, ...] | None = None if self.max_seqlen is None else (self.max_seqlen,)
        if self.segments is not None and longest is not None:
            documents = len(self.segments.lengths)
            longest = *longest, max(self.segments.lengths, default=0)
        self.launch = LaunchSizes(
            documents,
            longest,
            capacity=self.capacity,
            bound=self.max_seqlen_bound,
            total_tokens=self.total_tokens,
            may_have_tail=self.has_padding is not False,
            device=self.device,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._note_launch_sizes()  # an unpickled tensor may have lost Dynamo's mark

    def __repr__(self) -> str:
        """The lengths of the documents, the first few of many.

        >>> PackedLayout.from_lengths([3, 1, 5])
        PackedLayout(3 documents of 3, 1, 5 tokens, total_tokens=9, capacity=4, \
max_seqlen_bound=8, device=cpu)
        """
        return described(self)
