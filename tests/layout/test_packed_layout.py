"""PackedLayout: boundaries mean the same from anywhere, and shapes hide the documents."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexvarlen import PackedLayout
from flexvarlen.layout.boundaries import default_capacity, document_starts, round_up_to_power_of_two
from flexvarlen.layout.launch_sizes import SHORT_ROW
from flexvarlen.measure import watch_compilation

lengths_of = st.lists(st.integers(0, 40), min_size=1, max_size=12)
filled = st.lists(
    st.integers(1, 40), min_size=1, max_size=12
)  # no empty documents: positions cannot show them


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def positions(lengths):
    return torch.cat([torch.arange(n) for n in lengths])


@given(lengths_of, st.integers(0, 50))
def test_tokens_belong_to_the_document_that_holds_them(lengths, tail):
    layout = PackedLayout.from_lengths(lengths, total_tokens=sum(lengths) + tail)
    owners = [i for i, n in enumerate(lengths) for _ in range(n)]
    places = [j for n in lengths for j in range(n)]
    assert layout.document_ids().tolist() == owners + [layout.capacity] * tail
    assert layout.position_ids().tolist() == places + list(range(tail))
    assert layout.real_tokens().tolist() == [True] * len(owners) + [False] * tail
    assert layout.lengths == tuple(lengths)
    assert layout.max_seqlen == max(lengths)
    assert layout.num_docs == len(lengths)
    assert layout.has_padding is (tail > 0)


@pytest.mark.gpu
@given(lengths_of, st.integers(0, 700))
def test_a_gpu_numbers_positions_alike(lengths, tail):
    layout = PackedLayout.from_lengths(lengths, total_tokens=sum(lengths) + tail)
    assert torch.equal(layout.to("cuda").position_ids().cpu(), layout.position_ids())


@given(lengths_of, st.integers(0, 50))
def test_lengths_and_cu_seqlens_make_the_same_layout(lengths, tail):
    total = sum(lengths) + tail
    from_lengths = PackedLayout.from_lengths(lengths, total_tokens=total)
    from_tensor = PackedLayout.from_lengths(torch.tensor(lengths), total_tokens=total)
    from_cu_seqlens = PackedLayout.from_cu_seqlens(cumulative(lengths), total_tokens=total)
    assert repr(from_lengths) == repr(from_cu_seqlens) == repr(from_tensor)
    assert torch.equal(from_lengths.cu_seqlens, from_cu_seqlens.cu_seqlens)
    assert torch.equal(from_lengths.cu_seqlens, from_tensor.cu_seqlens)


@given(st.lists(filled, min_size=1, max_size=3), st.integers(-3, 200))
def test_positions_restart_anywhere(rows, offset):
    """Rows follow one another; a document may begin anywhere but where the last one's end."""
    width = max(map(sum, rows))
    rows = [[*row, width - sum(row)] if sum(row) < width else row for row in rows]
    ids = torch.stack([positions(row) for row in rows])
    flat = [n for row in rows for n in row]
    assert PackedLayout.from_position_ids(ids).lengths == tuple(flat)
    assert PackedLayout.from_position_ids(ids + offset).lengths == tuple(flat)
    if len(rows) == 1:
        assert PackedLayout.from_position_ids(ids[0]).lengths == tuple(flat)


@pytest.mark.parametrize(
    ("ids", "lengths"),
    [
        ([[100, 101, 102, 0, 1]], (3, 2)),  # a document that goes on from position 100
        ([[0, 1, 2, 2, 3]], (3, 2)),  # begins at 2, after position 2
        ([[0, 0, 0, 1]], (1, 1, 2)),
        ([[0, 1, 2, 5, 6]], (3, 2)),  # a jump ahead
        ([[0, 1], [2, 3]], (2, 2)),  # positions run on from row to row: still two rows
    ],
)
def test_document_that_does_not_begin_at_position_zero(ids, lengths):
    assert PackedLayout.from_position_ids(torch.tensor(ids)).lengths == lengths


@given(filled, st.data())
def test_padding_runs_inside_the_row_are_slots_of_their_own(lengths, data):
    runs = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    starts = positions(lengths) == 0
    padding = torch.tensor([run for run, n in zip(runs, lengths, strict=True) for _ in range(n)])
    layout = PackedLayout.from_starts(starts, padding_T=padding)
    assert layout.lengths == tuple(lengths)
    assert torch.equal(layout.real_tokens(), ~padding)
    assert layout.has_padding is bool(padding.any())
    assert (layout.padding is None) is (not padding.any())


def test_first_token_begins_a_document_without_a_flag():
    layout = PackedLayout.from_starts(torch.tensor([False, False, True, False]))
    assert layout.lengths == (2, 2)


@given(st.integers(1, 5000))
def test_power_of_two_is_the_next_one(n):
    power = round_up_to_power_of_two(n)
    assert n <= power < 2 * n
    assert power & (power - 1) == 0


@given(lengths_of)
def test_shapes_do_not_tell_similar_documents_apart(lengths):
    """capacity and bound are rounded up: documents much like the last recompile nothing."""
    layout = PackedLayout.from_lengths(lengths)
    assert layout.capacity == round_up_to_power_of_two(len(lengths))
    assert layout.max_seqlen_bound == min(
        round_up_to_power_of_two(max(lengths)), max(sum(lengths), 1)
    )
    assert layout.cu_seqlens.shape == (layout.capacity + 1,)
    assert (layout.cu_seqlens[len(lengths) :] == sum(lengths)).all()
    assert layout.cu_seqlens.dtype == torch.int32


