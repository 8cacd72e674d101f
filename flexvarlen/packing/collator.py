"""`PackedCollator`: packs documents into one row of fixed shape, with their boundaries.

Shapes: T = total_tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flexvarlen.layout.arguments import checked_sizes, to_int_or_none
from flexvarlen.layout.labels import IGNORE_INDEX
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.routed_experts import OWN_CHOICE, ROUTED_EXPERTS, routes_of_samples
from flexvarlen.packing.columns import (
    BOUNDARIES,
    KNOWN,
    LOSS_MASKS,
    check_row,
    differ,
    ends_of,
    features_of,
    require_a_kind,
    require_no_loss_after,
    rows_of,
)
from flexvarlen.packing.images import (
    GRIDS,
    IMAGES,
    TOKEN_TYPES,
    has_images,
    joined_images,
    text_alone,
)
from flexvarlen.packing.loader_pass import DISPATCH_NOTHING, is_dispatched
from flexvarlen.packing.rope_index import RopeIndex, rope_positions

_GIVEN = "labels as given"  # a document's labels that the collator did not make


def pad_token_id_of(tokenizer: Any, pad_token_id: int | None) -> int:
    """The padding token: the one given, else the tokenizer's, else 0. No document sees it.

    Raises:
        ValueError: the tokenizer is another object, or the value is not a token id.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    if tokenizer is not None and not hasattr(tokenizer, "pad_token_id"):
        raise ValueError(
            f"tokenizer must be a transformers tokenizer, got {tokenizer!r:.80}; pass the model's, "
            "and all other arguments by name, such as total_tokens=4096."
        )
    if pad_token_id is None:
        pad_token_id = getattr(tokenizer, "pad_token_id", None)
    return 0 if pad_token_id is None else _not_negative("pad_token_id", pad_token_id)


def _not_negative(name: str, value: Any) -> int:
    number = to_int_or_none(value)
    if number is None or number < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {value!r}.")
    return number


