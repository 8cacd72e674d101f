"""The sizes of the layout that a forward's arguments give: what kernels and graphs are made for."""

from __future__ import annotations

import pytest
import torch

import flexvarlen as fv
from flexvarlen.patches.batch.find_layout import find_layout
from flexvarlen.patches.batch.given_documents import GivenDocuments
from tests.slow import with_slow

CPU = torch.device("cpu")
T = 256


def layout_of(lengths=(100, 56, 60), *, capacity=16, bound=128):
    """Ends at token 216: 40 tokens of padding."""
    sizes = {"capacity": capacity, "max_seqlen_bound": bound}
    return fv.PackedLayout.from_lengths(lengths, total_tokens=T, **sizes)


def masked(layout, *padding, **sizes):
    """The layout found beside a mask that is 0 in these slices."""
    mask = torch.ones(1, T, dtype=torch.long)
    for tokens in padding:
        mask[:, tokens] = 0
    return find_layout(
        GivenDocuments(1, T, CPU, packed_layout=layout, attention_mask=mask, **sizes)
    )


def sizes_of(layout):
    return layout.capacity, layout.max_seqlen_bound


def real_lengths(layout):
    """Lengths of the documents that are no padding."""
    ids, real = layout.document_ids(), layout.real_tokens()
    return ids[real].unique_consecutive(return_counts=True)[1].tolist()


def test_a_mask_of_ones_leaves_the_sizes_of_an_explicit_layout():
    found = masked(layout_of())
    assert sizes_of(found) == (16, 128)
    assert real_lengths(found) == [100, 56, 60]


def test_padding_that_makes_more_documents_than_the_explicit_capacity():
    found = masked(layout_of(capacity=3), slice(10, 20), slice(30, 40))
    assert real_lengths(found) == [10, 10, 60, 56, 60]
    assert found.capacity >= 8
    assert found.max_seqlen_bound == 128


@pytest.mark.parametrize("bound", [64, 60])
def test_padding_longer_than_the_explicit_bound(bound):
    found = masked(layout_of((60, 5), bound=bound))
    assert sizes_of(found) == (16, bound)
    assert real_lengths(found) == [60, 5]
    assert max(found.lengths) <= bound


def test_the_sizes_of_the_patch_come_first():
    found = masked(layout_of(), capacity=32, max_seqlen_bound=200)
    assert sizes_of(found) == (32, 200)


def test_cu_seq_lens_beside_a_mask_of_ones_keep_their_sizes():
    cu_seqlens = layout_of().cu_seqlens
    alone = find_layout(GivenDocuments(1, T, CPU, cu_seq_lens_q=cu_seqlens))
    mask = torch.ones(1, T, dtype=torch.long)
    found = find_layout(GivenDocuments(1, T, CPU, cu_seq_lens_q=cu_seqlens, attention_mask=mask))
    assert sizes_of(found) == sizes_of(alone)


def test_padding_longer_than_the_bound_of_the_patch():
    mask = (torch.arange(T)[None] < 100).long()
    found = find_layout(GivenDocuments(1, T, CPU, attention_mask=mask, max_seqlen_bound=100))
    assert real_lengths(found) == [100]
    assert found.max_seqlen_bound == 100


@pytest.mark.parametrize(
    "padding",
    with_slow(
        [(), (slice(10, 20), slice(30, 40)), (slice(0, T),)],
        [(), (slice(0, T),)],
    ),
)
def test_in_a_graph_the_sizes_are_static_and_suffice(padding):
    torch._dynamo.reset()
    mask = torch.ones(1, T, dtype=torch.long)
    for tokens in padding:
        mask[:, tokens] = 0
    sizes = []

    def run(mask, cu_seqlens):
        layout = fv.PackedLayout.from_cu_seqlens(
            cu_seqlens, total_tokens=T, capacity=128, max_seqlen_bound=100
        )
        found = find_layout(GivenDocuments(1, T, CPU, packed_layout=layout, attention_mask=mask))
        sizes.append(sizes_of(found))
        return found.document_ids(), found.real_tokens()

    # 70 documents: more than `default_capacity`
    lengths = [100, 56, 14, *[1] * 67]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    ids, real = torch.compile(run, fullgraph=True, backend="eager")(mask, cu_seqlens)
    eager = masked(fv.PackedLayout.from_lengths(lengths, total_tokens=T), *padding)
    assert torch.equal(real, eager.real_tokens())
    counts = ids[real].unique_consecutive(return_counts=True)[1].tolist()
    assert counts == real_lengths(eager)
    assert sizes[0][0] >= 128
    assert sizes[0][1] == 100


# ---- numbers of other dtypes, and numbers that contradict one another ----

