"""Find the documents of a forward from the arguments of a transformers model.

Priority: an explicit `packed_layout`; else `cu_seq_lens_q`; else the union of restarts in
`position_ids` and changes of value in a 2D `attention_mask` and in `seq_idx`, so that a mask of
ones changes nothing; else one document per row.

Shapes: B rows of S tokens, packed one after another: T = B·S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexvarlen.layout.arguments import is_integer_tensor, to_int_or_none, whole_numbers
from flexvarlen.layout.boundaries import (
    Condition,
    default_capacity,
    document_starts,
    raise_or_assert,
)
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.batch.checks import (
    changes_in_rows,
    check_row_starts,
    check_same_documents,
    layout_from_cu_seq_lens,
    numbers_documents,
    same_documents,
)
from flexvarlen.patches.batch.given_documents import SAME_KEYS, GivenDocuments, check_arguments


def find_layout(given: GivenDocuments) -> PackedLayout:
    """The layout of a forward's T tokens.

    Raises:
        ValueError: boundaries that are not valid, or contradict one another.

    In eager mode it reads the device once for the boundaries, and once more for each other form
    that it compares them with: `cu_seq_lens_k`, and beside explicit boundaries `seq_idx` and a mask
    (twice if that needs more slots). In a compiled graph it asserts the boundaries on the device
    instead.
    """
    check_arguments(given)
    given, conditions = _in_exact_numbers(given)
    changes = None
    if given.seq_idx is not None:
        numbers_BS = given.seq_idx.to(torch.int64)
        changes = changes_in_rows(numbers_BS).expand(given.shape).reshape(-1)
    if not given.is_explicit:
        return _from_values(given, changes, conditions)
    explicit = _explicit_layout(given)
    if given.batch > 1:
        check_row_starts(explicit, given.batch, given.row_tokens)
    if changes is not None:
        check_same_documents(
            changes,
            explicit,
            given.attention_mask,
            given.shape,
            reads=given.packed_layout is None,
        )
    if given.attention_mask is None:
        return explicit
    if explicit.segments is not None:
        raise ValueError(
            "attention_mask cannot be combined with a packed_layout of trees; remove it, and pass "
            "total_tokens= to from_tree if the row ends in padding."
        )
    return _with_padding(explicit, given, conditions)


Conditions = tuple[Condition, ...]


def _in_exact_numbers(given: GivenDocuments) -> tuple[GivenDocuments, Conditions]:
    """Positions as int64 and the mask as int64 or bool, and on which condition.

    Raises:
        ValueError: positions that are not integers.
    """
    positions, mask = given.position_ids, given.attention_mask
    conditions: Conditions = ()
    if positions is not None:
        positions = whole_numbers("position_ids", positions)
    if mask is not None and is_integer_tensor(mask):
        mask = mask.to(torch.int64)
    elif mask is not None and mask.dtype != torch.bool:
        binary = Condition(
            ~numbers_documents(mask),
            f"attention_mask must be 0 and 1 in {mask.dtype}, which rounds document numbers, got "
            "other values; keep document numbers in torch.int64 when a batch is cast.",
        )
        conditions, mask = (binary,), mask != 0
    return given._replace(position_ids=positions, attention_mask=mask), conditions


def _explicit_layout(given: GivenDocuments) -> PackedLayout:
    """`packed_layout`, or the layout of `cu_seq_lens_q`."""
    if given.packed_layout is not None:
        compiling = torch.compiler.is_compiling()
        return given.packed_layout if compiling else given.packed_layout.to(given.device)
    q, k = given.cu_seq_lens_q, given.cu_seq_lens_k
    assert q is not None
    if k is not None and k is not q:
        raise_or_assert((k == q).all(), SAME_KEYS)
    layout = layout_from_cu_seq_lens(q, given.total_tokens, given.capacity, given.max_seqlen_bound)
    if layout.max_seqlen is None:  # in a graph, comparing the lengths would add guards
        return layout
    for longest in (given.max_length_q, given.max_length_k):
        if longest is not None and (to_int_or_none(longest) or 0) < layout.max_seqlen:
            raise ValueError(
                "max_length_q and max_length_k must be at least the longest document, "
                f"{layout.max_seqlen} tokens, got {longest}; pass the largest difference of "
                "cu_seq_lens_q."
            )
    return layout


def _from_values(
    given: GivenDocuments, changes: Tensor | None, conditions: Conditions
) -> PackedLayout:
    """The layout from positions, mask and `seq_idx` combined, or else one document per row."""
    capacity, bound, mask = given.capacity, given.max_seqlen_bound, given.attention_mask
    shape = given.shape
    if given.position_ids is None and mask is None and changes is None:
        return PackedLayout.from_rows(
            *shape, device=given.device, capacity=capacity, max_seqlen_bound=bound
        )
    starts = document_starts(
        *shape, given.device, position_ids_BT=given.position_ids, attention_mask_BT=mask
    )
    if given.position_ids is not None and mask is not None and mask.dtype != torch.bool:
        # Each may leave out boundaries that the other has, but not both.
        restarts, changes_BS = given.position_ids.diff(dim=-1) != 1, mask.diff(dim=-1) != 0
        inside = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
        contradict = (
            numbers_documents(mask)
            & (restarts & ~changes_BS & inside).any()
            & (changes_BS & ~restarts & inside).any()
        )
        agree = Condition(
            ~contradict,
            "position_ids must restart where the document numbers of attention_mask change, got "
            "restarts elsewhere and changes without one; remove one of them.",
        )
        conditions = (*conditions, agree)
    padding = None if mask is None else (mask == 0).reshape(-1)
    if changes is not None:  # seq_idx must not cut a run of padding
        starts = starts | (changes if padding is None else changes & ~padding)
    if padding is not None:
        starts = _cut_padding(starts, padding, bound)
    return PackedLayout.from_starts(
        starts,
        padding_T=padding,
        capacity=capacity,
        max_seqlen_bound=bound,
        conditions=conditions,
    )


def _with_padding(
    explicit: PackedLayout, given: GivenDocuments, conditions: Conditions
) -> PackedLayout:
    """The documents of an explicit layout, without the padding given by a mask."""
    mask = given.attention_mask
    assert mask is not None
    starts = document_starts(
        given.batch,
        given.row_tokens,
        given.device,
        cu_seqlens=explicit.cu_seqlens,
        attention_mask_BT=mask,
    )
    if mask.dtype != torch.bool:
        changes = changes_in_rows(mask).reshape(-1)
        same = same_documents(changes, explicit, mask, given.shape)
        agree = Condition(
            same | ~numbers_documents(mask),
            "attention_mask must be 0 and 1, or number the documents of packed_layout or "
            "cu_seq_lens_q, got other documents; remove one of them.",
        )
        conditions = (*conditions, agree)
    padding = (mask == 0).reshape(-1) | ~explicit.real_tokens()
    bound = given.max_seqlen_bound
    bound = explicit.max_seqlen_bound if bound is None else bound
    starts = _cut_padding(starts, padding, bound)

    def layout(capacity: int | None) -> PackedLayout:
        return PackedLayout.from_starts(
            starts,
            padding_T=padding,
            capacity=capacity,
            max_seqlen_bound=bound,
            conditions=conditions,
        )

    if given.capacity is not None:
        return layout(given.capacity)
    if torch.compiler.is_compiling():  # add slots for the runs of padding
        runs = -(-given.total_tokens // bound)
        return layout(max(explicit.capacity + runs, default_capacity(given.total_tokens)))
    try:
        return layout(explicit.capacity)
    except ValueError:  # runs of padding may need more slots; any other error is raised again
        return layout(None)


def _cut_padding(starts: Tensor, padding: Tensor, bound: int | None) -> Tensor:
    """Split runs of padding so that none is longer than `bound`, as they use slots too."""
    if bound is None:
        return starts
    return starts | (padding & (torch.arange(len(starts), device=starts.device) % bound == 0))
