"""`PackedBatch`: the documents of an experiment, in one row without padding.

`ModelInputs`: a forward of them.

Shapes: T tokens; N documents.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.reference.attention import spans_of
from flexvarlen.reference.model import IGNORE_INDEX, Loss, next_token_loss
from flexvarlen.verify.experiment.row_images import NO_IMAGES, RowImages

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelInputs:
    """One forward of a step, on B rows of S positions.

    Attributes:
        inputs: keyword arguments of the model.
        real: bool `[B, S]`, the positions that are not padding; None: all.
        labels: int64 `[B, S]`, the next token, `IGNORE_INDEX` where there is none; None where they
            are not used.
        counts: int64 `[B, S]`, the samples that each token stands for; None: one.
        grad_output: `[B, S, hidden]`, where the backward starts, if not from a loss.
    """

    inputs: Mapping[str, Any]
    real: Tensor | None = None
    labels: Tensor | None = None
    counts: Tensor | None = None
    grad_output: Tensor | None = None

    def tokens_of(self, outputs: Tensor) -> Tensor:
        """`[B, S, …]` -> `[tokens, …]`, row by row without the padding."""
        return outputs.flatten(0, 1) if self.real is None else outputs[self.real]


@dataclass(frozen=True)
class PackedBatch:
    """Documents of real tokens, one after another.

    Attributes:
        input_ids: int64 `[1, T]`.
        lengths: tokens of each document, each at least 1; their sum is T.
        source: where the tokens come from, for the report.
        given: the caller's batch that they come from, if transformers can read it: what is not of
            single tokens, and `real`.
        images: of the documents.
        unit, sample: what is replaced to find leaks, and what runs alone, in words.
    """

    input_ids: Tensor
    lengths: tuple[int, ...]
    source: str = "the caller's batch"
    given: ModelInputs | None = field(default=None, compare=False, repr=False)
    images: RowImages = field(default=NO_IMAGES, compare=False, repr=False)
    unit: ClassVar[str] = "document"
    sample: ClassVar[str] = "document"

    def __post_init__(self) -> None:
        tokens = self.input_ids.numel()
        if self.input_ids.ndim != 2 or self.input_ids.shape[0] != 1 or tokens == 0:
            raise ValueError(
                f"input_ids must have shape [1, T], got {tuple(self.input_ids.shape)}; pack the "
                "documents into one row."
            )
        if not self.lengths or min(self.lengths) < 1 or sum(self.lengths) != tokens:
            raise ValueError(
                f"lengths must be at least 1 and add up to the row's {tokens} tokens, got "
                f"{self.lengths}; give one length per document."
            )

    @classmethod
    def random(cls, lengths: Sequence[int], vocabulary: int, seed: int = 0) -> PackedBatch:
        """Documents of random tokens below `vocabulary`, on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocabulary, (1, sum(lengths)), generator=generator, device="cpu")
        return cls(ids, tuple(lengths))

    @property
    def total_tokens(self) -> int:
        """T."""
        return self.input_ids.shape[1]

    def spans(self) -> list[tuple[int, int]]:
        """First token, and the one past the last, of each document."""
        return spans_of(self.lengths)

    @property
    def samples(self) -> PackedBatch:
        """What runs alone: the documents."""
        return self

    @property
    def paths(self) -> tuple[Tensor, ...]:
        """int64 `[L]` of each document: where its tokens are in the row."""
        return tuple(torch.arange(*span, device=self.input_ids.device) for span in self.spans())

    def layout(self, capacity: int | None = None, longest: int | None = None) -> PackedLayout:
        """The documents, on the tokens' device; sizes as in `PackedLayout.from_lengths`."""
        return PackedLayout.from_lengths(
            self.lengths,
            device=self.input_ids.device,
            capacity=capacity,
            max_seqlen_bound=longest,
        )

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its tokens on `device`; images stay, on that of their model."""
        return replace(self, input_ids=self.input_ids.to(device))

    def labels(self, documents: Sequence[int] | None = None) -> Tensor:
        """int64 `[1, T]`: the tokens, with -100 at the first token of each document, which has no
        predecessor to predict it.

        Args:
            documents: those that count; the labels of all others are -100. Default: all.
        """
        labels = self.input_ids.clone()
        counted = set(range(len(self.lengths)) if documents is None else documents)
        for document, (start, end) in enumerate(self.spans()):
            labels[0, start : start + 1 if document in counted else end] = IGNORE_INDEX
        return labels

    def next_tokens(self) -> Tensor:
        """int64 `[1, T]`: what each token predicts; -100 at the last of each document."""
        return self.labels().roll(-1, dims=1)

    def counted(self, labels: Tensor) -> Tensor:
        """0-d tensor: the labels that count, at least 1."""
        return (labels != IGNORE_INDEX).sum().clamp(min=1)

    def loss_alone(
        self, model: PreTrainedModel, documents: Sequence[int], piece_tokens: int | None = None
    ) -> Loss:
        """The loss of `labels(documents)`, of each document alone.

        Args:
            piece_tokens: as in `next_token_loss`.
        """
        return next_token_loss(
            model, self.input_ids, self.lengths, documents, piece_tokens=piece_tokens
        )

    def loss_inputs(self, labels: Tensor, counted: Tensor) -> dict[str, Tensor]:
        """The keyword arguments of a forward whose loss is that of `labels` over `counted`."""
        return {"labels": labels, "num_items_in_batch": counted}

    def inputs(self) -> dict[str, Tensor]:
        """What a user hands to transformers: tokens, positions that restart, and images."""
        marks = {"position_ids": self.layout().position_ids()[None]}
        return {"input_ids": self.input_ids, **self.images.packed(marks)}

    def images_alone(self, document: int) -> dict[str, Tensor]:
        """The keyword arguments of a document's images, for a forward of it alone."""
        return self.images.alone(slice(*self.spans()[document]))


def recut(batch: PackedBatch, seed: int, *, capacity: int, longest: int) -> PackedBatch:
    """The same tokens cut into other documents: at most `capacity`, none above `longest` tokens."""
    rng = random.Random(seed)
    lengths: list[int] = []
    left = batch.total_tokens
    while left:
        room = (capacity - len(lengths) - 1) * longest  # of the documents that may follow
        lengths.append(rng.randint(max(1, left - room), min(longest, left)))
        left -= lengths[-1]
    return PackedBatch(batch.input_ids, tuple(lengths), batch.source)
