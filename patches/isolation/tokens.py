"""Choose which documents, or segments of trees, are replaced together, and by which tokens.

To test every ordered pair of N documents, 2·ceil(log2 N) forwards are enough: for each binary digit
of a document's number, the documents with that digit 1 are replaced while those with 0 are watched,
and the other way round. Any two documents differ in some digit. The segments of trees are replaced
depth by depth in the same way.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexvarlen.packing.images import TOKEN_TYPES, rows_of_pixels


class Unit(NamedTuple):
    """Tokens that are replaced together: a document, or a segment of a tree.

    Attributes:
        start, end: its first token, and one past its last token.
        subtree_end: one past the last token that may see it; for a document its end.
        depth: number of segments above it; 0 for a document.
        tree: the index of its tree in the row; None for a document.
    """

    start: int
    end: int
    subtree_end: int
    depth: int = 0
    tree: int | None = None

    @property
    def tokens(self) -> slice:
        """The indices of its tokens."""
        return slice(self.start, self.end)


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


def halves_of(chosen: Sequence[int], units: Sequence[Unit]) -> list[tuple[list[int], list[int]]]:
    """Pairs (replaced, watched) of units: the chosen units are replaced by halves of each depth.

    All units that do not see the replaced ones are watched. If there are none, there is no pair.

    >>> halves_of([1, 0], [Unit(0, 3, 3), Unit(3, 4, 4), Unit(4, 6, 6)])  # documents
    [([0], [1, 2]), ([1], [0, 2])]
    >>> tree = [Unit(0, 3, 6, 0, 0), Unit(3, 4, 4, 1, 0), Unit(4, 6, 6, 1, 0)]
    >>> halves_of([0, 1, 2], tree)
    [([2], [0, 1]), ([1], [0, 2])]
    """
    groups: list[list[int]] = []
    for depth in sorted({units[unit].depth for unit in chosen}):
        level = [unit for unit in chosen if units[unit].depth == depth]
        groups += [[level[i] for i in ones] for ones, _ in halves(len(level))] or [level]
    pairs = [(replaced, outside(replaced, units)) for replaced in groups]
    return [(replaced, watched) for replaced, watched in pairs if watched]


def outside(chosen: Sequence[int], units: Sequence[Unit]) -> list[int]:
    """The units that see none of the chosen units: neither among them nor below them.

    Args:
        chosen: indices of units.
        units: all units, in the order of their tokens.
    """
    among, subtree_end, found = set(chosen), 0, []
    for index, unit in enumerate(units):
        if index in among:
            subtree_end = max(subtree_end, unit.subtree_end)
        if unit.start >= subtree_end:
            found.append(index)
    return found


def chosen_documents(documents: int | Sequence[int] | None, num_docs: int, seed: int) -> list[int]:
    """The documents to replace: all, a random selection of that size, or those given.

    Raises:
        ValueError: fewer than 1, or an index that no document has.
    """
    if documents is None:
        return list(range(num_docs))
    if isinstance(documents, int):
        if documents < 1:
            raise ValueError(
                f"documents must be at least 1, got {documents}; remove it to take all."
            )
        return sorted(random.Random(seed).sample(range(num_docs), min(documents, num_docs)))
    chosen = sorted(set(documents))
    if not chosen or chosen[0] < 0 or chosen[-1] >= num_docs:
        raise ValueError(
            f"documents must be indices from 0 to {num_docs - 1}, got {list(documents)}; pass "
            "documents of the batch."
        )
    return chosen


def with_other_tokens(
    ids_T: Tensor,
    replaced: Sequence[slice],
    vocabulary: int,
    seed: int,
    special: frozenset[int] = frozenset(),
) -> Tensor:
    """A copy of the tokens in which each token of some documents or segments is replaced.

    Args:
        ids_T: int64 `[T]`.
        replaced: the tokens of each replaced document or segment.
        vocabulary: number of tokens to draw from.
        seed: random seed; a token's substitute does not depend on which others are replaced.
        special: tokens that are neither replaced nor drawn, since a model may give them a meaning
            (padding, ends of documents, images); they are replaced in a slice without other tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    device = ids_T.device
    stay = torch.tensor(sorted(special), dtype=torch.int64, device=device)
    allowed = torch.arange(vocabulary, device=device)
    allowed = allowed[~torch.isin(allowed, stay)]
    steps = torch.randint(1, len(allowed), ids_T.shape, generator=generator, device="cpu")
    steps = steps.to(device)
    places = torch.searchsorted(allowed, ids_T.contiguous()).clamp(max=len(allowed) - 1)
    other = allowed[(places + steps) % len(allowed)].to(ids_T.dtype)
    kept = torch.isin(ids_T, stay)
    changed = ids_T.clone()
    for rows in replaced:
        words = other[rows]
        if not bool(kept[rows].all()):
            words = torch.where(kept[rows], ids_T[rows], words)
        changed[rows] = words
    return changed


def with_other_images(
    inputs: Mapping[str, Any], replaced: Sequence[slice], image_token: int | None
) -> dict[str, Tensor]:
    """The pixels of a batch, other ones where an image's tokens lie in replaced documents.

    The tokens of images are known by their types, or by their id. Pixels that `rows_of_pixels`
    leaves out are left out.
    """
    types = next((x for name in TOKEN_TYPES if (x := inputs.get(name)) is not None), None)
    if types is None and image_token is not None:
        types = (inputs["input_ids"] == image_token).long()
    if types is None:
        return {}
    found = {}
    for name, rows in rows_of_pixels(inputs, types.reshape(-1), replaced).items():
        pixels = inputs[name]
        found[name] = torch.where(rows.view(-1, *[1] * (pixels.ndim - 1)), 1 - pixels, pixels)
    return found


def special_tokens(config: Any) -> frozenset[int]:
    """Every `…_token_id` or `…_token_index` of a config and of its nested configs."""
    found: set[int] = set()
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if name.endswith(("token_id", "token_index")) and value is not None:
                found |= {int(x) for x in (value if isinstance(value, (list, tuple)) else [value])}
    return frozenset(found)
