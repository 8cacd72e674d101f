"""The sizes of the layout that a forward's arguments give: what kernels and graphs are made for."""

from __future__ import annotations

import pytest
import torch

import flexvarlen as fv
from flexvarlen.patches.batch.find_layout import GivenDocuments, find_layout

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


@pytest.mark.parametrize("padding", [(), (slice(10, 20), slice(30, 40)), (slice(0, T),)])
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
    ids, real = torch.compile(run, fullgraph=True, backend="aot_eager")(mask, cu_seqlens)
    eager = masked(fv.PackedLayout.from_lengths(lengths, total_tokens=T), *padding)
    assert torch.equal(real, eager.real_tokens())
    counts = ids[real].unique_consecutive(return_counts=True)[1].tolist()
    assert counts == real_lengths(eager)
    assert sizes[0][0] >= 128
    assert sizes[0][1] == 100
