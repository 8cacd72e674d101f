"""`RowSplit`: what `layout.shard` answers about how a row is split over ranks.

`flexvarlen.parallel` makes three kinds: balanced documents, consecutive tokens, and whole trees.
`flexvarlen.trees` makes a fourth: parts of a tree, in forwards one after another. `WHOLE` is a row
that is not split. Code asks the properties of the object, never its class.

Shapes: T = tokens of this rank, H = num_heads, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

if TYPE_CHECKING:  # not available in a torch built without distributed
    from torch.distributed import ProcessGroup

Layout = TypeVar("Layout")
"""`PackedLayout`, which imports this module."""
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Any]
"""q `[T, H, D]`, k, v and sinks -> the output."""


class RowKeys(Protocol[Layout]):
    """The keys that a rank's queries attend to, under one mask."""

    def layouts(self, layout: Layout) -> tuple[Layout, Layout | None]:
        """The layouts of queries and keys (None: the same), of a rank's layout."""

    def attend(
        self,
        attend: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layer: int | None = None,
    ) -> Any:
        """Call `attend` with these keys.

        Args:
            attend: takes q, k and v of `layouts`.
            layer: index of the layer; required in a part of a tree.
            q, k, v: of the rank's own tokens.

        No sync; traces under `fullgraph=True`.
        """


class RowSplit(Protocol[Layout]):
    """How a row is split over ranks, and which of its tokens are here."""

    @property
    def rank(self) -> int:
        """The rank in the group."""

    @property
    def ranks(self) -> int:
        """The size of the group."""

    @property
    def is_whole(self) -> bool:
        """Whether the row is not split; False for a group of one."""

    @property
    def needs_group(self) -> bool:
        """Whether the other parts of the row are on ranks of a group."""

    @property
    def is_part_of_tree(self) -> bool:
        """Whether the row is a part of a tree, whose other parts run in forwards of their own."""

    @property
    def splits_documents(self) -> bool:
        """Whether rows split in this way may have documents on several ranks."""

    @property
    def exchanges_keys(self) -> bool:
        """Whether a document of this row is on several ranks."""

    @property
    def links(self) -> Tensor | None:
        """int64 `[3]` on the host, read by `BoundaryLinks.of`; None unless ranks hold consecutive
        tokens of the row, as recurrent layers need.
        """

    def position_bound(self, row_tokens: int) -> int:
        """A bound on the positions in rows of that many tokens."""

    def positions(self, layout: Layout, positions: Tensor) -> Tensor:
        """int64 `[T]`: positions in the documents, from those in the pieces that are here."""

    def keys(
        self, window: int | None, chunk: int | None, group: ProcessGroup | None
    ) -> RowKeys[Layout]:
        """The keys of layers with this mask.

        Args:
            window, chunk: as in `packed_attention`.
            group: the ranks; None: all.
        """

    def why_not(self, *, causal: bool, window: int | None) -> str | None:
        """Why it does not serve layers with such a mask, or None."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> RowSplit[Layout]:
        """The same with each tensor on the device of the tokens replaced by `move(tensor)`."""


class BoundaryLinks(NamedTuple):
    """Which documents of a rank continue on its neighbours.

    Attributes:
        continues_from_previous: 1 if the first document continues one of the previous rank, else 0.
        continues_on_next: 1 if the last document continues on the next rank, else 0.
        last_slot: the slot of the last document.
    """

    continues_from_previous: int
    continues_on_next: int
    last_slot: int

    @classmethod
    def of(cls, links: Tensor | None) -> BoundaryLinks:
        """Read the links from an int64 tensor `[3]` on the host; None has no links."""
        return cls(0, 0, 0) if links is None else cls(*links.tolist())


# ---- a row that is not split ----


class _OwnKeys:
    """Queries attend to the keys that are here."""

    def layouts(self, layout: Layout) -> tuple[Layout, Layout | None]:
        return layout, None

    def attend(
        self,
        attend: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layer: int | None = None,
    ) -> Any:
        return attend(q, k, v, sinks)

    def __reduce__(self) -> str:
        return "OWN_KEYS"  # a copy is the same object


class _Whole:
    """All tokens of the row are here."""

    rank, ranks = 0, 1
    is_whole, needs_group, splits_documents, exchanges_keys = True, False, False, False
    is_part_of_tree = False
    links = None

    def position_bound(self, row_tokens: int) -> int:
        return row_tokens

    def positions(self, layout: Any, positions: Tensor) -> Tensor:
        return positions

    def keys(self, window: int | None, chunk: int | None, group: Any) -> RowKeys[Any]:
        return OWN_KEYS

    def why_not(self, *, causal: bool, window: int | None) -> str | None:
        return None

    def moved(self, move: Callable[[Tensor], Tensor]) -> RowSplit[Any]:
        return self

    def __reduce__(self) -> str:
        return "WHOLE"


OWN_KEYS: RowKeys[Any] = _OwnKeys()
WHOLE: RowSplit[Any] = _Whole()
