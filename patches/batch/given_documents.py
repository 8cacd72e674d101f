"""`GivenDocuments`: the arguments of a forward that describe its documents, and what each must be.

Shapes: B rows of S tokens, packed one after another: T = B·S.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexvarlen.layout.arguments import is_integer_tensor
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.refusal import Refusal, refuse

BOUNDARIES = (
    "packed_layout",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)
"""The keywords that only describe documents; no model uses them for anything else."""


class GivenDocuments(NamedTuple):
    """The arguments of a forward that describe its documents.

    Not a dataclass, as Dynamo would guard on the lengths it stores.

    Attributes:
        batch, row_tokens, device: B, S and where the tokens are.
        packed_layout: the documents of all T tokens.
        cu_seq_lens_q, cu_seq_lens_k: int32 `[num_docs + 1]`, cumulative over all T tokens; equal.
        max_length_q, max_length_k: tokens of the longest document, if the caller gave it; checked
            eagerly.
        position_ids: integer `[B, S]` or `[1, S]`.
        attention_mask: `[B, S]`, 0 at padding; other values may number documents, in an integer
            dtype. Beside other boundaries such a mask must agree with them.
        seq_idx: integer `[B, S]` or `[1, S]`, the index of each token's document; together with
            `packed_layout` or `cu_seq_lens_q` it must agree with them.
        capacity, max_seqlen_bound: as in `PackedLayout.from_lengths`; default: those of
            `packed_layout`, more slots if a mask beside it makes more documents.
    """

    batch: int
    row_tokens: int
    device: torch.device
    packed_layout: PackedLayout | None = None
    cu_seq_lens_q: Tensor | None = None
    cu_seq_lens_k: Tensor | None = None
    max_length_q: int | None = None
    max_length_k: int | None = None
    position_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    seq_idx: Tensor | None = None
    capacity: int | None = None
    max_seqlen_bound: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """B and S."""
        return self.batch, self.row_tokens

    @property
    def total_tokens(self) -> int:
        """T."""
        return self.batch * self.row_tokens

    @property
    def is_explicit(self) -> bool:
        """Whether the documents are given explicitly."""
        return self.packed_layout is not None or self.cu_seq_lens_q is not None


When = Callable[[GivenDocuments], bool | str | None]


def _no(kind: type, name: str) -> When:
    def when(given: GivenDocuments) -> str | None:
        x = getattr(given, name)
        return None if isinstance(x, kind) else type(x).__name__

    return when


def _without_cu_seq_lens_q(name: str) -> Refusal:
    return Refusal(
        lambda given: not given.is_explicit,
        f"{name} must be passed together with cu_seq_lens_q, got {name} without it; pass "
        f"cu_seq_lens_q (in self-attention equal to cu_seq_lens_k), or remove {name}.",
    )


def _no_int32_tensor(name: str) -> Refusal:
    return Refusal(
        _no(Tensor, name),
        f"{name} must be an int32 tensor [documents + 1], got {{got}}; pass torch.tensor({name}, "
        "dtype=torch.int32).",
    )


def _other_tokens(given: GivenDocuments) -> str | None:
    layout: Any = given.packed_layout
    moves = not torch.compiler.is_compiling()  # to the tokens: DDP and FSDP move tensors alone
    device = given.device if moves else layout.device
    if (layout.total_tokens, device) == (given.total_tokens, given.device):
        return None
    advice = "move it there with layout.to(device)"
    if layout.total_tokens > given.total_tokens:
        advice = "make it of the documents of this batch"
    elif layout.total_tokens < given.total_tokens:
        advice = (
            "make it with total_tokens= if the row ends in padding, and remove it from generate(), "
            "which takes one document per row"
        )
    return (
        f"{given.total_tokens} tokens on {given.device}, got {layout.total_tokens} on {device}; "
        f"{advice}"
    )


def _other_boundaries(given: GivenDocuments) -> str | None:
    x: Any = given.cu_seq_lens_q
    if x.dtype == torch.int32 and x.ndim == 1:
        return None
    return f"{x.dtype} of shape {tuple(x.shape)}"


def _other_device(given: GivenDocuments) -> str | None:
    x: Any = given.cu_seq_lens_q
    return None if x.device == given.device else f"{given.device}, got {x.device}"


def _no_document(given: GivenDocuments) -> str | None:
    x: Any = given.cu_seq_lens_q
    return str(x.shape[0]) if x.shape[0] < 2 else None


def _other_keys(given: GivenDocuments) -> Any:
    q: Any = given.cu_seq_lens_q
    k: Any = given.cu_seq_lens_k
    return (k.shape, k.dtype) != (q.shape, torch.int32)


def _other_numbers(given: GivenDocuments) -> str | None:
    x: Any = given.seq_idx
    fits = x.ndim == 2 and x.shape[0] in (1, given.batch) and x.shape[1] == given.row_tokens
    if fits and x.device == given.device and is_integer_tensor(x):
        return None
    return (
        f"of shape {given.shape} on {given.device}, one for each token, got {x.dtype} of shape "
        f"{tuple(x.shape)} on {x.device}"
    )


def _other_shape(name: str, *, one_row: bool = False) -> When:
    """Whether it is not `[B, S]`; `one_row`: nor `[1, S]`."""

    def when(given: GivenDocuments) -> str | None:
        shape = tuple(getattr(given, name).shape)
        fits = shape == given.shape or (one_row and shape == (1, given.row_tokens))
        return None if fits else f"{given.shape}, as the tokens, got {shape}"

    return when


SAME_KEYS = (
    "cu_seq_lens_k must equal cu_seq_lens_q in self-attention; pass the same tensor for both."
)

ARGUMENTS: dict[str, tuple[Refusal, ...]] = {
    "attention_mask": (
        Refusal(
            _other_shape("attention_mask"),
            "attention_mask must have shape {got}; give one value per token.",
        ),
    ),
    "position_ids": (
        Refusal(
            _other_shape("position_ids", one_row=True),
            "position_ids must have shape {got}; give one position per token, or remove "
            "position_ids.",
        ),
    ),
    "packed_layout": (
        Refusal(
            _no(PackedLayout, "packed_layout"),
            "packed_layout must be a PackedLayout, got {got}; make it with "
            "PackedLayout.from_lengths(lengths, total_tokens=, device=).",
        ),
        Refusal(_other_tokens, "packed_layout must cover the batch's {got}."),
    ),
    "cu_seq_lens_q": (
        _no_int32_tensor("cu_seq_lens_q"),
        Refusal(
            _other_boundaries,
            "cu_seq_lens_q must be an int32 tensor [documents + 1], got {got}; flatten it and call "
            ".to(torch.int32) on it.",
        ),
        Refusal(_other_device, "cu_seq_lens_q must be on the tokens' device {got}; move it."),
        Refusal(
            _no_document,
            "cu_seq_lens_q must have one entry more than there are documents, got {got}; "
            "accelerate's dispatch_batches, its default for an IterableDataset, cuts it to the "
            "number of rows: turn it off, in TrainingArguments by "
            'accelerator_config={{"dispatch_batches": False}}.',
        ),
    ),
    "cu_seq_lens_k": (
        _without_cu_seq_lens_q("cu_seq_lens_k"),
        _no_int32_tensor("cu_seq_lens_k"),
        Refusal(_other_keys, SAME_KEYS),
    ),
    "max_length_q": (_without_cu_seq_lens_q("max_length_q"),),
    "max_length_k": (_without_cu_seq_lens_q("max_length_k"),),
    "seq_idx": (
        Refusal(
            _no(Tensor, "seq_idx"),
            "seq_idx must be an integer tensor [B, S], got {got}; pass torch.tensor(seq_idx).",
        ),
        Refusal(
            _other_numbers,
            "seq_idx must be integers {got}; number the documents of each row.",
        ),
    ),
}
"""What each argument must be, whatever its values are."""

_BESIDE_A_LAYOUT = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Not read where a packed_layout is given."""


def check_arguments(given: GivenDocuments) -> None:
    """Refuse an argument that is not what it must be.

    Raises:
        ValueError: there is one.
    """
    unread = () if given.packed_layout is None else _BESIDE_A_LAYOUT
    for name, table in ARGUMENTS.items():
        if name not in unread and getattr(given, name) is not None:
            refuse(given, table)
