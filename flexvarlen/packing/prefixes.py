"""Find the prefixes that samples share, and lay the samples out as trees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flexvarlen.layout.arguments import int64s, require_int_at_least, require_tensor
from flexvarlen.layout.labels import IGNORE_INDEX, why_not_labels
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.prefix_tree import PrefixTree
from flexvarlen.layout.routed_experts import (
    OWN_CHOICE,
    ROUTED_EXPERTS,
    route_ids,
    routes_of_samples,
)
from flexvarlen.packing.collator import pad_token_id_of
from flexvarlen.packing.tree_images import SAMPLE_COLUMNS, ImagesOfSamples, any_images
from flexvarlen.packing.tree_ranks import TreeSubset, deal_samples
from flexvarlen.trees.run import PartBatch, run_parts

Sample = Mapping[str, Any] | Sequence[int] | Tensor
_IDS = "tokenize it, and pass token ids"


@dataclass(frozen=True)
class SharedPrefixes:
    """Samples that share prefixes, laid out as one row of trees.

    Attributes:
        input_ids: int64 `[1, T]`.
        shift_labels: int64 `[1, T]`, the label of each token's next token; -100 without a label.
        sample_counts: int64 `[1, T]`, how many samples share each token; 0 at padding.
        label_counts: int64 `[1, T]`, in how many of these samples the label counts.
        layout: the trees.
        paths: for each sample, in the caller's order, the indices of its tokens in the row,
            int64 `[L]`.
        has_label: for each sample bool `[L]`, on the host, whether the token after each is a label.
        samples: the index of each sample among those given: all, or those of a rank.
        num_items_in_batch: labels by which the loss is divided, 0-d; None: those of the row.
        images: what the model gets of images: `pixel_values` and similar, `mm_token_type_ids`
            int64 `[1, T]`, position_ids int64 `[4, 1, T]`.
        routed_experts: int16 `[1, T, M, K]`, the experts that routers replay, -1 at padding; None:
            no sample has any.
    """

    input_ids: Tensor
    shift_labels: Tensor
    sample_counts: Tensor
    label_counts: Tensor
    layout: PackedLayout
    paths: tuple[Tensor, ...]
    has_label: tuple[Tensor, ...]
    samples: tuple[int, ...]
    num_items_in_batch: Tensor | None = None
    images: Mapping[str, Tensor] = field(default_factory=dict)
    routed_experts: Tensor | None = None

    def batch(self) -> dict[str, Any]:
        """The keyword arguments of a patched model, whose loss is then `tree_loss`."""
        batch = {
            "input_ids": self.input_ids,
            "shift_labels": self.shift_labels,
            "sample_counts": self.sample_counts,
            "label_counts": self.label_counts,
            "packed_layout": self.layout,
            **self.images,
        }
        if self.routed_experts is not None:
            batch[ROUTED_EXPERTS] = self.routed_experts
        count = self.num_items_in_batch
        return batch if count is None else batch | {"num_items_in_batch": count}

    def of_rank(self, rank: int, ranks: int) -> SharedPrefixes:
        """The samples of one rank, of one tree over several.

        Samples stay in the order of the tree, and the largest rank has as few tokens as that
        allows. What samples of several ranks share is computed on each of these ranks. The losses
        divide by the labels of all ranks, so losses and gradients of the ranks sum to those of the
        tree.

        Args:
            rank: which, from 0.
            ranks: how many; the same call on each, with equal samples, needs no communication.

        Returns:
            A row of the rank's own trees, whose `samples` are their indices here. A rank without
            samples has a row of one token, without a label, and must run too: begin the sum of a
            loss of its log-probabilities with `0 * logprobs.sum()`.

        Raises:
            ValueError: the rank is not below `ranks`, or samples have images.

        >>> shared = share_prefixes([[5, 6, 7, 8], [5, 6, 7, 9], [4, 4]])
        >>> [shared.of_rank(rank, 2).samples for rank in (0, 1)]
        [(0, 1), (2,)]
        """
        ranks = require_int_at_least("ranks", ranks, 1)
        if require_int_at_least("rank", rank, 0) >= ranks:
            raise ValueError(f"rank must be below {ranks}, got {rank}; count ranks from 0.")
        self._require_text("to be dealt to ranks")
        own = deal_samples(self.paths, ranks)[rank]
        paths, has_label = [self.paths[i] for i in own], [self.has_label[i] for i in own]
        kept = TreeSubset(self.layout, paths)
        counts, label_counts = kept.counts(paths), kept.counts(paths, has_label)
        device, here = self.input_ids.device, kept.tokens.to(self.input_ids.device)
        labels = self.shift_labels[:, here].masked_fill(label_counts.to(device) == 0, IGNORE_INDEX)
        return SharedPrefixes(
            self.input_ids[:, here],
            labels,
            counts.to(device),
            label_counts.to(device),
            kept.layout.to(device),
            kept.paths(paths),
            tuple(has_label),
            tuple(self.samples[i] for i in own),
            self._count(),
            routed_experts=None if self.routed_experts is None else self.routed_experts[:, here],
        )

    def parts(self, model: nn.Module, max_tokens: int) -> Iterator[PartBatch]:
        """Run the trees in parts of a bounded number of tokens, with the gradients of the whole.

        The segments that other parts continue run first, without gradients, and their keys and
        values (of layers with a window the last, of recurrent layers states) are stored; then those
        parts run; then their own part, whose backward adds the gradients of what was stored.
        Activations are those of one part; what is stored is that of one path and its open branches.

        Args:
            model: patched; in training without dropout. Each part runs once, in this model. Under
                DDP and FSDP2 ranks may have different trees, and numbers of parts; for the
                gradients of all, set a part's `num_items_in_batch` to the labels of all ranks, and
                multiply its loss by the number of ranks. If the model is compiled, parts are
                padded, and trees of equal `capacity` and `max_depth` share a graph (longer paths
                above a part, by powers of two, take another).
            max_tokens: tokens of a part at most; of a compiled model, exactly.

        Returns:
            An iterator of keyword arguments for the model, each with `tokens`, int64 `[T]` on the
            CPU: its indices in the row, without those of padding at its end; none in the parts that
            FSDP2 adds where only other ranks have one. The losses add up to that of `batch()`. Run
            the backward of each before the next; under `torch.no_grad()` each part runs once.

        Raises:
            ValueError: `max_tokens` is below 1, or samples have images; when a part has run, that
                the model is not patched, has dropout, or runs parts in several dtypes.
            NotImplementedError: FSDP1 or ZeRO-3 shards the model, or it trains under tensor
                parallelism, inside DDP's forward or with its static_graph; when the first part
                runs, `output_router_logits`, `torch.compile` of recurrent layers or layer by
                layer, layers without a layer_idx, a convolution wider than 4 tokens.
            RuntimeError: the forward or backward of a part did not run, or ran twice.

        >>> for part in shared.parts(model, max_tokens=16_384):  # doctest: +SKIP
        ...     model(**part).loss.backward()
        """
        self._require_text("to run in parts")
        batch, given = self.batch(), ("packed_layout", "num_items_in_batch")
        columns = {name: x for name, x in batch.items() if name not in given}
        arguments = {"num_items_in_batch": self._count()}
        return run_parts(model, self.layout, columns, arguments, max_tokens)

    def _count(self) -> Tensor:
        """The labels by which the loss is divided."""
        if self.num_items_in_batch is not None:
            return self.num_items_in_batch
        return (self.label_counts * (self.shift_labels != IGNORE_INDEX)).sum()

    def _require_text(self, what: str) -> None:
        if self.images:
            raise ValueError(
                f"trees must hold text alone {what}, got samples with images; pass batch() to the "
                "model."
            )

    def unfold(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split x into one tensor per sample; the gradients of a shared token add up.

        Args:
            x: `[T, ...]` or `[1, T, ...]`, such as logits or hidden states.

        Returns:
            A tensor `[L, ...]` for each sample, in the caller's order.

        Raises:
            ValueError: another number of tokens.
        """
        require_tensor("x", x)
        x_T = x[0] if x.shape[:2] == self.input_ids.shape else x
        if x_T.shape[:1] != (self.layout.total_tokens,):
            raise ValueError(
                f"x must have the row's {self.layout.total_tokens} tokens, got shape "
                f"{tuple(x.shape)}; pass what the model returned for batch()."
            )
        return tuple(x_T[path.to(x.device)] for path in self.paths)

    def fold(self, values: Sequence[Tensor], padding: float) -> Tensor:
        """Lay out values of each sample's tokens as a row, as `unfold` splits one.

        Args:
            values: for each sample `[L, ...]` on the host, such as of `fv.sampling_masks`; equal
                where samples share a token, or `padding` in some of them.
            padding: that of tokens without a value, and of the row's padding.

        Returns:
            `[1, T, ...]`, on the row's device.

        Raises:
            ValueError: another number of tokens, or samples that share a token differ there.
        """
        lengths = [len(path) for path in self.paths]
        if [len(x) for x in values] != lengths:
            raise ValueError(
                f"values must have lengths {lengths}, those of the samples, got "
                f"{[len(x) for x in values]}; pass one value for each token."
            )
        given, index = torch.cat(list(values)), torch.cat(self.paths)
        row = given.new_full((self.layout.total_tokens, *given.shape[1:]), padding)
        has_value = given.ne(padding).reshape(len(given), -1).any(1)
        given, index = given[has_value], index[has_value]
        row[index] = given
        if not torch.equal(row[index], given):
            raise ValueError(
                "values of samples that share a token must be equal there; share the prefixes of "
                "those samples alone whose values agree."
            )
        return row[None].to(self.input_ids.device)

    def save_picture(self, path: str | Path, names: Sequence[str] | None = None) -> Path:
        """Draw the trees as a PNG, with a line for each branch and the end of each sample. Syncs.

        Args:
            path: output file ending in .png; missing folders are created.
            names: names of the samples; default: their indices.

        Returns:
            The path.

        Raises:
            ValueError: another ending, or another number of names.
        """
        from flexvarlen.packing.tree_picture import Drawn, save_tree_picture

        drawn = Drawn(self.input_ids, self.shift_labels, self.layout, self.paths)
        return save_tree_picture(drawn, Path(path), names)


