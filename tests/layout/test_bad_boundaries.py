"""Bad boundaries raise one sentence that says what to do, before any kernel runs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import flexvarlen as fv
from flexvarlen import PackedLayout
from tests.sentences import (  # noqa: F401
    TOKENS,
    _no_kernel_may_run,
    cu_seqlens,
    int32,
    lengths,
    refused,
)


@pytest.mark.parametrize(
    ("make", "contract", "remedy"),
    [
        pytest.param(cu_seqlens(1, 5), r"must start at 0, got 1", "put a 0", id="not_from_zero"),
        pytest.param(cu_seqlens(-1, 5), r"must start at 0, got -1", "put a 0", id="below_zero"),
        pytest.param(
            cu_seqlens(0, 5, 3, 8),
            r"never decrease, got 5 then 3 at index 2",
            "in order",
            id="decreasing",
        ),
        pytest.param(
            cu_seqlens(0, 5, 20, total_tokens=16),
            r"end at or before total_tokens=16, got 20",
            "shorten the documents",
            id="past_the_end",
        ),
        pytest.param(
            lengths(10, 7, total_tokens=16),
            "total_tokens=16, got 17",
            "shorten",
            id="lengths_past_the_end",
        ),
        pytest.param(
            lambda: PackedLayout.from_cu_seqlens(torch.tensor([0.0, 5.0])),
            r"int32 or int64, got torch.float32",
            r"call \.to\(torch\.int32\)",
            id="float",
        ),
        pytest.param(
            lambda: PackedLayout.from_cu_seqlens([0, 2**31]), "fits in int32", "split", id="int64"
        ),
        pytest.param(
            lambda: PackedLayout.from_cu_seqlens([0, 5.0]),
            r"integers, got 5\.0 at index 1",
            "number of tokens",
            id="float_in_a_list",
        ),
        pytest.param(
            lambda: PackedLayout.from_cu_seqlens(int32(0, 5)[None]),
            r"shape \[num_docs \+ 1\].*got \(1, 2\)",
            "flatten it",
            id="two_dimensions",
        ),
        pytest.param(
            cu_seqlens(0),
            r"at least one document, got \(1,\)",
            "start it with 0",
            id="one_boundary",
        ),
        pytest.param(
            cu_seqlens(), r"at least one document, got \(0,\)", "start it with 0", id="no_boundary"
        ),
        pytest.param(
            lengths(4, 9, max_seqlen_bound=8),
            r"at least the longest document, 9 tokens, got 8",
            "raise the bound",
            id="bound_too_small",
        ),
        pytest.param(
            cu_seqlens(0, 4, 13, max_seqlen_bound=8),
            "9 tokens, got 8",
            "raise the bound",
            id="bound_of_cu_seqlens",
        ),
        pytest.param(
            lengths(1, 1, 1, capacity=2),
            "at least the 3 documents given, got 2",
            "raise capacity",
            id="capacity",
        ),
        pytest.param(
            lengths(4, -1), "at least 0, got -1 at index 1", "drop or fix", id="negative_length"
        ),
        pytest.param(
            lengths(4, True),
            "integers, got True at index 1",
            "number of tokens",
            id="boolean_length",
        ),
        pytest.param(
            lengths(4, 2.0), r"integers, got 2\.0 at index 1", "number of tokens", id="float_length"
        ),
        pytest.param(
            lambda: PackedLayout.from_lengths(torch.tensor([4.0, 2.0])),
            r"integers, got 4\.0 at index 0",
            "number of tokens",
            id="float_lengths_tensor",
        ),
        pytest.param(
            lambda: PackedLayout.from_lengths(torch.tensor([True, False])),
            "integers, got True at index 0",
            "number of tokens",
            id="mask_for_lengths",
        ),
        pytest.param(
            lengths(2**30, 2**30, 2**30), "fits in int32", "split the row", id="beyond_int32"
        ),
        pytest.param(
            lambda: PackedLayout.from_position_ids(torch.zeros(2, 4)),
            r"integer tensor \[B, S\], got torch.float32",
            "text row",
            id="float_positions",
        ),
        pytest.param(
            lambda: PackedLayout.from_position_ids(torch.ones(2, 4, dtype=torch.bool)),
            r"integer tensor \[B, S\], got torch.bool",
            "text row",
            id="mask_for_positions",
        ),
        pytest.param(
            lambda: PackedLayout.from_position_ids(torch.zeros(3, 2, 4, dtype=torch.int64)),
            r"\[B, S\], got torch.int64 \(3, 2, 4\)",
            "pass the text row",
            id="multimodal_positions",
        ),
        pytest.param(
            lambda: PackedLayout.from_position_ids(
                torch.zeros(1, 4, dtype=torch.int64), capacity=3
            ),
            "at least the 4 documents given, got 3",
            "raise capacity",
            id="capacity_of_positions",
        ),
    ],
)
def test_bad_boundaries(make, contract, remedy):
    refused(ValueError, contract, remedy, make)


@pytest.mark.parametrize(
    "tensors",
    [
        {"cu_seqlens": torch.tensor([0, 4])},
        {"cu_seqlens": int32(0, 4), "padding": torch.zeros(4, dtype=torch.uint8)},
    ],
    ids=["int64", "uint8_padding"],
)
def test_tensors_of_other_dtypes_make_no_layout(tensors):
    refused(
        ValueError,
        "int32 boundaries and bool padding, got",
        "make it with",
        lambda: PackedLayout(
            **tensors,
            cu_seqlens_host=None,
            total_tokens=4,
            max_seqlen_bound=4,
            num_docs=1,
            max_seqlen=4,
        ),
    )


@pytest.mark.parametrize(
    "sizes",
    [
        {"total_tokens": 8.0},
        {"total_tokens": 2**31},
        {"capacity": 2.5},
        {"capacity": True},
        {"max_seqlen_bound": 4.0},
        {"max_seqlen_bound": -1},
    ],
    ids=str,
)
def test_sizes_that_are_no_sizes(sizes):
    name = next(iter(sizes))
    refused(
        ValueError,
        f"{name} must be an integer that fits in int32, at least 0, got",
        "count",
        lambda: PackedLayout.from_cu_seqlens(int32(0, 4), **({"total_tokens": 4} | sizes)),
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("values", "contract"),
    [
        ((1, 16), "must start at 0, got 1"),
        ((0, 9, 3, 16), "never decrease"),
        ((0, 9, 40), "total_tokens=16, got 40"),
    ],
)
def test_boundaries_that_only_the_gpu_knows_are_read_back_and_checked(values, contract):
    refused(
        ValueError,
        contract,
        "",
        lambda: PackedLayout.from_cu_seqlens(int32(*values).cuda(), total_tokens=TOKENS),
    )


@pytest.mark.parametrize(
    "boundaries", [[0, 5, 9], (0, 5, 9), torch.tensor([0, 5, 9]), np.array([0, 5, 9])]
)
def test_boundaries_may_be_a_list_or_int64(boundaries):
    layout = PackedLayout.from_cu_seqlens(boundaries)
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.lengths == (5, 4)


def test_lengths_of_numpy_are_integers():
    assert PackedLayout.from_lengths(np.array([3, 1])).lengths == (3, 1)


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.int16, torch.int64, torch.uint16, torch.uint32, torch.uint64],
    ids=str,
)
def test_integers_of_any_dtype(dtype):
    """The sums are past the dtype: 100 + 100 in int8."""
    made = torch.tensor([100, 100, 100], dtype=dtype)
    assert PackedLayout.from_lengths(made).cu_seqlens.tolist() == [0, 100, 200, 300, 300]
    parents = torch.tensor([-1, 0, 0]).to(dtype if dtype.is_signed else torch.int8)
    assert PackedLayout.from_tree(made, parents).lengths == (300,)
    counts = fv.tree_loss(torch.zeros(3, 4), torch.tensor([1, 2, -100]), made)
    assert counts.item() == pytest.approx(np.log(4))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["lengths", "parents", "cu_seqlens", "label_counts", "starts"])
def test_no_integers(name, dtype):
    """257 in bfloat16 is 256."""
    bad, good = torch.tensor([257, 1]).to(dtype), torch.tensor([257, 1])
    calls = {
        "lengths": lambda: PackedLayout.from_lengths(bad),
        "parents": lambda: PackedLayout.from_tree(good, bad - 1 if dtype.is_signed else bad),
        "cu_seqlens": lambda: PackedLayout.from_cu_seqlens(bad),
        "label_counts": lambda: fv.tree_loss(torch.zeros(2, 4), good * 0, bad),
        "starts": lambda: PackedLayout.from_starts(bad),
    }
    if name == "starts" and dtype == torch.bool:
        assert calls[name]().lengths == (1, 1)
        return
    contract = {
        "cu_seqlens": "must be int32 or int64",
        "starts": "starts_T and padding_T must",
    }
    refused(ValueError, contract.get(name, f"{name} must be integers"), "", calls[name])


def test_a_boundary_past_int32_is_not_wrapped_around_to_one_in_the_row():
    """Nothing is read back in a graph: without a check, 2**32 + 4 would wrap around to 4."""
    boundaries = torch.tensor([0, 2**32 + 4])

    def made(boundaries):
        return PackedLayout.from_cu_seqlens(boundaries, total_tokens=8).cu_seqlens

    with pytest.raises(RuntimeError, match="end at or before the row's last token"):
        torch.compile(made, fullgraph=True, backend="eager")(boundaries)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_a_sentence():
    refused(
        ValueError,
        "one that torch sees, got 'cuda'",
        "pass 'cpu'",
        lambda: PackedLayout.from_lengths([4], device="cuda"),
    )


def test_print_shows_the_lengths():
    assert "2 documents of 5, 4 tokens" in str(PackedLayout.from_lengths([5, 4]))
    assert "... (longest 9) tokens" in str(PackedLayout.from_lengths([5] * 20 + [9]))


LAYOUT = fv.PackedLayout.from_lengths([3, 2])
TREE = fv.PackedLayout.from_tree([3, 1, 1], parents=[-1, 0, 0])
SHARED = fv.share_prefixes([[1, 2], [1, 3]])


@pytest.mark.parametrize("value", [None, 5, np.zeros(5)], ids=str)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", LAYOUT.split),
        ("x", TREE.unfold),
        ("x", SHARED.unfold),
        ("x", lambda x: fv.pool(x, LAYOUT)),
        ("layout", lambda x: fv.pool(torch.zeros(5, 2), x)),
        ("layout", fv.document_block_mask),
        ("device", lambda x: LAYOUT.to([] if x is None else x)),  # None: as Tensor.to
        ("device", lambda x: fv.PackedLayout.from_lengths([1], device=x)),
        ("position_ids", fv.PackedLayout.from_position_ids),
        ("starts_T", fv.PackedLayout.from_starts),
        ("x", lambda x: fv.document_logprobs(x, torch.zeros(1, 5).long(), LAYOUT)),
        ("labels", lambda x: fv.document_logprobs(torch.zeros(5, 2), x, LAYOUT)),
        ("logits", lambda x: fv.tree_loss(x, torch.zeros(5), torch.zeros(5))),
        ("label_counts", lambda x: fv.tree_loss(torch.zeros(5, 2), torch.zeros(5), x)),
        ("q", lambda x: fv.packed_attention(x, torch.zeros(5, 1, 8), torch.zeros(5, 1, 8), LAYOUT)),
    ],
)
def test_what_is_no_tensor_or_layout_is_named(name, call, value):
    """Without a check, an AttributeError would name neither the argument nor what it takes."""
    if name == "device" and isinstance(value, int):  # 5 is the sixth GPU
        value = -1
    with pytest.raises(ValueError, match=f"{name} must be"):
        call(value)


@pytest.mark.parametrize("of", [np.int32, np.int64, np.uint8, torch.tensor])
def test_integers_of_numpy_and_torch(of):
    """Without a conversion, a length taken from an array would be refused."""
    sizes = {"total_tokens": of(9), "capacity": of(4), "max_seqlen_bound": of(8)}
    for make in (fv.PackedLayout.from_lengths, partial(fv.PackedLayout.from_tree, parents=[-1, 0])):
        layout = make([3, 2], **sizes)
        for name in sizes:
            assert type(getattr(layout, name)) is int
    assert layout.total_tokens == fv.PackedCollator(**sizes)([[1]])["packed_layout"].total_tokens
    assert layout.segments.max_depth == 2
    tree = fv.PackedLayout.from_tree([3], parents=[-1], max_depth=of(3))
    assert type(tree.segments.max_depth) is int
    mask = fv.DocumentMask.of(LAYOUT, window=of(2), prefix=np.int64(1))
    assert mask.spec == fv.DocumentMask.of(LAYOUT, window=2, prefix=1).spec
    pair = fv.DocumentMask.of(LAYOUT, window=(of(2), of(0)), chunk=of(2))
    assert pair.spec == fv.DocumentMask.of(LAYOUT, window=(2, 0), chunk=2).spec
    sampler = fv.BalancedSampler([[4], [of(4)]], num_replicas=of(2), rank=of(1), window=of(3))
    assert len(list(sampler)) == len(list(sampler)) == 1
    assert len(list(fv.StreamPacker([[1, 2], [3, 4], [5, 6]], of(8), buffer=of(2)))) == 2
    labels = torch.zeros(1, 5).long()
    fv.document_logprobs(torch.zeros(5, 2), labels, LAYOUT, chunk_tokens=of(2))
    with pytest.raises(ValueError, match="must be an integer"):
        fv.PackedCollator(total_tokens=torch.tensor(True))