def test_named_capacity_and_bound_are_kept():
    layout = PackedLayout.from_lengths([3, 4], total_tokens=64, capacity=5, max_seqlen_bound=33)
    assert (layout.capacity, layout.max_seqlen_bound) == (5, 33)
    assert layout.cu_seqlens.tolist() == [0, 3, 7, 7, 7, 7]


@pytest.mark.parametrize(
    ("tokens", "slots"), [(10, 10), (100, 64), (8192, 64), (32768, 256), (32769, 256), (40000, 512)]
)
def test_default_capacity_stays_far_below_one_slot_a_token(tokens, slots):
    assert default_capacity(tokens) == slots


def test_row_of_no_tokens():
    layout = PackedLayout.from_lengths([])
    assert (layout.total_tokens, layout.num_docs, layout.capacity) == (0, 0, 1)
    assert layout.cu_seqlens.tolist() == [0, 0]
    assert layout.document_ids().shape == (0,)


def test_to_moves_the_tensors_and_keeps_the_rest():
    padding = torch.tensor([False, False, True])
    here = PackedLayout.from_starts(torch.tensor([True, False, True]), padding_T=padding)
    there = here.to("meta")
    assert there.device.type == there.padding.device.type == "meta"
    assert repr(there).replace("meta", "cpu") == repr(here)
    assert there.lengths == here.lengths
    assert there.has_padding is True


def made_in_a_graph(lengths):
    positions = torch.cat([torch.arange(n) for n in lengths])
    made = torch.compile(PackedLayout.from_position_ids, backend="eager", fullgraph=True)
    return made(positions)


@pytest.mark.parametrize(
    "make",
    [
        PackedLayout.from_lengths,
        lambda lengths: pickle.loads(pickle.dumps(PackedLayout.from_lengths(lengths))),
        lambda lengths: copy.copy(PackedLayout.from_lengths(lengths)),
        lambda lengths: PackedLayout.from_lengths([9]).replace(
            **PackedLayout.from_lengths(lengths).__getstate__()
        ),
        made_in_a_graph,
    ],
    ids=["made", "pickled", "copied", "replaced", "leaves_a_graph"],
)
def test_a_layout_is_frozen_with_the_launch_sizes_of_its_fields(make):
    layout = make([SHORT_ROW, 3])
    documents = layout.capacity if layout.num_docs is None else 2
    assert layout.launch.read(compiling=False)[0] == documents
    assert layout.position_ids()[-3:].tolist() == [0, 1, 2]
    for name in ("cu_seqlens", "segments", "shard", "launch", "another"):
        with pytest.raises(AttributeError, match=f"{name} of a PackedLayout must not change"):
            setattr(layout, name, None)


def test_a_layout_moved_to_where_it_is_is_itself():
    layout = PackedLayout.from_lengths([5])
    assert layout.to("cpu") is layout


@pytest.mark.parametrize(
    ("given_", "lengths"),
    [
        ({}, (8, 8)),  # one document per row
        ({"mask": [[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]]}, (2, 6, 5, 3)),
        ({"mask": [[1, 1, 1, 2, 2, 3, 3, 3], [1, 1, 1, 1, 2, 2, 0, 0]]}, (3, 2, 3, 4, 2, 2)),
        (
            {"positions": [[0, 1, 2, 0, 1, 0, 1, 2]]},
            (3, 2, 3, 3, 2, 3),
        ),  # one row of positions for both
        ({"cu_seqlens": [0, 3, 8, 12, 16]}, (3, 5, 4, 4)),
        ({"cu_seqlens": [0, 3, 12]}, (3, 5, 4, 4)),  # a row's start is one, and so is the tail
        # cu_seqlens wins over positions; pads at position 0 stay one run
        ({"cu_seqlens": [0, 8], "positions": [[0, 1, 0, 1, 0, 1, 0, 1]] * 2}, (8, 8)),
        (
            {
                "mask": [[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]],
                "positions": [[1, 1, 1, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 1, 1, 1]],
            },
            (3, 3, 2, 5, 3),
        ),
        # a mask of ones changes nothing
        ({"mask": [[1] * 8] * 2, "positions": [[0, 1, 2, 3, 0, 1, 2, 3]] * 2}, (4, 4, 4, 4)),
    ],
)
def test_boundaries_from_what_a_model_is_called_with(given_, lengths):
    def tensor(name, dtype=torch.int64):
        return torch.tensor(given_[name], dtype=dtype) if name in given_ else None

    starts = document_starts(
        2,
        8,
        torch.device("cpu"),
        position_ids_BT=tensor("positions"),
        attention_mask_BT=tensor("mask"),
        cu_seqlens=tensor("cu_seqlens", torch.int32),
    )
    assert PackedLayout.from_starts(starts).lengths == lengths


def test_other_documents_compile_nothing_again():
    """On the CPU the boundaries of host and device are one tensor: a clone would be a new graph."""
    sizes = {"capacity": 4, "max_seqlen_bound": 8}

    @torch.compile(backend="eager", fullgraph=True)
    def uses(layout):
        return layout.cu_seqlens.sum() + layout.cu_seqlens_host.sum()

    with watch_compilation() as first:
        uses(PackedLayout.from_lengths([3, 5], **sizes))
    with watch_compilation() as again:
        assert uses(PackedLayout.from_lengths([1, 6, 1], **sizes)) == 2 * (0 + 1 + 7 + 8 + 8)
    assert (first.compilations, again.compilations) == (1, 0)
