"""Find the prefixes that samples share, and lay the samples out as trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flexvarlen.layout.boundaries import integers
from flexvarlen.layout.logprobs import IGNORE_INDEX
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.segments import path_to

Sample = Mapping[str, Any] | Sequence[int] | Tensor


@dataclass(frozen=True)
class SharedPrefixes:
    """Samples as one row of trees.

    Attributes:
        input_ids: int64 `[1, T]`.
        shift_labels: int64 `[1, T]`, the label of each token's next token; -100 where it has none.
        sample_counts: int64 `[1, T]`, how many samples each token stands for; 0 at padding.
        layout: the trees.
        paths: for each sample, in the caller's order, the tokens that it consists of, int64 `[L]`.
    """

    input_ids: Tensor
    shift_labels: Tensor
    sample_counts: Tensor
    layout: PackedLayout
    paths: tuple[Tensor, ...]

    def batch(self) -> dict[str, Any]:
        """The keyword arguments of a patched model, whose loss is then `tree_loss`."""
        return {
            "input_ids": self.input_ids,
            "shift_labels": self.shift_labels,
            "sample_counts": self.sample_counts,
            "packed_layout": self.layout,
        }

    def unfold(self, x: Tensor) -> tuple[Tensor, ...]:
        """x of each sample, in the caller's order; the gradients of a shared token add up.

        Args:
            x: `[T, ...]` or `[1, T, ...]`, such as logits or hidden states.

        Returns:
            A tensor `[L, ...]` for each sample.
        """
        x_T = x[0] if x.shape[:2] == self.input_ids.shape else x
        return tuple(x_T[path.to(x.device)] for path in self.paths)


def share_prefixes(
    samples: Sequence[Sample],
    *,
    total_tokens: int | None = None,
    pad_token_id: int = 0,
    device: torch.device | str = "cpu",
    **sizes: Any,
) -> SharedPrefixes:
    """Lay samples out as trees, in which what they have in common is computed once.

    Two samples share a token if all tokens up to it are equal, and all labels of their next tokens.
    So branches begin one token before the first that differs, and each token has one label. Equal
    samples share everything, and a sample that another one continues shares all but its end.

    Args:
        samples: token ids, or mappings with `input_ids` and perhaps `labels`, which are of the
            tokens themselves, as in transformers, -100 where nothing is learned.
        total_tokens: T; default: the tokens that are left. What is missing is padding.
        pad_token_id: what padding holds.
        device: where the tensors go.
        sizes: further arguments of `PackedLayout.from_tree`: capacity, max_seqlen_bound, max_depth.

    Raises:
        ValueError: a sample without tokens, or with another number of labels than of tokens; and as
            `PackedLayout.from_tree`.

    >>> shared = share_prefixes([[5, 6, 7, 8], [5, 6, 7, 9]])
    >>> shared.input_ids.tolist(), shared.sample_counts.tolist()
    ([[5, 6, 7, 8, 7, 9]], [[2, 2, 1, 1, 1, 1]])
    >>> shared.unfold(shared.input_ids)[1]
    tensor([5, 6, 7, 9])
    """
    pairs = [_with_labels(index, sample) for index, sample in enumerate(samples)]
    tree = _Tree(pairs)
    for group in _by_next(pairs, range(len(pairs)), 0):
        tree.add(group, 0, -1)
    lengths = [len(x) for x in tree.tokens]
    layout = PackedLayout.from_tree(
        lengths, tree.parents, total_tokens=total_tokens, device=device, **sizes
    )
    starts = list(accumulate(lengths, initial=0))
    missing = layout.total_tokens - starts[-1]
    padding = torch.tensor([[pad_token_id, IGNORE_INDEX]]).expand(missing, 2)
    rows_T2 = torch.cat([*tree.tokens, padding])
    of_segments = [torch.full((n,), count) for n, count in zip(lengths, tree.counts, strict=True)]
    counts_T = torch.cat([*of_segments, torch.zeros(missing, dtype=torch.long)])
    ids, labels, counts = (x[None].to(device) for x in (*rows_T2.unbind(1), counts_T))
    return SharedPrefixes(
        ids,
        labels,
        counts,
        layout,
        paths=tuple(path_to(tree.ends[i], starts, tree.parents) for i in range(len(pairs))),
    )


def _with_labels(index: int, sample: Sample) -> Tensor:
    """int64 `[L, 2]`: each token, and the label of the next."""
    given = sample if isinstance(sample, Mapping) else {"input_ids": sample}
    others = [name for name in given if name not in ("input_ids", "labels")]
    if others or "input_ids" not in given:
        raise ValueError(
            "a sample must have input_ids and perhaps labels, and no other column, got "
            f"{', '.join(given)} at index {index}; set labels to -100 where nothing is learned, "
            "and drop the others."
        )
    ids = integers("input_ids", given["input_ids"])
    labels = integers("labels", given["labels"]) if given.get("labels") is not None else ids
    if not ids or len(labels) != len(ids):
        raise ValueError(
            "a sample must have tokens, and as many labels, got "
            f"{len(ids)} and {len(labels)} at index {index}; drop or fix it."
        )
    return torch.tensor([ids, [*labels[1:], IGNORE_INDEX]]).T.contiguous()


def _by_next(pairs: list[Tensor], group: Sequence[int], at: int) -> list[list[int]]:
    """The samples of a group that go on, by their next token and label, in order of appearance."""
    found: dict[tuple[int, ...], list[int]] = {}
    for index in group:
        if at < len(pairs[index]):
            found.setdefault(tuple(pairs[index][at].tolist()), []).append(index)
    return list(found.values())


class _Tree:
    """Segments, as they are found depth first.

    Attributes:
        pairs: tokens and labels of the samples.
        tokens: of each segment, `[L, 2]`.
        parents, counts: the segment above each, and how many samples go through it.
        ends: the last segment of each sample.
    """

    def __init__(self, pairs: list[Tensor]) -> None:
        self.pairs = pairs
        self.tokens: list[Tensor] = []
        self.parents: list[int] = []
        self.counts: list[int] = []
        self.ends: dict[int, int] = {}

    def add(self, group: list[int], start: int, parent: int) -> None:
        """Add what the samples of a group have in common from `start` on, then what follows."""
        stop = start + min(self._common(group[0], other, start) for other in group)
        segment = len(self.tokens)
        self.tokens.append(self.pairs[group[0]][start:stop])
        self.parents.append(parent)
        self.counts.append(len(group))
        for index in group:
            if len(self.pairs[index]) == stop:
                self.ends[index] = segment
        for others in _by_next(self.pairs, group, stop):
            self.add(others, stop, segment)

    def _common(self, a: int, b: int, start: int) -> int:
        """How many tokens two samples share from `start` on."""
        first, second = self.pairs[a][start:], self.pairs[b][start:]
        length = min(len(first), len(second))
        differ = (first[:length] != second[:length]).any(1).nonzero()
        return int(differ[0]) if len(differ) else length


class TreeCollator:
    """Makes a batch of samples one row of trees, for a patched model.

    Args:
        sizes: arguments of `share_prefixes`. Batches of equal total_tokens, capacity,
            max_seqlen_bound and max_depth share one compiled graph.

    The model's loss is then `tree_loss`: that of the samples computed one by one.
    """

    def __init__(self, **sizes: Any) -> None:
        self.sizes = sizes

    def __call__(self, features: Sequence[Sample]) -> dict[str, Any]:
        """The keyword arguments of the model.

        Raises:
            ValueError: as `share_prefixes`.
        """
        return share_prefixes(features, **self.sizes).batch()
