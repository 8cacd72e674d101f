"""`DocumentMask` as an object: equality, what it counts, what it refuses."""

from __future__ import annotations

import pytest
import torch

from flexvarlen import DocumentMask, PackedLayout, document_block_mask, packed_attention
from flexvarlen.attention.backends.sdpa import SdpaBackend
from flexvarlen.mask.spec import MaskSpec
from tests.backends import DEVICES
from tests.mask_cases import MaskCase, slots_of
from tests.oracle import Documents

LAYOUT = PackedLayout.from_lengths([300, 212], capacity=2)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_equal_of_the_same_layouts_and_prefix_only():
    other = PackedLayout.from_lengths([300, 212], capacity=2)
    prefix, equal_prefix = int32(3, 4), int32(3, 4)
    masks = [
        DocumentMask.of(LAYOUT),
        DocumentMask.of(other),
        DocumentMask.of(LAYOUT, causal=False),
        DocumentMask.of(LAYOUT, layout_k=other),
        DocumentMask.of(LAYOUT, prefix=prefix),
        DocumentMask.of(LAYOUT, prefix=equal_prefix),
    ]
    for i, mask in enumerate(masks):
        assert [mask == m for m in masks] == [i == j for j in range(len(masks))]
    again = DocumentMask.of(LAYOUT, prefix=prefix, window=(-1, -1))
    assert again == masks[4]
    assert hash(again) == hash(masks[4])
    assert len(set(masks)) == len(masks)
    assert masks[0] != "causal"


def test_counts_are_those_of_the_dense_mask():
    mask = DocumentMask.of(LAYOUT, window=100)
    dense = mask.to_dense()
    assert dense.shape == (512, 512)
    assert mask.num_pairs() == int(dense.sum())
    assert mask.flops(64, 8) == 4 * int(dense.sum()) * 64 * 8
    assert mask.flops(64, 8, backward=True) * 2 == 5 * mask.flops(64, 8)
    tiles = dense.view(4, 128, 4, 128).sum((1, 3))
    partial, full, total = mask.num_blocks()
    assert (partial + full, full, total) == (
        int((tiles > 0).sum()),
        int((tiles == 2**14).sum()),
        16,
    )
    assert mask.num_blocks((256, 128)).total == 2 * 4
    assert mask.sparsity() == document_block_mask(LAYOUT, window=100).sparsity()


def test_counts_of_a_cross_mask():
    keys = PackedLayout.from_lengths([200, 100], capacity=2)
    mask = DocumentMask.of(LAYOUT, layout_k=keys)
    assert mask.num_pairs() == int(mask.to_dense().sum())
    assert mask.num_blocks().total == 4 * 3


def test_dense_mask_of_a_long_row_is_refused():
    mask = DocumentMask.of(PackedLayout.from_lengths([2**15 + 1]))
    with pytest.raises(
        ValueError, match=r"at most 1,073,741,824 pairs of tokens, got .*bounds\(\)"
    ):
        mask.to_dense()


def keys(*lengths, **sizes):
    return {"layout_k": PackedLayout.from_lengths(lengths, **sizes)}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (keys(5, 5, 5, capacity=4), "layout_k must have as many documents as the layout, 2, got"),
        (keys(5, 5, capacity=4), "layout_k must have the layout's capacity 2, got 4"),
        (keys(5, 5, device="meta"), "layout_k must be on the layout's device cpu, got meta"),
        ({"layout_k": [5, 5]}, "layout_k must be a PackedLayout, got list"),
        ({"prefix": int32(1, 2, 3)}, r"an int32 tensor \[2\]"),
        ({"prefix": torch.tensor([1, 2])}, r"an int32 tensor \[2\].*got torch.int64"),
        ({"prefix": int32(1, 2).to("meta")}, "on the layout's device cpu, got meta"),
        ({"prefix": [1]}, "one value for each of the 2 documents, got 1"),
        ({"prefix": 1.5}, "prefix must be a list or a 1D array of integers, got 1.5"),
        ({"prefix": [1, -1]}, "got -1"),
        ({"prefix": 2**31}, "got 2147483648"),
        ({"prefix": True}, "got True"),
        ({"causal": None}, "causal must be True or False, got None"),
        ({"chunk": [4]}, r"chunk must be an integer of at least 1 token, got \[4\]"),
        ({"causal": [True]}, "causal must be True or False"),
        ({"window": {1, 2}}, "window must be an integer or"),
        ({"window": [[1], 0]}, "window must be an integer or"),
        ({"chunk": 2.0}, "chunk must be an integer of at least 1 token, got 2.0"),
    ],
    ids=str,
)
def test_what_makes_no_mask_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        DocumentMask.of(LAYOUT, **options)


def test_what_was_valid_before_makes_nothing_else_valid():
    """Kinds are remembered; True and 1.0 are equal to 1."""
    for options in ({"window": (1, 0)}, {"window": 1}, {"chunk": 1}):
        DocumentMask.of(LAYOUT, **options)
    for options in ({"window": (True, 0)}, {"window": (1.0, 0)}, {"chunk": True}, {"window": 1.0}):
        with pytest.raises(ValueError, match="must be an integer"):
            DocumentMask.of(LAYOUT, **options)


