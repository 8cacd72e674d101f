"""`MaskSpec`: the mask inside each document (causal, window, chunk, ...), without boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flexvarlen.layout.arguments import to_int_or_none

UNLIMITED = -1


# Larger windows and chunks are clamped to this: no limit in practice, and sums stay in int32.
_LONGEST_SIDE = 2**30


Align = Literal["bottom_right", "top_left"]


@dataclass(frozen=True, repr=False)
class MaskSpec:
    """The mask inside each document, without the document boundaries. Hashable.

    A query at position p of its document sees the key at position k of the same document if all of
    these hold. It is the cache key of plans and compiled kernels; make one with `MaskSpec.of`.

    Attributes:
        causal: k <= p (with `prefix`: or k lies in the document's prefix).
        left, right: k >= p - left and k <= p + right; -1 means no limit. Causal without a prefix
            and runs has right = 0.
        chunk: p and k lie in the same chunk of this many tokens; 0: no chunks.
        prefix: each document has a prefix, which all its queries see.
        runs: tokens of one run, such as those of an image, see one another both ways: k <= p, or k
            lies in the run of p.
        cross: the keys have a separate layout.
        tree: documents are trees: a query sees the keys of its path, along which windows and chunks
            are counted. With `cross` the queries are the last tokens of the row of keys.
        top_left: with `cross`, the first query is aligned with the first key; otherwise, or where
            no limit depends on it, the last query with the last key (bottom-right, as in
            FlashAttention).
    """

    causal: bool = True
    left: int = UNLIMITED
    right: int = 0
    chunk: int = 0
    prefix: bool = False
    cross: bool = False
    top_left: bool = False
    tree: bool = False
    runs: bool = False

    def __post_init__(self) -> None:
        limited, ahead = self.right == 0, self.prefix or self.runs
        if limited != (self.causal and not ahead) or (ahead and not self.causal):
            raise ValueError(
                f"a MaskSpec with causal={self.causal}, prefix={self.prefix} and runs={self.runs} "
                f"cannot have right={self.right}; make it with MaskSpec.of()."
            )
        if self.tree and self.right != 0:
            raise NotImplementedError(
                f"trees need causal attention without prefix and runs, got {self!r}; pack each "
                "path as a document."
            )
        if self.runs and (self.cross or self.prefix):
            raise NotImplementedError(
                "runs need causal attention of a row to itself, without prefix or layout_k, got "
                f"{self!r}; remove one of them."
            )
        if self.top_left and not self.cross:
            raise ValueError("a MaskSpec has top_left only with cross; make it with MaskSpec.of().")

    @classmethod
    def of(
        cls,
        *,
        causal: bool = True,
        window: int | tuple[int, int] | None = None,
        chunk: int | None = None,
        prefix: bool = False,
        cross: bool = False,
        align: Align = "bottom_right",
    ) -> MaskSpec:
        """Build the spec from the arguments of `document_block_mask`; equal masks give equal specs.

        Args:
            causal: no key after the query.
            window: an int W keeps |q - kv| < W (transformers' meaning); a pair `(left, right)`
                counts keys on each side (FlashAttention's meaning), -1 for no limit.
            chunk: only keys of the query's own chunk of this many tokens, counted from the start of
                the document (Llama 4).
            prefix: whether documents have prefixes.
            cross: whether the keys have a separate layout.
            align: with `cross`, where the diagonal lies.

        Raises:
            ValueError: `causal` is not a bool, W or chunk is below 1, a pair has a value below -1,
                `align` is unknown, or `prefix` is set without `causal`.

        >>> MaskSpec.of(window=4)
        MaskSpec(causal, window=(3, 0))
        """
        if not isinstance(causal, bool):
            raise ValueError(f"causal must be True or False, got {causal!r}; choose one.")
        left, right = _sides(window)
        tokens = 0 if chunk is None else to_int_or_none(chunk)
        if tokens is None or (chunk is not None and tokens < 1):
            raise ValueError(
                f"chunk must be an integer of at least 1 token, got {chunk!r}; pass None for no "
                "chunks."
            )
        if align not in ("bottom_right", "top_left"):
            raise ValueError(
                f"align must be 'bottom_right' or 'top_left', got {align!r}; FlashAttention's is "
                "'bottom_right'."
            )
        if prefix and not causal:
            raise ValueError(
                "prefix needs causal=True, got causal=False, under which every key of a document "
                "is seen already; remove prefix."
            )
        if right == 0:  # the window is causal already, and cuts off what a prefix would add
            causal, prefix = True, False
        elif causal and not prefix:
            right = 0
        depends_on_alignment = causal or chunk is not None or (left, right) != (-1, -1)
        return cls(
            causal=causal,
            left=left,
            right=right,
            chunk=min(tokens, _LONGEST_SIDE),
            prefix=prefix,
            cross=cross,
            top_left=cross and align == "top_left" and depends_on_alignment,
        )

    def with_trees(self) -> MaskSpec:
        """The same mask where documents are trees.

        Raises:
            NotImplementedError: the mask is not causal, or has prefixes.
        """
        return replace(self, tree=True)

    def with_runs(self) -> MaskSpec:
        """The same mask where tokens of one run see one another both ways, inside its window.

        Raises:
            ValueError: the mask is not causal.
            NotImplementedError: the mask has a prefix, separate keys or trees.
        """
        return replace(self, right=UNLIMITED, runs=True)

    @property
    def has_window(self) -> bool:
        """Whether a window hides keys before the query, or some of those after it."""
        return self.left != UNLIMITED or self.right not in (UNLIMITED, 0)

    @property
    def is_limited(self) -> bool:
        """Whether a window or chunks hide keys of the query's document."""
        return self.left != UNLIMITED or self.chunk > 0

    @property
    def ends_at_query(self) -> bool:
        """Whether the last key a query sees is the one at its own index in the row."""
        return self.right == 0 and not self.cross

    def as_ints(self) -> list[int]:
        """Return the fields as integers for a custom operator; the inverse of `from_ints`."""
        flags = (self.prefix, self.cross, self.top_left, self.tree, self.runs)
        return [int(self.causal), self.left, self.right, self.chunk, *map(int, flags)]

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> MaskSpec:
        """Rebuild the spec from the output of `as_ints`."""
        causal, left, right, chunk, *flags = values
        return cls(bool(causal), left, right, chunk, *map(bool, flags))

    def __repr__(self) -> str:
        words = ["causal" if self.causal else "bidirectional"]
        if self.has_window:
            words.append(f"window=({self.left}, {self.right})")
        if self.chunk:
            words.append(f"chunk={self.chunk}")
        if self.prefix:
            words.append("prefix")
        if self.cross:
            words.append("cross, " + ("top-left" if self.top_left else "bottom-right"))
        if self.tree:
            words.append("tree")
        if self.runs:
            words.append("runs")
        return f"MaskSpec({', '.join(words)})"


def _sides(window: int | tuple[int, int] | None) -> tuple[int, int]:
    """`(left, right)` of a window, -1 for no limit."""
    if window is None:
        return UNLIMITED, UNLIMITED
    width = None if isinstance(window, tuple | list) else to_int_or_none(window)
    if width is not None:
        if width < 1:
            raise ValueError(f"window must be at least 1, got {window}; pass None for no window.")
        sides = [width - 1, width - 1]
    else:
        given = map(to_int_or_none, window) if isinstance(window, tuple | list) else ()
        sides = [side for side in given if side is not None and side >= UNLIMITED]
        if len(sides) != 2 or len(window) != 2:  # type: ignore[arg-type]
            raise ValueError(
                f"window must be an integer or (left, right), each at least -1, got {window}; pass "
                "None for no window, -1 for no limit on a side."
            )
    left, right = (min(side, _LONGEST_SIDE) for side in sides)
    return left, right