def share_prefixes(
    samples: Iterable[Sample],
    *,
    total_tokens: int | None = None,
    pad_token_id: int | None = None,
    device: torch.device | str = "cpu",
    capacity: int | None = None,
    max_seqlen_bound: int | None = None,
    max_depth: int | None = None,
    min_tokens: int = 1,
    model: Any = None,
) -> SharedPrefixes:
    """Lay samples out as trees, so that prefixes they share are computed once.

    Samples share a token if all tokens up to it are equal, and the labels of their next tokens
    agree; -100 agrees with every label, so that a token may have a label in only some of its
    samples. Branches begin at the first token that differs, or, where several branches have labels
    there, one token before it. Equal samples share everything, and a sample that others continue is
    the beginning of one of them. A label that is not its own token counts as a difference, and so
    do a different image and other experts that routers replay. An image in a shared prefix goes
    through the vision tower once.

    Args:
        samples: token ids, or mappings with `input_ids` and optionally `labels`, aligned with the
            input_ids as in transformers, not shifted; -100 is ignored by the loss; and with
            `routed_experts`, of `engine_routes`, in all of them or in none. Those of Qwen-VL models
            may have the columns of images of a processor, and `mm_token_type_ids`.
        total_tokens: T; default: the tokens of the trees. The rest is padding.
        pad_token_id: token id for padding, which no sample sees; None: 0.
        device: where the tensors go.
        capacity, max_seqlen_bound: as in `PackedLayout.from_tree`.
        max_depth: maximum number of segments on a path; below, samples share nothing. Default:
            no bound.
        min_tokens: minimum length of a shared segment; a shorter one is repeated in each branch.
        model: the model; needed if samples have images, to compute their position_ids.

    Raises:
        ValueError: there are no samples, one has no tokens or another number of labels than of
            tokens; or as in `PackedLayout.from_tree`.

    >>> shared = share_prefixes([[5, 6, 7, 8], [5, 6, 7, 9]])
    >>> shared.input_ids.tolist(), shared.sample_counts.tolist()
    ([[5, 6, 7, 8, 7, 9]], [[2, 2, 1, 1, 1, 1]])
    >>> shared.unfold(shared.input_ids)[1]
    tensor([5, 6, 7, 9])
    """
    if isinstance(samples, str | Mapping) or not isinstance(samples, Iterable):
        raise ValueError(
            f"samples must be a list of samples, got {type(samples).__name__}; put a single one in "
            "a list."
        )
    samples = list(samples)
    if len(samples) == 0:
        raise ValueError("samples must contain at least one sample; the list is empty.")
    min_tokens, max_depth = checked_tree_sizes(min_tokens, max_depth)
    pad_token_id = pad_token_id_of(None, pad_token_id)
    rows, is_label = zip(*map(_with_labels, range(len(samples)), samples), strict=True)
    images = ImagesOfSamples(samples, [x[:, 0] for x in rows]) if any_images(samples) else None
    compared = rows if images is None else images.shared.with_image_ids(rows)
    routes = routes_of_samples(samples, [len(row) for row in rows])
    if routes is not None:
        pairs = zip(compared, route_ids(routes), strict=True)
        compared = [np.column_stack(pair) for pair in pairs]
    tree = PrefixTree(compared, is_label, max_depth=max_depth, min_tokens=min_tokens)
    layout = PackedLayout.from_tree(
        tree.lengths,
        tree.parents,
        total_tokens=total_tokens,
        device=device,
        capacity=capacity,
        max_seqlen_bound=max_seqlen_bound,
        max_depth=max_depth,
    )
    paths, total = tuple(tree.paths()), layout.total_tokens
    (tokens, labels), labelled = np.concatenate(rows).T, np.concatenate(is_label)
    index = torch.cat(paths).numpy()
    predicting = np.roll(index, 1)[labelled]
    ids, shift_labels = np.full(total, pad_token_id), np.full(total, IGNORE_INDEX)
    ids[index] = tokens
    shift_labels[predicting] = labels[labelled]
    counts = (np.bincount(x, minlength=total) for x in (index, predicting))
    row_4T = torch.from_numpy(np.stack([ids, shift_labels, *counts])).to(device)
    ids_1T, labels_1T, sample_counts, label_counts = row_4T.split(1)
    columns = {} if images is None else images.row(tree, layout, model)
    columns = {name: x.to(device) for name, x in columns.items()}
    routed_experts = None
    if routes is not None:
        in_row = torch.full((total, *routes[0].shape[1:]), OWN_CHOICE, dtype=torch.int16)
        in_row[index] = torch.from_numpy(np.concatenate(routes))
        routed_experts = in_row[None].to(device)
    has_label = tuple(torch.from_numpy(np.roll(x, -1)) for x in is_label)
    return SharedPrefixes(
        ids_1T,
        labels_1T,
        sample_counts,
        label_counts,
        layout,
        paths,
        has_label,
        tuple(range(len(samples))),
        images=columns,
        routed_experts=routed_experts,
    )


