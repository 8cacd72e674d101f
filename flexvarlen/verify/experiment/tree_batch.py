"""`TreeBatch`: samples that share prefixes, in one row of trees, that a comparison runs on.

Shapes: T tokens of the row; N samples, each a path from a root to a leaf; L tokens of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.packing.images import has_images
from flexvarlen.reference.model import IGNORE_INDEX, Loss, weighted_loss
from flexvarlen.verify.experiment.batch import ModelInputs, PackedBatch
from flexvarlen.verify.experiment.row_images import NO_IMAGES, RowImages

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TreeBatch:
    """A row of trees, in the place of a `PackedBatch`.

    Attributes:
        input_ids: int64 `[1, T]`.
        trees: the layout.
        shift_labels: int64 `[1, T]`, the label of each token's next token; -100 where it has none.
        label_counts: int64 `[1, T]`, in how many samples each label counts.
        source: where the tokens come from, for the report.
        images: none.
        unit, sample: what is replaced to find leaks, and what runs alone, in words.
    """

    input_ids: Tensor
    trees: PackedLayout
    shift_labels: Tensor
    label_counts: Tensor
    source: str = "the caller's batch"
    images: RowImages = field(default=NO_IMAGES, compare=False, repr=False)
    given: ClassVar[None] = None  # no attention but ours reads trees
    unit: ClassVar[str] = "segment"
    sample: ClassVar[str] = "sample"

    @cached_property
    def paths(self) -> tuple[Tensor, ...]:
        """int64 `[L]` of each sample: where its tokens are in the row."""
        return tuple(path for path in self.trees.paths() if len(path))

    @cached_property
    def samples(self) -> PackedBatch:
        """What runs alone: the samples, one after another, sharing nothing."""
        ids = torch.cat([self.input_ids[0, path] for path in self.paths])
        return PackedBatch(ids[None], tuple(map(len, self.paths)), self.source)

    @property
    def total_tokens(self) -> int:
        """Tokens of the row, padding left out."""
        return sum(self.trees.lengths or ())

    def layout(self, capacity: int | None = None, longest: int | None = None) -> PackedLayout:
        """The trees; their own sizes count."""
        return self.trees

    def labels(self, samples: Sequence[int] | None = None) -> Tensor:
        """int64 `[1, T]`: `shift_labels`, -100 at tokens of none of these samples. Default: all."""
        if samples is None:
            return self.shift_labels
        return self.shift_labels.masked_fill(self._samples_through(samples) == 0, IGNORE_INDEX)

    def next_tokens(self) -> Tensor:
        """The labels: they are of next tokens."""
        return self.shift_labels

    def counted(self, labels: Tensor) -> Tensor:
        """0-d tensor: the number of labels, each times its label_counts; at least 1."""
        return torch.where(labels == IGNORE_INDEX, 0, self.label_counts).sum().clamp(min=1)

    def weights(self, samples: Sequence[int] | None = None) -> Tensor:
        """`[T]`: the labels' weights, of a shared token divided among those of these samples."""
        every = range(len(self.paths))
        through = self._samples_through(every if samples is None else samples)
        return self.label_counts[0] / through.clamp(min=1)

    def loss_alone(self, model: PreTrainedModel, samples: Sequence[int]) -> Loss:
        """The summed loss of these samples, each run alone."""
        labels, weights = self.labels(samples), self.weights(samples)
        return weighted_loss(
            model,
            [labels[0, path] for path in self.paths],
            [weights[path] for path in self.paths],
            self.counted(labels),
        )

    def loss_inputs(self, labels: Tensor, counted: Tensor) -> dict[str, Tensor]:
        """The keyword arguments of a forward whose loss is that of `labels` over `counted`."""
        counts = {"label_counts": self.label_counts, "num_items_in_batch": counted}
        return {"shift_labels": labels, **counts}

    def _samples_through(self, samples: Sequence[int]) -> Tensor:
        """int64 `[T]`: how many of these samples each token is in."""
        chosen = torch.cat([self.paths[sample] for sample in samples])
        return chosen.bincount(minlength=self.input_ids.shape[1])


