"""The catalogue of batch forms: every way in which documents reach a model's forward.

A *form* turns the documents of a `Batch` (tests/tiny_models.py) into keyword arguments. Something
`BESIDE` a form is a second argument that says the same, or nothing about documents. `ROWS` are the
batches: how documents lie in rows, with padding and without. `given` puts them together:

    given("cu_seq_lens", one_row(), "ones", "max_length")

A test that needs a form takes it from here; what a test refuses or malforms stays in that test.
Shapes: B rows of S tokens, T = B·S.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import flexvarlen as fv
from tests.tiny_models import Batch, one_row, padded_rows, two_rows

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """A way to hand the documents of a batch to a model.

    Attributes:
        means: what the keywords say about the documents.
        rows: the most that the form can say: "one" document a row, or "one padded"; rows that are
            "whole", of documents alone; rows "padded" on both sides; "explicit" boundaries, with
            empty documents, and padding behind the last.
        inputs: the forward's keyword arguments beside input_ids.
        beside: names in `BESIDE` that may come along and change nothing.
    """

    means: str
    rows: str
    inputs: Callable[[Batch], Inputs]
    beside: tuple[str, ...] = ()


def real_tokens(batch: Batch) -> Tensor:
    """int64 `[B, S]`, 1 at tokens of documents: the usual padding mask."""
    return (batch.document_ids > 0).long()


def layout_of(batch: Batch, **sizes: Any) -> fv.PackedLayout:
    """The documents as an explicit layout; `sizes` are those of `PackedLayout.from_lengths`."""
    sizes = {"total_tokens": batch.ids.numel(), "device": batch.ids.device, **sizes}
    return fv.PackedLayout.from_lengths(batch.cu_seqlens.diff().tolist(), **sizes)


def _seq_idx(batch: Batch) -> Inputs:
    real = real_tokens(batch)
    padded = {} if real.all() else {"attention_mask": real}
    return {"seq_idx": batch.document_ids.int(), **padded}


def _max_length(batch: Batch) -> Inputs:
    longest = int(batch.cu_seqlens.diff().max())
    return {"max_length_q": longest, "max_length_k": longest}


FORMS = {
    "packed_layout": Form(
        "an explicit PackedLayout; it comes first",
        "explicit",
        lambda b: {"packed_layout": layout_of(b)},
        ("ones", "seq_idx", "positions"),
    ),
    "cu_seq_lens": Form(
        "the documents' boundaries, as FlashAttention takes them",
        "explicit",
        lambda b: {"cu_seq_lens_q": b.cu_seqlens},
        ("ones", "seq_idx", "positions", "cu_seq_lens_k", "max_length"),
    ),
    "position_ids": Form(
        "a document begins where positions restart",
        "whole",
        lambda b: {"position_ids": b.position_ids},
        ("ones", "seq_idx"),
    ),
    "document_ids": Form(
        "a 2D mask that numbers the documents of a row; 0 is padding",
        "padded",
        lambda b: {"attention_mask": b.document_ids},
        ("positions",),
    ),
    "padding_mask_and_position_ids": Form(
        "a document begins where positions restart; the mask is 0 at padding",
        "padded",
        lambda b: {"attention_mask": real_tokens(b), "position_ids": b.position_ids},
        ("bool",),
    ),
    "seq_idx": Form(
        "a document begins where the value changes, as DataCollatorWithFlattening numbers them",
        "padded",
        _seq_idx,
        ("positions",),
    ),
    "padding_mask": Form(
        "one document per row; the mask is 0 at padding, on either side",
        "one padded",
        lambda b: {"attention_mask": real_tokens(b)},
        ("positions", "bool"),
    ),
    "plain": Form("nothing: one document per row", "one", lambda b: {}, ("positions", "ones")),
}

BESIDE: dict[str, Callable[[Batch], Inputs]] = {
    "positions": lambda b: {"position_ids": b.position_ids},
    "ones": lambda b: {"attention_mask": torch.ones_like(b.ids)},
    "bool": lambda b: {"attention_mask": real_tokens(b).bool()},
    "seq_idx": _seq_idx,
    "cu_seq_lens_k": lambda b: {"cu_seq_lens_k": b.cu_seqlens.clone()},
    "max_length": _max_length,
}


def given(form: str, batch: Batch, *beside: str) -> Inputs:
    """The forward's keyword arguments beside input_ids: a form's, then those named in `BESIDE`."""
    inputs = FORMS[form].inputs(batch)
    for name in beside:
        inputs |= BESIDE[name](batch)
    return inputs


# ---- rows ----


def row_of(
    lengths: Sequence[int], ids: Tensor | None = None, device: torch.device | str = "cpu"
) -> Batch:
    """Documents of these lengths in one row, with tokens `[1, T]` of their own or all of one id."""
    numbers = torch.arange(len(lengths)) + 1
    rows = {
        "ids": torch.full((1, sum(lengths)), 5) if ids is None else ids,
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "document_ids": numbers.repeat_interleave(torch.tensor(lengths))[None],
        "cu_seqlens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
    }
    return Batch(**{name: x.to(device) for name, x in rows.items()}, order=())


def rolled(batch: Batch, tokens: int) -> Batch:
    """Padding at the right moved to the left, `tokens` of it."""
    moved = ("ids", "position_ids", "document_ids")
    return replace(batch, **{name: getattr(batch, name).roll(tokens, dims=1) for name in moved})


def both_sides(device: str = "cpu", *, packed: bool = True) -> Batch:
    """Two rows of 128 tokens, padding at both ends of each."""
    return rolled(padded_rows(device, left=False, packed=packed), 20)


ROWS: dict[str, Callable[..., Batch]] = {
    "one_row": one_row,
    "two_rows": two_rows,
    "right_padding": partial(padded_rows, left=False),
    "left_padding": partial(padded_rows, left=True),
    "right_padding_packed": partial(padded_rows, left=False, packed=True),
    "left_padding_packed": partial(padded_rows, left=True, packed=True),
    "both_sides_packed": both_sides,
    "first_document_at_position_100": partial(one_row, firsts={0: 100}),
    "later_document_at_position_2": partial(one_row, firsts={2: 2, 3: 2}),
    "several_continued": partial(one_row, firsts={0: 100, 2: 7, 4: 60}),
}