def _with_labels(index: int, sample: Sample) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Tokens and labels (the token at -100), int64 `[L, 2]`; which are labels, bool `[L]`."""
    given = sample if isinstance(sample, Mapping) else {"input_ids": sample}
    known = ("input_ids", "labels", ROUTED_EXPERTS, *SAMPLE_COLUMNS)
    others = [name for name in given if name not in known]
    if others or "input_ids" not in given:
        raise ValueError(
            "a sample may only have the columns input_ids, labels, routed_experts and those of "
            f"Qwen's images, got {', '.join(given)} at index {index}; set labels to -100 where a "
            "mask is 0, and drop the other columns."
        )
    ids = int64s(f"input_ids of sample {index}", given["input_ids"], _IDS)
    labels = ids
    if given.get("labels") is not None:
        labels = int64s(f"labels of sample {index}", given["labels"], _IDS)
    if ids.min(initial=0) < 0:
        raise ValueError(
            f"input_ids of sample {index} must be at least 0, got {ids.min()}; fix them (only "
            "labels may be -100)."
        )
    why = why_not_labels(f"labels of sample {index}", labels)
    if why is not None:
        raise ValueError(why)
    if not len(ids) or len(labels) != len(ids):
        raise ValueError(
            "a sample must have at least one token and a label for each, got "
            f"{len(ids)} tokens and {len(labels)} labels at index {index}; drop or fix it."
        )
    is_label = labels != IGNORE_INDEX
    is_label[0] = False  # no token predicts the first
    return np.stack([ids, np.where(is_label, labels, ids)], axis=1), is_label


def checked_tree_sizes(min_tokens: int, max_depth: int | None) -> tuple[int, int | None]:
    """Both as ints.

    Raises:
        ValueError: one is not an integer, or is below 1.
    """
    depth = None if max_depth is None else require_int_at_least("max_depth", max_depth, 1)
    return require_int_at_least("min_tokens", min_tokens, 1), depth