INTEGERS = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
HOW = {
    "eager": find_layout,
    "compiled": lambda given: torch.compile(
        lambda: find_layout(given).document_ids(), fullgraph=True, backend="eager"
    )(),
}


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_a_restart_at_the_end_of_a_small_dtype_begins_a_document(dtype):
    """0 - 255 is 1 in uint8: two documents became one."""
    last = min(torch.iinfo(dtype).max, 300)
    positions = torch.cat([torch.arange(last + 1), torch.arange(4)])[None].to(dtype)
    assert fv.PackedLayout.from_position_ids(positions).lengths == (last + 1, 4)
    numbers = (torch.arange(last + 5)[None] > last).long().add(1).to(dtype)
    for given in (
        {"position_ids": positions},
        {"position_ids": positions, "attention_mask": torch.ones_like(positions)},
        {"position_ids": positions, "seq_idx": numbers, "attention_mask": numbers},
        {"attention_mask": numbers},
    ):
        found = find_layout(GivenDocuments(1, last + 5, CPU, **given))
        assert found.lengths == (last + 1, 4)


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool, *FLOATS], ids=str)
def test_a_mask_of_zeros_and_ones_in_any_dtype(dtype):
    mask = (torch.arange(12)[None] < 9).to(dtype)
    found = find_layout(GivenDocuments(1, 12, CPU, attention_mask=mask))
    assert real_lengths(found) == [9]
    explicit = fv.PackedLayout.from_lengths([5, 7])
    found = find_layout(GivenDocuments(1, 12, CPU, packed_layout=explicit, attention_mask=mask))
    assert real_lengths(found) == [5, 4]


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        *((dtype, "eager") for dtype in (torch.bool, *FLOATS)),
        pytest.param(torch.bool, "compiled", marks=pytest.mark.slow),
        (torch.bfloat16, "compiled"),
    ],
    ids=str,
)
def test_positions_and_numbers_that_rounding_merges(dtype, how):
    """257 is 256 in bfloat16: documents would merge, or one would fall apart."""
    torch._dynamo.reset()
    positions, numbers = torch.arange(T)[None], (torch.arange(T) // 2 + 1)[None]
    for name, given in (("position_ids", positions), ("seq_idx", numbers)):
        with pytest.raises(Exception, match=rf"{name} must be integers.* got {dtype}"):
            HOW[how](GivenDocuments(1, T, CPU, **{name: given.to(dtype)}))
    if dtype != torch.bool:
        with pytest.raises(Exception, match=f"attention_mask must be 0 and 1 in {dtype}, which"):
            HOW[how](GivenDocuments(1, T, CPU, attention_mask=numbers.to(dtype)))
        explicit = layout_of()
        given = GivenDocuments(1, T, CPU, packed_layout=explicit, attention_mask=numbers.to(dtype))
        with pytest.raises(Exception, match=f"attention_mask must be 0 and 1 in {dtype}, which"):
            HOW[how](given)
    k = torch.tensor([0, T]).to(dtype)
    given = GivenDocuments(1, T, CPU, cu_seq_lens_q=k.int(), cu_seq_lens_k=k)
    with pytest.raises(Exception, match="cu_seq_lens_k must equal"):
        HOW[how](given)


NUMBERS = torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3, 0, 0]])
LENGTHS = {True: (3, 2, 3), False: (3, 3, 2)}
RESTARTS = {
    True: torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 0]]),
    False: torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1, 0, 1]]),
}


@pytest.mark.parametrize(
    ("beside", "how"),
    [
        *((beside, "eager") for beside in ("packed_layout", "cu_seq_lens_q", "position_ids")),
        pytest.param("packed_layout", "compiled", marks=pytest.mark.slow),  # as cu_seq_lens_q
        *((beside, "compiled") for beside in ("cu_seq_lens_q", "position_ids")),
    ],
)
def test_a_mask_that_numbers_other_documents(beside, how):
    """Without a check, it would be ignored, or would cut documents."""
    torch._dynamo.reset()
    for agrees in (True, False, True):
        explicit = fv.PackedLayout.from_lengths(LENGTHS[agrees], total_tokens=10, capacity=3)
        values = {
            "packed_layout": explicit,
            "cu_seq_lens_q": explicit.cu_seqlens,
            "position_ids": RESTARTS[agrees],
        }
        given = GivenDocuments(1, 10, CPU, **{beside: values[beside]})
        HOW[how](given._replace(attention_mask=(NUMBERS > 0).int()))
        numbered = given._replace(attention_mask=NUMBERS, capacity=8)
        if agrees:
            assert real_lengths(find_layout(numbered)) == [3, 2, 3]
            HOW[how](numbered)
        else:
            sentence = (
                "must restart where the document"
                if beside == "position_ids"
                else "must be 0 and 1, or"
            )
            with pytest.raises((ValueError, RuntimeError), match=sentence):
                HOW[how](numbered)


def test_positions_that_run_on_contradict_no_numbers():
    positions = torch.arange(10)[None]
    given = GivenDocuments(1, 10, CPU, position_ids=positions, attention_mask=NUMBERS)
    assert real_lengths(find_layout(given)) == [3, 2, 3]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("beside", ["packed_layout", "position_ids"])
def test_one_read_of_the_device(monkeypatch, beside, dtype):
    values = {
        "packed_layout": fv.PackedLayout.from_lengths([3, 2, 3], total_tokens=10),
        "position_ids": RESTARTS[True],
    }
    mask = (NUMBERS > 0).to(dtype)
    given = GivenDocuments(1, 10, CPU, **{beside: values[beside]}, attention_mask=mask)
    reads, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: reads.append(x.shape) or cpu(x))
    assert real_lengths(find_layout(given)) == [3, 2, 3]
    assert len(reads) == 1