@dataclass
class PackedCollator:
    """Packs documents into one row of a fixed shape, for a `DataLoader` or `Trainer`.

    Called on the examples of a dataset, it returns a batch for a patched model:

        input_ids     int64 `[1, T]`, `pad_token_id` after the last document
        labels        int64 `[1, T]`; -100 at padding and, for next-token labels, at each document's
                      first token (which no preceding token may predict)
        position_ids  int64 `[1, T]`, from `position_ids_start` in each document; in padding they
                      repeat, and never exceed those of the longest document
        packed_layout the `PackedLayout`, with boundaries and maximum length on the host, so no
                      forward has to sync with the device
        use_cache     False: with a cache, an unpatched model would not detect documents from
                      position_ids

    Images and videos are joined in the order of the documents. With `image_grid_thw` or
    `video_grid_thw`, positions are those of the model's `get_rope_index` for each document alone,
    `[4, 1, T]` (in the document, then in time, height and width), if `model` is given; else
    position_ids are left out, and a patched model makes them, which reads the device.

    With `boundaries="cu_seq_lens"`, the batch has the keywords of transformers' FlashAttention
    instead of the layout: `cu_seq_lens_q`, `cu_seq_lens_k` int32 `[capacity + 1]`, with the last
    value repeated in unused slots, and `max_length_q`, `max_length_k`, the bound. The padding then
    forms extra documents (FlashAttention writes only rows in a document): leave slots for them.

    Each input is one of the following, alone, in a list, or in a list of lists (grouped by `pack`):

        a document       `input_ids`, optionally `labels`; `attention_mask`, whose zeros are dropped
                         so that the tokens around them become adjacent;
                         `routed_experts` of `engine_routes`, in all documents or in none;
                         `completion_mask`, `assistant_masks`, with no loss where they are zero;
                         from a processor `pixel_values`, `image_grid_thw` and similar columns of
                         images and videos, `mm_token_type_ids` or `token_type_ids`
        several in one   the same columns with `seq_lengths` (TRL's packing), or `position_ids`,
                         `seq_idx` or document ids in `attention_mask` that separate them
        a batch          from `DataCollatorWithFlattening` or TRL's padding-free collator: the same
                         columns with a row dimension, and `cu_seq_lens_q`

    Tokens without any of these columns are one document: if they were several, this cannot be
    detected. A mapping with `input_ids` `[1, T]` and none of these columns is rejected, because
    `DataCollatorWithFlattening(return_position_ids=False)` returns several documents like this.

    Labels that the collator makes from input_ids are next-token labels; tokens of images get none.
    Given labels belong to their own tokens (token classification, masked LM) if one of the batch
    differs from its token, and are then all kept; else they are next-token labels. If a document's
    first token has a label and later tokens have none, they may be either: pass
    `next_token_labels`.

    Args:
        tokenizer: the model's tokenizer or processor, whose pad token fills the padding, or None.
        total_tokens: T; the rest of the row is padding. None: the tokens of the documents, so the
            shape differs between batches.
        capacity: document slots; None: the number of documents, rounded up to a power of two.
        max_seqlen_bound: upper bound on document length; None: the maximum, rounded up likewise.
        pad_token_id: token id for padding, which no document sees; None: the tokenizer's, else 0.
        boundaries: how to return the document boundaries, "packed_layout" or "cu_seq_lens".
        position_ids_start: position of a document's first token; RoBERTa and similar count from
            `padding_idx + 1`.
        extra: additional columns with one value per token, as a mapping of name to padding value; a
            feature with any other column raises an error.
        next_token_labels: whether given labels are next-token labels; None: see above.
        model: the model. Needed only for Qwen-VL and similar, whose `get_rope_index` gives the
            position_ids of images; its weights are not kept. None: see above.

    All but the tokenizer are keyword arguments, and are checked when the collator is made.

    Raises, when called:
        ValueError: there are more than `total_tokens` tokens or `capacity` documents, or one is
            longer than `max_seqlen_bound`; a column is missing, unknown, of another length or not
            integer; the boundaries contradict one another, or do not cover all tokens; a batch of
            one row has no boundaries; labels do not show whether they are next-token labels.

    A `DataLoader(pin_memory=True)` pins the layout too. If accelerate loads the batches of all
    processes in one (`dispatch_batches`, its default for an `IterableDataset`), only tensors can be
    sent, so the batch has `input_ids`, `labels`, `position_ids` and the extra columns.
    """

    tokenizer: Any = None
    _: KW_ONLY
    total_tokens: int | None = None
    capacity: int | None = None
    max_seqlen_bound: int | None = None
    pad_token_id: int | None = None
    boundaries: str = "packed_layout"
    position_ids_start: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    next_token_labels: bool | None = None
    model: Any = None

    def __post_init__(self) -> None:
        self.total_tokens, self.capacity, self.max_seqlen_bound = checked_sizes(
            self.total_tokens, self.capacity, self.max_seqlen_bound
        )
        self.pad_token_id = pad_token_id_of(self.tokenizer, self.pad_token_id)
        self.position_ids_start = _not_negative("position_ids_start", self.position_ids_start)
        if self.boundaries not in ("packed_layout", "cu_seq_lens"):
            raise ValueError(
                "boundaries must be packed_layout or cu_seq_lens, got "
                f"{self.boundaries!r}; choose one."
            )
        if not isinstance(self.next_token_labels, bool | None):
            raise ValueError(
                "next_token_labels must be True, False or None, got "
                f"{self.next_token_labels!r}; choose one."
            )
        if not isinstance(self.extra, Mapping):
            raise ValueError(
                "extra must map names of columns to their padding values, got "
                f"{self.extra!r:.80}; pass a dict."
            )
        if not isinstance(self.model, RopeIndex | None):
            self.model = RopeIndex.of(self.model)  # loader workers need no weights
        for name in self.extra:
            if name in (*KNOWN, *BOUNDARIES, *LOSS_MASKS, *TOKEN_TYPES, *IMAGES):
                raise ValueError(
                    f"extra must name columns unknown to the collator, got {name!r}; remove it."
                )

    def __call__(self, features: Any) -> dict[str, Any]:
        """Collate documents into one batch; see the class."""
        rows = [row for feature in features_of(features) for row in rows_of(feature, self.extra)]
        documents = [document for row in rows for document in self._documents(row)]
        if not documents:
            raise ValueError("features must contain at least one document; the list is empty.")
        layout = self._layout([len(document["input_ids"]) for document in documents])
        self._mask_first_labels(documents)
        fills = {"input_ids": self.pad_token_id, "labels": IGNORE_INDEX, **self.extra}
        fills |= {name: 0 for name in TOKEN_TYPES if any(name in each for each in documents)}
        routes = routes_of_samples(documents, [len(x["input_ids"]) for x in documents])
        for name in TOKEN_TYPES:
            if name in fills and any(has_images(row) and name not in row for row in rows):
                raise ValueError(
                    f"{name} must be given for all documents with images or for none; make all "
                    "documents with one processor."
                )
        batch: dict[str, Any] = {}
        for name, fill in fills.items():
            zeros = (np.zeros_like(document["input_ids"]) for document in documents)
            values = np.concatenate([d.get(name, x) for d, x in zip(documents, zeros, strict=True)])
            kind = np.result_type(values.dtype, np.asarray(fill).dtype)
            row = np.full(layout.total_tokens, fill, kind)
            row[: values.size] = values
            batch[name] = torch.from_numpy(row)[None]
        if routes is not None:
            fill_TMK = np.full((layout.total_tokens, *routes[0].shape[1:]), OWN_CHOICE, np.int16)
            fill_TMK[: sum(map(len, routes))] = np.concatenate(routes)
            batch[ROUTED_EXPERTS] = torch.from_numpy(fill_TMK)[None]
        # A position embedding table may have only max_seqlen_bound entries.
        positions = layout.position_ids()[None] % layout.max_seqlen_bound
        batch["position_ids"] = positions + self.position_ids_start
        images = joined_images(rows)
        if is_dispatched():
            if images:
                raise ValueError(
                    f"batches of images cannot be loaded in one process for all ranks, got "
                    f"{', '.join(images)}; pass {DISPATCH_NOTHING}."
                )
            return batch  # the model finds the documents by position_ids
        batch |= images
        if any(name in images for name in GRIDS):
            del batch["position_ids"]  # of 4 rows for such models, which make them without `model`
            if self.model is not None:
                tokens, types = batch["input_ids"][0], batch["mm_token_type_ids"][0]
                positions_4T, _ = rope_positions(self.model, layout, tokens, types, batch)
                batch["position_ids"] = positions_4T[:, None]
        batch["use_cache"] = False
        if self.boundaries == "packed_layout":
            return batch | {"packed_layout": layout}
        ends, longest = layout.cu_seqlens, layout.max_seqlen_bound
        return batch | {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def check_dispatched(self) -> None:
        """Raise unless rows of several processes can be joined."""
        if self.total_tokens is None:
            raise ValueError(
                "total_tokens must be given where accelerate loads the batches of all processes in "
                f"one, got None; pass it, or {DISPATCH_NOTHING}."
            )

    def _mask_first_labels(self, documents: list[dict[str, NDArray[Any]]]) -> None:
        """Set first labels to -100 where labels are next-token labels.

        Trainer counts the labels of a batch, by which the loss is divided, before the model masks
        them.
        """
        next_token = self.next_token_labels
        if next_token is None:
            given = [(each[_GIVEN], each["input_ids"]) for each in documents if _GIVEN in each]
            next_token = not any(differ(labels, tokens) for labels, tokens in given)
            for labels, _ in given if next_token else ():
                require_a_kind(labels)
        for each in documents:
            if next_token or _GIVEN not in each:
                each["labels"][0] = IGNORE_INDEX

    def _layout(self, lengths: list[int]) -> PackedLayout:
        if self.total_tokens is not None and sum(lengths) > self.total_tokens:
            raise ValueError(
                f"features must contain at most total_tokens={self.total_tokens} tokens, got "
                f"{sum(lengths)} in {len(lengths)} documents; raise total_tokens, or pass fewer "
                "at a time: if an example is a whole row, per_device_train_batch_size=1 and "
                "per_device_eval_batch_size=1 (Trainer's default is 8)."
            )
        left = (self.total_tokens or 0) - sum(lengths)
        if self.boundaries == "cu_seq_lens" and left > 0:
            longest = self.max_seqlen_bound or max(lengths)
            whole, rest = divmod(left, longest)
            lengths = lengths + [longest] * whole + [rest] * bool(rest)
        return PackedLayout.from_lengths(
            lengths,
            total_tokens=self.total_tokens,
            capacity=self.capacity,
            max_seqlen_bound=self.max_seqlen_bound,
        )

    def _documents(self, row: dict[str, NDArray[Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the documents of one row, without padding; labels default to the input_ids."""
        check_row(row, self.extra)
        tokens = row["input_ids"]
        names = ("labels", "input_ids", ROUTED_EXPERTS, *TOKEN_TYPES, *self.extra)
        columns = {name: row[name] for name in names if name in row}
        if "labels" in row:
            columns[_GIVEN] = row["labels"]
        else:
            is_masked = any(name in row for name in LOSS_MASKS)
            columns["labels"] = tokens if is_masked else text_alone(row)
        for name in LOSS_MASKS:
            if name in row:
                columns["labels"] = np.where(row[name] != 0, columns["labels"], IGNORE_INDEX)
        kept = row.get("attention_mask", np.ones_like(tokens)) != 0
        ends = ends_of(row, kept)
        require_no_loss_after(ends[-1], kept, row)
        for start, stop in pairwise(ends):
            inside = kept[start:stop]
            if not inside.any():
                continue  # a run of padding
            yield {name: values[start:stop][inside] for name, values in columns.items()}
