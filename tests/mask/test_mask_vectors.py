"""flexvarlen.mask.vectors: each query's interval of keys is the mask, and never decreases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexvarlen import DocumentMask, PackedLayout
from flexvarlen.mask.spec import MaskSpec
from flexvarlen.mask.vectors import dense_mask, key_bounds
from tests.mask_cases import KINDS, cases
from tests.oracle import Documents
from tests.rows import layout_of

any_case = st.sampled_from(KINDS).flatmap(cases)


@given(any_case)
def test_interval_is_the_mask(case):
    lo, hi = case.mask().bounds()
    dense = case.dense()
    assert lo.dtype == hi.dtype == torch.int32
    assert torch.equal(dense_mask(lo, hi, dense.shape[1]), dense)


@given(any_case)
def test_interval_of_a_key_is_the_transposed_mask(case):
    first, last = key_bounds(case.mask().inputs)
    dense = case.dense()
    assert torch.equal(dense_mask(first, last, dense.shape[0]), dense.T)


@given(any_case)
def test_bounds_never_decrease(case):
    """The tables are runs because of it, padding rows included."""
    mask = case.mask()
    for bounds, tokens in (
        (mask.bounds(), mask.layout_k.total_tokens),
        (key_bounds(mask.inputs), mask.layout.total_tokens),
    ):
        for bound in bounds:
            assert (bound.diff() >= 0).all()
            assert ((bound >= 0) & (bound <= tokens)).all()


def test_padding_rows_hold_the_end_and_the_start_of_their_run():
    """Bounds that keep nothing, and between those of the documents around them."""
    documents = Documents((3, 2, 2), 9, frozenset({1}))
    lo, hi = DocumentMask.of(layout_of(documents), causal=False).bounds()
    assert lo.tolist() == [0, 0, 0, 5, 5, 5, 5, 9, 9]
    assert hi.tolist() == [3, 3, 3, 3, 3, 7, 7, 7, 7]


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


@given(any_case)
def test_a_spec_survives_as_integers(case):
    spec = case.mask().spec
    assert MaskSpec.from_ints(spec.as_ints()) == spec
    assert hash(MaskSpec.from_ints(spec.as_ints())) == hash(spec)


def test_equal_masks_have_equal_specs():
    assert MaskSpec.of(causal=False, window=(7, 0)) == MaskSpec.of(window=8)
    assert MaskSpec.of(prefix=True, window=(-1, 0)) == MaskSpec.of()
    assert MaskSpec.of(align="top_left") == MaskSpec.of()
    unmasked = {"causal": False, "cross": True}
    assert MaskSpec.of(**unmasked, align="top_left") == MaskSpec.of(**unmasked)
    assert MaskSpec.of(window=(2**40, 0)).left < 2**31


def test_a_spec_reads_as_what_it_is():
    spec = MaskSpec.of(window=4, chunk=8, prefix=True, cross=True, align="top_left")
    assert repr(spec) == "MaskSpec(causal, window=(3, 3), chunk=8, prefix, cross, top-left)"
    layout = PackedLayout.from_lengths([3, 2])
    assert repr(DocumentMask.of(layout)) == "DocumentMask(causal, 2 documents in 5 tokens)"
