"""`DocumentRow`: the frozen fields of a `PackedLayout`, and what they say of tokens and documents.

Shapes: T = total_tokens (padding included), N = number of document slots (`capacity`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from flexvarlen.layout.arguments import one_row, require_device
from flexvarlen.layout.boundaries import is_traced, slots_of
from flexvarlen.layout.launch_sizes import LaunchSizes, is_replayed
from flexvarlen.layout.position_ids import compute_position_ids, traced_position_ids
from flexvarlen.layout.row_split import WHOLE, RowSplit
from flexvarlen.layout.segments import Segments, token_bounds


class DocumentRow:
    """The documents of one packed row; `PackedLayout` says what each field is.

    All fields are set in one call, and none afterwards. It is no dataclass: Dynamo would guard on
    each field of one, and compile again for every number of documents.
    """

    cu_seqlens: Tensor
    cu_seqlens_host: Tensor | None
    total_tokens: int
    max_seqlen_bound: int
    num_docs: int | None
    max_seqlen: int | None
    padding: Tensor | None
    has_padding: bool | None
    segments: Segments | None
    shard: RowSplit[Any]
    launch: LaunchSizes

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
        shard: RowSplit[Any] | None = None,
    ) -> None:
        if cu_seqlens.dtype != torch.int32 or (padding is not None and padding.dtype != torch.bool):
            raise ValueError(
                "a PackedLayout takes int32 boundaries and bool padding, got "
                f"{cu_seqlens.dtype} and {None if padding is None else padding.dtype}; make it "
                "with from_lengths() or from_cu_seqlens()."
            )
        fields = {
            "cu_seqlens": cu_seqlens.contiguous(),  # kernels know no strides
            "cu_seqlens_host": cu_seqlens_host,
            "total_tokens": total_tokens,
            "max_seqlen_bound": max_seqlen_bound,
            "num_docs": num_docs,
            "max_seqlen": max_seqlen,
            "padding": None if padding is None else padding.contiguous(),
            "has_padding": has_padding,
            "segments": segments,
            "shard": WHOLE if shard is None else shard,  # no default, which Dynamo cannot trace
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "launch", _launch_sizes(self))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"{name} of a PackedLayout must not change after it is made, got {value!r:.80}; make "
            f"another one, with layout.replace({name}=...)."
        )

    def replace(self, **fields: Any) -> Self:
        """The same layout with other values of these fields, named as in the constructor."""
        return type(self)(**(self.__getstate__() | fields))

    def moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        """The same layout with each tensor replaced by `move(tensor)`, except those on the host."""
        return self.replace(
            cu_seqlens=move(self.cu_seqlens),
            padding=None if self.padding is None else move(self.padding),
            segments=None if self.segments is None else self.segments.moved(move),
            shard=self.shard.moved(move),
        )

    def to(self, device: torch.device | str | None, *, non_blocking: bool = False) -> Self:
        """Return the layout with its tensors on `device`, or `self` if they are already there.

        As in `Tensor.to`, None keeps the current device (accelerate's hooks pass it), and with
        `non_blocking` copies from pinned memory do not block the host.

        Raises:
            ValueError: `device` is no device.
        """
        device = self.device if device is None else require_device(device)

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        return self if move(self.cu_seqlens) is self.cu_seqlens else self.moved(move)

    def pin_memory(self) -> Self:
        """The same layout with its tensors in page-locked memory; a `DataLoader` calls it."""
        return self.moved(Tensor.pin_memory)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FIELDS}  # the constructor's arguments

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Launch sizes are made anew: an unpickled tensor may have lost Dynamo's mark.
        DocumentRow.__init__(self, **state)

    # ---- tokens ----

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
        host = self.cu_seqlens_host
        return None if host is None else tuple(host.diff()[: self.num_docs].tolist())

    def document_ids(self) -> Tensor:
        """int32 `[T]`: the slot of each token; `capacity` at padding after the last document.

        No sync; traces.
        """
        tokens = torch.arange(self.total_tokens, device=self.device, dtype=torch.int32)
        return slots_of(self.cu_seqlens, tokens)

    def position_ids(self) -> Tensor:
        """int64 `[T]`: each token's position in its document, from 0; in a tree along its path.

        In a shard of a row a document continues where the rank before left off. No sync; traces.
        """
        if self.segments is not None:
            along_paths = token_bounds(self.segments.table, self.total_tokens)[1].long()
            return self.shard.positions(self, along_paths)
        compute = traced_position_ids if is_traced() else compute_position_ids
        return self.shard.positions(self, compute(self.cu_seqlens, self.total_tokens))

    def real_tokens(self) -> Tensor:
        """bool `[T]`: True where the token belongs to a document, False at padding.

        No sync; traces.
        """
        tokens = torch.arange(self.total_tokens, device=self.device, dtype=torch.int32)
        real = tokens < self.cu_seqlens[-1]
        return real if self.padding is None else real & ~self.padding

    # ---- documents; see also `pool` and `document_logprobs` ----

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Views of x, one for each document; padding after the last document is left out.

        Args:
            x: any dtype, `[T, ...]` or `[1, T, ...]`, on any device.

        Returns:
            `num_docs` views `[length, ...]`; a padding run inside the row is one of them.

        Raises:
            ValueError: x has another shape, only the device knows the boundaries, or inside a
                compiled graph, whose shapes cannot depend on the documents.
            NotImplementedError: one rank's shard that splits documents.

        Differentiable. No sync; does not trace.

        >>> from flexvarlen import PackedLayout
        >>> PackedLayout.from_lengths([2, 1], total_tokens=4).split(torch.arange(4))
        (tensor([0, 1]), tensor([2]))
        """
        require_whole_documents(self)
        lengths = None if torch.compiler.is_compiling() else self.lengths
        if lengths is None:
            raise ValueError(
                "split() needs boundaries that the host knows; call it outside torch.compile with "
                "a layout made there, or use pool() or document_ids()."
            )
        x_T = one_row(x, self.total_tokens)
        return torch.split(x_T, [*lengths, self.total_tokens - sum(lengths)])[:-1]

    def paths(self) -> tuple[Tensor, ...]:
        """The tokens of each path of the trees, from the root to a leaf; of plain documents, all.

        Returns:
            int64 index tensors `[L]` on the layout's device, in the order of the leaves.

        Raises:
            ValueError, NotImplementedError: as `split`.

        >>> from flexvarlen import PackedLayout
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
            ValueError, NotImplementedError: as `split`.

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

        Raises:
            NotImplementedError: trees (call `unfold`), or a shard that splits documents.

        No sync; traces under `fullgraph=True`.

        >>> from flexvarlen import PackedLayout
        >>> PackedLayout.from_lengths([2, 3]).first_tokens()
        tensor([0, 2])
        """
        return document_boundaries(self)[:-1].long().clamp(max=self.total_tokens - 1)

    def last_tokens(self) -> Tensor:
        """The index of each document's last token; otherwise as `first_tokens`."""
        return (document_boundaries(self)[1:].long() - 1).clamp(min=0)

    def real_documents(self) -> Tensor:
        """True at documents with tokens; False at empty ones, padding runs and spare slots.

        Bool `[num_docs]` or `[capacity]`, with the errors of `first_tokens`. Its sum counts the
        documents inside a compiled graph. No sync; traces under `fullgraph=True`.

        >>> from flexvarlen import PackedLayout
        >>> PackedLayout.from_lengths([2, 0, 3]).real_documents().sum()
        tensor(2)
        """
        real = document_boundaries(self).diff() > 0
        return real if self.padding is None else real & ~self.padding[self.first_tokens()]


FIELDS = tuple(name for name in DocumentRow.__annotations__ if name != "launch")


def _launch_sizes(row: DocumentRow) -> LaunchSizes:
    documents = row.num_docs
    longest: tuple[int, ...] | None = None if row.max_seqlen is None else (row.max_seqlen,)
    if row.segments is not None and longest is not None:
        documents = len(row.segments.lengths)
        longest = *longest, max(row.segments.lengths, default=0)
    return LaunchSizes(
        documents,
        longest,
        capacity=row.capacity,
        bound=row.max_seqlen_bound,
        total_tokens=row.total_tokens,
        may_have_tail=row.has_padding is not False,
        device=row.device,
    )


def document_boundaries(row: DocumentRow) -> Tensor:
    """int32 `[N + 1]`: `cu_seqlens`, without the spare slots where the number of documents holds.

    A compiled or captured graph may run for other documents, so it keeps all slots.

    Raises:
        NotImplementedError: trees, which have no one last token, or documents of a shard.
    """
    require_whole_documents(row)
    if row.segments is not None:
        raise NotImplementedError(
            "a layout of trees has no one vector of a document: its paths share tokens; call "
            "layout.unfold(x), which returns a tensor for each path."
        )
    any_documents = torch.compiler.is_compiling() or is_replayed(row.cu_seqlens)
    if any_documents or row.num_docs is None:
        return row.cu_seqlens
    return row.cu_seqlens[: row.num_docs + 1]


def require_whole_documents(row: DocumentRow) -> None:
    """Raise NotImplementedError for the shard of a row, which may have parts of documents."""
    if row.shard.splits_documents:
        raise NotImplementedError(
            "a shard of a row may have parts of documents, which continue on other ranks; gather "
            "the tokens of all ranks in the order of the row, and pass the whole row's layout."
        )
