"""Which documents are replaced together, and by which tokens.

To test every ordered pair of N documents, 2·ceil(log2 N) forwards are enough: for each binary digit
of a document's number, the documents with that digit 1 are replaced while those with 0 are watched,
and the other way round. Any two documents differ in some digit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Span = tuple[int, int]
"""First token, and the one past the last, of a document."""


def halves(num_docs: int) -> list[tuple[list[int], list[int]]]:
    """Pairs (replaced, watched) of documents, such that each ordered pair is separated somewhere.

    >>> halves(3)
    [([1], [0, 2]), ([0, 2], [1]), ([2], [0, 1]), ([0, 1], [2])]
    """
    pairs = []
    for digit in range(max(num_docs - 1, 0).bit_length()):
        ones = [document for document in range(num_docs) if document >> digit & 1]
        zeros = [document for document in range(num_docs) if not document >> digit & 1]
        pairs += [(ones, zeros), (zeros, ones)]
    return pairs


def halves_of(sample: Sequence[int], num_docs: int) -> list[tuple[list[int], list[int]]]:
    """The halves of a sample; the documents outside it are watched each time.

    >>> halves_of([4, 1], 5)
    [([1], [0, 2, 3, 4]), ([4], [0, 1, 2, 3])]
    """
    chosen = [[sample[i] for i in ones] for ones, _ in halves(len(sample))] or [list(sample)]
    return [(ones, [d for d in range(num_docs) if d not in set(ones)]) for ones in chosen]


def sample_of(documents: int | Sequence[int] | None, num_docs: int, seed: int) -> list[int]:
    """The documents to replace: all, that many at random, or those named.

    Raises:
        ValueError: fewer than 1, or a number that no document has.
    """
    if documents is None:
        return list(range(num_docs))
    if isinstance(documents, int):
        if documents < 1:
            raise ValueError(
                f"documents must be at least 1, got {documents}; leave it out for all."
            )
        return sorted(random.Random(seed).sample(range(num_docs), min(documents, num_docs)))
    chosen = sorted(set(documents))
    if not chosen or chosen[0] < 0 or chosen[-1] >= num_docs:
        raise ValueError(
            f"documents must be numbers from 0 to {num_docs - 1}, got {list(documents)}; name some "
            "of the batch."
        )
    return chosen


def with_other_tokens(
    ids_T: Tensor,
    spans: Sequence[Span],
    replaced: Sequence[int],
    vocabulary: int,
    seed: int,
    special: frozenset[int] = frozenset(),
) -> Tensor:
    """A copy of the tokens in which each token of the replaced documents is another one.

    Args:
        ids_T: int64 `[T]`.
        spans: of all documents.
        replaced: those to replace.
        vocabulary: number of tokens to draw from.
        seed: of the draw; a token's substitute does not depend on which documents are replaced.
        special: tokens that neither come nor go, since a model may read more than words from them
            (padding, ends of documents, images); a document that holds nothing else loses them.
    """
    generator = torch.Generator().manual_seed(seed)
    device = ids_T.device
    stay = torch.tensor(sorted(special), dtype=torch.int64, device=device)
    allowed = torch.arange(vocabulary, device=device)
    allowed = allowed[~torch.isin(allowed, stay)]
    steps = torch.randint(1, len(allowed), ids_T.shape, generator=generator, device="cpu")
    steps = steps.to(device)
    places = torch.searchsorted(allowed, ids_T).clamp(max=len(allowed) - 1)
    other = allowed[(places + steps) % len(allowed)].to(ids_T.dtype)
    kept = torch.isin(ids_T, stay)
    changed = ids_T.clone()
    for document in replaced:
        rows = slice(*spans[document])
        words = other[rows]
        if not bool(kept[rows].all()):
            words = torch.where(kept[rows], ids_T[rows], words)
        changed[rows] = words
    return changed


def special_tokens(config: Any) -> frozenset[int]:
    """Every `…_token_id` of a config, and of the configs in it."""
    found: set[int] = set()
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if name.endswith("token_id") and value is not None:
                found |= {int(x) for x in (value if isinstance(value, (list, tuple)) else [value])}
    return frozenset(found)