Row = PackedBatch | TreeBatch
"""What an experiment runs on."""

CACHES = ("past_key_values", "cache")
THEIR_MARKS = ("position_ids", "attention_mask", "seq_idx", "cu_seq_lens_q")
OF_TOKENS_OR_OURS = (
    *("input_ids", "labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "return_dict"),
    *("packed_layout", "label_counts", "sample_counts"),
)
"""Arguments of a forward that a comparison makes itself, or that transformers does not read."""


def row_from(batch: Mapping[str, Any], model: PreTrainedModel) -> Row:
    """A row from a forward's keyword arguments, its boundaries found as `patch_model` does.

    Of documents, rows are put one after another; padding is dropped, and so are labels: a
    comparison makes its own. The batch as it stands is kept for transformers' attention, unless a
    packed_layout alone marks its documents. Of trees without `shift_labels` and `label_counts`,
    each token predicts the next of its segment, and counts for each path that it is on. Reads the
    device.

    Args:
        batch: the keyword arguments.
        model: that gets them; the row is on its device.

    Raises:
        ValueError: no input_ids, boundaries that break the contract, a cache, shift_labels without
            label_counts, or images that do not fit the tokens.
        NotImplementedError: images in trees, or of models whose images differ in size.
    """
    # They import transformers.
    from flexvarlen.patches.isolation.documents import layout_of, units_of
    from flexvarlen.patches.isolation.tokens import special_tokens

    for name in CACHES:
        if batch.get(name) is not None:
            raise ValueError(
                f"batch must hold no {name}, got {type(batch[name]).__name__}; remove it: every "
                "forward of a comparison starts without one."
            )
    batch = {
        name: x.to(model.device) if isinstance(x, Tensor | PackedLayout) else x
        for name, x in batch.items()
    }
    layout = layout_of(batch)
    ids: Tensor = batch["input_ids"].reshape(1, -1)
    if layout.segments is None:
        documents = [document.tokens for document in units_of(layout)]
        if not documents:
            raise ValueError("batch must hold at least one document, got padding only.")
        real = torch.zeros_like(ids[0], dtype=torch.bool)
        for tokens in documents:
            real[tokens] = True
        given = None
        if batch.get("packed_layout") is None or any(batch.get(x) is not None for x in THEIR_MARKS):
            others = {name: x for name, x in batch.items() if name not in OF_TOKENS_OR_OURS}
            given = ModelInputs(others, real.view_as(batch["input_ids"]))
        row = PackedBatch(ids[:, real], tuple(len(ids[0, x]) for x in documents), given=given)
        if not has_images(batch):
            return row
        spans = [slice(*span) for span in row.spans()]
        real = real.view_as(batch["input_ids"])
        special = special_tokens(model.config)
        return replace(row, images=RowImages.read(batch, real, spans, model, special))
    if has_images(batch):
        raise NotImplementedError(
            "batch must hold text alone where its packed_layout has trees, in a comparison, got "
            "images; check those with fv.verify_isolation."
        )
    labels, counts = batch.get("shift_labels"), batch.get("label_counts")
    if (labels is None) != (counts is None):
        raise ValueError(
            "shift_labels and label_counts must be given together with a packed_layout of "
            "trees, got one of them; take both from fv.share_prefixes."
        )
    if labels is None or counts is None:
        labels = torch.full_like(ids, IGNORE_INDEX)
        for start, end, *_ in units_of(layout):
            labels[0, start : end - 1] = ids[0, start + 1 : end]
        counts = torch.cat(layout.paths()).bincount(minlength=layout.total_tokens)
    return TreeBatch(ids, layout, labels.reshape(1, -1), counts.reshape(1, -1))
