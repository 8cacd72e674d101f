"""Bad boundaries raise one sentence that says what to do, before any kernel runs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import flexvarlen as fv
from flexvarlen import PackedLayout
from tests.sentences import failed_refusals, int32, tensor

# ---- constructors ----


def cu_seqlens(*values, **sizes):
    return partial(PackedLayout.from_cu_seqlens, int32(*values), **sizes)


def lengths(*values, **sizes):
    return partial(PackedLayout.from_lengths, values, **sizes)


def rows(*shape):
    return partial(PackedLayout.from_rows, *shape, device=torch.device("cpu"))


def positions(given, **sizes):
    return partial(PackedLayout.from_position_ids, given, **sizes)


def fields(**changes):
    sizes = {"total_tokens": 4, "max_seqlen_bound": 4, "num_docs": 1, "max_seqlen": 4}
    given = {"cu_seqlens": int32(0, 4), "cu_seqlens_host": None, **sizes, **changes}
    return partial(PackedLayout, **given)


SHAPE = "cu_seqlens must have shape [num_docs + 1] with at least one document, got "
END = "cu_seqlens must end at or before total_tokens=16, got "
TOTAL = "total_tokens must be at least the tokens of all documents, "
BOUND = "max_seqlen_bound must be at least the longest document,"
SLOTS = "capacity must be at least the"
POSITIONS = "position_ids must be an integer tensor [B, S], got "
FIELDS = "a PackedLayout takes int32 boundaries and bool padding, got "
SIZE = "must be an integer that fits in int32, at least 0, got "
BAD = [
    ("cu_seqlens must start at 0, got 1", cu_seqlens(1, 5)),
    ("cu_seqlens must start at 0, got -1", cu_seqlens(-1, 5)),
    ("cu_seqlens must never decrease, got 5 then 3 at index 2", cu_seqlens(0, 5, 3, 8)),
    (f"{END}20", cu_seqlens(0, 5, 20, total_tokens=16)),
    (f"{TOTAL}17, got 16", lengths(10, 7, total_tokens=16)),
    ("batch must be an integer of at least 0, got -1", rows(-1, 3)),
    ("row_tokens must be an integer of at least 0, got -1", rows(2, -1)),
    (f"{SHAPE}(1, 2)", partial(PackedLayout.from_cu_seqlens, int32(0, 5)[None])),
    (f"{SHAPE}(1,)", cu_seqlens(0)),
    (f"{SHAPE}(0,)", cu_seqlens()),
    (f"total_tokens {SIZE}2147483648", partial(PackedLayout.from_cu_seqlens, [0, 2**31])),
    ("cu_seqlens must be integers, got 5.0", partial(PackedLayout.from_cu_seqlens, [0, 5.0])),
    (f"total_tokens {SIZE}3221225472", lengths(2**30, 2**30, 2**30)),
    ("lengths must be at least 0, got -1 at index 1", lengths(4, -1)),
    ("lengths must be integers, got True at index 1", lengths(4, True)),
    ("lengths must be integers, got 2.0 at index 1", lengths(4, 2.0)),
    (f"{BOUND} 9 tokens, got 8", lengths(4, 9, max_seqlen_bound=8)),
    (f"{BOUND} 9 tokens, got 8", cu_seqlens(0, 4, 13, max_seqlen_bound=8)),
    (f"{SLOTS} 3 documents given, got 2", lengths(1, 1, 1, capacity=2)),
    (f"{SLOTS} 4 documents given, got 3", positions(torch.zeros(1, 4).long(), capacity=3)),
    (f"{POSITIONS}torch.float32", positions(torch.zeros(2, 4))),
    (f"{POSITIONS}torch.bool", positions(torch.ones(2, 4).bool())),
    (f"{POSITIONS}torch.int64 (3, 2, 4)", positions(torch.zeros(3, 2, 4).long())),
    (FIELDS, fields(cu_seqlens=torch.tensor([0, 4]))),
    (FIELDS, fields(padding=torch.zeros(4, dtype=torch.uint8))),
    *(
        (f"{name} {SIZE}", cu_seqlens(0, 4, **{name: size}))
        for name, size in (
            ("total_tokens", 8.0),
            ("total_tokens", 2**31),
            ("capacity", 2.5),
            ("capacity", True),
            ("max_seqlen_bound", 4.0),
            ("max_seqlen_bound", -1),
        )
    ),
]


def test_bad_boundaries_make_a_layout():
    assert failed_refusals(BAD, lambda make: make()) == []


@pytest.mark.gpu
def test_boundaries_that_only_the_gpu_knows_are_read_back_and_checked():
    cases = [
        ("cu_seqlens must start at 0, got 1", int32(1, 16)),
        ("cu_seqlens must never decrease", int32(0, 9, 3, 16)),
        (f"{END}40", int32(0, 9, 40)),
    ]
    make = partial(PackedLayout.from_cu_seqlens, total_tokens=16)
    assert failed_refusals(cases, lambda boundaries: make(boundaries.cuda())) == []


def test_a_boundary_past_int32_is_not_wrapped_around_to_one_in_the_row():
    """Nothing is read back in a graph: without a check, 2**32 + 4 would wrap around to 4."""
    boundaries = torch.tensor([0, 2**32 + 4])

    def made(boundaries):
        return PackedLayout.from_cu_seqlens(boundaries, total_tokens=8).cu_seqlens

    with pytest.raises(RuntimeError, match="end at or before the row's last token"):
        torch.compile(made, fullgraph=True, backend="eager")(boundaries)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_a_sentence():
    words = "device must be one that torch sees, got 'cuda' without a CUDA device; pass 'cpu'"
    assert failed_refusals([(words, lengths(4, device="cuda"))], lambda make: make()) == []


# ---- integers ----


@pytest.mark.parametrize(
    "boundaries", [[0, 5, 9], (0, 5, 9), torch.tensor([0, 5, 9]), np.array([0, 5, 9])]
)
def test_boundaries_may_be_a_list_or_int64(boundaries):
    layout = PackedLayout.from_cu_seqlens(boundaries)
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.lengths == (5, 4)


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
def test_no_integers(dtype):
    """257 in bfloat16 is 256."""
    bad, good = torch.tensor([257, 1]).to(dtype), torch.tensor([257, 1])
    parents = bad - 1 if dtype.is_signed else bad
    cases = [
        ("lengths must be integers", partial(PackedLayout.from_lengths, bad)),
        ("parents must be integers", partial(PackedLayout.from_tree, good, parents)),
        ("cu_seqlens must be int32 or int64", partial(PackedLayout.from_cu_seqlens, bad)),
        ("label_counts must be integers", partial(fv.tree_loss, torch.zeros(2, 4), good * 0, bad)),
        ("starts_T and padding_T must", partial(PackedLayout.from_starts, bad)),
    ]
    if dtype == torch.bool:
        _, starts = cases.pop()
        assert starts().lengths == (1, 1)
    assert failed_refusals(cases, lambda make: make()) == []


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
    assert PackedLayout.from_lengths(np.array([of(3), of(1)])).lengths == (3, 1)
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


# ---- other arguments ----

LAYOUT = fv.PackedLayout.from_lengths([3, 2])
TREE = fv.PackedLayout.from_tree([3, 1, 1], parents=[-1, 0, 0])
SHARED = fv.share_prefixes([[1, 2], [1, 3]])


def test_what_is_no_tensor_or_layout_is_named():
    """Without a check, an AttributeError would name neither the argument nor what it takes."""
    logits, labels, kv = torch.zeros(5, 2), torch.zeros(1, 5).long(), tensor(5)
    calls = [
        ("x", LAYOUT.split),
        ("x", TREE.unfold),
        ("x", SHARED.unfold),
        ("x", lambda x: fv.pool(x, LAYOUT)),
        ("layout", lambda x: fv.pool(logits, x)),
        ("layout", fv.document_block_mask),
        ("position_ids", fv.PackedLayout.from_position_ids),
        ("starts_T", fv.PackedLayout.from_starts),
        ("x", lambda x: fv.document_logprobs(x, labels, LAYOUT)),
        ("labels", lambda x: fv.document_logprobs(logits, x, LAYOUT)),
        ("logits", lambda x: fv.tree_loss(x, labels[0], labels[0])),
        ("label_counts", lambda x: fv.tree_loss(logits, labels[0], x)),
        ("q", lambda x: fv.packed_attention(x, kv, kv, LAYOUT)),
        ("device", LAYOUT.to),
        ("device", lambda x: fv.PackedLayout.from_lengths([1], device=x)),
    ]
    for name, call in calls:
        values = ([], -1, np.zeros(5)) if name == "device" else (None, 5, np.zeros(5))
        words = f"{name} must be "
        assert failed_refusals([(words, value) for value in values], call) == []


def test_print_shows_the_lengths():
    assert "2 documents of 5, 4 tokens" in str(PackedLayout.from_lengths([5, 4]))
    assert "... (longest 9) tokens" in str(PackedLayout.from_lengths([5] * 20 + [9]))