@pytest.mark.parametrize("block_size", [0, 1.5, None, True, (128,), (128, 0), "128"], ids=repr)
def test_block_sizes_that_are_none_are_refused(block_size):
    with pytest.raises(ValueError, match="block_size must be an integer of at least 1, or a pair"):
        document_block_mask(LAYOUT, block_size=block_size)


def test_a_layout_that_is_none_is_refused():
    with pytest.raises(ValueError, match="layout must be a PackedLayout, got list"):
        document_block_mask([3, 2])


@pytest.mark.parametrize(
    "fields",
    [
        {"causal": False},
        {"right": 3},
        {"prefix": True},
        {"causal": False, "right": -1, "prefix": True},
        {"top_left": True},
    ],
    ids=str,
)
def test_specs_that_contradict_themselves_are_refused(fields):
    with pytest.raises(ValueError, match=r"make it with MaskSpec.of\(\)"):
        MaskSpec(**fields)


def test_specs_that_do_not_fit_the_mask_are_refused():
    keys = PackedLayout.from_lengths([1, 2])
    for spec, tensors in (
        (MaskSpec.of(), {"layout_k": keys}),
        (MaskSpec.of(cross=True), {}),
        (MaskSpec.of(prefix=True), {}),
        (MaskSpec.of(), {"prefix": int32(1, 2)}),
    ):
        with pytest.raises(ValueError, match=r"make the mask with DocumentMask.of\(\)"):
            DocumentMask(LAYOUT, spec, **tensors)


@pytest.mark.parametrize(
    ("lengths", "boundaries"),
    [
        pytest.param((4, 4, 4, 4), (0, 16, 16, 16, 16), id="whole_blocks"),
        pytest.param((13, 3), (0, 15, 16), id="partial_blocks"),  # of the last block of queries
    ],
)
def test_documents_beyond_the_bound_are_never_cut_off(lengths, boundaries):
    """Boundaries overwritten behind the layout's back: the tables are too narrow for them."""
    layout = PackedLayout.from_lengths(lengths, max_seqlen_bound=max(lengths))
    layout.cu_seqlens.copy_(int32(*boundaries))
    with pytest.raises(RuntimeError, match="does not fit the layout or max_seqlen_bound"):
        DocumentMask.of(layout).tables((2, 2), compact=True)


# ---- what the kernels are told ----


@pytest.mark.parametrize("device", DEVICES)
def test_strides_of_what_is_given_do_not_matter(device):
    """The Triton kernels read memory in order."""
    table = int32(3, 8, 5, 7).view(2, 2).to(device)
    starts = torch.tensor([True, False, False, True, False, False], device=device)
    padding = torch.stack([~starts.cumsum(0).bool(), starts.cumsum(0) == 2], 1)
    for column in (0, 1):
        plain = DocumentMask.of(LAYOUT.to(device), prefix=table[:, column].contiguous())
        strided = DocumentMask.of(LAYOUT.to(device), prefix=table[:, column])
        assert_same_tables(plain, strided)
    expanded = DocumentMask.of(LAYOUT.to(device), prefix=int32(4).to(device).expand(2))
    assert_same_tables(expanded, DocumentMask.of(LAYOUT.to(device), prefix=4))
    plain, strided = (
        DocumentMask.of(PackedLayout.from_starts(starts, padding_T=p))
        for p in (padding[:, 1].contiguous(), padding[:, 1])
    )
    assert_same_tables(plain, strided)
    boundaries = int32(0, 9, 4, 9, 8, 9).to(device)[::2]
    layout = PackedLayout.from_cu_seqlens(boundaries, total_tokens=9)
    assert layout.cu_seqlens[:3].tolist() == [0, 4, 8]


def assert_same_tables(one, other):
    for mine, theirs in zip(
        one.tables((2, 2), compact=True), other.tables((2, 2), compact=True), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_a_backend_is_asked_about_the_mask_of_the_call(monkeypatch):
    asked = []

    def why_not(self, request):
        asked.append(request.spec)
        return "never."

    monkeypatch.setattr(SdpaBackend, "why_not", why_not)
    x = torch.randn(512, 7, 3)  # a call of a kind that no other test makes
    with pytest.raises(NotImplementedError, match="never"):
        packed_attention(x, x, x, LAYOUT, backend="sdpa", chunk=11, causal=False)
    assert asked == [MaskSpec.of(causal=False, chunk=11)]


def test_sdpa_reads_back_what_only_the_device_knows_of_the_keys():
    case = MaskCase(Documents((20, 12), 32), {}, Documents((7, 30), 40))
    layout, keys = (slots_of(documents) for documents in (case.documents, case.keys))
    keys = keys.replace(cu_seqlens_host=None)
    plan = SdpaBackend().plan(DocumentMask.of(layout, layout_k=keys))
    assert plan[:2].tolist() == [[0, 20, 32], [0, 7, 37]]


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_a_row_of_padding_has_zero_gradients(backend):
    layout = PackedLayout.from_lengths([0], total_tokens=5)
    q, k, v = (torch.randn(5, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    out = packed_attention(q, k, v, layout, backend=backend)
    for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert grad.shape == x.shape
        assert (grad == 0).all()
