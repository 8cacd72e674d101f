"""flexvarlen.bounds: each row's interval of keys is the mask, and never decreases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from flexvarlen import row_bounds
from flexvarlen.bounds import MaskSpec, dense_mask
from tests import oracle
from tests.oracle import Documents
from tests.rows import layout_of, masks, rows


@given(rows(), masks())
def test_interval_is_the_mask(documents, mask):
    lo, hi = row_bounds(layout_of(documents), **mask)
    assert lo.dtype == hi.dtype == torch.int32
    assert torch.equal(dense_mask(lo, hi), oracle.dense(documents, **mask))


@given(rows(), masks())
def test_bounds_never_decrease(documents, mask):
    """The tables are binary searches over the bounds, padding rows included."""
    for bound in row_bounds(layout_of(documents), **mask):
        assert (bound.diff() >= 0).all()
        assert ((bound >= 0) & (bound <= documents.total_tokens)).all()


def test_padding_rows_hold_the_end_and_the_start_of_their_run():
    """Bounds that keep nothing, and between those of the documents around them."""
    documents = Documents((3, 2, 2), 9, frozenset({1}))
    lo, hi = row_bounds(layout_of(documents), causal=False)
    assert lo.tolist() == [0, 0, 0, 5, 5, 5, 5, 9, 9]
    assert hi.tolist() == [3, 3, 3, 3, 3, 7, 7, 7, 7]


@given(rows(), masks())
def test_spare_slots_move_no_bound(documents, mask):
    few, many = layout_of(documents), layout_of(documents, capacity=64)
    for bound, other in zip(row_bounds(few, **mask), row_bounds(many, **mask), strict=True):
        assert torch.equal(bound, other)


@pytest.mark.parametrize(
    ("causal", "window", "left", "right"),
    [
        (True, None, -1, 0),
        (False, None, -1, -1),
        (True, 1, 0, 0),
        (True, 4096, 4095, 0),
        (False, 4096, 4095, 4095),
        (True, (7, 3), 7, 0),
        (False, (7, 3), 7, 3),
        (False, (-1, 3), -1, 3),
        (False, (7, -1), 7, -1),
        (False, (7, 0), 7, 0),
    ],
)
def test_windows_of_transformers_and_of_flash_attention(causal, window, left, right):
    spec = MaskSpec.of(causal=causal, window=window)
    assert (spec.left, spec.right) == (left, right)
    assert spec.causal is (right == 0)
