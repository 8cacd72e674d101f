"""The cells of suite "kernels": shapes of attention over packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from flexvarlen.bench.suites.attention.inputs import AttentionCase, Inputs
from flexvarlen.bench.suites.model.geometries import drawn_lengths

Documents = Literal["uniform", "log-normal", "short"]

# Of the documents. Seed 0 draws one so long that the smallest rows hold nothing else, seed 1 one in
# twenty thousand; the squares of these lengths sum to about what is expected.
SEED = 6
UNIFORM_MEAN = 2048
SHORTEST, LONGEST = 32, 128  # of the documents "short"

TOKENS = (256, 1024, 4096, 8192, 32_768, 131_072)
DOCUMENTS: tuple[tuple[Documents, int], ...] = (
    ("uniform", UNIFORM_MEAN),
    ("log-normal", 500),
    ("log-normal", 2048),
    ("log-normal", 16_384),
    ("short", (SHORTEST + LONGEST) // 2),
)
"""Kinds of documents, and their mean length in tokens."""


@dataclass(frozen=True)
class Cell(AttentionCase):
    """One shape of attention over one packed row; a run measures every variant on it."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    dtype: str
    causal: bool
    tokens: int
    documents: Documents
    mean_doc: int
    seed: int = SEED

    @classmethod
    def of(cls, case: Mapping[str, Any]) -> Cell:
        return cls(**{field.name: case[field.name] for field in fields(cls)})

    @property
    def name(self) -> str:
        """The name for `--cases` and the log.

        >>> Cell(128, 32, 8, "bfloat16", True, 8192, "log-normal", 500).name
        'd128-h32x8-causal-t8192-log-normal500'
        """
        mask = "causal" if self.causal else "full"
        mean = self.mean_doc if self.documents == "log-normal" else ""
        heads = f"h{self.num_heads}x{self.num_kv_heads}"
        return f"d{self.head_dim}-{heads}-{mask}-t{self.tokens}-{self.documents}{mean}"

    @property
    def kind(self) -> tuple[int, int, int, bool]:
        """What kernels are compiled for: cells of one kind follow one another."""
        return self.head_dim, self.num_heads, self.num_kv_heads, self.causal

    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document; the last one is cut to fit."""
        if self.documents != "short":
            return tuple(drawn_lengths(self.tokens, self.documents, self.mean_doc, self.seed))
        generator = torch.Generator().manual_seed(self.seed)
        lengths: list[int] = []
        left = self.tokens
        while left > 0:
            drawn = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
            lengths.append(min(left, drawn))
            left -= lengths[-1]
        return tuple(lengths)

    def inputs(self, device: torch.device) -> Inputs:
        heads, dtype = (self.num_heads, self.num_kv_heads), getattr(torch, self.dtype)
        lengths = self.lengths()
        return Inputs.random(lengths, heads, self.head_dim, dtype, device, self.causal, self.seed)


def cells_of(
    head_dim: int,
    heads: tuple[int, int],
    causal: bool,
    tokens: Sequence[int],
    documents: Sequence[tuple[Documents, int]] = DOCUMENTS,
    dtype: str = "bfloat16",
) -> Iterator[Cell]:
    """The cells of one kind; none whose documents are those of another, or one alone by chance."""
    for total in tokens:
        seen = set()
        for name, mean in documents:
            cell = Cell(head_dim, *heads, dtype, causal, total, name, mean)
            collapsed = name == "log-normal" and (mean >= total or len(cell.lengths()) == 1)
            if not collapsed and cell.lengths() not in seen:
                seen.add(cell.lengths())
                yield cell


def all_cells() -> list[Cell]:
    """All of the commonest kind, and samples of four others.

    The other head_dim, no causal mask, no grouped queries, and all three at once.
    """
    uniform, mean_500, mean_2k, mean_16k, short = DOCUMENTS
    found = list(cells_of(128, (32, 8), True, TOKENS))
    for head_dim, heads, causal, tokens, documents in (
        (64, (32, 8), True, 256, [uniform]),
        (64, (32, 8), True, 1024, [mean_500]),
        (64, (32, 8), True, 8192, [mean_500, mean_2k]),
        (64, (32, 8), True, 32_768, [mean_2k, short]),
        (64, (32, 8), True, 131_072, [mean_16k]),
        (128, (32, 8), False, 1024, [uniform]),
        (128, (32, 8), False, 8192, [mean_500]),
        (128, (32, 8), False, 32_768, [mean_2k, short]),
        (128, (32, 8), False, 131_072, [uniform]),
        (128, (16, 16), True, 32_768, [uniform, mean_2k, short]),
        (64, (16, 16), False, 8192, [uniform, mean_500, short]),
    ):
        found += cells_of(head_dim, heads, causal, [tokens], documents)
    return found


def quick_cells(dtype: str) -> list[Cell]:
    """Small cells, of a head_dim that every kernel has."""
    kinds: tuple[tuple[Documents, int], ...] = (("uniform", 64), ("log-normal", 48), ("short", 80))
    return [
        *cells_of(64, (4, 2), True, (128,), kinds[:1], dtype),
        *cells_of(64, (4, 2), True, (256,), kinds[1:], dtype),
        *cells_of(64, (2, 2), False, (256,), kinds[:1], dtype),
    ]
